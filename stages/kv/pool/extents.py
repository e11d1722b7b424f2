"""The memory of a KV arena, reserved in extents as its pages are needed.

The arena's file has its full size from the start, and the pages behind the last extent are holes in it. Memory is
reserved before a page is given out, so that no process touches a hole: that could end in SIGBUS when the file system is
full. The arena's header says how far the reservation goes; a successor continues there.

It is reserved in huge pages where the kernel grants them (shm/huge_pages.py), and extents then end at whole ones.
After a refusal, or an extent that took long, the next ones are in ordinary pages for a while.

Ranks on all memory nodes read any page: where they run beside several nodes, the memory is taken from these in turns,
in ordinary pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from shm import huge_pages, memory_nodes
from shm.arena import HEADER_BYTES, Arena
from shm.pages import KvGeometry, pages_offset

log = logging.getLogger("starling.kv")

EXTENT_BYTES = 16 << 20  # reserved in about 4 ms, which the kv stage's frames wait for
MAX_HUGE_S = 0.05  # for each EXTENT_BYTES in huge pages, which the kernel may have to move other memory for
HUGE_RETRY_S = 60.0  # in ordinary pages after a refusal or a longer time


class PageMemory(Protocol):
    """Memory of an arena's pages, of which the first `n_pages` have some."""

    n_pages: int

    def grow(self, n_pages: int, on_grown: Callable[[], object] = lambda: None) -> int:
        """Reserve memory until the first `n_pages` have it, or there is no more. Returns `n_pages` of now.

        `on_grown` is called after each extent.
        """
        ...

    def shrink(self, n_pages: int) -> int:
        """Return the memory of the pages from `n_pages` on, as far as extents allow. Returns `n_pages` of now."""
        ...


class Extents:
    """See `PageMemory`; for the arena's owner."""

    def __init__(
        self,
        arena: Arena,
        geometry: KvGeometry,
        total: int,
        extent_bytes: int = EXTENT_BYTES,
        node_cpus: Sequence[Sequence[int]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total`: pages of the arena. `node_cpus`: the CPUs of each memory node to place them on; (): anywhere.

        clock: in seconds.
        """
        self._arena = arena
        self._node_cpus = node_cpus
        self._total = total
        self._page_bytes = geometry.page_bytes
        self._pages_at = pages_offset(total)
        self._each = max(1, extent_bytes // geometry.page_bytes)
        self._is_refused = False  # the last attempt to reserve whole extents failed
        self._takes_huge = len(node_cpus) < 2  # nodes take turns of one huge page: the parts end within these
        self._clock = clock
        self._no_huge_until = -float("inf")
        # With the pages in the last huge page, which a predecessor may have given out: none of these is a hole.
        self.n_pages = max(0, min(total, (arena.reserved - self._pages_at) // geometry.page_bytes))

    def grow(self, n_pages: int, on_grown: Callable[[], object] = lambda: None) -> int:
        """See `PageMemory.grow`. Without room for whole extents it takes as many pages as were asked for."""
        n_pages = min(self._total, n_pages)
        while self.n_pages < n_pages:
            target = min(self._total, (self.n_pages // self._each + 1) * self._each)
            if not self._extend(target, True):
                self._extend(n_pages, False)
                break
            on_grown()
        return self.n_pages

    def _extend(self, n_pages: int, whole: bool) -> bool:
        """Reserve memory up to the end of the first `n_pages`; False: there is none."""
        try:
            self._reserve(self._end_of(n_pages, whole))
        except OSError as error:
            if not self._is_refused:
                log.warning(
                    "no memory for more KV pages: cached ones make room, and requests wait",
                    extra={
                        "path": str(self._arena.path),
                        "error": error.strerror,
                        "pages": self.n_pages,
                        "total": self._total,
                    },
                )
            self._is_refused = True
            return False
        self._is_refused = not whole
        self.n_pages = n_pages
        return True

    def shrink(self, n_pages: int) -> int:
        """See `PageMemory.shrink`. The first extent stays."""
        target = max(self._each, -(-n_pages // self._each) * self._each)
        if target < self.n_pages:
            self.n_pages = target
            self._arena.give_back(self._end_of(target, True))
        return self.n_pages

    def _reserve(self, end: int) -> None:
        arena, cpus, begun = self._arena, self._node_cpus, self._clock()
        before = arena.reserved
        if end <= before:
            return
        huge = self._takes_huge and begun >= self._no_huge_until
        if not cpus:
            is_granted = arena.reserve(end, huge)
        else:
            parts = memory_nodes.in_turns(before, end, cpus) if len(cpus) > 1 else [(end, cpus[0])]
            is_granted = memory_nodes.reserve(arena, parts, huge)
        now = self._clock()
        most_s = MAX_HUGE_S * max(1.0, (end - before) / EXTENT_BYTES)
        if huge and (not is_granted or now - begun > most_s):
            self._no_huge_until = now + HUGE_RETRY_S
            facts = {"path": str(arena.path), "granted": is_granted, "seconds": round(now - begun, 3)}
            log.info("the kernel has no huge pages at hand: more KV pages are in ordinary ones for now", extra=facts)

    def _end_of(self, n_pages: int, whole: bool) -> int:
        """Bytes of the arena's contents up to the end of the first `n_pages`, or of their last huge page (`whole`)."""
        end = self._pages_at + n_pages * self._page_bytes
        if whole and self._takes_huge:
            end = min(huge_pages.round_up(HEADER_BYTES + end) - HEADER_BYTES, self._arena.buffer.size)
        return end
