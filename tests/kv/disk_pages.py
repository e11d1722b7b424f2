"""Pages and a page file for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shm.pages import PAGE_FULL, PAGE_HEADER
from shm.prefix_hash import PageHash
from stages.kv.pool.page_headers import PageHeaders, PageIdentity, checksum
from stages.kv.storage.disk_store import DiskPageStore
from stages.kv.storage.page_file import BLOCK, EXTENT_CELLS

PAGE_BYTES = 8192
EXTENT = BLOCK + EXTENT_CELLS * PAGE_BYTES
IDENTITY = {"digest": "ab" * 32, "kv_type": "f16"}


def page(i: int) -> tuple[PageHash, bytes, np.ndarray]:
    """(hash, record, content) of a page; all pages differ."""
    content = np.random.default_rng(i).integers(0, 256, PAGE_BYTES, np.uint8)
    digest = PageHash(i.to_bytes(16, "big"))
    raw = np.zeros((1, PAGE_HEADER), np.uint8)
    headers = PageHeaders(raw)
    headers.lease([0], PageHash(bytes(16)), 1, now_ns=1000 + i, born_ns=1)
    headers.mark_full(0, PageIdentity(PageHash(bytes(16)), digest, digest, checksum(content), i, 16))
    assert headers.state(0) == PAGE_FULL
    return digest, headers.record(0), content


def open_store(path: Path, max_bytes: int = BLOCK + 2 * EXTENT, **options: Any) -> DiskPageStore:
    """Its clock stands still unless the test gives one: no access counts as slow, however busy the machine is."""
    options.setdefault("clock", lambda: 0.0)
    return DiskPageStore(path, options.pop("identity", IDENTITY), PAGE_BYTES, max_bytes, 1, **options)
