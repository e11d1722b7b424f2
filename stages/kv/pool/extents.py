"""The memory of a KV arena, reserved in extents as its pages are needed.

The arena's file has its full size from the start, and the pages behind the last extent are holes in it. Memory is
reserved before a page is given out, so that no process touches a hole: that could end in SIGBUS when the file system is
full. The arena's header says how far the reservation goes; a successor continues there.

It is reserved in huge pages where the kernel grants them (shm/huge_pages.py), and extents then end at whole ones.

Ranks on all memory nodes read any page: where the machine has several nodes, the memory is taken from them in turns, in
ordinary pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from shm import huge_pages, memory_nodes
from shm.arena import HEADER_BYTES, Arena
from shm.pages import KvGeometry, pages_offset

log = logging.getLogger("starling.kv")

EXTENT_BYTES = 16 << 20  # reserved in about 4 ms, which the kv stage's frames wait for
MAX_HUGE_S = 0.25  # of a reservation, before no more huge pages are asked for: the kernel moves other memory for them


class PageMemory(Protocol):
    """Memory of an arena's pages, of which the first `n_pages` have some."""

    n_pages: int

    def grow(self, n_pages: int) -> int:
        """Reserve memory until the first `n_pages` have it, or there is no more. Returns `n_pages` of now."""
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
    ) -> None:
        """`total`: pages of the arena. `node_cpus`: the CPUs of each memory node to place them on; (): anywhere."""
        self._arena = arena
        self._node_cpus = node_cpus
        self._total = total
        self._page_bytes = geometry.page_bytes
        self._pages_at = pages_offset(total)
        self._each = max(1, extent_bytes // geometry.page_bytes)
        self._is_refused = False  # the last attempt to reserve whole extents failed
        self._takes_huge = True
        # With the pages in the last huge page, which a predecessor may have given out: none of these is a hole.
        self.n_pages = max(0, min(total, (arena.reserved - self._pages_at) // geometry.page_bytes))

    def grow(self, n_pages: int) -> int:
        """See `PageMemory.grow`. Without room for whole extents it takes as many pages as were asked for."""
        wanted = min(self._total, -(-n_pages // self._each) * self._each)
        for target, whole in ((wanted, True), (min(self._total, n_pages), False)):
            if target <= self.n_pages:
                break
            try:
                self._reserve(self._end_of(target, whole))
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
                continue
            self._is_refused = not whole
            self.n_pages = target
            break
        return self.n_pages

    def shrink(self, n_pages: int) -> int:
        """See `PageMemory.shrink`. The first extent stays."""
        target = max(self._each, -(-n_pages // self._each) * self._each)
        if target < self.n_pages:
            self.n_pages = target
            self._arena.give_back(self._end_of(target, True))
        return self.n_pages

    def _reserve(self, end: int) -> None:
        arena = self._arena
        if not self._node_cpus:
            begun = time.monotonic()
            arena.reserve(end, huge=self._takes_huge)
            took_s = time.monotonic() - begun
            if self._takes_huge and took_s > MAX_HUGE_S:
                self._takes_huge = False
                facts = {"path": str(arena.path), "seconds": round(took_s, 3)}
                log.info("the kernel took long to make huge pages: more KV pages are in ordinary ones", extra=facts)
        elif end > arena.reserved:
            memory_nodes.reserve(arena, memory_nodes.in_turns(arena.reserved, end, self._node_cpus))

    def _end_of(self, n_pages: int, whole: bool) -> int:
        """Bytes of the arena's contents up to the end of the first `n_pages`, or of their last huge page (`whole`)."""
        end = self._pages_at + n_pages * self._page_bytes
        if whole and not self._node_cpus:
            end = min(huge_pages.round_up(HEADER_BYTES + end) - HEADER_BYTES, self._arena.buffer.size)
        return end
