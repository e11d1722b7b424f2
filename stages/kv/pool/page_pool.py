"""The pages of an arena and what is known of each: who holds it, what it is called, when it goes.

    free   ->  leased       `take`
    leased ->  named        `publish`: it is full, and found by its name from now on; nobody writes it
    leased ->  free         `unpin`, without a name
    named  ->  cached       `unpin` by the last one who holds it
    cached ->  named        `pin`: held again, once its bytes are found to be what they were
    cached ->  free         evicted (copied to disk first, if there is a place), expired, discarded, damaged

Page numbers and names only: what a sequence is, `manager.py` knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pipeline.faults.points import FaultPoint
from shm.pages import PAGE_FREE, KvArena
from stages.kv.pool.allocator import CACHED, FREE, LEASED, LIMBO, Allocator
from stages.kv.pool.eviction import Evictor
from stages.kv.pool.headers import Count, Headers, PageName
from stages.kv.pool.prefix_hash import PageDigest


class Tier(Protocol):
    """A place on disk for copies of full pages, see spill.py."""

    residency: int  # its bit in the page header

    def __contains__(self, digest: PageDigest) -> bool: ...

    def put(self, digest: PageDigest, record: bytes, content: np.ndarray) -> bool: ...

    def expect(self, digests: Iterable[PageDigest]) -> None: ...

    def fetch(self, digest: PageDigest, out: np.ndarray) -> PageName | None: ...

    def discard(self, digest: PageDigest) -> None: ...

    def touch(self, digest: PageDigest) -> None: ...

    def idle(self, before_ns: int) -> list[PageDigest]: ...


@dataclass
class Counters:
    """Since the process started."""

    hits: int = 0  # pages of prompts found, in the arena or on disk
    misses: int = 0  # full pages of prompts not found
    evictions: int = 0  # cached pages given up, kept on disk or not
    expired: int = 0  # of these, by their age
    spilled: int = 0  # pages copied to disk on eviction
    restored: int = 0  # pages brought back from there
    checksum_failures: int = 0  # pages in the arena dropped because their bytes had changed
    restore_s: list[float] = field(default_factory=list)  # of each page restored; the reader empties it
    unread: int = 0  # times a page stayed without a name because its tokens could not be read


@dataclass
class Pool:
    """One arena. Single-threaded; nobody else writes the headers' first half."""

    arena: KvArena
    policy: str = "lru"
    ttl_ns: int = 0  # cached pages unused for so long go; 0: never
    spill: Tier | None = None  # where evicted pages go
    tiers: Sequence[Tier] = ()  # where missing pages are looked for, `spill` included
    clock_ns: Callable[[], int] = time.time_ns
    fault: FaultPoint | None = None  # struck with the count of pages named
    on_moved: Callable[[], object] = lambda: None  # after each page to or from a disk: it may have taken long

    def __post_init__(self) -> None:
        self.total, self._page_bytes = self.arena.pages.shape
        self._content = self.arena.pages.data.cast("B")  # all pages
        self.headers = Headers(self.arena.headers)
        self.counters = Counters()
        self.index: dict[PageDigest, int] = {}
        self.allocator = Allocator(self.total)
        self._name_of: dict[int, PageDigest] = {}
        self._evictor = Evictor(self.policy)
        self._published = 0

    # -------------------------------------------------------------- what there is

    @property
    def free(self) -> int:
        return self.allocator.free

    @property
    def cached(self) -> int:
        return self.allocator.cached

    @property
    def leased(self) -> int:
        return self.allocator.leased

    def name_of(self, page: int) -> PageDigest | None:
        """The name by which a page is found."""
        return self._name_of.get(page)

    def is_in_limbo(self, page: int) -> bool:
        return self.allocator.state(page) == LIMBO

    def cached_pages(self) -> list[int]:
        """The next victim first."""
        return list(self._evictor.order())

    def named_pages(self) -> list[int]:
        """All full pages, those in use first, then the last to be evicted first."""
        in_use = [page for page in self._name_of if page not in self._evictor]
        return in_use + self.cached_pages()[::-1]

    # -------------------------------------------------------------- finding and holding

    def find(self, digests: Sequence[PageDigest]) -> tuple[list[int], list[PageDigest]]:
        """The longest known run: sound pages in the arena, then names that a tier has."""
        found: list[int] = []
        # A long prompt is hundreds of pages: the same as `is_damaged` asks of one, in one loop.
        index, states, vouches = self.index, self.allocator.states, self.headers.vouches
        content, size = self._content, self._page_bytes
        for digest in digests:
            page = index.get(digest)
            if page is None:
                break
            if states[page] == CACHED and not vouches(page, digest, content[page * size : page * size + size]):
                self.counters.checksum_failures += 1
                self._drop(page)
                break
            found.append(page)
        on_disk: list[PageDigest] = []
        if self.tiers:
            for digest in digests[len(found) :]:
                # A page that is in the arena again further on is read from disk all the same: a
                # sequence's pages are shared in one run, then fresh.
                if not any(digest in tier for tier in self.tiers):
                    break
                on_disk.append(digest)
        return found, on_disk

    def pin(self, pages: Iterable[int]) -> None:
        """One more holds these named pages."""
        share, remove = self.allocator.share, self._evictor.remove
        for page in pages:
            if share(page) == 1:  # it was cached
                remove(page)

    def unpin(self, pages: Sequence[int]) -> None:
        """One hold fewer on each, the last page first."""
        now = self.clock_ns()
        for page in reversed(pages):
            is_named = page in self._name_of
            if self.allocator.drop(page, keep=is_named) == 0:
                if is_named:
                    self._park(page, now)
                else:
                    self.headers.free(page)
        if pages:
            self.headers.unpin(pages, self._refs(pages), now)

    def share(self, pages: Sequence[int], now_ns: int) -> None:
        """Note a further use of pages that have been pinned."""
        if pages:
            self.headers.share(pages, self._refs(pages), now_ns)

    def take(self, count: int, root: PageDigest, serial: int, now_ns: int, born_ns: int) -> list[int]:
        """Fresh pages for a sequence; there is room."""
        pages = self.allocator.take(count)
        if pages:
            self.headers.lease(pages, root, serial, now_ns, born_ns)
        return pages

    def restore(self, digests: Sequence[PageDigest], fresh: Sequence[int]) -> int:
        """Bring pages back from the tiers into `fresh` ones. Returns how many came, in a run."""
        count = 0
        for tier in self.tiers:
            tier.expect(digests)
        for digest, page in zip(digests, fresh, strict=False):
            begun = time.perf_counter()
            if not self._fetch(digest, page):
                break
            count += 1
            self.counters.restore_s.append(time.perf_counter() - begun)
            self.on_moved()
        self.counters.restored += count
        return count

    def publish(self, page: int, name: PageName) -> None:
        """A leased page is full, final, and the only one of its name."""
        self._published += 1
        if self.fault is not None and self.fault.trigger is not None:
            self.fault.trigger(self._published)
        self.headers.publish(page, name)
        self.index[name.digest] = page
        self._name_of[page] = name.digest

    def _fetch(self, digest: PageDigest, page: int) -> bool:
        for tier in self.tiers:
            name = tier.fetch(digest, self.arena.pages[page]) if digest in tier else None
            if name is not None:
                self.headers.mark_copy(page, tier.residency)
                if digest not in self.index:
                    self.publish(page, name)
                return True
        return False

    def _refs(self, pages: Sequence[int]) -> list[int]:
        return [self.allocator.refs[page] for page in pages]

    def _park(self, page: int, now_ns: int) -> None:
        self._evictor.add(page, now_ns, self.headers.uses(page), self.headers.born_ns(page))

    # -------------------------------------------------------------- doubt

    def is_damaged(self, page: int) -> bool:
        """A cached page whose bytes or header are not what they were. Computes the checksum."""
        if self.allocator.state(page) != CACHED:
            return False  # in use: it was looked at when it was taken into use, or is its user's own
        return not self.headers.vouches(page, self._name_of[page], self.arena.pages[page].data)

    def disown(self, page: int) -> None:
        """A damaged cached page, which a sequence may be using, loses its name and is in limbo."""
        self.counters.checksum_failures += 1
        self._evictor.remove(page)
        del self.index[self._name_of.pop(page)]
        self.headers.demote(page)
        self.allocator.doubt(page)

    # -------------------------------------------------------------- giving up

    def make_room(self, count: int) -> bool:
        """Evict until `count` pages are free. Evicts nothing if that cannot be."""
        if count > self.free + self.cached:
            return False
        while self.free < count:
            page = self._evictor.pop()
            self._keep_copy(page)
            self._forget(page)
            self.counters.evictions += 1
        return True

    def expire(self) -> int:
        """Give up cached pages that nobody has used for the time to live, and copies of such pages on disk.

        Returns how many pages of the arena went.
        """
        if not self.ttl_ns:
            return 0
        before_ns = self.clock_ns() - self.ttl_ns
        pages = self._evictor.expired(before_ns)
        for page in pages:
            self._drop(page)
        self.counters.expired += len(pages)
        self.counters.evictions += len(pages)
        for tier in self.tiers:
            for digest in tier.idle(before_ns):
                if digest in self.index:  # its page is young enough, and in use without the copy
                    tier.touch(digest)
                else:
                    tier.discard(digest)
        return len(pages)

    def discard(self, digests: Iterable[PageDigest]) -> int:
        """Free these pages at once, and their copies; not those in use. Returns how many were freed."""
        count = 0
        for digest in digests:
            for tier in self.tiers:
                tier.discard(digest)
            page = self.index.get(digest)
            if page is not None and self.allocator.state(page) == CACHED:
                self._drop(page)
                count += 1
        return count

    def _drop(self, page: int) -> None:
        self._evictor.remove(page)
        self._forget(page)

    def _forget(self, page: int) -> None:
        """A cached page, already out of the evictor, becomes free."""
        self.headers.free(page)
        del self.index[self._name_of.pop(page)]
        self.allocator.forget(page)

    def _keep_copy(self, page: int) -> None:
        digest = self._name_of[page]
        if self.spill is None or digest in self.spill:
            return
        if self.spill.put(digest, self.headers.record(page), self.arena.pages[page]):
            self.counters.spilled += 1
        self.on_moved()

    # -------------------------------------------------------------- after a restart

    def adopt(self, full: Sequence[tuple[int, PageName]], limbo: Iterable[int]) -> None:
        """Take over an arena: `full` pages, the one to be evicted first in front, and doubtful ones."""
        kept: set[int] = set()
        doubtful = set(limbo)
        for page, name in full:
            if name.digest in self.index:
                doubtful.add(page)
                continue
            self.index[name.digest] = page
            self._name_of[page] = name.digest
            kept.add(page)
        self.allocator.adopt(kept, doubtful)
        for page, _ in full:
            if page in kept:
                self._park(page, self.headers.last_use_ns(page))

    def free_limbo(self) -> None:
        """Nobody has declared these: nobody holds them. What the headers say of the others is put right."""
        for page in self.allocator.limbo():
            self.headers.free(page)
            self.allocator.forget(page)
        self.headers.correct(self.allocator.refs)

    # -------------------------------------------------------------- the law

    def count(self, held: Iterable[int]) -> Count:
        """By our own books; `held` are the pages of all leases, each counted once."""
        limbo = self.allocator.limbo()
        return Count(self.free, self.cached, len({*held, *limbo}))

    def check(self, held: dict[int, int]) -> None:
        """Raises `AssertionError` when an invariant does not hold. `held`: by how many, of each page."""
        self.allocator.check()
        assert len(self.index) == len(self._name_of), "a name without a page, or a page without a name"
        for page in range(self.total):
            state = self.allocator.state(page)
            named = page in self._name_of
            assert self.allocator.refs[page] == held.get(page, 0), f"page {page}: wrong reference count"
            assert held.get(page, 0) <= 1 or named, f"page {page} is shared and has no name"
            assert (page in self._evictor) == (state == CACHED), f"page {page}: not evictable"
            assert named or state != CACHED, f"page {page} is cached without a name"
            assert not named or state in (CACHED, LEASED), f"page {page} is free and has a name"
            assert not named or self.index[self._name_of[page]] == page
            is_free = self.headers.state(page) == PAGE_FREE
            assert state != FREE or is_free, f"page {page} is free by our books only"
