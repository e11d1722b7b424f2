"""The rules of the `kv` stage: who gets which page, what is shared, what goes when there is no room.

A *lease* is a sequence's hold on pages.  Its life, in messages of `pipeline/protocol/messages.py`:

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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stages.kv.pool import prefix_hash
from stages.kv.pool.headers import Count, PageName, checksum
from stages.kv.pool.page_pool import Pool
from stages.kv.pool.prefix_hash import PageDigest, RootOf

# (row, serial, begin, end) -> tokens (end - begin,) int32, or None when the row is another's.
ReadTokens = Callable[[int, int, int, int], np.ndarray | None]


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
    n_tokens: int  # positions with a known token: of the prompt, then as far as is committed
    is_doubtful: bool = False  # declared wrongly: holds its pages until it is released, names none


class Manager:
    """One model's leases. Single-threaded."""

    def __init__(
        self,
        pool: Pool,
        page_tokens: int,
        root_of: RootOf,
        read_tokens: ReadTokens,
        caching: bool = True,
        declared: bool = True,
    ) -> None:
        """Without `caching` nothing is shared; `declared` False: nothing is granted before `declare`."""
        self.pool = pool
        self.page_tokens = page_tokens
        self.declared = declared
        self.leases: dict[str, Lease] = {}
        self._root_of = root_of
        self._read_tokens = read_tokens
        self._caching = caching

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
        pool = self.pool
        known = self.leases.get(sequence)
        root = self._root_of(salt)
        digests = prefix_hash.chain(root, tokens, self.page_tokens) if self._caching else []
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

        now = pool.clock_ns()
        sharable = min(len(digests), max(0, len(tokens) - 1) // self.page_tokens)
        found, on_disk = pool.find(digests[:sharable])
        needed = max(self.pages_for(want_tokens), len(found) + len(on_disk))
        pool.pin(found)  # first of all: they must not be evicted to make room for their own tail
        if not pool.make_room(needed - len(found)):
            denial = self._denial(needed, held=len(found))
            pool.unpin(found)
            return denial
        fresh = pool.take(needed - len(found), root, serial, now, now)
        shared = len(found) + pool.restore(on_disk, fresh)
        pool.share(found, now)
        pool.counters.hits += shared
        pool.counters.misses += sharable - shared
        pages = found + fresh
        self.leases[sequence] = Lease(sequence, row, serial, root, pages, digests, shared, shared, now, len(tokens))
        return Grant(tuple(pages), shared * self.page_tokens)

    def extend(self, sequence: str, want_tokens: int) -> Grant | Denial:
        """Fresh pages at the end of the lease. An unknown sequence is denied: acquire it again."""
        lease = self.leases.get(sequence)
        needed = self.pages_for(want_tokens)
        if lease is None or not self.declared:
            return self._denial(needed)
        missing = max(0, needed - len(lease.pages))
        if not self.pool.make_room(missing):
            return self._denial(needed, held=len(lease.pages))
        if missing:
            now = self.pool.clock_ns()
            lease.pages += self.pool.take(missing, lease.root, lease.serial, now, lease.born_ns)
        return Grant(tuple(lease.pages), lease.cached_pages * self.page_tokens)

    def commit(self, sequence: str, n_tokens: int) -> None:
        """The first `n_tokens` positions are final. Unknown sequences are late, and ignored."""
        lease = self.leases.get(sequence)
        if lease is not None:
            self._settle(lease, n_tokens)

    def release(self, sequence: str, n_tokens: int) -> None:
        """The sequence lets go of its pages. Unknown sequences are late, and ignored."""
        lease = self.leases.get(sequence)
        if lease is not None:
            self._settle(lease, n_tokens)
            self._end(lease)

    def declare(self, leases: Iterable[DeclaredLease]) -> list[str]:
        """All that the scheduler holds. Returns the sequences that are refused.

        A lease is refused when one of its pages is another's, is free, or is full with another's
        tokens or damaged: any doubt is a miss.  Its sequence is to be released and acquired anew.
        """
        claims = {claim.sequence: claim for claim in leases}
        for lease in list(self.leases.values()):
            claim = claims.get(lease.sequence)
            if claim is None or tuple(lease.pages) != tuple(claim.pages) or lease.row != claim.row:
                self._end(lease)
        refused = [
            claim.sequence for claim in claims.values() if claim.sequence not in self.leases and not self._claim(claim)
        ]
        self.pool.free_limbo()
        self.declared = True
        return refused

    def _end(self, lease: Lease) -> None:
        del self.leases[lease.sequence]
        self.pool.unpin(lease.pages)

    def _denial(self, needed: int, held: int = 0) -> Denial:
        pool = self.pool
        return Denial(needed <= pool.total, needed - held, pool.free + pool.cached, pool.total)

    def fragmentation(self) -> float:
        """Share of the positions of leased pages that hold no token: reserved ahead, or behind a sequence's end.

        Pages are of one size and a sequence's need not be neighbours, so there is no other waste.
        """
        each = self.page_tokens
        # A page that several hold is full: what is unused is one lease's alone.
        unused = sum(max(0, len(lease.pages) * each - lease.n_tokens) for lease in self.leases.values())
        return unused / (self.pool.leased * each) if self.pool.leased else 0.0

    # -------------------------------------------------------------- naming

    def _settle(self, lease: Lease, n_tokens: int) -> None:
        """Name the lease's full pages within the first `n_tokens` positions."""
        lease.n_tokens = max(lease.n_tokens, n_tokens)
        full = min(n_tokens // self.page_tokens, len(lease.pages))
        if full <= lease.settled or lease.is_doubtful or not self._caching:
            return
        if len(lease.digests) < full and not self._read_on(lease, full):
            full = len(lease.digests)
        for i in range(lease.settled, full):
            digest = lease.digests[i]
            if digest in self.pool.index:
                continue
            page = lease.pages[i]
            parent = lease.digests[i - 1] if i else lease.root
            content = checksum(self.pool.arena.pages[page])
            self.pool.publish(page, PageName(lease.root, parent, digest, content, i, self.page_tokens))
        lease.settled = max(lease.settled, full)

    def _read_on(self, lease: Lease, full: int) -> bool:
        """Digests up to page `full` from the row's tokens; False if the row cannot be trusted."""
        begin, tokens = len(lease.digests), None
        if lease.serial:
            tokens = self._read_tokens(lease.row, lease.serial, begin * self.page_tokens, full * self.page_tokens)
        if tokens is None:
            self.pool.counters.unread += 1
            return False
        parent = lease.digests[-1] if lease.digests else lease.root
        lease.digests += prefix_hash.chain(parent, tokens, self.page_tokens)
        return True

    # -------------------------------------------------------------- declared leases

    def _claim(self, claim: DeclaredLease) -> bool:
        """Make a declared lease from the headers of its pages; False if they say otherwise.

        A refused one still holds what is not another's alone: a step under way may read and write it.
        """
        pool = self.pool
        lease = self._recognise(claim)
        is_good = lease is not None
        if lease is None:
            mine = [
                page
                for page in dict.fromkeys(claim.pages)
                if 0 <= page < pool.total
                and (pool.name_of(page) is not None or self._is_leased_as(page, claim.pages[-1]))
            ]
            lease = Lease(claim.sequence, claim.row, 0, self._root_of(""), mine, [], 0, 0, 0, claim.n_tokens, True)
        for page in lease.pages:
            if pool.is_in_limbo(page):
                pool.allocator.claim(page)
            else:
                pool.pin((page,))
        self.leases[claim.sequence] = lease
        return is_good

    def _recognise(self, claim: DeclaredLease) -> Lease | None:
        """The lease as the headers tell it; None when they contradict it, or a page is damaged."""
        pool, headers, pages = self.pool, self.pool.headers, list(claim.pages)
        if not pages or len(set(pages)) != len(pages) or claim.n_tokens > len(pages) * self.page_tokens:
            return None
        if not all(0 <= page < pool.total for page in pages):
            return None
        # The last page was leased fresh to this very sequence: shared pages come first.
        root, serial = headers.lease_of(pages[-1])
        born_ns = headers.born_ns(pages[-1])
        lease = Lease(claim.sequence, claim.row, serial, root, pages, [], 0, 0, born_ns, claim.n_tokens)
        knows_tokens = self._caching
        for i, page in enumerate(pages):
            if pool.is_in_limbo(page):
                if headers.lease_of(page) != (root, serial):
                    return None
                is_computed = (i + 1) * self.page_tokens <= claim.n_tokens
                knows_tokens = knows_tokens and is_computed and self._read_on(lease, i + 1)
                continue
            name = headers.name(page) if pool.name_of(page) is not None else None
            if name is None or name.ordinal != i or name.root != root:
                return None
            if pool.is_damaged(page):
                pool.disown(page)
                return None
            if knows_tokens:
                if name.parent != (lease.digests[-1] if i else root):
                    return None
                lease.digests.append(name.digest)
        return lease

    def _is_leased_as(self, page: int, last: int) -> bool:
        """Is `page` in limbo, and the same sequence's as `last`, or one that was disowned?"""
        if not self.pool.is_in_limbo(page):
            return False
        serial = self.pool.headers.lease_of(page)[1]
        return serial in (0, self.pool.headers.lease_of(last)[1] if 0 <= last < self.pool.total else 0)

    # -------------------------------------------------------------- the law

    def count(self) -> Count:
        """Pages by our own books: those on the free list, those to evict, and those that leases name."""
        return self.pool.count(page for lease in self.leases.values() for page in lease.pages)

    def check(self) -> None:
        """Raises `AssertionError` when an invariant does not hold. O(total); for tests and `starling kv check`."""
        held: dict[int, int] = {}
        for lease in self.leases.values():
            for page in lease.pages:
                held[page] = held.get(page, 0) + 1
        self.pool.check(held)
        count = self.count()
        assert sum(count) == self.pool.total, f"{count} are not {self.pool.total} pages"
        if self.declared:  # until then nobody believes the headers' reference counts
            assert self.pool.headers.count() == count, f"the headers say {self.pool.headers.count()}, not {count}"
