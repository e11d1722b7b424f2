"""At most one leader, on any coordination store.

    KEY      the leader's identity, with the leader's lease; its revision is the fence of the term

A candidate that creates the key leads.  The store deletes it when the lease ends, `ttl_s` after the last renewal that
it received.  The leader counts from before it sent that renewal, by its own monotonic clock, and stops a margin
earlier: it has stopped before the store can let another one lead.  Against a process that is stopped between its check
and its write there is the fence: a write of the leader is a transaction with `term.condition`, which a later term makes
fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from pipeline.coordination.interface import Condition, CoordinationStore
from pipeline.errors import StorageUnavailable

MARGIN = (
    0.2  # of the lease, by which a leader stops before it ends: for clocks of different speed, and for its last work
)
RENEWALS = 5  # attempts in the time of a lease
RETRY_S = 0.1  # after an error of the store

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]


class Term:
    """One term of a leader. `fence` grows from term to term."""

    def __init__(self, key: str, lease: str, fence: int, ttl_s: float, begun: float, clock: Clock) -> None:
        """`begun`: when the lease was asked for, by `clock`."""
        self.lease = lease
        self.fence = fence
        self.condition = Condition(key, fence)
        self._lasts_s = ttl_s * (1 - MARGIN)
        self._until = begun + self._lasts_s
        self._clock = clock

    @property
    def is_valid(self) -> bool:
        """Whether this process leads now. Ask before each action, without waiting in between."""
        return self._clock() < self._until

    @property
    def remaining_s(self) -> float:
        """Seconds until it ends unless it is renewed."""
        return max(0.0, self._until - self._clock())

    def renewed(self, begun: float) -> None:
        """The store has renewed the lease, as asked for at `begun`."""
        self._until = begun + self._lasts_s

    def end(self) -> None:
        """It is over, whatever the clock says."""
        self._until = float("-inf")


class Election:
    """A candidate. `identity`: what others read of the leader."""

    def __init__(
        self,
        store: CoordinationStore,
        key: str,
        identity: bytes,
        ttl_s: float,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """`clock`: monotonic, s; it must count time in which the machine's processes are stopped."""
        self._store = store
        self._key = key
        self._identity = identity
        self._ttl_s = ttl_s
        self._clock = clock
        self._sleep = sleep

    async def campaign(self) -> Term:
        """Wait until this process leads."""
        while True:
            try:
                term = await self.attempt()
                if term is not None:
                    return term
                await self._wait_for_end()
            except StorageUnavailable:
                await self._sleep(RETRY_S)

    async def hold(self, term: Term) -> None:
        """Renew the term until it is lost. Cancelled, it resigns."""
        try:
            while term.is_valid:
                await self._sleep(min(self._ttl_s / RENEWALS, term.remaining_s))
                begun = self._clock()
                try:
                    async with asyncio.timeout(max(0.001, term.remaining_s)):
                        is_renewed = await self._store.renew(term.lease)
                except (StorageUnavailable, TimeoutError):
                    continue  # until the time is over
                if not is_renewed:
                    break
                # An answer that came after the end renews nothing: the process has stopped leading meanwhile.
                if term.is_valid:
                    term.renewed(begun)
        finally:
            term.end()
            await self._resign(term)

    async def attempt(self) -> Term | None:
        """Lead now; None if another process does. Raises `StorageUnavailable`."""
        begun = self._clock()
        lease = await self._store.grant(self._ttl_s)
        fence = await self._store.swap(self._key, 0, self._identity, lease)
        if fence is not None:
            return Term(self._key, lease, fence, self._ttl_s, begun, self._clock)
        await self._store.revoke(lease)
        return None

    async def _wait_for_end(self) -> None:
        """Wait until the key has no value."""
        async with aclosing(self._store.watch(self._key)) as updates:  # type: ignore[type-var]
            async for update in updates:
                values = [event.value for event in update.events if event.key == self._key]
                if (update.is_snapshot and not values) or (values and values[-1] is None):
                    return

    async def _resign(self, term: Term) -> None:
        """Let another one lead at once, if the store can be reached; otherwise the lease ends by itself."""
        try:
            async with asyncio.timeout(self._ttl_s):
                await self._store.revoke(term.lease)
        except (StorageUnavailable, TimeoutError):
            return
