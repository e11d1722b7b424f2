"""The agent's lease: while it lasts the agent is in the coordination store, and may serve.

The store counts the lease from the last renewal that it received.  The agent counts from before it sent that renewal,
by its own monotonic clock, and stops a margin earlier (`Term`): when the store forgets it, it serves no more.  With
each renewal it reads its record: it serves no more either when that is another agent's.

While the store does not answer, an orchestrator that still reaches the agent extends the lease by a heartbeat that has
the fleet's token: both are then on the same side, and nothing else changes until the store is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import msgspec

from pipeline.coordination.election import MARGIN, RENEWALS, RETRY_S, Clock, Sleep, Term
from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import StorageUnavailable
from pipeline.fleet import records
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.agent.lease")

LATE = 0.4  # of the time for which a renewal lasts: with less left, the agent reports that it is late


class AgentLease:
    """Keeps the record of one agent. `hold` and `guard` run for the agent's whole life."""

    def __init__(
        self,
        store: CoordinationStore,
        record: records.AgentRecord,
        ttl_s: float,
        previous: str,
        *,
        clock: Clock,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """`previous`: incarnation of the agent that ran here before, which is dead with its engines: its record is
        replaced. "": of none that is known to be dead.

        clock: monotonic, s; it must count time in which the machine's processes are stopped.
        """
        self._store = store
        self._record = record
        self._ttl_s = ttl_s
        self._own = {record.incarnation, previous}
        self._clock = clock
        self._sleep = sleep
        self._term: Term | None = None
        self._is_store_silent = False
        self._renewed = asyncio.Event()  # set when the lease becomes valid
        self._ended = asyncio.Event()  # set when it ends before its time
        self.is_name_taken = False  # by another agent

    @property
    def is_valid(self) -> bool:
        """Whether the agent may serve now."""
        return self._term is not None and self._term.is_valid

    @property
    def lease_id(self) -> str:
        """The lease in the store, for further keys that end with it; "" without a valid one."""
        return self._term.lease if self._term is not None and self._term.is_valid else ""

    @property
    def remaining_s(self) -> float:
        """Seconds for which it may serve unless the lease is renewed."""
        return self._term.remaining_s if self._term is not None else 0.0

    @property
    def is_late(self) -> bool:
        """Whether renewals have failed for a while."""
        return self._term is not None and self.remaining_s < LATE * self._ttl_s * (1 - MARGIN)

    def extend(self) -> bool:
        """An orchestrator reaches this agent. Prolongs a lease that the store cannot renew; whether it did."""
        if not self._is_store_silent or self._term is None or not self._term.is_valid:
            return False
        self._term.renewed(self._clock())
        return True

    async def hold(self) -> None:
        """Register, and renew without end. Cancelled, it removes the record. Raises `ConfigError` of the store."""
        try:
            while True:
                await self._register()
                await self._renew()
        finally:
            if self._term is not None:
                lease = self._term.lease
                self._term.end()
                with contextlib.suppress(StorageUnavailable, TimeoutError):
                    async with asyncio.timeout(self._ttl_s):
                        await self._store.revoke(lease)

    async def guard(self, begin: Callable[[], Awaitable[None]], end: Callable[[], Awaitable[None]]) -> None:
        """Call `begin` whenever the lease has become valid, and `end` as soon as it is not."""
        while True:
            await self._renewed.wait()
            self._renewed.clear()
            self._ended.clear()
            if not self.remaining_s:
                continue
            await begin()
            # Also if there is another lease by now: the other agent has served meanwhile.
            while not self._ended.is_set() and (left_s := self.remaining_s):
                await self._sleep_or_end(left_s)
            log.warning("the lease has ended, or could not be renewed in time: no more requests are taken")
            await end()

    async def _sleep_or_end(self, seconds: float) -> None:
        tasks = [asyncio.ensure_future(self._sleep(seconds)), asyncio.ensure_future(self._ended.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _register(self) -> None:
        """Write the record. Waits while another agent has the name, or the store is away."""
        key = records.agent_key(self._record.agent_id)
        while True:
            begun = self._clock()
            try:
                async with asyncio.timeout(self._ttl_s):
                    lease = await self._store.grant(self._ttl_s)
                    found = await self._store.get(key)
                    is_own = found is None or self._is_own(found.value)
                    revision = found.revision if found is not None else 0
                    value = records.encode(self._record)
                    fence = await self._store.swap(key, revision, value, lease) if is_own else None
                    if fence is None:
                        await self._store.revoke(lease)
            except (StorageUnavailable, TimeoutError):
                await self._sleep(RETRY_S)
                continue
            if fence is not None:
                self._term = Term(key, lease, fence, self._ttl_s, begun, self._clock)
                self._is_store_silent = self.is_name_taken = False
                self._renewed.set()
                log.info("registered", extra={"agent": self._record.agent_id, "url": self._record.url})
                return
            if not is_own and not self.is_name_taken:
                self.is_name_taken = True
                log.error(
                    "another agent has the same id: this one waits for the end of its lease; if it lives, give one of "
                    "them another fleet.agent.id",
                    extra={"agent": self._record.agent_id},
                )
            await self._sleep(max(RETRY_S, self._ttl_s / RENEWALS))

    def _is_own(self, value: bytes) -> bool:
        """Whether a record is of this agent, or of the one that ran here before."""
        try:
            return msgspec.json.decode(value, type=records.AgentRecord).incarnation in self._own
        except DECODE_ERRORS:
            return False

    async def _renew(self) -> None:
        """Renew until the store has ended the lease, or another agent has the name."""
        term = self._term
        assert term is not None
        while True:
            await self._sleep(self._ttl_s / RENEWALS)
            begun = self._clock()
            try:
                async with asyncio.timeout(self._ttl_s / 4):
                    is_renewed = await self._store.renew(term.lease)
                    found = await self._store.get(term.condition.key) if is_renewed else None
            except (StorageUnavailable, TimeoutError):
                self._is_store_silent = True
                continue
            self._is_store_silent = False
            if not is_renewed:
                return
            if found is not None and not self._is_own(found.value):
                term.end()
                self._ended.set()
                with contextlib.suppress(StorageUnavailable, TimeoutError):
                    async with asyncio.timeout(self._ttl_s):
                        await self._store.revoke(term.lease)  # further keys end with it; the record has another one
                return
            was_valid = term.is_valid
            term.renewed(begun)
            if not was_valid:
                self._renewed.set()
