"""Which cached page goes first. Holds unpinned pages only: a page in use is not in here.

    lru    the page unpinned longest ago
    lfu    the page that the fewest sequences have held; among equals as lru
    fifo   the page whose sequence was admitted first; among equals as lru

A sequence's pages are unpinned together, the last one first, so equals leave from the end of a
prefix and what remains can still be found from its start.  A turn of a session touches all of its
pages, so lru and fifo drop one session's pages after the other's.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

POLICIES = ("lru", "lfu", "fifo")


class Evictor:
    """Pages in the order of their eviction. All operations are O(log n) or better."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"eviction_policy is {policy!r}, expected one of {POLICIES}")
        self.policy = policy
        self._ticks = 0
        # By the time of unpinning: the order of lru, and of expiry for all.  Not a dict: the first
        # key of one that loses keys at its front is found by walking over all that are gone.
        self._live: OrderedDict[int, tuple[int, int]] = OrderedDict()  # page -> (tick, unpinned, ns)
        self._heap: list[tuple[int, int, int]] = []  # (rank, tick, page); stale where tick differs

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, page: int) -> bool:
        return page in self._live

    def add(self, page: int, now_ns: int, uses: int, born_ns: int) -> None:
        """`page` was unpinned: held by `uses` sequences so far, computed by one admitted `born_ns`."""
        self._ticks += 1
        self._live[page] = (self._ticks, now_ns)
        if self.policy != "lru":
            heapq.heappush(self._heap, (uses if self.policy == "lfu" else born_ns, self._ticks, page))
            if len(self._heap) > 64 + 4 * len(self._live):
                self._heap = [entry for entry in self._heap if self._is_live(entry)]
                heapq.heapify(self._heap)

    def remove(self, page: int) -> None:
        """`page` is used again, or gone."""
        del self._live[page]

    def pop(self) -> int:
        """The next victim. Raises `IndexError` when there is none."""
        if self.policy == "lru":
            if not self._live:
                raise IndexError("no cached page to evict")
            page = next(iter(self._live))
        else:
            while not self._is_live(self._heap[0]):
                heapq.heappop(self._heap)
            page = heapq.heappop(self._heap)[2]
        del self._live[page]
        return page

    def expired(self, before_ns: int) -> list[int]:
        """Pages unpinned before `before_ns`, oldest first; they stay in here."""
        pages = []
        for page, (_, unpinned_ns) in self._live.items():
            if unpinned_ns >= before_ns:
                break
            pages.append(page)
        return pages

    def order(self) -> Iterator[int]:
        """All pages, the next victim first. O(n log n); for views and tests."""
        if self.policy == "lru":
            return iter(list(self._live))
        return (page for _, _, page in sorted(e for e in self._heap if self._is_live(e)))

    def _is_live(self, entry: tuple[int, int, int]) -> bool:
        live = self._live.get(entry[2])
        return live is not None and live[0] == entry[1]
