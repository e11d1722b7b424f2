"""The order in which cache entries are evicted: LRU, LFU or FIFO; and a heap from which entries can be removed.

lru    the entry added longest ago; an entry that is used is added again
lfu    the entry with the fewest uses; among equals as lru
fifo   the entry with the earliest birth; among equals as lru
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

POLICIES = ("lru", "lfu", "fifo")

Key = TypeVar("Key", bound=Hashable)


class PrunedHeap(Generic[Key]):
    """A min-heap of keys by integer rank. A key that was removed or pushed again leaves a stale item behind.

    Stale items are skipped when they reach the top, and all of them are dropped when they outnumber the others by
    three to one, so the heap stays in proportion to its live keys.
    """

    def __init__(self) -> None:
        self._ticks = 0
        self._tick_of: dict[Key, int] = {}
        self._items: list[tuple[int, int, Key]] = []  # (rank, tick, key); stale where the key's tick differs

    def __len__(self) -> int:
        return len(self._tick_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._tick_of

    @property
    def n_items(self) -> int:
        """Items in the heap, stale ones included."""
        return len(self._items)

    def push(self, key: Key, rank: int) -> None:
        """Add a key, or move it to another rank. Equal ranks leave in the order of their pushes."""
        self._ticks += 1
        self._tick_of[key] = self._ticks
        heapq.heappush(self._items, (rank, self._ticks, key))
        if len(self._items) > 64 + 4 * len(self._tick_of):
            self._items = [item for item in self._items if self._is_live(item)]
            heapq.heapify(self._items)

    def remove(self, key: Key) -> None:
        """Remove a key. Raises `KeyError` when it is not in the heap."""
        del self._tick_of[key]

    def remove_all(self, keys: Collection[Key]) -> None:
        """`remove` each of `keys`."""
        tick_of = self._tick_of
        for key in keys:
            del tick_of[key]

    def pop(self) -> Key:
        """Remove and return the key of the lowest rank. Raises `IndexError` when the heap is empty."""
        while True:
            item = heapq.heappop(self._items)
            if self._is_live(item):
                del self._tick_of[item[2]]
                return item[2]

    def order(self) -> Iterator[Key]:
        """Yield all keys, the lowest rank first. O(n log n)."""
        return (key for _, _, key in sorted(filter(self._is_live, self._items), key=lambda item: item[:2]))

    def _is_live(self, item: tuple[int, int, Key]) -> bool:
        return self._tick_of.get(item[2]) == item[1]


class EvictionOrder(Generic[Key]):
    """The entries that may be evicted, in the order of a policy. All operations are O(log n) or better."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"eviction_policy is {policy!r}, expected one of {POLICIES}")
        self.policy = policy
        # In the order of `add`, which is the order of lru, and of expiry for all policies.  Not a dict: to find the
        # first key of a dict that loses keys at its front, Python walks over all removed ones.
        self._added_at: OrderedDict[Key, int] = OrderedDict()
        self._heap: PrunedHeap[Key] | None = None if policy == "lru" else PrunedHeap()

    def __len__(self) -> int:
        return len(self._added_at)

    def __contains__(self, key: Key) -> bool:
        return key in self._added_at

    @property
    def n_items(self) -> int:
        """Entries of the largest structure inside, stale ones included; for tests."""
        return len(self._added_at) if self._heap is None else self._heap.n_items

    def add(self, key: Key, now: int, uses: int, born: int) -> None:
        """Add an entry that is not in the order: `now` is the time of its last use, `born` that of its creation."""
        self._added_at[key] = now
        if self._heap is not None:
            self._heap.push(key, uses if self.policy == "lfu" else born)

    def add_oldest(self, key: Key, last_use: int, uses: int, born: int) -> None:
        """Add an entry that was last used before all others; only `uses` or `born` may give it another place."""
        first = next(iter(self._added_at.values()), last_use)
        self.add(key, min(last_use, first), uses, born)
        self._added_at.move_to_end(key, last=False)

    def remove(self, key: Key) -> None:
        """Remove an entry that is in use or deleted. Raises `KeyError` when it is not in the order."""
        del self._added_at[key]
        if self._heap is not None:
            self._heap.remove(key)

    def remove_all(self, keys: Collection[Key]) -> None:
        """`remove` each of `keys`."""
        added_at = self._added_at
        for key in keys:
            del added_at[key]
        if self._heap is not None:
            self._heap.remove_all(keys)

    def pop(self) -> Key:
        """Remove and return the entry to evict next. Raises `IndexError` when there is none."""
        if self._heap is None:
            if not self._added_at:
                raise IndexError("no entry to evict")
            return self._added_at.popitem(last=False)[0]
        key = self._heap.pop()
        del self._added_at[key]
        return key

    def oldest(self, before: int) -> Key | None:
        """The entry whose last use was first, if that was before `before`; it stays in the order."""
        first = next(iter(self._added_at.items()), None)
        return first[0] if first is not None and first[1] < before else None

    def expired(self, before: int) -> list[Key]:
        """Entries whose last use was before `before`, oldest first; they stay in the order."""
        keys = []
        for key, added_at in self._added_at.items():
            if added_at >= before:
                break
            keys.append(key)
        return keys

    def order(self) -> Iterator[Key]:
        """Yield all entries, the next one to evict first. O(n log n)."""
        return iter(list(self._added_at)) if self._heap is None else self._heap.order()
