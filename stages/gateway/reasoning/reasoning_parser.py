"""Divides a text into reasoning and answer while it is being generated.

    <think> REASONING </think> ANSWER           or, if the prompt ends with the first mark,  REASONING </think> ANSWER

`ReasoningParser` is a function of the text so far: however the text was cut into parts, the same reasoning and the same
answer come out.  It holds back what a later character can change: the beginning of a mark, and white space that may
stand before one.  White space beside the marks is left out, at each place up to `MAX_SPACE` characters.  Marks count
where reasoning may begin or end, once; later ones are text.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from pipeline.api.requests.reasoning_fields import Reasoning

MAX_SPACE = 256
SPACE = " \t\n\r"


class Kind(enum.Enum):
    """What a part of a text is."""

    MARK = "mark"  # a mark, or white space beside it
    REASONING = "reasoning"
    ANSWER = "answer"


class Part(NamedTuple):
    """A part of the text. The parts together are the text."""

    kind: Kind
    text: str


class _State(enum.Enum):
    BEFORE = "before"  # nothing but white space so far, and perhaps a part of the first mark
    BEGIN = "begin"  # white space after the first mark
    WITHIN = "within"
    END = "end"  # white space after the second mark
    ANSWER = "answer"


class ReasoningParser:
    """Parses one text."""

    __slots__ = ("_held", "_n_space", "_reasoning", "_state", "n_marks")

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning
        self._state = _State.BEGIN if reasoning.is_open else _State.BEFORE
        self.n_marks = int(reasoning.is_open)  # that were met, those of the prompt included
        self._held = ""
        self._n_space = 0  # characters of white space that were left out beside the current mark

    @property
    def is_answer(self) -> bool:
        """The answer has begun: all that follows is part of it."""
        return self._state is _State.ANSWER

    @property
    def is_reasoning(self) -> bool:
        """The first mark was met, and the second one was not."""
        return self._state is _State.BEGIN or self._state is _State.WITHIN

    @property
    def may_be_ending(self) -> bool:
        """The text so far ends with the beginning of the second mark."""
        return self._state is _State.WITHIN and _overlap(self._held, self._reasoning.end) > 0

    def feed(self, text: str) -> list[Part]:
        """Return what has become certain with more of the text."""
        text, self._held = self._held + text, ""
        parts: list[Part] = []
        while text:
            state = self._state
            if state is _State.ANSWER:
                parts.append(Part(Kind.ANSWER, text))
                break
            if state is _State.BEFORE:
                rest = self._before(text, parts)
            elif state is _State.WITHIN:
                rest = self._within(text, parts)
            else:
                rest = self._space(text, parts)
            if rest is None:
                break
            text = rest
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back. The text has ended."""
        text, self._held = self._held, ""
        kind = Kind.REASONING if self._state is _State.WITHIN else Kind.ANSWER
        return [Part(kind, text)] if text else []

    # Each step returns the text after what it has taken; None: it holds the rest back.

    def _before(self, text: str, parts: list[Part]) -> str | None:
        begin = self._reasoning.begin
        at = 0
        while at < len(text) and at < MAX_SPACE and text[at] in SPACE:
            at += 1
        if at < MAX_SPACE and begin.startswith(text[at : at + len(begin)]):
            if len(text) < at + len(begin):
                self._held = text
                return None
            at += len(begin)
            self.n_marks = 1
            parts.append(Part(Kind.MARK, text[:at]))
            self._state = _State.BEGIN
            return text[at:]
        self._state = _State.ANSWER
        return text

    def _space(self, text: str, parts: list[Part]) -> str:
        """After a mark."""
        at = 0
        while at < len(text) and self._n_space < MAX_SPACE and text[at] in SPACE:
            at += 1
            self._n_space += 1
        if at:
            parts.append(Part(Kind.MARK, text[:at]))
        if at < len(text):
            self._n_space = 0
            self._state = _State.WITHIN if self._state is _State.BEGIN else _State.ANSWER
        return text[at:]

    def _within(self, text: str, parts: list[Part]) -> str | None:
        end = self._reasoning.end
        found = text.find(end)
        at = found if found >= 0 else len(text) - _overlap(text, end)
        first = max(0, at - MAX_SPACE)
        kept = first + len(text[first:at].rstrip(SPACE))
        if kept:
            parts.append(Part(Kind.REASONING, text[:kept]))
        if found < 0:
            self._held = text[kept:]
            return None
        at += len(end)
        self.n_marks = 2
        parts.append(Part(Kind.MARK, text[kept:at]))
        self._state = _State.ANSWER if self._reasoning.keeps_space else _State.END
        return text[at:]


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
