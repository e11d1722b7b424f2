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
    chains = _Chains(records, is_present)
    room: Counter[bytes] = Counter()
    roots = {root.tobytes() for root in records["root"]}
    share = limit if len(roots) < 2 else -(-limit // 2)
    left_over: list[int] = []
    chosen: list[int] = []
    places, groups = unpack_ordinal(records["ordinal"])
    for row in np.lexsort((groups, places, -rank)).tolist():
        chain = chains.missing(row)
        root = records["root"][row].tobytes()
        if chain and len(chosen) + len(chain) <= limit:
            if room[root] + len(chain) <= share:
                room[root] += len(chain)
                chains.take(chain)
                chosen += chain
            else:
                left_over.append(row)
    for row in left_over:
        chain = chains.missing(row)
        if len(chosen) + len(chain) <= limit:
            chains.take(chain)
            chosen += chain
    return [_ranked(records[row]) for row in chosen]


def _ranked(record: np.void) -> RankedPage:
    use = PageUse(int(record["uses"]), int(record["last_use"]), int(record["born"]))
    return RankedPage(PageHash(record["hash"].tobytes()), use)


class _Chains:
    """The prefixes that the records form."""

    def __init__(self, records: np.ndarray, is_present: Callable[[PageHash], bool]) -> None:
        self._hashes = [hash.tobytes() for hash in records["hash"]]
        self._parents = [
            group_hash(PageHash(page_hash), group) if group else parent.tobytes()
            for page_hash, parent, group in zip(
                self._hashes, records["parent"], unpack_ordinal(records["ordinal"])[1].tolist(), strict=True
            )
        ]
        self._roots = [root.tobytes() for root in records["root"]]
        self._row_of = {page_hash: row for row, page_hash in enumerate(self._hashes)}
        self._is_present = is_present
        self._taken: set[int] = set()
        self._useless: set[int] = set()  # a page before them is lost

    def take(self, rows: list[int]) -> None:
        """These are chosen."""
        self._taken.update(rows)

    def missing(self, row: int) -> list[int]:
        """The page and those before it that are not there, first ones first. Empty: none is, or one of them is lost."""
        found: list[int] = []
        at: int | None = row
        while at is not None and at not in self._taken and not self._is_present(PageHash(self._hashes[at])):
            found.append(at)
            if at in self._useless or len(found) > len(self._hashes):
                break
            if self._parents[at] == self._roots[at]:
                return found[::-1]
            parent = self._parents[at]
            at = self._row_of.get(parent)
            if at is None and not self._is_present(PageHash(parent)):
                break
        else:
            return found[::-1]
        self._useless.update(found)
        return []
