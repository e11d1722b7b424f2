"""Requests that outlive the gateway: what a successor does with the journal, and the answers of ended requests.

    in flight     in the relay
    waiting       read from the journal; opened as soon as a version is described that gives the same answer: of the
                  same file and `Hyper.kv_revision`
    replayable    ended a short time ago in this process: the replay buffer has the answer
    dormant       ended a short time ago, according to the journal: generated again if a client asks. If that does not
                  come to its end, as when the client leaves, the request is dormant again

Without a journal everything works except the recovery. The clocks are injected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from pipeline.errors import Conflict, StarlingError
from pipeline.protocol.messages import Described
from shm.pages import NUMERICS
from stages.gateway.requests.idempotency import IdempotencyKeys
from stages.gateway.requests.journal import KEEP_S, JournalEntry, RequestEnd
from stages.gateway.requests.readers import FanOutSink, Readers, readers_of
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.replay_buffer import ReplayBuffer
from stages.gateway.requests.spec import RequestSpec
from stages.gateway.requests.state import Outcome, RequestState, SequencePhase, Sink, finish
from stages.gateway.requests.state_writer import StateWriter
from stages.gateway.tracing.recorder import Recorder
from stages.gateway.versions.catalog import VersionCatalog

log = logging.getLogger("starling.gateway.recovery")


class Recovery:
    """One per gateway, beside its relay. `clock` is monotonic, `wall` is s since 1970 and steady."""

    def __init__(
        self,
        relay: Relay,
        readers: Readers,
        journal: StateWriter,
        clock: Callable[[], float],
        wall: Callable[[], float],
        timeout_s: float,
        keys: IdempotencyKeys | None = None,
        timelines: Recorder | None = None,
    ) -> None:
        self._timelines = timelines
        self.journal = journal
        # A table without keys is false.
        self.keys = IdempotencyKeys(clock, KEEP_S, 1 << 20, 1 << 20) if keys is None else keys
        self.keys.on_drop = self._drop
        self.replay_buffer = ReplayBuffer(clock)
        self.load: Callable[[str], None] = lambda model: None  # starts loading a model that a waiting request needs
        self.store_end: Callable[[RequestState, Callable[[], None]], None] = lambda request, then: then()
        self._relay = relay
        self._readers = readers
        self._clock = clock
        self._wall = wall
        self._timeout_s = timeout_s  # of a request that is generated again on demand
        self._waiting: dict[str, RequestState] = {}
        self._dormant: dict[str, JournalEntry] = {}
        self._woken: dict[str, JournalEntry] = {}  # what was dormant, of requests that are generated again
        self._named: set[str] = set()  # ids of requests that came with a name and are being handled
        for entry in journal.take_entries():
            if entry.end is not None:
                self._dormant[entry.spec.id] = entry
            else:
                self._waiting[entry.spec.id] = self._traced(self._recovered(entry.spec))
                self.keys.run(entry.spec)
        self._restore_keys()
        if self._waiting:
            log.warning("recovering requests that were in flight", extra={"requests": len(self._waiting)})

    # ---------------------------------------------------------------- the life of a request

    def record_start(self, spec: RequestSpec, on_written: Callable[[bool], object] = lambda is_written: None) -> None:
        """Journal an admitted request, which is submitted after `on_written` (False: it was left out).

        A thread may call that.
        """
        self.journal.open(spec, on_written)

    def record_withdrawal(self, spec: RequestSpec) -> None:
        """An admitted request is not submitted after all."""
        self.journal.end(RequestEnd(spec.id, self._wall(), "ABANDONED"), is_kept=False)

    def record_end(self, request: RequestState, *, is_lost: bool = False) -> None:
        """Store the answer for readers, and journal the outcome when `store_end` has stored what clients read of it.

        One that was not generated again to its end is dormant as before, unless its answer `is_lost`.
        """
        woken = self._woken.pop(request.id, None)
        if woken is not None and request.outcome is not Outcome.FINISHED and not is_lost:
            self._put_back(woken)
            return
        if woken is not None and request.spec.idempotency_key:
            self.journal.open(request.spec)  # in place of the old records
        is_kept = request.outcome is not Outcome.ABANDONED
        error = request.error
        is_pinned = False

        def pin(size: int) -> bool:
            nonlocal is_pinned
            is_pinned = self.keys.keep(request.spec, size)
            return is_pinned

        if request.outcome is Outcome.FINISHED:
            self.replay_buffer.put(request, pin)
        else:
            self.keys.forget(request.spec)
            if is_kept:
                self.replay_buffer.put(request)
        code = "" if is_kept else "ABANDONED"
        code, message = (error.code, error.message) if error is not None else (code, "")
        end = RequestEnd(request.id, self._wall(), code, message)
        self.store_end(request, lambda: self.journal.end(end, is_kept, is_pinned))

    def send_end(self, request: RequestState, sink: Sink) -> None:
        """Send the end of an answer to its readers: if it is kept for an idempotency key, once the journal has that.

        A client that has a whole answer gets no other one under its key, though the gateway is killed.
        """
        if not self.keys.keeps(request.spec):
            finish(sink)
            return
        readers = readers_of(request)  # those that join from now on are sent the whole answer at once

        def send() -> None:
            for reader in readers:
                if reader in readers_of(request):  # it has not left
                    finish(reader)

        self.journal.when_written(send)

    def _put_back(self, entry: JournalEntry) -> None:
        """The answer is dormant again, with its key, for what is left of its time."""
        spec, end = entry
        assert end is not None
        has_key = self.keys.keeps(spec)
        is_pinned = has_key and self.keys.keep(spec, sum(map(len, spec.prompts)), self._wall() - end.when)
        if has_key and not is_pinned:
            self._drop(spec.id)
            return
        self._dormant[spec.id] = entry
        self.journal.end(end, is_kept=True, is_pinned=is_pinned)

    def _drop(self, request_id: str) -> None:
        """The answer that was kept for an idempotency key need not be stored any longer."""
        self.replay_buffer.drop(request_id)
        self._dormant.pop(request_id, None)
        self.journal.forget(request_id)

    def _restore_keys(self) -> None:
        """Keep the idempotency keys of answered requests in the journal, the latest ones if not all fit."""
        keyed = [
            (end.when, spec) for spec, end in self._dormant.values() if spec.idempotency_key and end and not end.code
        ]
        keyed.sort(key=lambda answered: answered[0])
        latest = {(spec.tenant, spec.idempotency_key): spec.id for _, spec in keyed}
        for when, spec in keyed:
            is_latest = latest[spec.tenant, spec.idempotency_key] == spec.id
            if is_latest:
                self.keys.run(spec)
            if not (is_latest and self.keys.keep(spec, sum(map(len, spec.prompts)), self._wall() - when)):
                self._drop(spec.id)

    def spec_of(self, request_id: str, tenant: str) -> RequestSpec | None:
        """What a request of that tenant asks for that can be read. Nothing is generated for that."""
        found = self._known(request_id) or self._dormant_entry(request_id)
        return found.spec if found is not None and found.spec.tenant == tenant else None

    def find(
        self, request_id: str, tenant: str, check: Callable[[RequestSpec], object] = lambda spec: None
    ) -> RequestState | None:
        """A request of that tenant that can be read. A dormant one is generated again, unless `check` raises."""
        request = self._known(request_id)
        found = request or self._dormant_entry(request_id)
        if found is None or found.spec.tenant != tenant:
            return None
        check(found.spec)
        return request or self._wake(self._dormant[request_id])

    def _known(self, request_id: str) -> RequestState | None:
        """A request that is in flight, replayable or waiting."""
        request = self._relay.requests.get(request_id) or self.replay_buffer.find(request_id)
        return request or self._waiting.get(request_id)

    def _dormant_entry(self, request_id: str) -> JournalEntry | None:
        entry = self._dormant.get(request_id)
        return entry if entry is not None and not self._is_stale(entry) else None

    @contextmanager
    def named(self, request_id: str) -> Iterator[None]:
        """Reserve an id that a client has chosen. Raises `Conflict` if a request has it that has not failed."""
        dormant, ended = self._dormant.get(request_id), self.replay_buffer.find(request_id)
        has_failed = (dormant is None or bool(dormant.end and dormant.end.code)) and (
            ended is None or ended.error is not None
        )
        is_running = any(request_id in table for table in (self._relay.requests, self._waiting, self._named))
        if is_running or not has_failed:
            raise Conflict(
                f"there is a request {request_id} already: read it with GET /v1/requests/{request_id}, or send another "
                "X-Starling-Request",
                "X-Starling-Request",
            )
        self._named.add(request_id)
        self.replay_buffer.drop(request_id)
        self._dormant.pop(request_id, None)
        try:
            yield
        finally:
            self._named.remove(request_id)

    def find_open(self, request_id: str) -> RequestState | None:
        """A request that has not ended."""
        return self._relay.requests.get(request_id) or self._waiting.get(request_id)

    def cancel(self, request: RequestState, error: StarlingError) -> None:
        """End a request of `find_open` that its client has cancelled: its readers get `error`."""
        if self._waiting.pop(request.id, None) is None:
            self._relay.fail(request, error)
        else:
            self._fail(request, error)

    async def forget(self, request_id: str, tenant: str) -> None:
        """Drop the answer of a tenant's request that has ended, and free its key: on return also for a successor.

        Does nothing while a request of that name runs, or is being admitted.
        """
        if request_id in self._named or self.find_open(request_id) is not None:
            return
        ended, entry = self.replay_buffer.find(request_id), self._dormant.get(request_id)
        for spec in (ended.spec if ended is not None else None, entry.spec if entry is not None else None):
            if spec is not None:
                if spec.tenant != tenant:  # it has chosen the same name
                    return
                self.keys.forget(spec)
        self.replay_buffer.drop(request_id)
        self._dormant.pop(request_id, None)
        await self.journal.drop(request_id)

    def waiting(self) -> Collection[RequestState]:
        """The requests that wait for a version of their model."""
        return self._waiting.values()

    def waiting_on(self, version: str) -> int:
        """Number of waiting requests that were admitted to that version."""
        return sum(request.spec.version == version for request in self._waiting.values())

    # ---------------------------------------------------------------- time

    @property
    def has_waiting(self) -> bool:
        """Requests of the journal wait for their version, for which ticks look."""
        return bool(self._waiting)

    def tick(self, described: Mapping[str, Described], catalog: VersionCatalog) -> None:
        """At each tick: open waiting requests, expire answers, sync the journal. `described`: by version."""
        for request in list(self._waiting.values()):
            self._try_open(request, described, catalog)
        self.replay_buffer.expire()
        self.keys.expire()
        if self._dormant:
            self._dormant = {name: entry for name, entry in self._dormant.items() if not self._is_stale(entry)}
        self.journal.sync()

    def _try_open(self, request: RequestState, described: Mapping[str, Described], catalog: VersionCatalog) -> None:
        """Open a waiting request on a version that gives the same answer, or fail it if there will be none."""
        spec = request.spec
        home = catalog.equivalent(spec.model, spec.version, spec.digest, spec.kv_revision, described)
        is_undecided = catalog.has_undescribed(spec.model, described)
        is_loaded = bool(catalog.versions(spec.model))
        if not is_loaded and catalog.may_load(spec.model):
            self.load(spec.model)
            is_loaded = is_undecided = True
        if error := self._obstacle(request, home is not None or is_undecided, is_loaded):
            del self._waiting[request.id]
            self._fail(request, error, is_lost=error.code == "CONFLICT")
        elif home is not None and (home.id == spec.version or not is_undecided):
            request.place_on(home.id, described[home.id].tokenizer)
            del self._waiting[request.id]
            self._readers.expect(request)
            self._relay.open(request)

    def _obstacle(self, request: RequestState, has_home: bool, is_loaded: bool) -> StarlingError | None:
        """Why the answer cannot be generated again."""
        model = request.spec.model
        if self._clock() >= request.deadline:
            return StarlingError("TIMEOUT", "the request's time was over before the gateway had restarted")
        if not is_loaded:
            return StarlingError("MODEL_NOT_FOUND", f"model {model!r} is no longer loaded", "model")
        if not has_home or request.spec.numerics != NUMERICS:
            return StarlingError(
                "CONFLICT",
                f"model {model!r} is now another version, whose answer would differ; send the request again",
                "model",
            )
        return None

    def _fail(self, request: RequestState, error: StarlingError, *, is_lost: bool = False) -> None:
        """End a waiting request, which the relay does not have. `is_lost`: see `record_end`."""
        request.error = error
        request.end(Outcome.FAILED)
        for sequence in request.sequences:
            sequence.move(SequencePhase.FAILED)
        self._readers.forget(request.id)
        if self._timelines is not None:
            self._timelines.ended(request)
        self.record_end(request, is_lost=is_lost)
        if request.sink is not None:
            request.sink.failed(error)
            request.sink.flush()

    # ---------------------------------------------------------------- journal entries and requests

    def _is_stale(self, entry: JournalEntry) -> bool:
        return entry.end is None or not (self.keys.keeps(entry.spec) or self._wall() - entry.end.when <= KEEP_S)

    def _wake(self, entry: JournalEntry) -> RequestState:
        """Restore a dormant request. An error is returned on every call; an answer is generated again, once."""
        spec, end = entry
        if end is not None and end.code:
            request = self._recovered(spec)
            request.error = StarlingError(end.code, end.message)
            request.end(Outcome.FAILED)
            return request
        self._woken[spec.id] = self._dormant.pop(spec.id)
        self.keys.run_again(spec)
        generation = spec.generation
        if generation.turn is not None:  # the session has the turn already
            turn = msgspec.structs.replace(generation.turn, number=0)
            generation = msgspec.structs.replace(generation, turn=turn)
        # Its span has been sent: the trace of this computation is its reader's.
        deadline = self._wall() + self._timeout_s
        spec = msgspec.structs.replace(spec, deadline=deadline, generation=generation, trace=None)
        request = self._recovered(spec)
        request.is_charged = True
        if not spec.idempotency_key:  # the journal drops it soon; if it has no room, there are the old records
            self.journal.open(spec)
        self._waiting[spec.id] = self._traced(request)
        return request

    def _traced(self, request: RequestState) -> RequestState:
        """Begin the timeline of a request that is to be computed again; it was received before this process began."""
        if self._timelines is not None:
            self._timelines.recover(request, self._wall() - (request.spec.deadline - self._timeout_s))
        return request

    def _recovered(self, spec: RequestSpec) -> RequestState:
        """The state of a journaled request, without any tokens."""
        now = self._clock()
        request = RequestState(spec, now + spec.deadline - self._wall(), now)
        request.is_recovered = request.is_journaled = True
        request.sink = FanOutSink()
        for sequence in request.sequences:
            sequence.n_resubmitted = 1  # it was admitted before: if the scheduler's queue is full, it waits
        return request
