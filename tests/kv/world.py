"""A small arena, a clock that only tests advance, and page contents that identify their tokens."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from shm import prefix_hash
from shm.pages import PAGE_HEADER, KvArena, KvGeometry
from stages.kv.manager import Manager
from stages.kv.pool.page_pool import PagePool

GEOMETRY = KvGeometry(n_layers=1, n_kv_heads=1, head_dim=32, page_tokens=16, kv_type="f16")
PAGE_TOKENS = GEOMETRY.page_tokens
PAGE_BYTES = 4096  # the manager accepts any size, and small pages make tests fast
DIGEST = bytes(range(32))


class Clock:
    """Nanoseconds; every reading advances it by one, so that all events have different times."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        self.now += 1
        return self.now


class FakeRows:
    """The scheduler's rows: tokens by row, each taken under a new serial."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, list[int]]] = {}
        self._serial = 0

    def take(self, row: int, tokens: list[int]) -> int:
        self._serial += 1
        self.rows[row] = (self._serial, tokens)
        return self._serial

    def read(self, row: int, serial: int, begin: int, end: int) -> np.ndarray | None:
        found, tokens = self.rows.get(row, (0, []))
        if found != serial or end > len(tokens):
            return None
        return np.array(tokens[begin:end], np.int32)


def small_arena(n_pages: int, page_bytes: int = PAGE_BYTES) -> KvArena:
    return KvArena(np.zeros((n_pages, PAGE_HEADER), np.uint8), np.zeros((n_pages, page_bytes), np.uint8))


def contents(tokens: list[int], i: int, salt: str = "", page_bytes: int = PAGE_BYTES) -> np.ndarray:
    """The contents of page `i` of a sequence: a function of all tokens up to its end.

    They also depend on the salt, unlike real contents, so that a test finds pages shared across salts.
    """
    seed = hashlib.sha256(repr((salt, tokens[: (i + 1) * PAGE_TOKENS])).encode()).digest()
    return np.frombuffer((seed * (page_bytes // 32 + 1))[:page_bytes], np.uint8)


def manager(arena: KvArena, rows: FakeRows, caching: bool = True, **options: Any) -> Manager:
    """`options` are the pool's."""
    return Manager(
        PagePool(arena, **options), PAGE_TOKENS, prefix_hash.root_hasher(DIGEST, GEOMETRY), rows.read, caching=caching
    )
