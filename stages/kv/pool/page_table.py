"""The state, references and hash of every page of an arena. The headers in the arena are its write-through.

    FREE       in the free list
    LEASED     held by `refs > 0` sequences; with a hash if it is full
    CACHED     full, held by no sequence, can be evicted: it has a hash, and is in the eviction order
    UNCLAIMED  after a restart: a sequence that the scheduler has not named yet may hold it (counted as leased)

                  get_new_pages               cache_full_page
        FREE ----------------------> LEASED -----------------> LEASED with a hash
         ^ ^                           |                         |        ^
         | |   release_ref (last one)  |    release_ref (last)   v        | acquire_ref
         | '---------------------------'                       CACHED ----'
         |                       evict                           |
         '-------------------------------------------------------'

        restart:  adopt      (nothing) -> CACHED, UNCLAIMED     claim            UNCLAIMED -> LEASED
                  invalidate CACHED -> UNCLAIMED (damaged)      free_unclaimed   UNCLAIMED -> FREE

Between `adopt` and `free_unclaimed` a sequence that the scheduler has yet to name may hold a page that is CACHED here,
and its steps read the page meanwhile: no page becomes free until then (`may_free`).

After every operation free + cached + leased == total, and the headers agree.  Independent of tokens, sequences, disks
and clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Sequence

from pipeline.eviction_order import EvictionOrder
from shm.pages import PAGE_FREE, KvArena
from shm.prefix_hash import PageHash
from stages.kv.pool.page_headers import PageCounts, PageHeaders, PageIdentity

FREE, LEASED, CACHED, UNCLAIMED = range(4)
_FREE_STATE = bytes([FREE])


class PageTable:
    """All pages of `arena`; at first all are free. Single-threaded; the only writer of the page headers."""

    def __init__(self, arena: KvArena, policy: str = "lru", reserved: int | None = None) -> None:
        """`policy`: the order of eviction, see pipeline/eviction_order.py. `reserved`: see the attribute; None: all."""
        self.total, self._page_bytes = arena.pages.shape
        self.reserved = self.total if reserved is None else reserved  # the first pages have memory, the others are free
        self.may_free = True  # all sequences that hold pages are known
        self.headers = PageHeaders(arena.headers)
        self._content = arena.pages.data.cast("B")  # of all pages
        self._states = bytearray(self.total)
        self._refs = [0] * self.total
        self._hashes: list[PageHash | None] = [None] * self.total
        self._page_of: dict[PageHash, int] = {}
        self._free = list(range(self.reserved - 1, -1, -1))  # those with memory; the last one is given out next
        self._evictable: EvictionOrder[int] = EvictionOrder(policy)
        self._is_lru = policy == "lru"

    # -------------------------------------------------------------- reading

    @property
    def free(self) -> int:
        """Pages that are free, with memory or without."""
        return len(self._free) + self.total - self.reserved

    @property
    def free_reserved(self) -> int:
        """Free pages that have memory."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that can be evicted."""
        return len(self._evictable)

    @property
    def leased(self) -> int:
        """Pages that a sequence holds, or may hold."""
        return self.reserved - len(self._free) - len(self._evictable)

    def state(self, page: int) -> int:
        """FREE, LEASED, CACHED or UNCLAIMED."""
        return self._states[page]

    def refs(self, page: int) -> int:
        """Number of sequences that hold the page."""
        return self._refs[page]

    def hash_of(self, page: int) -> PageHash | None:
        """Hash of a full page; None for any other page."""
        return self._hashes[page]

    def hashes(self) -> KeysView[PageHash]:
        """Hashes of all full pages."""
        return self._page_of.keys()

    def get_cached_page(self, page_hash: PageHash) -> int | None:
        """The full page with this hash, cached or leased; its bytes are not verified."""
        return self._page_of.get(page_hash)

    def get_cached_pages(self, hashes: Sequence[PageHash]) -> list[int]:
        """The full pages of the longest prefix of `hashes`, up to a missing or damaged one."""
        found: list[int] = []
        page_of, states, verify = self._page_of, self._states, self.headers.verify
        content, size = self._content, self._page_bytes
        for page_hash in hashes:
            page = page_of.get(page_hash)
            if page is None:
                break
            # A leased page was verified when it was acquired, or its sequence computed it.
            if states[page] == CACHED and not verify(page, page_hash, content[page * size : page * size + size]):
                break
            found.append(page)
        return found

    def is_damaged(self, page: int) -> bool:
        """Whether a cached page's bytes or header have changed. Computes the checksum."""
        page_hash = self._hashes[page]
        if self._states[page] != CACHED or page_hash is None:
            return False
        begin = page * self._page_bytes
        return not self.headers.verify(page, page_hash, self._content[begin : begin + self._page_bytes])

    def evictable_pages(self) -> list[int]:
        """All cached pages, the next one to evict first."""
        return list(self._evictable.order())

    def full_pages(self) -> list[int]:
        """All full pages: leased ones, then cached ones, the last one to evict first."""
        leased = [page for page in self._page_of.values() if self._states[page] == LEASED]
        return leased + self.evictable_pages()[::-1]

    def expired_pages(self, before_ns: int) -> list[int]:
        """Cached pages whose last use was before `before_ns`, oldest first."""
        return self._evictable.expired(before_ns)

    def oldest_cached_page(self, before_ns: int) -> int | None:
        """The cached page that was used longest ago; None: that was not before `before_ns`."""
        return self._evictable.oldest(before_ns)

    # -------------------------------------------------------------- leases

    def get_new_pages(self, count: int, root: PageHash, serial: int, now_ns: int, born_ns: int) -> list[int]:
        """Lease `count` free pages to a sequence. The lowest numbers come first, so that reading is sequential.

        Raises `ValueError` when too few have memory: call `grow` or `evict_next` first.
        """
        if count == 0:
            return []
        if count > len(self._free):
            raise ValueError(f"{count} pages requested, {len(self._free)} are free")
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        states, refs = self._states, self._refs
        for page in pages:
            refs[page] = 1
            states[page] = LEASED
        self.headers.lease(pages, root, serial, now_ns, born_ns)
        return pages

    def acquire_ref(self, pages: Sequence[int]) -> None:
        """One more sequence holds these pages, which are leased or cached."""
        if not pages:
            return
        states, refs = self._states, self._refs
        was_cached: list[int] = []
        for page in pages:
            state = states[page]
            if state == CACHED:
                states[page] = LEASED
                was_cached.append(page)
            elif state != LEASED:
                raise ValueError(f"page {page} is neither leased nor cached")
            refs[page] += 1
        self._evictable.remove_all(was_cached)
        self.headers.set_refs(pages, [refs[page] for page in pages])

    def record_use(self, pages: Sequence[int], now_ns: int) -> None:
        """Count a use of pages that were acquired."""
        if pages:
            self.headers.record_use(pages, now_ns)

    def release_ref(self, pages: Sequence[int], now_ns: int) -> None:
        """One sequence less holds these pages; the end of a prefix becomes evictable before its start.

        The last release makes a full page evictable and any other page free.
        """
        if not pages:
            return
        states, refs, hashes = self._states, self._refs, self._hashes
        for page in reversed(pages):
            if states[page] != LEASED:
                raise ValueError(f"page {page} is not leased")
            refs[page] = rest = refs[page] - 1
            if rest:
                continue
            if hashes[page] is None:
                self._append_free(page)
            else:
                self._make_evictable(page, now_ns)
        self.headers.release(pages, [refs[page] for page in pages], now_ns)

    def release_oldest(self, page: int, uses: int, last_use_ns: int) -> None:
        """Make a page evictable that was restored for no sequence: before all others that are equal by the policy."""
        if self._states[page] != LEASED or self._refs[page] != 1 or self._hashes[page] is None:
            raise ValueError(f"page {page} is not full, or sequences hold it")
        self._refs[page] = 0
        self._states[page] = CACHED
        self.headers.set_uses(page, uses)
        self._evictable.add_oldest(page, last_use_ns, uses, self.headers.born_ns(page))
        self.headers.release((page,), (0,), last_use_ns)

    # -------------------------------------------------------------- memory

    def grow(self, reserved: int) -> None:
        """The first `reserved` pages have memory, more than before."""
        self._free[:0] = range(reserved - 1, self.reserved - 1, -1)
        self.reserved = max(self.reserved, reserved)

    def end_of_use(self) -> int:
        """The lowest n for which all pages from n on are free. O(pages behind it)."""
        return len(self._states.rstrip(_FREE_STATE))

    def shrink(self, reserved: int) -> None:
        """The pages from `reserved` on, which are free, have no memory any more."""
        if reserved < self.end_of_use():
            raise ValueError(f"page {self.end_of_use() - 1} is in use and cannot lose its memory")
        self._free = [page for page in self._free if page < reserved]
        self.reserved = min(self.reserved, reserved)

    # -------------------------------------------------------------- the cache

    def cache_full_page(self, page: int, identity: PageIdentity) -> None:
        """A leased page is full and its bytes are final: from now on its hash finds it. The hash must be new."""
        page_hash = identity.page_hash
        if self._states[page] != LEASED or self._hashes[page] is not None or page_hash in self._page_of:
            raise ValueError(f"page {page} is not leased, or it or its hash is cached already")
        self.headers.mark_full(page, identity)
        self._page_of[page_hash] = page
        self._hashes[page] = page_hash

    def evict(self, page: int) -> None:
        """Free a cached page. Raises `ValueError` while `may_free` is False, as `evict_next`."""
        self._check_may_free()
        if self._states[page] != CACHED:
            raise ValueError(f"page {page} is not cached")
        self._evictable.remove(page)
        self._remove_hash(page)
        self._append_free(page)

    def evict_next(self, count: int, save: Callable[[int], None] | None = None) -> None:
        """Free `count` cached pages in the order of eviction; `save` is called with each one before."""
        self._check_may_free()
        for _ in range(count):
            page = self._evictable.pop()
            if save is not None:
                save(page)
            self._remove_hash(page)
            self._append_free(page)

    def _check_may_free(self) -> None:
        if not self.may_free:
            raise ValueError("sequences that are not known yet may hold cached pages")

    # -------------------------------------------------------------- after a restart

    def adopt(self, full: Sequence[tuple[int, PageIdentity]], unclaimed: Iterable[int]) -> None:
        """Take over the pages of a predecessor. Only for a new table.

        `full`: pages with an intact header, the next one to evict first.  Of several with the same hash the first one
        is cached and the others are unclaimed.
        """
        self.may_free = False
        states = self._states
        for page in unclaimed:
            states[page] = UNCLAIMED
        for page, identity in full:
            if identity.page_hash in self._page_of:
                states[page] = UNCLAIMED
                continue
            self._page_of[identity.page_hash] = page
            self._hashes[page] = identity.page_hash
            self._make_evictable(page, self.headers.last_use_ns(page))
        self._free = [page for page in range(self.reserved - 1, -1, -1) if states[page] == FREE]

    def claim(self, page: int) -> None:
        """A sequence holds this page: an unclaimed one, or a full one that others may hold too."""
        if self._states[page] != UNCLAIMED:
            self.acquire_ref((page,))
            return
        self._states[page] = LEASED
        self._refs[page] = 1
        self.headers.set_refs((page,), (1,))

    def invalidate(self, page: int) -> None:
        """A cached page, which a sequence may hold, is damaged: it loses its hash and is unclaimed."""
        if self._states[page] != CACHED:
            raise ValueError(f"page {page} is not cached")
        self._evictable.remove(page)
        self._remove_hash(page)
        self.headers.invalidate(page)
        self._states[page] = UNCLAIMED

    def unclaimed_pages(self) -> list[int]:
        """All unclaimed pages. O(total)."""
        return [page for page, state in enumerate(self._states) if state == UNCLAIMED]

    def free_unclaimed(self) -> None:
        """All sequences are known: free the pages that none of them claimed, and correct all counts in the headers."""
        for page in self.unclaimed_pages():
            self._append_free(page)
        self.headers.set_all_refs(self._refs)
        self.may_free = True

    # -------------------------------------------------------------- state changes

    def _append_free(self, page: int) -> None:
        self._states[page] = FREE
        self._free.append(page)
        self.headers.free(page)

    def _make_evictable(self, page: int, now_ns: int) -> None:
        self._states[page] = CACHED
        if self._is_lru:
            self._evictable.add(page, now_ns, 0, 0)
        else:
            self._evictable.add(page, now_ns, self.headers.uses(page), self.headers.born_ns(page))

    def _remove_hash(self, page: int) -> None:
        page_hash = self._hashes[page]
        assert page_hash is not None
        del self._page_of[page_hash]
        self._hashes[page] = None

    # -------------------------------------------------------------- invariants

    def count(self) -> PageCounts:
        """Pages by state; unclaimed ones count as leased."""
        return PageCounts(self.free, self.cached, self.leased)

    def check(self) -> None:
        """Raises `AssertionError` naming the page or count that breaks an invariant. O(total), for tests and audits."""
        tally = [0, 0, 0, 0]
        for page, state in enumerate(self._states):
            tally[state] += 1
            page_hash, refs = self._hashes[page], self._refs[page]
            assert (refs > 0) == (state == LEASED), f"page {page}: wrong reference count {refs}"
            assert refs <= 1 or page_hash is not None, f"page {page} is shared and has no hash"
            assert (page in self._evictable) == (state == CACHED), f"page {page}: cached and not evictable, or reverse"
            assert page_hash is not None or state != CACHED, f"page {page} is cached without a hash"
            assert page_hash is None or state in (CACHED, LEASED), f"page {page} is free and has a hash"
            assert page_hash is None or self._page_of[page_hash] == page, f"page {page}: its hash finds another page"
            assert state != FREE or self.headers.state(page) == PAGE_FREE, f"page {page} is not free in its header"
        assert len(self._page_of) == self.total - self._hashes.count(None), "a hash without a page"
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert all(self._states[page] == FREE for page in self._free), "a page in use is in the free list"
        assert self.end_of_use() <= self.reserved, "a page without memory is in use"
        assert all(page < self.reserved for page in self._free), "a page without memory is in the free list"
        counts = (tally[FREE], tally[CACHED], tally[LEASED] + tally[UNCLAIMED])
        assert counts == self.count(), f"pages by state are {counts}, the table counts {self.count()}"
        assert sum(self.count()) == self.total, f"{self.count()} are not {self.total} pages"
