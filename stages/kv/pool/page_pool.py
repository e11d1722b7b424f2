"""The page table of an arena, with the places outside it where pages are copied to and restored from.

Finds, restores, evicts and expires pages.  `manager.py` decides which sequence gets them; `page_table.py` keeps their
states.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.faults.points import FaultPoint
from shm.layer_groups import NO_PAGE, ONE_GROUP, LayerGroups
from shm.pages import KvArena
from shm.prefix_hash import PageHash, group_hash
from stages.kv.pool.extents import PageMemory
from stages.kv.pool.page_headers import MAX_USES, PageIdentity
from stages.kv.pool.page_source import PageSource, PageStore
from stages.kv.pool.page_table import CACHED, PageTable

log = logging.getLogger("starling.kv")

_NO_ROOT = PageHash(bytes(16))


class PageUse(NamedTuple):
    """What is known of a page outside the arena: sequences that have held it, and times in ns since 1970."""

    uses: int
    last_use_ns: int
    born_ns: int


@dataclass
class PoolCounters:
    """Totals since the process started."""

    hits: int = 0  # pages of prompts found, in the arena or in a source
    misses: int = 0  # full pages of prompts not found
    evictions: int = 0  # cached pages freed for other pages or by their age
    expired: int = 0  # of these, by their age
    spilled: int = 0  # pages copied to disk on eviction
    restored: int = 0  # pages copied back into the arena
    checksum_failures: int = 0  # pages in the arena, or of other engines, dropped because their bytes had changed
    warmed: int = 0  # pages copied into the arena before a sequence needed them
    warm_hits: int = 0  # of these, found by a sequence
    restore_s: list[float] = field(default_factory=list)  # of each page restored; the reader clears it
    imported: int = 0  # pages of other engines that were copied into the arena
    unread: int = 0  # times that pages stayed without a hash because their tokens could not be read


class Hit(NamedTuple):
    """The first `end` places of a sequence, which need not be computed, and the pages that the sequence needs of them.

    `pages`: in the order of a page table; NO_PAGE stands for one that a source contains.  `hashes`: of the same pages.
    Of the places before `first` those of groups with a window are not needed.
    """

    first: int
    end: int
    hashes: Sequence[PageHash]
    pages: list[int]

    @property
    def in_arena(self) -> list[int]:
        """The pages of the arena."""
        return [page for page in self.pages if page != NO_PAGE]

    @property
    def outside(self) -> list[PageHash]:
        """The pages that have to be fetched, in the order of a page table."""
        return [page_hash for page_hash, page in zip(self.hashes, self.pages, strict=True) if page == NO_PAGE]


def needed_hashes(hashes: Sequence[PageHash], first: int, groups: LayerGroups) -> list[PageHash]:
    """The pages of the places that `hashes` name, without those of groups with a window before the place `first`."""
    kept = [group_hash(page_hash, group) for page_hash in hashes[:first] for group in range(groups.full)]
    return kept + [group_hash(page_hash, group) for page_hash in hashes[first:] for group in range(groups.n_groups)]


@dataclass
class PagePool:
    """One arena. Single-threaded."""

    arena: KvArena
    policy: str = "lru"
    ttl_ns: int = 0  # cached pages unused for this time expire; 0: never
    spill: PageStore | None = None  # where evicted pages are saved, one of `stores`
    older_versions: Sequence[PageSource] = ()  # searched for missing pages before `stores`
    stores: Sequence[PageStore] = ()  # searched for missing pages, in this order
    clock_ns: Callable[[], int] = time.time_ns
    memory: PageMemory | None = None  # of the pages; None: all have some
    fault: FaultPoint | None = None  # struck with the number of pages that have become full
    on_moved: Callable[[], object] = lambda: None  # called after each page that was copied, and each extent of memory
    name: str = ""  # of the model's version, for the log

    def __post_init__(self) -> None:
        self.table = PageTable(self.arena, self.policy, None if self.memory is None else self.memory.n_pages)
        self.headers = self.table.headers
        self.total = self.table.total
        self.counters = PoolCounters()
        self._n_full = 0
        self._warmed: set[PageHash] = set()  # pages that were warmed and that no sequence has held since
        # Pages and their most uses, to be removed when all sequences that may hold them are known.
        self._to_remove: list[tuple[PageHash, int]] = []

    @property
    def free(self) -> int:
        """Pages that are free, with memory or without."""
        return self.table.free

    @property
    def cached(self) -> int:
        """Pages that can be evicted."""
        return self.table.cached

    @property
    def leased(self) -> int:
        """Pages that a sequence holds, or may hold."""
        return self.table.leased

    # -------------------------------------------------------------- finding pages

    def find(self, hashes: Sequence[PageHash], fetchable: bool = False) -> Hit:
        """The longest known prefix of `hashes`: intact pages in the arena, then hashes that a source contains.

        fetchable: only those that it can give now.
        """
        found = self.table.get_cached_pages(hashes)
        if len(found) < len(hashes):
            page = self.table.get_cached_page(hashes[len(found)])
            if page is not None:  # damaged
                self._report_damage(page)
                self.table.evict(page)
        if self.older_versions or self.stores:
            for page_hash in hashes[len(found) :]:
                # Pages of the arena behind a gap are fetched all the same: a sequence shares one run of pages, and
                # all pages behind it are new.
                if not self._is_outside(page_hash, fetchable):
                    break
                found.append(NO_PAGE)
        return Hit(0, len(found), hashes[: len(found)], found)

    def find_last(
        self,
        hashes: Sequence[PageHash],
        first_needed: Callable[[int], int],
        sent: Container[PageHash] = (),
        groups: LayerGroups = ONE_GROUP,
        n_fetchable: int = 0,
        most_outside: int | None = None,
    ) -> Hit:
        """The longest prefix of `hashes` that a sequence with a window can continue.

        first_needed: (number of places) -> the first place that is read by the position behind them, in groups with a
        window.  `sent`: pages that need not be fetched.  `n_fetchable`: in so many groups, the first ones, a source's
        pages count only if it can give them now.
        `most_outside`: pages that can be fetched together; None: all.
        """
        table = self.table
        full, windowed = range(groups.full), range(groups.full, groups.n_groups)
        most = len(hashes) * groups.n_groups if most_outside is None else most_outside

        def to_fetch(page_hash: PageHash, group: int) -> int | None:
            """1: a source contains the page; 0: it is there; None: it is unknown."""
            name = group_hash(page_hash, group)
            if table.get_cached_page(name) is not None or name in sent:
                return 0
            return 1 if self._is_outside(name, group < n_fetchable) else None

        while True:
            end = gap = 0  # `gap`: the place behind the last unknown page of a group with a window
            n_full, n_windowed = 0, [0]  # pages to fetch: of the places so far; of those before each place
            for place, page_hash in enumerate(hashes):
                counts = [to_fetch(page_hash, group) for group in full]
                if None in counts:
                    break
                n_full += sum(filter(None, counts))
                counts = [to_fetch(page_hash, group) for group in windowed]
                n_windowed.append(n_windowed[-1] + sum(filter(None, counts)))
                first = first_needed(place + 1)
                if None in counts:
                    gap = place + 1
                elif gap <= first and n_full + n_windowed[-1] - n_windowed[first] <= most:
                    end = place + 1
            first = first_needed(end)
            needed = needed_hashes(hashes[:end], first, groups)
            pages = [table.get_cached_page(page_hash) for page_hash in needed]
            damaged = next((page for page in pages if page is not None and table.is_damaged(page)), None)
            if damaged is None:
                return Hit(first, end, needed, [NO_PAGE if page is None else page for page in pages])
            self._report_damage(damaged)
            table.evict(damaged)

    def _is_outside(self, page_hash: PageHash, fetchable: bool) -> bool:
        if any(page_hash in source for source in self.older_versions):
            return True
        return any(store.can_fetch(page_hash) if fetchable else page_hash in store for store in self.stores)

    def restore(self, hashes: Sequence[PageHash], new_pages: Sequence[int]) -> int:
        """Copy pages from the sources into `new_pages`, up to the first failure. Returns their number."""
        if not hashes:
            return 0
        count = 0
        for store in self.stores:
            store.prefetch(hashes)
        for page_hash, page in zip(hashes, new_pages, strict=False):
            begin = time.perf_counter()
            if not self._fetch(page_hash, page):
                break
            count += 1
            self.counters.restore_s.append(time.perf_counter() - begin)
            self.on_moved()
        self.counters.restored += count
        return count

    def _fetch(self, page_hash: PageHash, page: int) -> bool:
        out = self.arena.pages[page]
        for source in self.older_versions:
            identity = source.fetch(page_hash, out) if page_hash in source else None
            if identity is not None:
                self._cache_restored(page, identity)
                return True
        for store in self.stores:
            identity = store.fetch(page_hash, out) if page_hash in store else None
            if identity is not None:
                self.headers.mark_copy(page, store.residency)
                self._cache_restored(page, identity)
                return True
        return False

    def warm(self, source: PageSource, page_hash: PageHash, use: PageUse) -> bool:
        """Copy a page into a free page of the arena, for no sequence. False: it is there already, or cannot be."""
        table = self.table
        if table.get_cached_page(page_hash) is not None or page_hash not in source:
            return False
        if not table.free_reserved and not self._reserve(1):
            return False
        (page,) = table.get_new_pages(1, _NO_ROOT, 0, use.last_use_ns, use.born_ns)
        identity = source.fetch(page_hash, self.arena.pages[page])
        if identity is None or identity.page_hash != page_hash:
            table.release_ref((page,), self.clock_ns())
            return False
        for store in self.stores:
            if page_hash in store:
                self.headers.mark_copy(page, store.residency)
        self.cache_full_page(page, identity)
        table.release_oldest(page, use.uses, use.last_use_ns)
        self._note_warmed(page_hash)
        self.on_moved()
        return True

    def keep(self, source: PageSource, page_hash: PageHash, use: PageUse) -> bool:
        """Copy a page that another engine has used, for no sequence.

        It takes a free page, or that of the cached page that was used longest ago, if its own last use was later.
        False: it is there already, or cannot be.
        """
        table, headers = self.table, self.headers
        if table.get_cached_page(page_hash) is not None or page_hash not in source:
            return False
        if not table.free_reserved and not self._reserve(1):
            oldest = table.oldest_cached_page(use.last_use_ns)
            if oldest is None:
                return False
            self._save_copy(oldest)
            table.evict(oldest)
            self.counters.evictions += 1
        now_ns = self.clock_ns()
        (page,) = table.get_new_pages(1, _NO_ROOT, 0, now_ns, use.born_ns)
        identity = source.fetch(page_hash, self.arena.pages[page])
        if identity is None or identity.page_hash != page_hash:
            self.counters.checksum_failures += 1
            table.release_ref((page,), now_ns)
            return False
        self.cache_full_page(page, identity)
        headers.set_uses(page, use.uses)
        table.release_ref((page,), now_ns)
        self._note_warmed(page_hash)
        self.on_moved()
        return True

    def _note_warmed(self, page_hash: PageHash) -> None:
        self._warmed.add(page_hash)
        self.counters.warmed += 1
        if len(self._warmed) > 2 * self.total:  # most of them have left the arena
            self._warmed &= self.table.hashes()

    def count_warm_hits(self, hashes: Sequence[PageHash]) -> None:
        """A sequence has found these pages in the arena."""
        if self._warmed:
            found = self._warmed.intersection(hashes)
            self._warmed -= found
            self.counters.warm_hits += len(found)

    def _cache_restored(self, page: int, identity: PageIdentity) -> None:
        if self.table.get_cached_page(identity.page_hash) is None:
            self.cache_full_page(page, identity)

    def cache_full_page(self, page: int, identity: PageIdentity) -> None:
        """A leased page is full, and the only one with its hash."""
        self._n_full += 1
        if self.fault is not None and self.fault.trigger is not None:
            self.fault.trigger(self._n_full)
        self._warmed.discard(identity.page_hash)
        self.table.cache_full_page(page, identity)

    # -------------------------------------------------------------- freeing pages

    def make_room(self, count: int) -> bool:
        """Reserve memory or evict until `count` free pages have memory.

        False, without any eviction: leased pages leave too few, or there is no memory for enough of the others.
        """
        table = self.table
        missing = count - table.free_reserved
        if missing <= 0:
            return True
        if missing > table.cached + table.total - table.reserved:
            return False
        missing -= self._reserve(missing)
        if missing <= 0:
            return True
        if missing > table.cached:
            return False
        table.evict_next(missing, None if self.spill is None else self._save_copy)
        self.counters.evictions += missing
        return True

    def _reserve(self, count: int) -> int:
        """Reserve memory for `count` more pages, or as many as possible. Returns their number, which may be higher."""
        table, before = self.table, self.table.reserved
        if self.memory is not None and before < table.total:
            table.grow(self.memory.grow(min(table.total, before + count), self.on_moved))
        return table.reserved - before

    def _save_copy(self, page: int) -> None:
        page_hash = self.table.hash_of(page)
        if self.spill is None or page_hash is None:
            return
        if page_hash in self.spill:
            self.spill.touch(page_hash)  # its uses were those of the page in the arena
            return
        if self.spill.save(page_hash, self.headers.record(page), self.arena.pages[page]):
            self.counters.spilled += 1
        self.on_moved()

    def shrink(self) -> None:
        """Return the memory of the pages at the end that are all free."""
        if self.memory is not None:
            self.table.shrink(self.memory.shrink(self.table.end_of_use()))

    def expire(self) -> int:
        """Free cached pages that were not used for the time to live, and remove their copies.

        Returns the number of pages freed in the arena: none between a restart and the reconciliation.
        """
        if not self.ttl_ns or not self.table.may_free:
            return 0
        before_ns = self.clock_ns() - self.ttl_ns
        pages = self.table.expired_pages(before_ns)
        for page in pages:
            self.table.evict(page)
        if pages:
            self.shrink()
        self.counters.expired += len(pages)
        self.counters.evictions += len(pages)
        for store in self.stores:
            for page_hash in store.idle(before_ns):
                if self.table.get_cached_page(page_hash) is not None:  # its page was used without reading the copy
                    store.touch(page_hash)
                else:
                    store.remove(page_hash)
        return len(pages)

    def remove(self, hashes: Iterable[PageHash], most_uses: int = MAX_USES) -> int:
        """Free the cached pages with these hashes and remove their copies. Returns the number of pages freed.

        Pages that sequences hold stay, with their copies; so does what more than `most_uses` have held, each page and
        copy by its own count.  After a restart that waits for the reconciliation.
        """
        if not self.table.may_free:
            self._to_remove += [(page_hash, most_uses) for page_hash in hashes]
            return 0
        count = 0
        for page_hash in hashes:
            page = self.table.get_cached_page(page_hash)
            if page is not None:
                if self.table.state(page) != CACHED or self.headers.uses(page) > most_uses:
                    continue
                self.table.evict(page)
                count += 1
            for store in self.stores:
                store.remove(page_hash, most_uses)
        return count

    def free_unclaimed(self) -> None:
        """After a restart: all sequences are known."""
        self.table.free_unclaimed()
        pages, self._to_remove = self._to_remove, []
        for page_hash, most_uses in pages:
            self.remove([page_hash], most_uses)
        if pages:
            self.shrink()

    def invalidate(self, page: int) -> None:
        """A cached page, which a sequence may hold, was found damaged."""
        self._report_damage(page)
        self.table.invalidate(page)

    def _report_damage(self, page: int) -> None:
        """A cached page's bytes or header have changed: it is dropped."""
        self.counters.checksum_failures += 1
        log.warning("a page in memory is damaged and was dropped", extra={"model": self.name, "page": page})
