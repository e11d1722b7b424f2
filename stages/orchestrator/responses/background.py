"""Responses in the background: what runs them, whichever orchestrator dies.

    begin    the request is written where all orchestrators find it, and then answered
    look     each orchestrator lists the requests that none runs, and takes them; a lease says that it does
    run      as for a client, with its id: an engine that has the request already goes on with it
    end      the response is stored, complete, failed or cancelled, and then the request is removed

Two orchestrators may run one request for a moment, after a lease has ended: both get the same bytes from its engine,
and the response is stored once.  Without sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from pipeline.api import sse
from pipeline.api.fair_shares import FairShares
from pipeline.api.held_bytes import HeldBytes
from pipeline.api.idempotency_key import other_body
from pipeline.api.json_body import to_json
from pipeline.api.response_context import KeptResponse
from pipeline.api.response_object import failed_response, request_id_of
from pipeline.coordination.election import Election
from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import NotFound, Overloaded, StarlingError, StorageUnavailable
from stages.orchestrator.forward import MOVABLE, NotRepeated
from stages.orchestrator.responses.jobs import Job, Jobs, Opened
from stages.orchestrator.responses.keeper import ResponseKeeper
from stages.orchestrator.responses.store import ResponseStore
from stages.orchestrator.responses.use import PREFIX

log = logging.getLogger("starling.orchestrator")

RUN = f"{PREFIX}run/"
LEASE_S = 5.0
CHECK_S = 1.0  # between two checks for requests that none runs
ELSEWHERE_S = 0.05  # between two checks for a request at the engines, which another orchestrator sends there
RETRY_S = 1.0  # after the store has not answered, or no agent has taken a request; then twice as long, ...
MOST_RETRY_S = 15.0  # ... up to this
LATE_S = 600.0  # after its time: then a request ends whose failure could not be stored
MAX_RUNNING = 256  # of one orchestrator; others wait
MAX_OF_TENANT = 16  # that have not ended; as in a server
BODIES = "of responses in the background are held (server.body_buffer_mb)"

T = TypeVar("T")

KeepJob = Callable[[Job, bytes, KeptResponse], Awaitable[None]]  # stores what an engine has completed


class Begun:
    """The `Out` of a stream that no client reads here: engines have it for those who do."""

    def __init__(self, *, is_new: bool) -> None:
        """`is_new`: no engine has it, because it was sent here now."""
        self.is_new = is_new
        self.is_begun = False
        self.is_taken = False  # by an engine
        self.event = asyncio.Event()  # an engine has it, or it has ended
        self.error: StarlingError | None = None
        self.waits: StarlingError | None = None  # why no agent has taken it yet

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """See `Out`. Without headers it is a comment that follows, and no engine's answer."""
        self.is_begun = True
        if headers:
            self._begins()

    async def write(self, data: bytes) -> None:
        """See `Out`."""
        self.write_now(data)

    def write_now(self, data: bytes) -> bool:
        """See `Out`. Comments come also while it waits for an agent."""
        if not self.is_taken and any(not piece.startswith(b":") for piece in sse.pieces(data)):
            self._begins()
        return True

    def _begins(self) -> None:
        self.is_taken = True
        self.event.set()

    async def fail(self, error: StarlingError, open_choices: Sequence[int]) -> None:
        """See `Out`."""


# Runs a request to its end; JSON of the response if it has failed, else b"". Raises `StarlingError`.
Run = Callable[[Job, Begun, KeepJob], Awaitable[bytes]]


