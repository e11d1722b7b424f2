"""The sink of a stream of named events of which one token may make several, as in Anthropic's API.

The last event of a token has the token's cursor as its id, like the events of other streams.  Those before it have the
number of units (`message_formatter.py`) too: `req-5f..:17-230`, 230 units of what the first 17 tokens make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipeline.api import response_context, sse
from pipeline.errors import StarlingError
from stages.gateway.endpoints.message_formatter import BlockEvent
from stages.gateway.http.sinks import StreamSink
from stages.gateway.requests.event_cursor import ENDED, FLUSHED, TOKENS, ChoiceCursor
from stages.gateway.requests.state import RequestState, SequenceState


class BlockFormatter(Protocol):
    """What makes the events. Those before the first text are no units."""

    opens_before_error: bool  # an error comes after the opening events, also before the first text

    def opening_events(self) -> list[BlockEvent]:
        """Return the events before the first text."""

    def text_events(self, sequence: SequenceState, new: str) -> list[BlockEvent]:
        """Return the events of new text."""

    def end_events(self, sequence: SequenceState) -> list[BlockEvent]:
        """Return the events at the end of the sequence."""

    def closing_events(self) -> list[BlockEvent]:
        """Return the events at the end of the request."""

    def kept(self) -> bytes:
        """Return what an orchestrator stores with the answer; b"": nothing."""

    def error_event(self, error: StarlingError) -> BlockEvent | None:
        """Return the event of an error, the last one; None: the client has it."""

    def skip(self, text: str, *, is_whole: bool) -> None:
        """Count the events of `text`, from the beginning on, as sent."""

    def skip_units(self, units: int) -> None:
        """Make no events up to the unit `units`."""


class BlockStream(StreamSink):
    """See `StreamSink`. The request has one sequence."""

    END = b""

    def __init__(self, request: RequestState, formatter: BlockFormatter, drop: Callable[[str], None]) -> None:
        super().__init__(request, drop)
        self._formatter = formatter

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        """Add the events of new text."""
        self._open()
        level = FLUSHED if sequence.is_flushed else TOKENS
        self._add(self._formatter.text_events(sequence, new), sequence, end, level)

    def ended(self, sequence: SequenceState) -> None:
        """Add the events with the stop reason."""
        self._open()
        self._add(self._formatter.end_events(sequence), sequence, sequence.n_emitted, ENDED)

    def _add(self, events: list[BlockEvent], sequence: SequenceState, tokens: int, level: int) -> None:
        for event in events[:-1]:
            self._reach(sequence, tokens, level)
            self._places[sequence.index] += f"-{event.units}"
            self._event(event.data, event.name)
        self._reach(sequence, tokens, level)
        for event in events[-1:]:
            self._event(event.data, event.name)

    @property
    def _opens_before_error(self) -> bool:
        return self._formatter.opens_before_error

    def _add_opening_events(self) -> None:
        events = self._formatter.opening_events()
        self._pending.extend(sse.event(event.data, b"", event.name) for event in events[:-1])
        for event in events[-1:]:
            self._event(event.data, event.name)

    def _add_closing_events(self) -> None:
        if self.is_relayed and (kept := self._formatter.kept()):
            self._insert(response_context.kept_comment(kept))
        for event in self._formatter.closing_events():
            self._event(event.data, event.name)

    def _add_error(self, error: StarlingError) -> None:
        event = self._formatter.error_event(error)
        if event is None:
            return
        if self.is_relayed:
            self._insert(response_context.failed_comment(error.code))
        self._event(event.data, event.name)

    def _insert(self, comment: bytes) -> None:
        """Add a comment, before the line of a reconnection delay. A client that reads may be late by its bytes."""
        if self._transport is not None:
            self._max_backlog += len(comment)
        is_whole = not self._pending or self._pending[-1].endswith(b"\n\n")
        self._pending.insert(len(self._pending) - (not is_whole), comment)

    def _skip(self, sequence: SequenceState, text: str, end: int, *, is_whole: bool) -> None:
        self._formatter.skip(text, is_whole=is_whole)

    def _resume_sequence(self, sequence: SequenceState, place: ChoiceCursor, received: int) -> None:
        if place.units:
            self._formatter.skip_units(place.units)
            place, received = ChoiceCursor(0), 0
        super()._resume_sequence(sequence, place, received)
