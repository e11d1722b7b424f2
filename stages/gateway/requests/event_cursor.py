"""Taking a stream up where it broke off: what an event's id says, and several readers of one request.

An id is `REQUEST:PLACE[.PLACE...]`, a place for each choice: the output index reached, and a letter when
more than tokens have gone out.  There is an event for each token whose text has become certain,
however the tokens came, and the place counts tokens, because a choice's text can be held back for some.

    17    text of the first 17 tokens         17e   and the finish reason
    17f   all of the choice's text            17d   and what follows the last finish reason
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.errors import InvalidRequest, StarlingError
from stages.gateway.requests.state import SequenceState, Sink

LEVELS = ("", "f", "e", "d")
TOKENS, FLUSHED, ENDED, DONE = range(4)

_ID = re.compile(r"(req-[0-9a-f]{1,64}):([0-9]{1,9}[fed]?(?:\.[0-9]{1,9}[fed]?){0,255})")


class ChoiceCursor(NamedTuple):
    """What of a choice has been received."""

    tokens: int
    level: int = TOKENS


class EventCursor(NamedTuple):
    """An event's id."""

    request: str
    places: tuple[ChoiceCursor, ...]


def parse_event_cursor(text: str) -> EventCursor:
    """Raises `InvalidRequest`."""
    match = _ID.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"Last-Event-ID is {text[:80]!r}; send the id of the last event as it was received, like req-0a1b2c:17",
            "Last-Event-ID",
        )
    places = []
    for part in match[2].split("."):
        letter = part[-1] if part[-1] in "fed" else ""
        places.append(ChoiceCursor(int(part.removesuffix(letter)), LEVELS.index(letter)))
    return EventCursor(match[1], tuple(places))


def is_reached(sequence: SequenceState, place: ChoiceCursor) -> bool:
    """Has the sequence got as far again as a reader had it?"""
    return sequence.is_over or (place.level == TOKENS and sequence.end >= place.tokens)


class FanOutSink:
    """The sink of a request that has any number of readers, or none for the time being."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks: list[Sink] = list(sinks)

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        for sink in self.sinks:
            sink.text(sequence, new, begin, end)

    def ended(self, sequence: SequenceState) -> None:
        for sink in self.sinks:
            sink.ended(sequence)

    def finished(self) -> None:
        for sink in self.sinks:
            sink.finished()

    def failed(self, error: StarlingError) -> None:
        for sink in self.sinks:
            sink.failed(error)

    def flush(self) -> None:
        for sink in self.sinks:
            sink.flush()
