"""The store in one process: the plainest implementation of the interface, which the others are compared with."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from pipeline.coordination.interface import (
    Change,
    Condition,
    CoordinationStore,
    Event,
    Item,
    Update,
    check_transaction,
    check_ttl,
)

KEPT_EVENTS = 10_000  # for watchers that are behind
EXPIRY_POLL_S = 0.05  # at most, while something is watched


class _Lease:
    def __init__(self, ttl_s: float, ends: float) -> None:
        self.ttl_s, self.ends = ttl_s, ends


class MemoryStore(CoordinationStore):
    """Used in one event loop. `clock`: monotonic, s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, kept_events: int = KEPT_EVENTS) -> None:
        self._clock = clock
        self._items: dict[str, tuple[Item, str]] = {}  # with its lease
        self._leases: dict[str, _Lease] = {}
        self._events: deque[Event] = deque()
        self._kept_events = kept_events
        self._forgotten = 0  # revision of the last event that is not kept
        self._revision = 0
        self._changed = asyncio.Event()

    async def get(self, key: str) -> Item | None:
        """The value of a key."""
        self._expire()
        found = self._items.get(key)
        return found[0] if found else None

    async def scan(self, prefix: str) -> tuple[list[Item], int]:
        """All values below a prefix, and the revision."""
        self._expire()
        return self._below(prefix), self._revision

    async def transact(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> int | None:
        """Apply all changes or none."""
        check_transaction(conditions, changes)
        self._expire()
        for key, revision in conditions:
            found = self._items.get(key)
            if (found[0].revision if found else 0) != revision:
                return None
        if any(change.lease and change.lease not in self._leases for change in changes):
            return None
        self._apply(changes)
        return self._revision

    async def grant(self, ttl_s: float) -> str:
        """A new lease."""
        check_ttl(ttl_s)
        lease = secrets.token_hex(8)
        self._leases[lease] = _Lease(ttl_s, self._clock() + ttl_s)
        return lease

    async def renew(self, lease: str) -> bool:
        """Prolong a lease."""
        self._expire()
        found = self._leases.get(lease)
        if found is None:
            return False
        found.ends = self._clock() + found.ttl_s
        return True

    async def revoke(self, lease: str) -> None:
        """End a lease."""
        if self._leases.pop(lease, None) is not None:
            self._delete_of({lease})

    async def watch(self, prefix: str, after: int = 0) -> AsyncIterator[Update]:
        """Updates without end."""
        seen = after or None
        while True:
            self._expire()
            if seen is None or seen < self._forgotten or seen > self._revision:
                seen = self._revision
                yield Update(seen, tuple(Event(*item) for item in self._below(prefix)), True)
            elif seen < self._revision:
                events = tuple(e for e in self._events if e.revision > seen and e.key.startswith(prefix))
                seen = self._revision
                if events:
                    yield Update(seen, events, False)
            if seen == self._revision:
                self._changed.clear()
                try:
                    async with asyncio.timeout(EXPIRY_POLL_S if self._leases else None):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def _below(self, prefix: str) -> list[Item]:
        return sorted(item for key, (item, _) in self._items.items() if key.startswith(prefix))

    def _apply(self, changes: Sequence[Change]) -> None:
        effective = [change for change in changes if change.value is not None or change.key in self._items]
        if not effective:
            return
        self._revision += 1
        for key, value, lease in effective:
            if value is None:
                del self._items[key]
            else:
                self._items[key] = Item(key, value, self._revision), lease
            self._events.append(Event(key, value, self._revision))
        while len(self._events) > self._kept_events:
            self._forgotten = self._events.popleft().revision
        self._changed.set()

    def _expire(self) -> None:
        now = self._clock()
        ended = {lease for lease, state in self._leases.items() if state.ends <= now}
        for lease in ended:
            del self._leases[lease]
        if ended:
            self._delete_of(ended)

    def _delete_of(self, leases: set[str]) -> None:
        keys = sorted(key for key, (_, lease) in self._items.items() if lease in leases)
        self._apply([Change(key, None) for key in keys])
