"""The pages of an older version of the same file while both versions are loaded: a `PageSource`.

A reloaded model starts with an empty arena beside a full one, and pages with the same hash have the same bytes in both.
Copying a page costs a hundredth of computing it.  Both arenas belong to this process, so a page cannot change between
its verification and the copy.
"""

from __future__ import annotations

import numpy as np

from shm.prefix_hash import PageHash
from stages.kv.pool.page_headers import PageIdentity
from stages.kv.pool.page_pool import PagePool


class OlderVersion:
    """Reads the pages of `pool` and changes nothing there."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool

    def __contains__(self, page_hash: PageHash) -> bool:
        return self.pool.table.get_cached_page(page_hash) is not None

    def fetch(self, page_hash: PageHash, out: np.ndarray) -> PageIdentity | None:
        """See `PageSource.fetch`."""
        table = self.pool.table
        page = table.get_cached_page(page_hash)
        if page is None or table.is_damaged(page):
            return None
        identity = table.headers.identity(page)
        if identity is not None:
            np.copyto(out, self.pool.arena.pages[page])
        return identity
