"""The id of an event in a stream: a cursor from which a client resumes the stream.

An id is `REQUEST:POSITION[.POSITION...]` with a position for each choice: the number of output tokens whose text has
been sent, and a letter when more than text has been sent. Each token whose text becomes certain has an event, however
the scheduler grouped the tokens. A position counts tokens, because the text of some tokens is held back.

    17    text of the first 17 tokens         17e   and the finish reason
    17f   all of the choice's text            17d   and the events after the last finish reason

Where a token makes several events, those before the last one have a hyphen and the number of *units* up to their end
(`endpoints/message_formatter.py`): 17-230, 230 units of what the first 17 tokens make.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.errors import InvalidRequest
from stages.gateway.requests.state import SequenceState

LEVELS = ("", "f", "e", "d")
TOKENS, FLUSHED, ENDED, DONE = range(4)

_PLACE = r"[0-9]{1,9}[fed]?(?:-[0-9]{1,10})?"
_ID = re.compile(rf"(req-[0-9a-f]{{1,64}}):({_PLACE}(?:\.{_PLACE}){{0,255}})")


class ChoiceCursor(NamedTuple):
    """What a client has received of one choice. `level` is an index in `LEVELS`."""

    tokens: int
    level: int = TOKENS
    units: int = 0  # 0: all events of these tokens


class EventCursor(NamedTuple):
    """A parsed event id."""

    request: str
    choices: tuple[ChoiceCursor, ...]


def parse_event_cursor(text: str) -> EventCursor:
    """Parse the header `Last-Event-ID`. Raises `InvalidRequest`."""
    match = _ID.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"Last-Event-ID is {text[:80]!r}; send the id of the last event as it was received, like req-0a1b2c:17",
            "Last-Event-ID",
        )
    choices = []
    for part in match[2].split("."):
        part, _, units = part.partition("-")
        letter = part[-1] if part[-1] in "fed" else ""
        choices.append(ChoiceCursor(int(part.removesuffix(letter)), LEVELS.index(letter), int(units or 0)))
    return EventCursor(match[1], tuple(choices))


def is_reached(sequence: SequenceState, cursor: ChoiceCursor) -> bool:
    """Has the sequence produced what a client with this cursor has received?"""
    return sequence.is_over or (cursor.level == TOKENS and sequence.n_emitted >= cursor.tokens)
