"""Which pages are worth loading before a request needs them: those of the prefixes that were used most.

A page's rank is the logarithm of its uses, minus one for each day since the last one: what was used a thousand times a
month ago comes after what was used twice yesterday.  A page is of use only behind all pages before it, so it is chosen
together with those that are missing, and not at all if one of them is lost.  One of a layer group other than the first
is chosen together with the first group's pages up to its place.

Pages name no tokens: a root (model and tenant) and hashes are all that is known of a prefix.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shm.pages import PAGE_FULL, unpack_ordinal
from shm.prefix_hash import PageHash, group_hash
from stages.kv.pool.page_pool import PageUse

DAY_NS = 86_400 * 10**9


class RankedPage(NamedTuple):
    """A page outside the arena."""

    page_hash: PageHash
    use: PageUse


def most_used(
    records: np.ndarray, limit: int, now_ns: int, is_present: Callable[[PageHash], bool] = lambda _: False
) -> list[RankedPage]:
    """At most `limit` pages, the most used ones first, each behind the pages before it in its prefix.

    `records` (n,) of page headers or records.  Pages of one root (a tenant, or a `cache_salt`) get at most half of
    `limit` while those of others want the rest.  `is_present`: pages that need not be loaded.
    """
    records = records[records["state"] == PAGE_FULL]
    age_days = np.maximum(0, now_ns - records["last_use"].astype(np.int64)) / DAY_NS
    rank = np.log2(np.maximum(records["uses"], 1)) - age_days
    places, groups = unpack_ordinal(records["ordinal"])
    chains = _Chains(records, is_present)
    room: Counter[bytes] = Counter()
    roots = _names(records["root"])
    share = limit if len(set(roots)) < 2 else -(-limit // 2)
    left_over: list[int] = []
    chosen: list[int] = []
    for row in np.lexsort((groups, places, -rank)).tolist():
        if len(chosen) >= limit:
            break
        count = chains.n_missing(row)
        if not 0 < count <= limit - len(chosen):
            continue
        if room[roots[row]] + count <= share:
            room[roots[row]] += count
            chosen += chains.take(row)
        else:
            left_over.append(row)
    for row in left_over:
        if len(chosen) >= limit:
            break
        if chains.n_missing(row) <= limit - len(chosen):
            chosen += chains.take(row)
    return [_ranked(records[row]) for row in chosen]


def _names(values: np.ndarray) -> list[PageHash]:
    """The values of a field of 16 bytes, (n,) V16."""
    raw = values.tobytes()
    return [PageHash(raw[at : at + 16]) for at in range(0, len(raw), 16)]


def _ranked(record: np.void) -> RankedPage:
    use = PageUse(int(record["uses"]), int(record["last_use"]), int(record["born"]))
    return RankedPage(PageHash(record["hash"].tobytes()), use)


class _Chains:
    """The prefixes that the records form: trees of the pages that are not there, of which some are chosen (`take`).

    All pages before a chosen one are chosen or there.  A page has a link to the page before it and one that leads
    further back, over distances that grow as powers of two: the chosen pages before a page are counted in
    O(log(pages before it)), because a prefix of 32,000 tokens has 1,000 pages and each of them is looked at.
    """

    def __init__(self, records: np.ndarray, is_present: Callable[[PageHash], bool]) -> None:
        count = len(records)
        self._parent = [-1] * count  # row of the page before it; -1: that is there, or there is none
        self._back = list(range(count))  # row of a page further back; of the first page of a tree, its own
        self._depth = [0] * count  # pages to load for this one while none is chosen; 0: it is there, or one is lost
        self._is_chosen = bytearray(count)
        hashes, parents, roots = (_names(records[field]) for field in ("hash", "parent", "root"))
        row_of = {page_hash: row for row, page_hash in enumerate(hashes)}
        places, groups = unpack_ordinal(records["ordinal"])
        group_of = groups.tolist()
        for row in np.lexsort((groups, places)).tolist():  # each page behind those before it
            page_hash, group = hashes[row], group_of[row]
            if is_present(page_hash):
                continue
            parent = group_hash(page_hash, group) if group else parents[row]
            before = row_of.get(parent, -1)
            if before >= 0 and self._depth[before]:
                self._link(row, before)
            elif (not group and parent == roots[row]) or is_present(parent):
                self._depth[row] = 1

    def _link(self, row: int, before: int) -> None:
        back, depth = self._back, self._depth
        far = back[before]
        is_even = depth[before] - depth[far] == depth[far] - depth[back[far]]
        self._parent[row], depth[row] = before, depth[before] + 1
        back[row] = back[far] if is_even else before

    def n_missing(self, row: int) -> int:
        """Pages to load for this one, itself included. 0: none, or one of them is lost."""
        back, is_chosen = self._back, self._is_chosen
        at = row
        while not is_chosen[at]:
            if back[at] == at:
                return self._depth[row]
            at = self._parent[at] if is_chosen[back[at]] else back[at]
        return self._depth[row] - self._depth[at]

    def take(self, row: int) -> list[int]:
        """Choose a page and those before it. Returns those that were not chosen yet, first ones first."""
        found: list[int] = []
        while row >= 0 and not self._is_chosen[row]:
            self._is_chosen[row] = True
            found.append(row)
            row = self._parent[row]
        return found[::-1]
