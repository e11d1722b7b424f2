"""Passes the events of one engine to the client as they come, without a task in between while the client keeps up.

    take      called by the connection for each part of the answer: its events are written to the client at once
    deliver   called by the request's task when `take` could not do that: it waits for the client, or raises

Both count what the client has before it is written: a successor goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable

from stages.orchestrator.event_cutter import EventCutter
from stages.orchestrator.forward import Out, Tries
from stages.orchestrator.upstream import Answer, Unreachable


class Passing:
    """Of one answer. `begins` is called at its first bytes."""

    def __init__(self, cutter: EventCutter, tries: Tries, out: Out, version: str, holder: str) -> None:
        """`version`: of the engine. `holder`: its agent, if the request is of a session."""
        self.begins: Callable[[], object] | None = None
        self._cutter = cutter
        self._tries = tries
        self._out = out
        self._version = version
        self._holder = holder
        self._waiting = b""  # events that are to be written by the task
        self._failure: Exception | None = None

    def take(self, data: bytes) -> bool:
        """See `Answer.pass_to`. What follows the last event is dropped."""
        cutter, tries = self._cutter, self._tries
        if cutter.is_over:
            return True
        try:
            if self.begins is not None:
                self.begins()
                self.begins = None
            events = cutter.feed(data)
            if not tries.version and (events or cutter.output.n_tokens):
                tries.version = cutter.output.version = self._version
            if events:
                tries.advanced()
                if self._holder:
                    tries.hold(self._holder)
                if not self._out.write_now(events):
                    self._waiting = events
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
