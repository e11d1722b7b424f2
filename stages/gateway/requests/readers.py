"""The readers of a request: one HTTP connection at first, several after a client has resumed the stream elsewhere.

The request of a client that disconnects is cancelled, unless it has another reader. A request that was recovered from
the journal lost its client without the client's doing, the client of one with an idempotency key will repeat it, and
that of one that is relayed may reach it through another orchestrator: they wait `CLAIM_S` for a reader before they are
cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf

from pipeline.errors import Conflict, StarlingError
from stages.gateway.requests.event_cursor import EventCursor, is_reached
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.state import Outcome, RequestState, SequenceState, Sink

log = logging.getLogger("starling.gateway.recovery")

CLAIM_S = 60.0  # how long a request that may be resumed waits for a reader
MAX_UNCLAIMED = 16  # requests of a tenant with idempotency keys that wait for a reader; the oldest are cancelled
MAX_RELAYED = 256  # the same for requests that are relayed: an orchestrator forwards those of many clients
MAX_READERS = 8  # of one request


class FanOutSink:
    """The sink of a request with any number of readers, or with none for the time being."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks: list[Sink] = list(sinks)

    def started(self) -> None:
        """See `Sink.started`."""
        for sink in self.sinks:
            sink.started()

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        """See `Sink.text`."""
        for sink in self.sinks:
            sink.text(sequence, new, begin, end)

    def ended(self, sequence: SequenceState) -> None:
        """See `Sink.ended`."""
        for sink in self.sinks:
            sink.ended(sequence)

    def finished(self) -> None:
        """See `Sink.finished`."""
        for sink in self.sinks:
            sink.finished()

    def failed(self, error: StarlingError) -> None:
        """See `Sink.failed`."""
        for sink in self.sinks:
            sink.failed(error)

    def flush(self) -> None:
        """See `Sink.flush`."""
        for sink in self.sinks:
            sink.flush()


def readers_of(request: RequestState) -> list[Sink]:
    """The sinks of the clients that read a request, or wait for its answer."""
    sink = request.sink
    if isinstance(sink, FanOutSink):
        return list(sink.sinks)
    return [sink] if sink is not None else []


def has_reader(request: RequestState) -> bool:
    """Whether a client reads an open request, or waits for its answer."""
    return bool(readers_of(request))


def outlives_gateway(request: RequestState) -> bool:
    """Whether an open request goes on in the gateway's successor after an orderly exit, as after a kill.

    Others end with their connections: a request in the background has none of its own, and that of a request without a
    reader is closed.
    """
    is_unread = request.spec.generation.is_in_background or not has_reader(request)
    return is_unread and request.is_journaled


class CatchUpWaiter:
    """A sink that waits until a request has produced everything before a cursor again."""

    def __init__(self, request: RequestState, cursor: EventCursor | None) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._choices = cursor.choices if cursor is not None else ()
        self.flush()

    def started(self) -> None:
        """Ignored: `flush` looks at the state."""

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        """Ignored: `flush` looks at the state."""

    def ended(self, sequence: SequenceState) -> None:
        """Ignored: `flush` looks at the state."""

    def finished(self) -> None:
        """Ignored: `flush` looks at the state."""

    def failed(self, error: StarlingError) -> None:
        """Ignored: `flush` looks at the state."""

    def flush(self) -> None:
        """Resolve `over` if the request has ended or the cursor is reached."""
        request = self._request
        is_there = request.outcome is not Outcome.OPEN or all(
            is_reached(sequence, cursor) for sequence, cursor in zip(request.sequences, self._choices)
        )
        if is_there and not self.over.done():
            self.over.set_result(None)


