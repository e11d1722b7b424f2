"""The rules of the `kv` stage: who gets which page, what is shared, what goes when there is no room.

A *lease* is a sequence's hold on pages.  Its life, in messages of `pipeline/messages.py`:

    acquire   shares the longest run of full pages that is known (in the arena, or on disk), but
              never the page of the last known token, whose logits are needed; adds fresh pages
    extend    adds fresh pages
    commit    the first n positions are computed and acknowledged: their full pages get a name, and
              from here on nobody writes them
    release   as commit, then full pages with a name stay as cache, all others are free
    declare   after a restart of either side: what the scheduler holds; the rest is given away

Invariants (`check`):
    free + cached + leased == total
    a page is found by a name only while it is full, and has one name; a name has one page
    a page that two leases hold has a name
    nothing is granted between a restart and the declaration

A page whose name another page already has stays private to its sequence and is free afterwards.
Any doubt is a miss: a page is reused only if its checksum holds, and the tokens of a row are read
only while the row is known to be the sequence's.

Knows nothing of sockets, files or the scheduler.  Time and tokens are handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from shm.pages import KvArena
from stages.kv import prefix
from stages.kv.allocator import CACHED, FREE, LEASED, LIMBO, Allocator
from stages.kv.evict import Evictor
from stages.kv.headers import Headers, PageName, checksum
from stages.kv.prefix import PageDigest, RootOf

# (row, serial, begin, end) -> tokens (end - begin,) int32, or None when the row is another's.
ReadTokens = Callable[[int, int, int, int], np.ndarray | None]


class Tier(Protocol):
    """A place on disk for copies of full pages, see spill.py."""

    residency: int  # its bit in the page header

    def __contains__(self, digest: PageDigest) -> bool: ...

    def put(self, digest: PageDigest, record: bytes, content: np.ndarray) -> bool: ...

    def fetch(self, digest: PageDigest, out: np.ndarray) -> PageName | None: ...

    def discard(self, digest: PageDigest) -> None: ...


class Grant(NamedTuple):
    """The whole page table; the first `cached_tokens` positions are computed."""

    pages: tuple[int, ...]
    cached_tokens: int = 0


class Denial(NamedTuple):
    """`fits`: an empty arena would hold it. `needed`: pages beyond those that the sequence has or
    shares; `free`: pages that are free or can be evicted."""

    fits: bool
    needed: int
    free: int
    total: int


class DeclaredLease(NamedTuple):
    """What the scheduler says it holds; `pages` is the sequence's table."""

    sequence: str
    row: int
    n_tokens: int
    pages: tuple[int, ...]


@dataclass
class Counters:
    """Since the process started."""

    hits: int = 0  # pages of prompts found, in the arena or on disk
    misses: int = 0  # full pages of prompts not found
    evictions: int = 0  # cached pages given up, kept on disk or not
    expired: int = 0  # of these, by their age
    spilled: int = 0  # pages copied to a tier on eviction
    restored: int = 0  # pages brought back from a tier
    checksum_failures: int = 0  # pages in the arena dropped because their bytes had changed
    restore_s: list[float] = field(default_factory=list)  # of each page restored; the reader empties it
    unread: int = 0  # times a page stayed without a name because its tokens could not be read


@dataclass(slots=True)
class Lease:
    sequence: str
    row: int
    serial: int  # of the row, 0: unknown, its tokens are never read again
    root: PageDigest
    pages: list[int]
    digests: list[PageDigest]  # of the sequence's full pages, as far as its tokens are known
    cached_pages: int  # shared at the start
    settled: int  # leading pages that have been dealt with: shared, named or duplicates
    born_ns: int  # when it was admitted
    is_doubtful: bool = False  # declared wrongly: holds its pages until it is released, names none


