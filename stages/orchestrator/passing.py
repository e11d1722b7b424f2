"""Passes the events of one engine to the client as they come, without a task in between while the client keeps up.

    begin     called by the connection when the answer's head is there: with it the response to the client begins
    take      called by it for each part of the answer: its events are written to the client at once
    deliver   called by the request's task when `take` could not do that: it waits for the client, or raises

What the client has is counted before it is written: a successor goes on from there.  What else is noted of an answer
waits until its first event was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stages.orchestrator.event_cutter import EventCutter
from stages.orchestrator.forward import Out, Tries
from stages.orchestrator.upstream import Answer, Take, Unreachable


class Passing:
    """Of one answer."""

    def __init__(
        self,
        cutter: EventCutter,
        tries: Tries,
        out: Out,
        version: str,
        holder: str,
        accept: Callable[[], object] = lambda: None,
        note: Callable[[Mapping[str, str]], object] = lambda headers: None,
    ) -> None:
        """`version`: of the engine. `holder`: its agent, if the request is of a session.

        `accept` is called by `begin`; `note(headers)` when what has come first of the body was written.
        """
        self.is_accepted = False  # the answer has begun without the task
        self._accept = accept
        self._note: Callable[[Mapping[str, str]], object] | None = note
        self._headers: Mapping[str, str] = {}
        self._cutter = cutter
        self._tries = tries
        self._out = out
        self._version = version
        self._holder = holder
        self._waiting = b""  # events that are to be written by the task
        self._failure: Exception | None = None

    def begin(self, answer: Answer) -> Take | None:
        """See `Begins`. An answer that is none of a stream is read by the task."""
        if answer.status != 200:
            return None
        self.is_accepted, self._headers = True, answer.headers
        try:
            self._accept()
            if not self._out.is_begun:
                self._out.begin(200, answer.headers)
        except Exception as error:  # the task raises it
            self._failure = error
        return self.take

    def take(self, data: bytes) -> bool:
        """See `Answer.pass_to`. What follows the last event is dropped."""
        cutter, tries = self._cutter, self._tries
        if cutter.is_over:
            return True
        if self._failure is not None:
            return False
        try:
            events = cutter.feed(data)
            if not tries.version and (events or cutter.output.n_tokens):
                tries.version = cutter.output.version = self._version
            if events:
                tries.advanced()
                if self._holder:
                    tries.hold(self._holder)
                if not self._out.write_now(events):
                    self._waiting = events
            if self._note is not None:
                note, self._note = self._note, None
                note(self._headers)
            if self._waiting:
                return False
        except Exception as error:  # the task raises it
            self._failure = error
            return False
        return not cutter.error

    async def deliver(self) -> None:
        """Send what waits. Raises what `take` could not, and `ConnectionResetError` as `Out.write` does."""
        if self._failure is not None:
            raise self._failure
        events, self._waiting = self._waiting, b""
        if events:
            await self._out.write(events)


async def pass_events(answer: Answer, passing: Passing, cutter: EventCutter) -> bool:
    """See `Answer.pass_to`. The last event may take its time, because the response is stored before it: an engine that
    dies meanwhile is not missed.
    """
    try:
        return await answer.pass_to(passing.take)
    except Unreachable:
        if not cutter.is_over:
            raise
        return False
