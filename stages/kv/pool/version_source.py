"""The pages of an older version of the same file, while it is still there: a `pool.Tier`.

A model that is reloaded begins with an empty arena beside a full one, and pages of one name have the same
bytes in both.  What the new one misses and the old one has is copied, which costs a hundredth of computing it.
Both arenas are this process's, so nothing changes between the look and the copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stages.kv.pool.headers import PageName
from stages.kv.pool.page_pool import Pool
from stages.kv.pool.prefix_hash import PageDigest


class Sibling:
    """Reads from `pool`; writes and drops nothing there."""

    residency = 0  # no copy that lasts

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __contains__(self, digest: PageDigest) -> bool:
        return digest in self._pool.index

    def fetch(self, digest: PageDigest, out: np.ndarray) -> PageName | None:
        pool = self._pool
        page = pool.index.get(digest)
        if page is None or pool.is_damaged(page):
            return None
        name = pool.headers.name(page)
        if name is not None:
            np.copyto(out, pool.arena.pages[page])
        return name

    def put(self, digest: PageDigest, record: bytes, content: np.ndarray) -> bool:
        return False

    def expect(self, digests: Iterable[PageDigest]) -> None: ...

    def discard(self, digest: PageDigest) -> None: ...

    def touch(self, digest: PageDigest) -> None: ...

    def idle(self, before_ns: int) -> list[PageDigest]:
        return []