class Background:
    """One per orchestrator. `wall`: s since 1970."""

    def __init__(
        self,
        store: CoordinationStore,
        jobs: Jobs,
        responses: ResponseStore,
        keeper: ResponseKeeper,
        run: Run,
        identity: str,
        wall: Callable[[], float],
        *,
        timeout_s: float,
        max_open: int,
        bodies: FairShares | None = None,
    ) -> None:
        """`timeout_s`: for a response. `max_open`: of all tenants and orchestrators.

        `bodies`: the bounds on the bytes of those that run here, others wait; None: there are none.
        """
        self._store = store
        self._jobs = jobs
        self._responses = responses
        self._keeper = keeper
        self._run_job = run
        self._identity = identity.encode()
        self._wall = wall
        self._timeout_s = timeout_s
        self._max_open = max_open
        self._bodies = bodies
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, Begun] = {}
        self._pauses: dict[str, float] = {}  # s, of requests that wait here
        self._adding = asyncio.Lock()
        self._wake = asyncio.Event()

    # ---------------------------------------------------------------- for clients

    async def begin(self, job: Job) -> bytes:
        """Add a request; JSON of its response as it is now. Raises `StarlingError`."""
        known = await self._jobs.find(job.request_id, job.tenant)
        if known is None:
            stored = await self._responses.get(job.tenant, job.name)
            if stored is not None:  # an earlier attempt with this Idempotency-Key
                _check_same(stored.digest, job)
                return stored.body
            self._check_room(job.tenant, await self._jobs.all())
            if job.is_stream and len(self._tasks) >= MAX_RUNNING:  # its client would wait for others to end
                raise Overloaded(
                    f"this orchestrator runs {MAX_RUNNING} requests in the background; leave stream out, or try again",
                    "background",
                    retry_after_s=1.0,
                )
            if job.is_stream:  # likewise
                with HeldBytes(self._bodies, job.tenant, BODIES) as held:
                    held.add(len(job.body))
            if await self._add(job):
                self._take(job.request_id, job.tenant, len(job.body), is_new=True)
                return job.shown
            known = await self._jobs.find(job.request_id, job.tenant)
        if known is None:
            return job.shown
        _check_same(known.digest, job)
        return known.shown

    async def _add(self, job: Job) -> bool:
        """Store a request. False: there is one of this id. Raises `StarlingError`."""
        blob, may_be_named = await self._jobs.write(job), False
        try:
            async with self._adding:  # only other orchestrators may be in the way
                may_be_named = True  # by a record, unless the next call says that it has added none
                may_be_named = await self._jobs.add(job, blob, partial(self._check_room, job.tenant))
        except Overloaded:
            may_be_named = False
            raise
        finally:  # the client may also have left while it waited for the others
            if not may_be_named:
                await self._jobs.discard(blob)
        return may_be_named

    def _check_room(self, tenant: str, opened: list[Opened]) -> None:
        """Raises `Overloaded` if no other request of the tenant may be added to those that have not ended."""
        counts = Counter(one.tenant for one in opened)
        reserve = self._max_open // 8 if counts[tenant] else 0  # for tenants that have none
        if counts.total() >= self._max_open - reserve:
            raise Overloaded(
                f"{counts.total()} requests in the background have not ended, the most of all tenants "
                "(fleet.orchestrator.max_concurrent_requests); try again later",
                "background",
                retry_after_s=1.0,
            )
        if counts[tenant] >= MAX_OF_TENANT:
            raise Overloaded(
                f"{MAX_OF_TENANT} requests in the background have not ended, the most of a tenant; wait for one",
                "background",
                retry_after_s=1.0,
            )

    async def find(self, tenant: str, name: str) -> Job | None:
        """The request of a response that has not ended. Raises `StorageUnavailable`."""
        return await self._jobs.find(request_id_of(name), tenant)

    async def forget(self, tenant: str, name: str) -> None:
        """The response is stored, and will be deleted: nothing stores it again. Raises `StorageUnavailable`."""
        if await self._jobs.find(request_id_of(name), tenant) is not None:
            await self._jobs.end(request_id_of(name))

    async def once_begun(self, request_id: str, find: Callable[[], Awaitable[T]]) -> T:
        """What `find` returns when an engine has a request; it raises `NotFound` if none has. Raises `StarlingError`.

        Another orchestrator may have taken the request, and have yet to send it.
        """
        is_open = True
        while True:
            await self.begun(request_id)
            try:
                return await find()
            except NotFound:
                if not is_open:
                    raise
            is_open = await self._jobs.is_open(request_id)  # before the next check: it may end meanwhile
            if is_open:
                await asyncio.sleep(ELSEWHERE_S)

    async def begun(self, request_id: str) -> None:
        """Wait until an engine has a request that runs here. Raises `StarlingError` if it has failed before."""
        out = self._begun.get(request_id)
        if out is not None:
            await out.event.wait()
            if out.error is not None and not out.is_taken:
                raise out.error

    async def cancel(self, job: Job, running: bytes | None, stop: Callable[[], Awaitable[None]] | None = None) -> None:
        """End a request whose response has not been stored. `running`: the response as an engine shows it.

        `stop`: ends it at its engine, when it is stored as cancelled.  Raises `StarlingError`.
        """
        shown: dict[str, Any] = msgspec.json.decode(running or job.shown)
        ended = {**shown, "status": "cancelled", "usage": None, "incomplete_details": None}
        await self._responses.put(job.tenant, job.name, to_json(ended), job.conversation, job.inputs, job.digest)
        try:
            await self._keeper.withdraw_if_ended(job.tenant, job.name, job.conversation_id)
            await self._jobs.end(job.request_id)
        finally:  # else what is not withdrawn is so when the request is found again
            if (task := self._tasks.get(job.request_id)) is not None:
                task.cancel()
            if stop is not None:
                await stop()

    # ---------------------------------------------------------------- running them

    async def run(self) -> None:
        """Look for requests that none runs, without end."""
        while True:
            try:
                opened = await self._jobs.all()
                items, _ = await self._store.scan(RUN)
                held = {item.key.removeprefix(RUN) for item in items}
                for one in opened:
                    if one.request_id not in held:
                        self._take(one.request_id, one.tenant, one.size)
                known = {one.request_id for one in opened}
                self._pauses = {name: pause_s for name, pause_s in self._pauses.items() if name in known}
            except StarlingError as error:
                log.warning("requests in the background are not looked for", extra={"reason": error.message})
            await asyncio.sleep(CHECK_S)

    async def close(self) -> None:
        """Leave what runs here to the others."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, request_id: str, tenant: str, size: int = 0, *, is_new: bool = False) -> None:
        """Run a request here if there is room, also for `size` bytes of its body; else it is looked for again."""
        if request_id in self._tasks or len(self._tasks) >= MAX_RUNNING:
            return
        body = HeldBytes(self._bodies, tenant, BODIES)
        try:
            body.add(size)
        except Overloaded:
            return
        self._begun[request_id] = Begun(is_new=is_new)
        task = asyncio.get_running_loop().create_task(self._hold(request_id, tenant))
        self._tasks[request_id] = task
        task.add_done_callback(lambda done: self._dropped(request_id, body))

    def _dropped(self, request_id: str, body: HeldBytes) -> None:
        body.give_back()
        self._tasks.pop(request_id, None)
        out = self._begun.pop(request_id, None)
        if out is not None:
            out.event.set()

    async def _hold(self, request_id: str, tenant: str) -> None:
        """Run a request while this orchestrator has its lease, if no other one has it."""
        election = Election(self._store, RUN + request_id, self._identity, LEASE_S)
        try:
            term = await election.attempt()
            if term is None:
                return
            holding = asyncio.ensure_future(election.hold(term))
            try:
                job = await self._jobs.find(request_id, tenant)
                if job is not None:
                    await self._while_held(job, holding)
            finally:
                holding.cancel()
                await asyncio.gather(holding, return_exceptions=True)
        except StarlingError as error:  # it will be found again
            log.warning("a request in the background waits", extra={"request_id": request_id, "reason": error.message})
            pause_s = self._pauses.get(request_id, RETRY_S)
            self._pauses[request_id] = min(2 * pause_s, MOST_RETRY_S)
            await asyncio.sleep(pause_s)  # without the lease: another orchestrator may run it
        except Exception:
            log.exception("internal error of a request in the background", extra={"request_id": request_id})
            await asyncio.sleep(RETRY_S)

    async def _while_held(self, job: Job, holding: asyncio.Future[None]) -> None:
        running = asyncio.ensure_future(self._finish(job))
        try:
            await asyncio.wait({running, holding}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _finish(self, job: Job) -> None:
        """Run a request to its end. Raises `StorageUnavailable`: its end is not known."""
        out = self._begun[job.request_id]
        if await self._responses.has(job.tenant, job.name):  # an orchestrator has died, or could not withdraw its items
            await self._keeper.withdraw_if_ended(job.tenant, job.name, job.conversation_id)
            await self._jobs.end(job.request_id)
            return
        try:
            async with asyncio.timeout(max(0.0, self._left_s(job))):
                failed = await self._run_until_taken(job, out)
        except StorageUnavailable:
            raise
        except StarlingError as error:
            failed = self._failed(job, out, error)
        except TimeoutError:
            message = f"the response did not end within {self._timeout_s:g} s (server.request_timeout_ms)"
            failed = self._failed(job, out, out.waits or StarlingError("TIMEOUT", message))
        if failed:
            await self._put_failed(job, failed)
        await self._jobs.end(job.request_id)

    async def _run_until_taken(self, job: Job, out: Begun) -> bytes:
        """Run a request; again while no agent can serve it. See `Run`."""
        pause_s = RETRY_S
        while True:
            try:
                out.waits = None
                return await self._run_job(job, out, self._keep)
            except StarlingError as error:
                if error.code not in MOVABLE or isinstance(error, NotRepeated):
                    raise
                out.waits, out.is_new, out.is_begun = error, False, False
                log.info(
                    "a request in the background waits for an agent",
                    extra={"request_id": job.request_id, "reason": error.message},
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_RETRY_S)

    def _left_s(self, job: Job) -> float:
        return job.at + self._timeout_s - self._wall()

    @staticmethod
    def _failed(job: Job, out: Begun, error: StarlingError) -> bytes:
        log.warning("a response has failed", extra={"request_id": job.request_id, "reason": error.message})
        out.error = error
        return to_json(failed_response(msgspec.json.decode(job.shown), error))

    async def _put_failed(self, job: Job, body: bytes) -> None:
        """Store a response that has failed."""

        async def put(conversation: bytes, inputs: bytes) -> None:
            await self._responses.put(job.tenant, job.name, body, conversation, inputs, job.digest)
            await self._keeper.withdraw_if_ended(job.tenant, job.name, job.conversation_id)

        try:
            await self._put(job, partial(put, job.conversation, job.inputs), LATE_S)
        except StarlingError as problem:
            if problem.code != "INSUFFICIENT_RESOURCES":
                raise
            await self._put(job, partial(put, b"\x90", b"[]"), LATE_S)  # it can be read

    async def _keep(self, job: Job, body: bytes, kept: KeptResponse) -> None:
        """Store what an engine has completed. Raises `StarlingError`."""

        async def put() -> None:
            await self._keeper.put(job.tenant, body, kept, job.digest)

        await self._put(job, put, 0.0)

    async def _put(self, job: Job, put: Callable[[], Awaitable[None]], late_s: float) -> None:
        """Store a response, unless it was stored, or was cancelled and maybe deleted since; again if that fails.

        `late_s`: after the request's time, then nothing is stored.
        """
        pause_s = RETRY_S
        while True:
            try:
                if await self._jobs.is_open(job.request_id):
                    await put()
                return
            except StorageUnavailable as error:
                log.warning(
                    "a response in the background is not stored",
                    extra={"request_id": job.request_id, "reason": error.message},
                )
                if self._left_s(job) + late_s <= 0:
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_RETRY_S)


def _check_same(digest: bytes, job: Job) -> None:
    if digest != job.digest:
        raise other_body()
