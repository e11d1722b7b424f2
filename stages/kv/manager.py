"""Leases: which sequence holds which pages of one model.

A *lease* is a sequence's hold on pages.  Its life, in messages of `pipeline/protocol/messages/scheduler_kv.py`:

    acquire     share the longest known run of full pages (in the arena or in a source), but never the page of the last
                known token, whose logits are needed; add new pages for the rest
    extend      add new pages
    commit      the first n positions are computed and acknowledged: their full pages are cached under their hash, and
                their contents are final.  Leading pages that no step reads any more are released
    release     commit, then full pages with a hash become evictable and all others free
    reconcile   after a restart of either side: the scheduler names the leases that it holds, all others end

Invariants (`check`):
    free + cached + leased == total
    a hash finds at most one page, which is full; a page has at most one hash
    a page that two leases hold has a hash
    no page is granted, and none becomes free, between a restart and the reconciliation
    the pages that a lease does not hold (NO_PAGE) are those of its first places, and computed

A sequence whose layers all have a sliding window holds the pages that its next position reads, and those behind them:
older ones are released when they are committed, and not acquired when their successors are found in the cache.  Where
only some layers have a window, this holds for the pages of their groups (shm/layer_groups.py), and a sequence has the
pages of the other groups from its first place on.  A prompt's pages are granted as it is computed, but a sequence is
granted its first ones only when all that its prompt takes find room.

A page with the hash of another page stays private to its sequence and is free afterwards.  A page is shared only if
its checksum is right, and the tokens of a row are used only while its serial shows that they are the sequence's: in
doubt, the positions are computed again.

Independent of sockets, files and the scheduler.  Times and tokens are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np

from shm.layer_groups import NO_PAGE, ONE_GROUP, LayerGroups
from shm.pages import KV_SPLIT, first_read, pack_ordinal, unpack_ordinal
from shm.prefix_hash import PageHash, RootHasher, group_hash, page_hashes
from stages.kv.lease import Denial, Grant, Lease, LeaseClaim, expected_pages
from stages.kv.pool.page_headers import PageCounts, PageIdentity, checksum
from stages.kv.pool.page_pool import Hit, PagePool
from stages.kv.pool.page_table import UNCLAIMED
from stages.kv.pool.root_owners import RootOwners

# (row, serial, begin, end) -> tokens (end - begin,) int32; None when the row belongs to another sequence.
ReadTokens = Callable[[int, int, int, int], np.ndarray | None]


class Manager:
    """One model's leases. Single-threaded."""

    def __init__(
        self,
        pool: PagePool,
        page_tokens: int,
        root_hash_of: RootHasher,
        read_tokens: ReadTokens,
        caching: bool = True,
        is_reconciled: bool = True,
        groups: LayerGroups = ONE_GROUP,
    ) -> None:
        """Without `caching` no page is shared; `is_reconciled` False: no page is granted before `reconcile`."""
        self.pool = pool
        self.groups = groups
        self.page_tokens = page_tokens
        self.is_reconciled = is_reconciled
        self.leases: dict[str, Lease] = {}
        # Pages that are held for a sequence until it has its grant, by hash, by sequence (page_import.py); all full.
        self.imports: dict[str, dict[PageHash, int]] = {}
        self._table = pool.table
        self.root_hash_of = root_hash_of
        self.owners = RootOwners()
        self._read_tokens = read_tokens
        self.is_caching = caching

    def places_for(self, tokens: int) -> int:
        """Number of places that hold `tokens` positions."""
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
        sharable: int = -1,
        window: int = 0,
        ahead: int = 0,
    ) -> Grant | Denial:
        """Grant pages to a sequence whose known tokens are `tokens` (n,) int32, a copy of its row.

        `sharable`: only pages within so many leading positions are shared; -1: all that may be.
        `window`: positions that attention reads; 0: all.  With a window at most `ahead` (1 or more) positions beyond
        the shared ones are granted.
        Idempotent: the same request with the same tokens, after a lost answer, gets the same grant.
        """
        pool, table = self.pool, self._table
        known = self.leases.get(sequence)
        root = self.root_hash_of(salt)
        self.owners.learn(root, salt)
        hashes = page_hashes(root, tokens, self.page_tokens) if self.is_caching else []
        n_sharable = self._n_sharable(tokens, hashes, sharable)
        if known is not None:
            if (
                known.n_shared <= n_sharable
                and (known.row, known.serial, known.root) == (row, serial, root)
                and known.hashes == hashes
                and known.n_final == known.n_shared
                and not known.n_released
                and not known.is_suspect
            ):
                extended = self.extend(sequence, self._wanted(want_tokens, known.n_shared, window, ahead))
                if isinstance(extended, Denial):
                    return extended
                return Grant(extended.pages, known.n_shared * self.page_tokens)
            self._end(known)
        groups, n_tokens = self.groups, len(tokens)
        if not self.is_reconciled:
            return self._denial(groups.n_pages(self.places_for(want_tokens)))

        now = pool.clock_ns()
        hit = self._find(hashes[:n_sharable], window, n_fetchable=groups.n_groups)
        found, outside = hit.in_arena, hit.outside
        n_places = max(self.places_for(self._wanted(want_tokens, hit.end, window, ahead)), hit.end)
        n_prompt = self.places_for(n_tokens) if groups.full and window else 0
        n_window = min(n_prompt, self.places_for(window + KV_SPLIT + ahead))
        needed = groups.n_pages(n_places, hit.first)
        later = expected_pages(groups, n_places, hit.first, n_prompt, n_window)
        table.acquire_ref(found)  # before make_room, which could evict them
        if not (self._has_room(needed - len(found) + later) and pool.make_room(needed - len(found))):
            denial = self._denial(needed + later, held=len(found))
            table.release_ref(found, pool.clock_ns())
            return denial
        new = table.get_new_pages(needed - len(found), root, serial, now, now)
        n_restored = pool.restore(outside, new)
        if n_restored < len(outside) and (window or groups.full):  # what is behind the gap may need pages before it
            table.release_ref(found + new, pool.clock_ns())
            # Before the gap there may be a run that is complete; what has been restored is cached by now.
            before = self._place_of(outside[n_restored], hashes[:n_sharable]) * self.page_tokens
            return self.acquire(sequence, tokens, want_tokens, row, serial, salt, before, window, ahead)
        n_shared = hit.end - len(outside) + n_restored if n_restored < len(outside) else hit.end
        pool.count_warm_hits(hit.hashes)
        table.record_use(found, now)
        pool.counters.hits += n_shared
        pool.counters.misses += n_sharable - n_shared
        rest = iter(new)
        held = [next(rest) if page == NO_PAGE else page for page in hit.pages] + list(rest)
        pages = groups.table(held, hit.first)
        lease = Lease(sequence, row, serial, root, pages, hashes, n_shared, n_shared, now, n_tokens, hit.first)
        lease.groups, lease.n_prompt, lease.n_window = groups, n_prompt, n_window
        self.leases[sequence] = lease
        return Grant(tuple(pages), n_shared * self.page_tokens)

    def _has_room(self, count: int) -> bool:
        """Whether `count` pages can become free beside those that the prompts of other sequences will take."""
        if not self.groups.full:
            return True
        expected = sum(lease.n_expected for lease in self.leases.values())
        return count + expected <= self.pool.free + self.pool.cached

    def _place_of(self, page_hash: PageHash, hashes: list[PageHash]) -> int:
        """The place of a page of any group; 0 for one of none."""
        names = range(self.groups.n_groups)
        return next((i for i, one in enumerate(hashes) if any(group_hash(one, g) == page_hash for g in names)), 0)

    def _find(
        self,
        hashes: list[PageHash],
        window: int,
        sent: Container[PageHash] = (),
        n_fetchable: int = 0,
        most_outside: int | None = None,
    ) -> Hit:
        if not window and not self.groups.full:
            return self.pool.find(hashes, n_fetchable > 0)
        each, groups = self.page_tokens, self.groups
        return self.pool.find_last(
            hashes, lambda n: first_read(n * each, window) // each, sent, groups, n_fetchable, most_outside
        )

    def _wanted(self, want_tokens: int, n_shared: int, window: int, ahead: int) -> int:
        """Positions that a new lease holds, or has held."""
        return min(want_tokens, n_shared * self.page_tokens + max(1, ahead)) if window else want_tokens

    def _n_sharable(self, tokens: np.ndarray, hashes: list[PageHash], sharable: int) -> int:
        """How many of the leading pages may be shared."""
        most = max(0, len(tokens) - 1) if sharable < 0 else min(sharable, max(0, len(tokens) - 1))
        return min(len(hashes), most // self.page_tokens)

    def sharable_hashes(self, tokens: np.ndarray, salt: str = "", sharable: int = -1) -> list[PageHash]:
        """The pages that `acquire` may share for these tokens (n,) int32; none without caching."""
        hashes = page_hashes(self.root_hash_of(salt), tokens, self.page_tokens) if self.is_caching else []
        return hashes[: self._n_sharable(tokens, hashes, sharable)]

    def pages_with(self, hashes: list[PageHash], window: int, sent: Container[PageHash]) -> Sequence[PageHash]:
        """The pages that `acquire` would share if those of `sent` were in the arena, and sources contained none.

        With a window sources count as well, because each of its pages is fetched by itself.
        """
        if window or self.groups.full:
            return self._find(hashes, window, sent).hashes
        table = self._table
        missing = (
            place
            for place, page_hash in enumerate(hashes)
            if table.get_cached_page(page_hash) is None and page_hash not in sent
        )
        return hashes[: next(missing, len(hashes))]

    def pages_outside(
        self, hashes: list[PageHash], window: int, most: int, ahead: Container[PageHash] = (), n_fetchable: int = 0
    ) -> list[PageHash]:
        """The pages that `acquire` would fetch if sources could give `most` pages, and those of `ahead` beside them.

        `n_fetchable`: in so many groups, the first ones, only what they can give now.
        """
        return self._find(hashes, window, ahead, n_fetchable, most).outside

    def extend(self, sequence: str, want_tokens: int) -> Grant | Denial:
        """Add new pages at the end of a lease. Denies an unknown or suspect one: it must acquire again."""
        lease = self.leases.get(sequence)
        needed = self.groups.n_pages(self.places_for(want_tokens))
        if lease is None or lease.is_suspect or not self.is_reconciled:
            return self._denial(needed)
        missing = max(0, needed - len(lease.pages))
        if not self.pool.make_room(missing):
            held = len(lease.held)
            return self._denial(held + missing, held)
        if missing:
            now = self.pool.clock_ns()
            lease.pages += self._table.get_new_pages(missing, lease.root, lease.serial, now, lease.born_ns)
        return Grant(tuple(lease.pages), lease.n_shared * self.page_tokens)

    def remove(self, freed: Sequence[tuple[PageHash, int]]) -> None:
        """Drop the pages of the places (hash, most uses) in the arena and in page files, unless sequences hold them.

        A page or a copy that more sequences than these have held stays: requests without a session share it.
        """
        for page_hash, most_uses in freed:
            self.pool.remove([group_hash(page_hash, group) for group in range(self.groups.n_groups)], most_uses)

    def is_suspect(self, sequence: str) -> bool:
        """Whether the sequence's lease was refused, and the scheduler has not released it yet."""
        lease = self.leases.get(sequence)
        return lease is not None and lease.is_suspect

    def commit(self, sequence: str, n_tokens: int, unread: int = 0) -> None:
        """The first `n_tokens` positions are final, and no step reads the first `unread` ones any more.

        Ignores an unknown sequence, whose frame is late.
        """
        lease = self.leases.get(sequence)
        if lease is not None:
            self._cache_full_pages(lease, n_tokens)
            if unread and not lease.is_suspect:
                self._release_unread(lease, unread // self.page_tokens)

    def _release_unread(self, lease: Lease, n_unread: int) -> None:
        """Release the first `n_unread` places of a lease, except its last one, by which it is recognised."""
        groups = self.groups
        n_unread = min(n_unread, lease.n_places - 1)
        if n_unread <= lease.n_unread:
            return
        pages = []
        for at in range(lease.n_unread * groups.n_groups, n_unread * groups.n_groups):
            if at % groups.n_groups >= groups.full:
                pages.append(lease.pages[at])
                lease.pages[at] = NO_PAGE
        lease.n_released += len(pages)
        lease.n_unread = n_unread
        self._table.release_ref(pages, self.pool.clock_ns())

    def release(self, sequence: str, n_tokens: int) -> None:
        """The sequence releases its pages. Ignores an unknown sequence, whose frame is late."""
        lease = self.leases.get(sequence)
        if lease is not None:
            self._cache_full_pages(lease, n_tokens)
            self._end(lease)

    def reconcile(self, claims: Iterable[LeaseClaim]) -> list[str]:
        """Take over all leases that the scheduler holds and end the others. Returns the sequences refused.

        A claim is refused when one of its pages is another sequence's, is free, has another sequence's tokens or is
        damaged, or when it contradicts the lease that this manager has granted.  Then every later claim of that
        sequence is refused as well, until its release: the first refusal may be lost.  The scheduler must release a
        refused sequence and acquire it again; until then no page of either is granted to another sequence, since a
        step in flight may write it.
        """
        claim_of = {claim.sequence: claim for claim in claims}
        refused = []
        for lease in list(self.leases.values()):
            claim = claim_of.get(lease.sequence)
            if claim is None or lease.row != claim.row or not claim.pages:
                self._end(lease)
            elif lease.is_suspect or not self._matches(lease, claim):
                self._hold_both(lease, claim)
                refused.append(lease.sequence)
        new_claims = [claim for claim in claim_of.values() if claim.sequence not in self.leases]
        refused += [claim.sequence for claim in new_claims if not self._take_over(claim)]
        self.pool.free_unclaimed()
        self.is_reconciled = True
        return refused

    def _matches(self, lease: Lease, claim: LeaseClaim) -> bool:
        """Whether the claim has the lease's pages. Releases those that it does not need any more, or never learnt of.

        The frame that granted the last pages may be lost: no step has them then.
        """
        groups, n_pages = self.groups, len(claim.pages)
        n_unread = groups.n_unread(claim.pages)
        if n_pages % groups.n_groups or n_pages // groups.n_groups < max(lease.n_final, lease.n_unread + 1):
            return False
        if groups.held(lease.pages[:n_pages], n_unread) != groups.held(claim.pages, n_unread):
            return False
        if surplus := lease.pages[n_pages:]:
            del lease.pages[n_pages:]
            self._table.release_ref(surplus, self.pool.clock_ns())
        self._release_unread(lease, n_unread)
        return lease.n_unread == n_unread

    def _hold_both(self, lease: Lease, claim: LeaseClaim) -> None:
        """Hold the pages of the lease and of a claim that contradicts it, until the sequence's release."""
        lease.is_suspect = True
        held = set(lease.held)
        more = [
            page for page in dict.fromkeys(claim.pages) if page not in held and self._may_hold(page, claim.pages[-1])
        ]
        for page in more:
            self._table.claim(page)
        lease.pages += more

    def _end(self, lease: Lease) -> None:
        del self.leases[lease.sequence]
        self._table.release_ref(lease.held, self.pool.clock_ns())

    def _denial(self, needed: int, held: int = 0) -> Denial:
        pool = self.pool
        return Denial(needed <= pool.total, needed - held, pool.free + pool.cached, pool.total)

    def fragmentation(self) -> float:
        """Share of the positions of leased pages that hold no token: reserved ahead, or after a sequence's end.

        There is no other waste: pages have one size, and a sequence's pages need not be adjacent.
        """
        each = self.page_tokens
        # A page that several leases hold is full, so an unused position belongs to one lease only.
        count = self.groups.n_groups
        unused = sum(max(0, len(lease.pages) * each - lease.n_tokens * count) for lease in self.leases.values())
        return unused / (self.pool.leased * each) if self.pool.leased else 0.0

    # -------------------------------------------------------------- caching full pages

    def _cache_full_pages(self, lease: Lease, n_tokens: int) -> None:
        """Cache the lease's full pages within the first `n_tokens` positions."""
        lease.n_tokens = max(lease.n_tokens, n_tokens)
        n_full = min(n_tokens // self.page_tokens, lease.n_places)
        if n_full <= lease.n_final or lease.is_suspect or not self.is_caching:
            return
        if len(lease.hashes) < n_full and not self._extend_hashes(lease, n_full):
            n_full = len(lease.hashes)
        count = self.groups.n_groups
        for at in range(lease.n_final * count, n_full * count):
            (i, group), page = divmod(at, count), lease.pages[at]
            page_hash = group_hash(lease.hashes[i], group)
            if page != NO_PAGE and self._table.get_cached_page(page_hash) is None:
                parent = group_hash(lease.hashes[i - 1], group) if i else lease.root
                content, ordinal = checksum(self.pool.arena.pages[page]), pack_ordinal(i, group)
                identity = PageIdentity(lease.root, parent, page_hash, content, ordinal, self.page_tokens)
                self.pool.cache_full_page(page, identity)
        lease.n_final = max(lease.n_final, n_full)

    def _extend_hashes(self, lease: Lease, n_full: int) -> bool:
        """Hash the places up to `n_full` from the row's tokens; False if the row's tokens are not the sequence's."""
        begin, tokens = len(lease.hashes), None
        if lease.serial:
            tokens = self._read_tokens(lease.row, lease.serial, begin * self.page_tokens, n_full * self.page_tokens)
        if tokens is None:
            self.pool.counters.unread += 1
            return False
        parent = lease.hashes[-1] if lease.hashes else lease.root
        lease.hashes += page_hashes(parent, tokens, self.page_tokens)
        return True

    # -------------------------------------------------------------- reconciliation

    def _take_over(self, claim: LeaseClaim) -> bool:
        """Make a lease from the headers of a claim's pages; False if they contradict the claim.

        A refused sequence still holds its pages, except those of other sequences alone: a step in flight may read and
        write them.
        """
        lease = self._recognise(claim)
        is_accepted = lease is not None
        if lease is None:
            last = claim.pages[-1] if claim.pages else -1
            own = [page for page in dict.fromkeys(claim.pages) if self._may_hold(page, last)]
            root = self.root_hash_of("")
            lease = Lease(claim.sequence, claim.row, 0, root, own, [], 0, 0, 0, claim.n_tokens, is_suspect=True)
            lease.groups = self.groups
        for page in lease.held:
            self._table.claim(page)
        self.leases[claim.sequence] = lease
        return is_accepted

    def _recognise(self, claim: LeaseClaim) -> Lease | None:
        """Rebuild a lease from the headers; None when they contradict the claim, or a page is damaged."""
        table, headers, pages, groups = self._table, self._table.headers, list(claim.pages), self.groups
        n_unread = groups.n_unread(pages)
        held = groups.held(pages, n_unread)
        if not held or len(set(held)) != len(held) or len(pages) % groups.n_groups:
            return None
        if n_unread >= len(pages) // groups.n_groups:  # every lease has its last place
            return None
        if claim.n_tokens > len(pages) // groups.n_groups * self.page_tokens:
            return None
        if not all(0 <= page < table.total for page in held) or n_unread * self.page_tokens > claim.n_tokens:
            return None
        # Shared pages come first, so the last page was leased new to this very sequence.
        root, serial = headers.lease_of(pages[-1])
        if not serial:  # this page was found damaged before
            return None
        born_ns = headers.born_ns(pages[-1])
        lease = Lease(
            claim.sequence, claim.row, serial, root, pages, [], 0, 0, born_ns, claim.n_tokens, n_unread, n_unread
        )
        lease.groups = groups
        # Without a page of any group at the first places, these are hashed from the row's tokens.
        knows_tokens = self.is_caching and (groups.full > 0 or not n_unread or self._extend_hashes(lease, n_unread))
        for at, page in enumerate(pages):
            i, group = divmod(at, groups.n_groups)
            if i < n_unread and group >= groups.full:
                continue
            if table.state(page) == UNCLAIMED:
                if headers.lease_of(page) != (root, serial):
                    return None
                is_computed = (i + 1) * self.page_tokens <= claim.n_tokens
                knows_tokens = knows_tokens and is_computed and (group > 0 or self._extend_hashes(lease, i + 1))
                continue
            identity = headers.identity(page) if table.hash_of(page) is not None else None
            if identity is None or unpack_ordinal(identity.ordinal) != (i, group) or identity.root != root:
                return None
            if table.is_damaged(page):
                self.pool.invalidate(page)
                return None
            if knows_tokens:
                if identity.parent != (group_hash(lease.hashes[i - 1], group) if i else root):
                    return None
                if not group:
                    lease.hashes.append(identity.page_hash)
                elif identity.page_hash != group_hash(lease.hashes[i], group):
                    return None
        return lease

    def _may_hold(self, page: int, last: int) -> bool:
        """Whether a refused sequence may hold `page`: a full one, or an unclaimed one leased like page `last`."""
        table = self._table
        if not 0 <= page < table.total:
            return False
        if table.state(page) != UNCLAIMED:
            return table.hash_of(page) is not None
        serial = table.headers.lease_of(page)[1]
        return serial in (0, table.headers.lease_of(last)[1] if 0 <= last < table.total else 0)

    # -------------------------------------------------------------- invariants

    def count(self) -> PageCounts:
        """Pages in the free list, in the eviction order, and in leases or unclaimed."""
        held = {page for lease in self.leases.values() for page in lease.held}
        held.update(page for pages in self.imports.values() for page in pages.values())
        held.update(self._table.unclaimed_pages())
        return PageCounts(self.pool.free, self.pool.cached, len(held))

    def check(self) -> None:
        """Raises `AssertionError` when an invariant does not hold. O(total), for tests and `starling kv check`."""
        held: dict[int, int] = {}
        for lease in self.leases.values():
            assert NO_PAGE not in lease.held, f"{lease.sequence} lacks a page that it reads"
            gap = lease.groups.without_unread(lease.pages, lease.n_unread)
            assert gap == tuple(lease.pages), f"{lease.sequence} holds a page that it does not read"
            for page in lease.held:
                held[page] = held.get(page, 0) + 1
        for pages in self.imports.values():
            for page in pages.values():
                held[page] = held.get(page, 0) + 1
        self._table.check()
        for page in range(self.pool.total):
            refs = self._table.refs(page)
            assert refs == held.get(page, 0), f"page {page}: wrong reference count {refs}, not {held.get(page, 0)}"
        count = self.count()
        assert sum(count) == self.pool.total, f"{count} are not {self.pool.total} pages"
        if self.is_reconciled:  # until then the reference counts in the headers are not valid
            in_headers = self._table.headers.count()
            assert in_headers == count, f"the headers say {in_headers}, not {count}"