class Readers:
    """One per gateway, beside its relay. `clock` is monotonic, in s."""

    def __init__(self, relay: Relay, clock: Callable[[], float]) -> None:
        self._relay = relay
        self._clock = clock
        self._unclaimed: dict[str, float] = {}  # requests without a reader: when they are cancelled

    def join(self, request: RequestState, sink: Sink) -> None:
        """Add a reader. Raises `Conflict` if the request has `MAX_READERS`."""
        fan_out = request.sink
        if not isinstance(fan_out, FanOutSink):
            fan_out = request.sink = FanOutSink(fan_out) if fan_out is not None else FanOutSink()
        if len(fan_out.sinks) >= MAX_READERS:
            raise Conflict(f"{request.id} has {MAX_READERS} readers, the most that a request may have")
        fan_out.sinks.append(sink)
        self._unclaimed.pop(request.id, None)

    def replace(self, request: RequestState, sink: Sink, other: Sink) -> None:
        """Put `other` in the place of the reader `sink`."""
        fan_out = request.sink
        if isinstance(fan_out, FanOutSink):
            fan_out.sinks[fan_out.sinks.index(sink)] = other

    def leave(self, request: RequestState, sink: Sink) -> None:
        """Remove a reader that has disconnected or has everything it asked for."""
        fan_out = request.sink
        if isinstance(fan_out, FanOutSink):
            fan_out.sinks = [other for other in fan_out.sinks if other is not sink]
            if fan_out.sinks:
                return
        if request.outcome is not Outcome.OPEN:
            request.sink = None
            return
        if request.is_recovered:
            self.expect(request)
        elif request.spec.generation.is_in_background:
            request.sink = FanOutSink()
        elif request.spec.idempotency_key or request.is_relayed:
            request.sink = FanOutSink()
            self.expect(request)
            self._limit(request.spec.tenant)
        else:
            self._relay.abandon(request)
            request.sink = None

    def release(self, request: RequestState, after_s: int = 0) -> bool:
        """Who forwards the request needs it no longer: it ends with its last reader. True: it has ended.

        `after_s`: nothing is changed unless no one has read it for so long.
        """
        fan_out = request.sink
        if after_s and self._unclaimed.get(request.id, inf) > self._clock() + CLAIM_S - after_s:
            return False
        request.is_relayed = False
        if request.id in self._unclaimed or (isinstance(fan_out, FanOutSink) and not fan_out.sinks):
            self._unclaimed.pop(request.id, None)
            self._relay.abandon(request)
        return request.outcome is not Outcome.OPEN

    def abandon(self, request: RequestState, error: StarlingError) -> None:
        """End an open request that its client has cancelled: its readers get `error`."""
        sink = request.sink
        self._relay.abandon(request)
        request.error = error
        if sink is not None:
            sink.failed(error)
            sink.flush()

    def expect(self, request: RequestState) -> None:
        """Cancel a request unless a reader joins it within `CLAIM_S`; one in the background needs no reader."""
        fan_out = request.sink
        if request.spec.generation.is_in_background:
            return
        if not (isinstance(fan_out, FanOutSink) and fan_out.sinks):
            self._unclaimed[request.id] = self._clock() + CLAIM_S

    def _limit(self, tenant: str) -> None:
        """Cancel the oldest unclaimed requests of a tenant: they count against no bound of requests in flight."""
        requests = [self._relay.requests.get(request_id) for request_id in self._unclaimed]
        mine = [r for r in requests if r is not None and r.spec.tenant == tenant and not r.is_recovered]
        keyed, relayed = [r for r in mine if not r.is_relayed], [r for r in mine if r.is_relayed]
        for request in (*keyed[:-MAX_UNCLAIMED], *relayed[:-MAX_RELAYED]):
            self._cancel(request)

    def _cancel(self, request: RequestState) -> None:
        self._unclaimed.pop(request.id, None)
        log.info("a request was cancelled: no client resumed it", extra=request.log_names)
        self._relay.abandon(request)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._unclaimed.pop(request_id, None)

    def tick(self) -> None:
        """At each tick: cancel requests that no reader has joined in time."""
        now = self._clock()
        for request_id in [r for r, until in self._unclaimed.items() if now >= until]:
            del self._unclaimed[request_id]
            request = self._relay.requests.get(request_id)
            if request is not None:
                self._cancel(request)
