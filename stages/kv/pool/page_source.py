"""Where full pages outside the arena come from: a `PageSource` is read only, a `PageStore` also saves pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from shm.prefix_hash import PageHash
from stages.kv.pool.page_headers import MAX_USES, PageIdentity


class PageSource(Protocol):
    """Full pages that can be copied into the arena."""

    def __contains__(self, page_hash: PageHash) -> bool: ...

    def fetch(self, page_hash: PageHash, out: np.ndarray) -> PageIdentity | None:
        """Copy a page into `out` (page_bytes,) u8. None: it is missing or damaged, and `out` is undefined."""


class PageStore(PageSource, Protocol):
    """Copies of full pages that outlive the arena."""

    residency: int  # its bit in the page header

    def can_fetch(self, page_hash: PageHash) -> bool:
        """Whether `fetch` gives this page now, unless it is damaged."""

    def prefetch(self, hashes: Iterable[PageHash]) -> None:
        """Start reading pages that `fetch` will be called for."""

    def save(self, page_hash: PageHash, record: bytes, content: np.ndarray) -> bool:
        """Keep a copy of a page and its header's record. False: it was not saved."""

    def touch(self, page_hash: PageHash) -> None:
        """Count a use of a copy."""

    def remove(self, page_hash: PageHash, most_uses: int = MAX_USES) -> None:
        """Remove a copy, if there is one and no more sequences have held it."""

    def idle(self, before_ns: int) -> list[PageHash]:
        """Copies whose last use was before `before_ns` (ns since 1970), oldest first."""
