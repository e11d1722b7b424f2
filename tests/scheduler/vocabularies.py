"""A small vocabulary for tests of constraints: all bytes, some longer tokens, and two end tokens."""

from __future__ import annotations

from array import array
from itertools import accumulate

from stages.scheduler.constraints.frames import VocabularyFile

LONGER = [
    *['{"', '"}', '":', '": ', '", "', '"},', "[]", "{}", "}}", "]}", "true", "false", "null", "tr", "true "],
    *[
        "name",
        "value",
        "children",
        "kind",
        "the",
        " the",
        "é",
        "日本",
        "日",
        "12",
        "2024-",
        "-01",
        "00",
        "http",
        "\n  ",
    ],
]
END, TURN_END = 256 + len(LONGER), 257 + len(LONGER)
PIECES = [bytes([i]) for i in range(256)] + [text.encode() for text in LONGER] + [b"<|end|>", b"<|turn|>"]
SIZE = len(PIECES)


def vocabulary() -> VocabularyFile:
    """As a gateway describes it."""
    ends = array("I", accumulate(len(piece) for piece in PIECES))
    control = array("i", [END, TURN_END])
    return VocabularyFile(b"".join(PIECES), ends.tobytes(), control.tobytes(), (END, TURN_END))
