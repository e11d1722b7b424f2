"""Loads the most used prefixes into a version's arena before requests need them.

    list   the thread of each page file ranks its pages (storage/page_ranking.py); those of an older version of the same
           model file, which is still loaded, are ranked by a thread as well
    read   the thread reads a few pages ahead
    copy   one page in each step, into a free page of the arena; nothing is evicted for it

It begins when the scheduler has reconciled its leases: after a start, a reload, a load on demand.  Steps are made only
while no sequence of any model holds pages; a request that comes meanwhile interrupts the reading (`pause`), so it waits
at most for the page that is being read.  A page that a sequence finds here is as good as one that it reads itself: the
same checksum is verified, and another model file or another tenant has other hashes.  Prompts are not known here.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from stages.kv.manager import Manager
from stages.kv.model import ModelPages
from stages.kv.pool.older_version import OlderVersion
from stages.kv.pool.page_pool import PagePool
from stages.kv.pool.page_source import PageSource
from stages.kv.storage.page_ranking import RankedPage, most_used
from stages.kv.storage.threaded_store import ThreadedPageStore

log = logging.getLogger("starling.kv")

READ_BYTES = 4 << 20  # read ahead together: enough for a disk to read adjacent pages in one go
STEP_PAGES = 64  # looked at in one step


class Warming:
    """The warming of one version's arena."""

    def __init__(self, pages: ModelPages, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes`: of pages loaded into the arena; 0: none."""
        self._pages = pages
        self._max_bytes = max_bytes
        self._clock = clock
        self._begun_at: float | None = None
        self._room = -1  # pages that may be loaded yet; -1: not begun
        self._n_listing = 0
        self._listed: list[object] = []  # page files and arenas
        self._ranked: deque[tuple[weakref.ref[PagePool], list[RankedPage]]] = deque()  # from threads
        self._queue: deque[tuple[OlderVersion | ThreadedPageStore, RankedPage]] = deque()
        self._reads: deque[tuple[ThreadedPageStore, RankedPage]] = deque()
        self._is_logged = True

    def __len__(self) -> int:
        """Pages that are listed and not loaded."""
        return len(self._queue) + len(self._reads)

    def stop(self) -> None:
        """Load nothing more: cached pages are being dropped."""
        self.pause()
        self._max_bytes = self._room = 0
        self._queue.clear()
        self._listed.clear()

    def forget_removed(self) -> None:
        """Versions were removed: keep nothing that leads to their arenas, whose memory would not be free."""
        self._listed = self._current(self._listed)
        self._queue = deque(entry for entry in self._queue if self._is_current(entry[0]))

    def pause(self) -> None:
        """A request needs the disk."""
        while self._reads:
            store, page = self._reads.pop()
            store.release([page.page_hash])
            self._queue.appendleft((store, page))

    def step(self) -> bool:
        """Make a step. True: there is another one that waits for no thread. Call while no sequence holds pages."""
        manager, geometry = self._pages.manager, self._pages.geometry
        if manager is None or geometry is None or not manager.is_reconciled or not self._max_bytes:
            return False
        if self._room < 0:
            self._room = self._max_bytes // geometry.page_bytes
        while self._ranked:
            reference, ranked = self._ranked.popleft()
            self._n_listing -= 1
            pool = reference()
            if pool is not None:
                self._add(OlderVersion(pool), ranked)
        self._list(manager)
        if not self._reads and not self._begin_reads(manager, geometry.page_bytes):
            self._log_end()
            return False
        if not self._reads:
            return True  # a page of an older version was copied, or pages were skipped
        store, page = self._reads[0]
        if not self._is_current(store):
            self._reads.clear()
            return True
        if store.is_reading(page.page_hash):
            return False
        self._reads.popleft()
        self._copy(manager, store, page)
        store.release([page.page_hash])
        return True

    # -------------------------------------------------------------- listing

    def _list(self, manager: Manager) -> None:
        """Rank the pages of sources that were not there before."""
        pool = manager.pool
        limit = min(self._room, pool.free)
        self._listed = self._current(self._listed)
        for source in self._sources():
            if limit <= 0 or any(_owner(source) is known for known in self._listed):
                continue
            if isinstance(source, OlderVersion):
                self._listed.append(_owner(source))
                self._n_listing += 1
                records, now_ns = source.pool.headers.snapshot(), self._pages.clock_ns()
                work = partial(self._rank, weakref.ref(source.pool), records, limit, now_ns)
                threading.Thread(target=work, name="ranking", daemon=True).start()
            elif source.rank_pages(limit, pool.table.hashes(), partial(self._on_ranked, source)):
                self._n_listing += 1
                self._listed.append(_owner(source))

    def _rank(self, pool: weakref.ref[PagePool], records: np.ndarray, limit: int, now_ns: int) -> None:
        """Called on a thread; it keeps no arena, whose version may be removed meanwhile."""
        self._ranked.append((pool, most_used(records, limit, now_ns)))
        self._pages.wake()

    def _sources(self) -> list[OlderVersion | ThreadedPageStore]:
        return [*self._pages.older_versions, *self._pages.stores()]

    def _current(self, owners: list[object]) -> list[object]:
        """Those of `owners` that can be read."""
        current = [_owner(source) for source in self._sources()]
        return [owner for owner in owners if any(owner is one for one in current)]

    def _is_current(self, source: OlderVersion | ThreadedPageStore) -> bool:
        """Whether a source can be read: its version has not been removed, and its file not closed."""
        return bool(self._current([_owner(source)]))

    def _on_ranked(self, source: ThreadedPageStore, ranked: list[RankedPage]) -> None:
        self._n_listing -= 1
        self._add(source, ranked)

    def _add(self, source: OlderVersion | ThreadedPageStore, ranked: list[RankedPage]) -> None:
        self._queue.extend((source, page) for page in ranked)
        if ranked:
            self._is_logged = False
            self._begun_at = self._clock() if self._begun_at is None else self._begun_at

    # -------------------------------------------------------------- loading

    def _begin_reads(self, manager: Manager, page_bytes: int) -> bool:
        """Take the next pages. False: there are none, or their disk pauses."""
        pool = manager.pool
        for _ in range(STEP_PAGES):
            if self._room <= 0 or not pool.free:
                self._queue.clear()
            if not self._queue:
                return False
            source, page = self._queue[0]
            is_there = pool.table.get_cached_page(page.page_hash) is not None
            if is_there or not self._is_current(source) or page.page_hash not in source:
                self._queue.popleft()
                continue
            if not isinstance(source, ThreadedPageStore):
                self._queue.popleft()
                self._copy(manager, source, page)
                return True
            batch = self._next_of(source, max(1, READ_BYTES // page_bytes))
            accepted = source.read_ahead([one.page_hash for one in batch], is_use=False)
            self._reads.extend((source, one) for one in batch[: len(accepted)])
            self._queue.extendleft((source, one) for one in batch[len(accepted) :][::-1])
            return bool(accepted)
        return True

    def _next_of(self, source: ThreadedPageStore, count: int) -> list[RankedPage]:
        found: list[RankedPage] = []
        while self._queue and self._queue[0][0] is source and len(found) < count:
            found.append(self._queue.popleft()[1])
        return found

    def _copy(self, manager: Manager, source: PageSource, page: RankedPage) -> None:
        if manager.pool.warm(source, page.page_hash, page.use):
            self._room -= 1

    def _log_end(self) -> None:
        if not self._is_logged and not self._queue and not self._n_listing:
            self._is_logged = True
            manager, begun_at = self._pages.manager, self._begun_at
            if manager is not None and begun_at is not None:
                extra = {
                    "model": self._pages.name,
                    "pages": manager.pool.counters.warmed,
                    "ms": round((self._clock() - begun_at) * 1000, 1),
                }
                log.info("the most used prefixes are loaded", extra=extra)


def _owner(source: OlderVersion | ThreadedPageStore) -> object:
    """What a source reads; objects for older versions are made anew whenever a version is loaded or removed."""
    return source.pool if isinstance(source, OlderVersion) else source
