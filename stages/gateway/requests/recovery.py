"""Requests that outlive their connection, and those that outlive the gateway.

    in flight     in the relay; its readers share a `FanOutSink` once there is more than the first
    waiting       read from the journal; opened as soon as its model is described and the same
    kept          ended a short time ago in this process: `replay_buffer.py` has every byte of the answer
    dormant       ended a short time ago, according to the journal: generated again if somebody asks

A client that goes away cancels its request, unless another reader is there.  A request that was recovered
has lost its client through no fault of its own: it has `CLAIM_S` to be taken up, then it is cancelled.
Without a journal (`None`) everything works but the recovery.  The clocks are given.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping

import msgspec

from pipeline.errors import Conflict, StarlingError
from pipeline.faults import points
from pipeline.protocol.messages import Described
from shm.pages import NUMERICS
from stages.gateway.requests.event_cursor import EventCursor, FanOutSink, is_reached
from stages.gateway.requests.journal import KEEP_S, Ended, Entry, Journal, Line, Opened
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.replay_buffer import ReplayBuffer
from stages.gateway.requests.response_cache import Line as Answer
from stages.gateway.requests.state import Outcome, RequestState, SequencePhase, SequenceState, Sink
from stages.gateway.versions.catalog import VersionCatalog

log = logging.getLogger("starling.gateway.recovery")

CLAIM_S = 60.0  # for a reader to take up a recovered request
MAX_READERS = 8  # of one request


class Recovery:
    """One per process, beside its relay. `clock` is monotonic, `wall` is s since 1970."""

    def __init__(
        self,
        relay: Relay,
        journal: Journal | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
        timeout_s: float,
    ) -> None:
        self.journal = journal
        self._relay = relay
        self._clock = clock
        self._wall = wall
        self._timeout_s = timeout_s  # of a request that is generated again on demand
        self._waiting: dict[str, tuple[Opened, RequestState]] = {}
        self._dormant: dict[str, Entry] = {}
        self.kept = ReplayBuffer(clock)
        self._unclaimed: dict[str, float] = {}  # recovered, without a reader: until when
        self._sync: asyncio.Future[None] | None = None
        for entry in journal.take_entries() if journal is not None else ():
            if entry.ended is not None:
                self._dormant[entry.opened.id] = entry
            else:
                self._waiting[entry.opened.id] = entry.opened, self._request(entry.opened)
        if self._waiting:
            log.warning("requests were in flight and are recovered", extra={"requests": len(self._waiting)})

    @property
    def left_out(self) -> int:
        return self.journal.left_out if self.journal is not None else 0

    # ---------------------------------------------------------------- a request's life

    def open(self, request: RequestState, digest: str, answer: list[Answer] | None = None) -> None:
        """Into the journal, then to the scheduler; or, with an `answer` that was kept, to its end."""
        if self.journal is not None:
            self.journal.open(self._opened(request, digest))
        if answer is None:
            self._relay.open(request)
        else:
            self._relay.give(request, answer)

    def ended(self, request: RequestState) -> None:
        """It has its outcome."""
        self._unclaimed.pop(request.id, None)
        is_kept = request.outcome is not Outcome.ABANDONED
        error = request.error
        if self.journal is not None:
            code = "" if is_kept else "ABANDONED"
            code, message = (error.code, error.message) if error is not None else (code, "")
            self.journal.end(Ended(request.id, self._wall(), code, message), is_kept)
        if is_kept:
            self.kept.put(request)

    # ---------------------------------------------------------------- readers

    def find(self, request_id: str, tenant: str) -> RequestState | None:
        """A request that can be read, of that tenant. One that is dormant is woken."""
        request = self._relay.requests.get(request_id) or self.kept.find(request_id)
        if request is None and request_id in self._waiting:
            request = self._waiting[request_id][1]
        if request is not None:
            return request if request.tenant == tenant else None
        entry = self._dormant.get(request_id)
        if entry is None or entry.opened.tenant != tenant or self._is_stale(entry):
            return None
        return self._wake(entry)

    def join(self, request: RequestState, sink: Sink) -> None:
        """One more reader. Raises `Conflict` when it has enough."""
        fan = request.sink
        if not isinstance(fan, FanOutSink):
            fan = request.sink = FanOutSink(fan) if fan is not None else FanOutSink()
        if len(fan.sinks) >= MAX_READERS:
            raise Conflict(f"{request.id} has {MAX_READERS} readers, the most that a request may have")
        fan.sinks.append(sink)
        self._unclaimed.pop(request.id, None)

    def swap(self, request: RequestState, sink: Sink, other: Sink) -> None:
        """`other` in place of a reader that is there."""
        fan = request.sink
        if isinstance(fan, FanOutSink):
            fan.sinks[fan.sinks.index(sink)] = other

    def leave(self, request: RequestState, sink: Sink) -> None:
        """A reader has gone, or has all it wanted."""
        fan = request.sink
        if isinstance(fan, FanOutSink):
            fan.sinks = [other for other in fan.sinks if other is not sink]
            if fan.sinks:
                return
        if request.outcome is not Outcome.OPEN:
            request.sink = None
            return
        if request.is_recovered:
            self._unclaimed[request.id] = self._clock() + CLAIM_S
        else:
            self._relay.abandon(request)
            request.sink = None

    # ---------------------------------------------------------------- time

    def tick(self, described: Mapping[str, Described], instances: VersionCatalog) -> None:
        """Every 100 ms. `described`: by instance."""
        now = self._clock()
        for opened, request in list(self._waiting.values()):
            home = instances.equivalent(opened.model, opened.instance, opened.digest, described)
            is_undecided = instances.has_undescribed(opened.model, described)
            is_there = bool(instances.versions(opened.model))
            if error := self._obstacle(opened, request, home is not None or is_undecided, is_there, now):
                del self._waiting[request.id]
                self._fail(request, error)
            elif home is not None and (home.id == opened.instance or not is_undecided):
                # Its own version, or one of the same file: the answer comes out the same.
                request.instance, request.tokenizer = home.id, described[home.id].tokenizer
                del self._waiting[request.id]
                fan = request.sink
                if not (isinstance(fan, FanOutSink) and fan.sinks):
                    self._unclaimed[request.id] = now + CLAIM_S
                self._relay.open(request)
        for request_id in [r for r, until in self._unclaimed.items() if now >= until]:
            del self._unclaimed[request_id]
            unclaimed = self._relay.requests.get(request_id)
            if unclaimed is not None:
                log.info("a recovered request was not taken up", extra={"id": request_id})
                self._relay.abandon(unclaimed)
        self.kept.expire()
        if self._dormant:
            self._dormant = {name: entry for name, entry in self._dormant.items() if not self._is_stale(entry)}
        self._sync_journal()

    @staticmethod
    def _obstacle(
        opened: Opened, request: RequestState, has_home: bool, is_there: bool, now: float
    ) -> StarlingError | None:
        """Why the answer cannot be generated again."""
        if now >= request.deadline:
            return StarlingError("TIMEOUT", "the request's time was over before the gateway was back")
        if not is_there:
            return StarlingError("MODEL_NOT_FOUND", f"there is no model {opened.model!r} any more", "model")
        if not has_home or opened.numerics != NUMERICS:
            return StarlingError(
                "CONFLICT",
                f"model {opened.model!r} is another version now, whose answer would differ; send the request again",
                "model",
            )
        return None

    def waiting_on(self, instance: str) -> int:
        """Requests that were begun on that version and are not under way again yet."""
        return sum(opened.instance == instance for opened, _ in self._waiting.values())

    def _fail(self, request: RequestState, error: StarlingError) -> None:
        """End a request that the relay does not have."""
        request.error = error
        request.end(Outcome.FAILED)
        for sequence in request.sequences:
            sequence.move(SequencePhase.FAILED)
        self.ended(request)
        if request.sink is not None:
            request.sink.failed(error)
            request.sink.flush()

    def _sync_journal(self) -> None:
        """On a thread: a slow disk must not hold up the streams."""
        if self.journal is None or (self._sync is not None and not self._sync.done()):
            return
        fd = self.journal.unsynced()
        if fd is not None:
            self._sync = asyncio.get_running_loop().run_in_executor(None, sync_and_close, fd)

    # ---------------------------------------------------------------- records and requests

    def _is_stale(self, entry: Entry) -> bool:
        return entry.ended is None or self._wall() - entry.ended.when > KEEP_S

    def _wake(self, entry: Entry) -> RequestState:
        """An error is told again and again; an answer is generated once more, and kept."""
        opened, ended = entry
        if ended is not None and ended.code:
            request = self._request(opened)
            request.error = StarlingError(ended.code, ended.message)
            request.end(Outcome.FAILED)
            return request
        del self._dormant[opened.id]
        opened.deadline = self._wall() + self._timeout_s
        if opened.ask.turn is not None:
            opened.ask.turn.number = 0  # it was kept when the request ended
        request = self._request(opened)
        request.is_charged = True
        if self.journal is not None:
            self.journal.open(opened)
        self._waiting[opened.id] = opened, request
        return request

    def _opened(self, request: RequestState, digest: str) -> Opened:
        prompts: dict[bytes, int] = {}
        lines = [
            Line(
                prompts.setdefault(s.prompt, len(prompts)),
                s.prompt_index,
                s.choice,
                s.max_tokens,
                s.sampling,
                s.stop_ids,
            )
            for s in request.sequences
        ]
        return Opened(
            request.id,
            request.tenant,
            request.model,
            digest,
            NUMERICS,
            msgspec.structs.replace(request.ask, prompts=[], messages=None),
            request.seed,
            request.created,
            request.fingerprint,
            self._wall() + request.deadline - self._clock(),
            request.priority,
            request.client_id,
            list(prompts),
            request.echoes,
            lines,
            request.instance,
            request.tokenizer,
        )

    def _request(self, opened: Opened) -> RequestState:
        now = self._clock()
        request = RequestState(
            opened.id,
            opened.ask,
            opened.model,
            opened.tenant,
            now + opened.deadline - self._wall(),
            priority=opened.priority,
            created=opened.created,
            fingerprint=opened.fingerprint,
            started_at=now,
            client_id=opened.client_id,
            instance=opened.instance,
        )
        request.seed, request.tokenizer = opened.seed, opened.tokenizer
        request.echoes = opened.echoes
        request.is_recovered = True
        request.sink = FanOutSink()
        for index, line in enumerate(opened.lines):
            sequence = SequenceState(
                request,
                index,
                line.prompt_index,
                line.choice,
                opened.prompts[line.prompt],
                line.max_tokens,
                line.sampling,
                line.stop_ids,
            )
            sequence.resubmitted = 1  # it has been admitted before: a full queue makes it wait
            request.sequences.append(sequence)
        return request


class CatchUpWaiter:
    """A reader that only waits until all choices have got as far again as another one had them."""

    def __init__(self, request: RequestState, mark: EventCursor | None) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._places = mark.places if mark is not None else ()
        self.flush()

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None: ...

    def ended(self, sequence: SequenceState) -> None: ...

    def finished(self) -> None: ...

    def failed(self, error: StarlingError) -> None: ...

    def flush(self) -> None:
        request = self._request
        is_there = request.outcome is not Outcome.OPEN or all(
            is_reached(sequence, place) for sequence, place in zip(request.sequences, self._places)
        )
        if is_there and not self.over.done():
            self.over.set_result(None)


def sync_and_close(fd: int) -> None:
    """On a thread: the disk has everything when this returns, or the log says so."""
    fault = points.fault_point("disk", "journal_sync")
    try:
        if fault.trigger is not None:
            fault.trigger(0)
        os.fdatasync(fd)
    except OSError as error:
        log.error("journal or quotas could not be synced: %s", error.strerror)
    finally:
        os.close(fd)