@dataclass
class Manager:
    """One model's pages. Single-threaded; `arena` is written by nobody else, but for page contents."""

    arena: KvArena
    page_tokens: int
    root_of: RootOf
    read_tokens: ReadTokens
    policy: str = "lru"
    ttl_ns: int = 0  # cached pages unused for so long go; 0: never
    caching: bool = True
    spill: Tier | None = None  # where evicted pages go
    tiers: Sequence[Tier] = ()  # where missing pages are looked for, `spill` included
    clock_ns: Callable[[], int] = time.time_ns
    counters: Counters = field(default_factory=Counters)
    declared: bool = True

    def __post_init__(self) -> None:
        self.total = len(self.arena.pages)
        self.headers = Headers(self.arena.headers)
        self.leases: dict[str, Lease] = {}
        self.index: dict[PageDigest, int] = {}
        self._name_of: dict[int, PageDigest] = {}
        self._allocator = Allocator(self.total)
        self._evictor = Evictor(self.policy)

    # -------------------------------------------------------------- counts

    @property
    def free(self) -> int:
        return self._allocator.free

    @property
    def cached(self) -> int:
        return self._allocator.cached

    @property
    def leased(self) -> int:
        return self._allocator.leased

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    # -------------------------------------------------------------- the five requests

    def acquire(
        self,
        sequence: str,
        tokens: np.ndarray,
        want_tokens: int,
        row: int = -1,
        serial: int = 0,
        salt: str = "",
    ) -> Grant | Denial:
        """Pages for a sequence whose known tokens are `tokens` (n,) int32, a copy of its row.

        Asked twice with the same tokens (an answer was lost), it answers the same twice.
        """
        known = self.leases.get(sequence)
        root = self.root_of(salt)
        digests = prefix.chain(root, tokens, self.page_tokens) if self.caching else []
        if known is not None:
            if (
                (known.row, known.serial, known.root) == (row, serial, root)
                and known.digests == digests
                and known.settled == known.cached_pages
            ):
                extended = self.extend(sequence, want_tokens)
                if isinstance(extended, Denial):
                    return extended
                return Grant(extended.pages, known.cached_pages * self.page_tokens)
            self._end(known)
        if not self.declared:
            return self._denial(self.pages_for(want_tokens))

        now = self.clock_ns()
        sharable = min(len(digests), max(0, len(tokens) - 1) // self.page_tokens)
        found, on_disk = self._find(digests[:sharable])
        needed = max(self.pages_for(want_tokens), len(found) + len(on_disk))
        for page in found:  # first of all: they must not be evicted to make room for their own tail
            self._pin(page)
        if not self._make_room(needed - len(found)):
            denial = self._denial(needed, held=len(found))
            self._unpin(found)
            return denial
        fresh = self._allocator.take(needed - len(found))
        if fresh:
            self.headers.lease(fresh, root, serial, now, now)
        restored = self._restore(on_disk, fresh)
        shared = len(found) + restored
        if found:
            self.headers.share(found, [self._allocator.refs[page] for page in found], now)
        self.counters.hits += shared
        self.counters.misses += sharable - shared
        pages = found + fresh
        self.leases[sequence] = Lease(sequence, row, serial, root, pages, digests, shared, shared, now)
        return Grant(tuple(pages), shared * self.page_tokens)

    def extend(self, sequence: str, want_tokens: int) -> Grant | Denial:
        """Fresh pages at the end of the lease. An unknown sequence is denied: acquire it again."""
        lease = self.leases.get(sequence)
        needed = self.pages_for(want_tokens)
        if lease is None or not self.declared:
            return self._denial(needed)
        missing = max(0, needed - len(lease.pages))
        if not self._make_room(missing):
            return self._denial(needed, held=len(lease.pages))
        if missing:
            fresh = self._allocator.take(missing)
            self.headers.lease(fresh, lease.root, lease.serial, self.clock_ns(), lease.born_ns)
            lease.pages += fresh
        return Grant(tuple(lease.pages), lease.cached_pages * self.page_tokens)

    def commit(self, sequence: str, n_tokens: int) -> None:
        """The first `n_tokens` positions are final. Unknown sequences are late, and ignored."""
        lease = self.leases.get(sequence)
        if lease is not None and self.caching:
            self._settle(lease, n_tokens)

    def release(self, sequence: str, n_tokens: int) -> None:
        """The sequence lets go of its pages. Unknown sequences are late, and ignored."""
        lease = self.leases.get(sequence)
        if lease is None:
            return
        if self.caching:
            self._settle(lease, n_tokens)
        self._end(lease)

    def declare(self, leases: Iterable[DeclaredLease]) -> list[str]:
        """All that the scheduler holds. Returns the sequences that are refused: they hold nothing.

        A lease is refused when one of its pages is another's, is free, or is full with another's
        tokens or damaged: any doubt is a miss.  Its sequence is to be released and acquired anew.
        """
        claims = list(leases)
        kept = {c.sequence: c for c in claims}
        for lease in list(self.leases.values()):
            claim = kept.get(lease.sequence)
            if claim is None or tuple(lease.pages) != tuple(claim.pages) or lease.row != claim.row:
                self._end(lease)
        refused = [
            c.sequence for c in kept.values() if c.sequence not in self.leases and not self._claim(c)
        ]
        for page in self._allocator.limbo():
            self.headers.free(page)
            self._allocator.forget(page)
        self.declared = True
        return refused

    def discard(self, digests: Iterable[PageDigest]) -> int:
        """Free these pages at once, and their copies; not those in use. Returns how many were freed."""
        count = 0
        for digest in digests:
            for tier in self.tiers:
                tier.discard(digest)
            page = self.index.get(digest)
            if page is not None and self._allocator.state(page) == CACHED:
                self._evictor.remove(page)
                self._forget(page)
                count += 1
        return count

    # -------------------------------------------------------------- time, restart

    def expire(self) -> int:
        """Give up cached pages that nobody has used for the time to live. Returns how many."""
        if not self.ttl_ns:
            return 0
        pages = self._evictor.expired(self.clock_ns() - self.ttl_ns)
        for page in pages:
            self._evictor.remove(page)
            self._forget(page)
        self.counters.expired += len(pages)
        self.counters.evictions += len(pages)
        return len(pages)

    def adopt(self, full: Sequence[tuple[int, PageName]], limbo: Iterable[int]) -> None:
        """Take over an arena: `full` pages, the one to be evicted first in front, and doubtful ones.

        Nothing is granted before `declare`.
        """
        kept: set[int] = set()
        doubtful = set(limbo)
        for page, name in full:
            if name.digest in self.index:
                doubtful.add(page)
                continue
            self.index[name.digest] = page
            self._name_of[page] = name.digest
            kept.add(page)
        self._allocator.adopt(kept, doubtful)
        for page, _ in full:
            if page in kept:
                self._park(page, self.headers.last_use_ns(page))
        self.declared = False

    def named_pages(self) -> list[int]:
        """All full pages, those in use first, then the last to be evicted first."""
        in_use = [page for page in self._name_of if page not in self._evictor]
        return in_use + self.cached_pages()[::-1]

    def cached_pages(self) -> list[int]:
        """Cached pages, the next victim first."""
        return list(self._evictor.order())

    def name_of(self, page: int) -> PageDigest | None:
        """The name by which a page is found."""
        return self._name_of.get(page)

    # -------------------------------------------------------------- finding and sharing

    def _find(self, digests: Sequence[PageDigest]) -> tuple[list[int], list[PageDigest]]:
        """The longest known run: pages in the arena, then names that a tier has."""
        found: list[int] = []
        for digest in digests:
            page = self.index.get(digest)
            if page is None or not self._is_sound(page):
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

    def _is_sound(self, page: int) -> bool:
        """Are the bytes of a named page what they were? A cached one is checked at every reuse.

        One in use was checked when it was taken into use, or computed by one that uses it.
        """
        if self._allocator.state(page) == LEASED or self._has_its_bytes(page):
            return True
        self.counters.checksum_failures += 1
        self._evictor.remove(page)
        self._forget(page)
        return False

    def _has_its_bytes(self, page: int) -> bool:
        name = self.headers.name(page)
        return (
            name is not None
            and name.digest == self._name_of[page]
            and name.checksum == checksum(self.arena.pages[page])
        )

    def _pin(self, page: int) -> None:
        if self._allocator.state(page) == CACHED:
            self._evictor.remove(page)
        self._allocator.share(page)

    def _unpin(self, pages: Sequence[int]) -> None:
        """One hold fewer on each, the last page first."""
        now = self.clock_ns()
        for page in reversed(pages):
            named = page in self._name_of
            if self._allocator.drop(page, keep=named) == 0:
                if named:
                    self._park(page, now)
                else:
                    self.headers.free(page)
        if pages:
            self.headers.unpin(pages, [self._allocator.refs[page] for page in pages], now)

    def _park(self, page: int, now_ns: int) -> None:
        self._evictor.add(page, now_ns, self.headers.uses(page), self.headers.born_ns(page))

    def _restore(self, digests: Sequence[PageDigest], fresh: Sequence[int]) -> int:
        """Bring pages back from the tiers into leased `fresh` ones. Returns how many came, in a run."""
        if not digests:
            return 0
        count = 0
        for digest, page in zip(digests, fresh, strict=False):
            begun = time.perf_counter()
            name = None
            for tier in self.tiers:
                name = tier.fetch(digest, self.arena.pages[page]) if digest in tier else None
                if name is not None:
                    self.headers.mark_copy(page, tier.residency)
                    break
            if name is None:
                break
            if digest not in self.index:
                self._publish(page, name)
            count += 1
            self.counters.restore_s.append(time.perf_counter() - begun)
        self.counters.restored += count
        return count

    # -------------------------------------------------------------- naming

    def _settle(self, lease: Lease, n_tokens: int) -> None:
        """Name the lease's full pages within the first `n_tokens` positions."""
        full = min(n_tokens // self.page_tokens, len(lease.pages))
        if full <= lease.settled or lease.is_doubtful:
            return
        if len(lease.digests) < full and not self._read_on(lease, full):
            full = len(lease.digests)
        for i in range(lease.settled, full):
            digest = lease.digests[i]
            if digest in self.index:
                continue
            page = lease.pages[i]
            self._publish(
                page,
                PageName(
                    lease.root,
                    lease.digests[i - 1] if i else lease.root,
                    digest,
                    checksum(self.arena.pages[page]),
                    i,
                    self.page_tokens,
                ),
            )
        lease.settled = max(lease.settled, full)

    def _read_on(self, lease: Lease, full: int) -> bool:
        """Digests up to page `full` from the row's tokens; False if the row cannot be trusted."""
        begin = len(lease.digests)
        tokens = None
        if lease.serial:
            tokens = self.read_tokens(
                lease.row, lease.serial, begin * self.page_tokens, full * self.page_tokens
            )
        if tokens is None:
            self.counters.unread += 1
            return False
        parent = lease.digests[-1] if lease.digests else lease.root
        lease.digests += prefix.chain(parent, tokens, self.page_tokens)
        return True

    def _publish(self, page: int, name: PageName) -> None:
        self.headers.publish(page, name)
        self.index[name.digest] = page
        self._name_of[page] = name.digest

    def _forget(self, page: int) -> None:
        """A cached page, already out of the evictor, becomes free."""
        self.headers.free(page)
        del self.index[self._name_of.pop(page)]
        self._allocator.forget(page)

    # -------------------------------------------------------------- room

    def _make_room(self, count: int) -> bool:
        """Evict until `count` pages are free. Evicts nothing if that cannot be."""
        if count > self.free + self.cached:
            return False
        while self.free < count:
            page = self._evictor.pop()
            self._spill(page)
            self._forget(page)
            self.counters.evictions += 1
        return True

    def _spill(self, page: int) -> None:
        if self.spill is None:
            return
        digest = self._name_of[page]
        if digest in self.spill:
            return
        if self.spill.put(digest, self.headers.record(page), self.arena.pages[page]):
            self.counters.spilled += 1

    def _denial(self, needed: int, held: int = 0) -> Denial:
        return Denial(needed <= self.total, needed - held, self.free + self.cached, self.total)

    # -------------------------------------------------------------- leases

    def _end(self, lease: Lease) -> None:
        del self.leases[lease.sequence]
        self._unpin(lease.pages)

    def _claim(self, claim: DeclaredLease) -> bool:
        """Make a declared lease from the headers of its pages; False if they say otherwise.

        A refused one still holds what is not another's alone: a step under way may read and write it.
        """
        lease = self._recognise(claim)
        is_good = lease is not None
        if lease is None:
            mine = [
                page
                for page in dict.fromkeys(claim.pages)
                if 0 <= page < self.total
                and (page in self._name_of or self._is_leased_as(page, claim.pages[-1]))
            ]
            lease = Lease(claim.sequence, claim.row, 0, self.root_of(""), mine, [], 0, 0, 0, True)
        for page in lease.pages:
            if self._allocator.state(page) == LIMBO:
                self._allocator.claim(page)
            else:
                self._pin(page)
        self.leases[claim.sequence] = lease
        return is_good

    def _recognise(self, claim: DeclaredLease) -> Lease | None:
        pages = list(claim.pages)
        if not pages or len(set(pages)) != len(pages) or claim.n_tokens > len(pages) * self.page_tokens:
            return None
        if not all(0 <= page < self.total for page in pages):
            return None
        # The last page was leased fresh to this very sequence: shared pages come first.
        root, serial = self.headers.lease_of(pages[-1])
        born_ns = self.headers.born_ns(pages[-1])
        lease = Lease(claim.sequence, claim.row, serial, root, pages, [], 0, 0, born_ns)
        knows_tokens = self.caching
        for i, page in enumerate(pages):
            if self._allocator.state(page) == LIMBO:
                if self.headers.lease_of(page) != (root, serial):
                    return None
                is_computed = (i + 1) * self.page_tokens <= claim.n_tokens
                knows_tokens = knows_tokens and is_computed and self._read_on(lease, i + 1)
                continue
            name = self.headers.name(page) if page in self._name_of else None
            if name is None or name.ordinal != i or name.root != root:
                return None
            if self._allocator.state(page) == CACHED and not self._has_its_bytes(page):
                self._disown(page)
                return None
            if knows_tokens:
                if name.parent != (lease.digests[-1] if i else root):
                    return None
                lease.digests.append(name.digest)
        return lease

    def _is_leased_as(self, page: int, last: int) -> bool:
        """Is `page` in limbo, and the same sequence's as `last`, or one that was disowned?"""
        if self._allocator.state(page) != LIMBO:
            return False
        serial = self.headers.lease_of(page)[1]
        return serial in (0, self.headers.lease_of(last)[1] if 0 <= last < self.total else 0)

    def _disown(self, page: int) -> None:
        """A damaged page loses its name; whoever declares it holds it until the release."""
        self.counters.checksum_failures += 1
        self._evictor.remove(page)
        del self.index[self._name_of.pop(page)]
        self.headers.demote(page)
        self._allocator.doubt(page)

    # -------------------------------------------------------------- the laws

    def check(self) -> None:
        """Raises `AssertionError` when an invariant does not hold. O(total); for tests and `starling kv`."""
        self._allocator.check()
        held: dict[int, int] = {}
        for lease in self.leases.values():
            for page in lease.pages:
                held[page] = held.get(page, 0) + 1
        assert len(self.index) == len(self._name_of), "a name without a page, or a page without a name"
        for page in range(self.total):
            state = self._allocator.state(page)
            named = page in self._name_of
            assert self._allocator.refs[page] == held.get(page, 0), f"page {page}: wrong reference count"
            assert held.get(page, 0) <= 1 or named, f"page {page} is shared and has no name"
            assert (page in self._evictor) == (state == CACHED), f"page {page}: not evictable"
            assert not (state == CACHED and not named), f"page {page} is cached without a name"
            assert not (state in (FREE, LIMBO) and named), f"page {page} is free and has a name"
            if named:
                assert self.index[self._name_of[page]] == page
