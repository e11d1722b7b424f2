"""A manager, the rows of its sequences and their worker, for tests of single rules."""

from __future__ import annotations

import numpy as np

from stages.kv.lease import Denial, Grant
from stages.kv.manager import Manager
from stages.kv.pool.arena import scan
from stages.kv.pool.page_headers import PageHeaders
from tests.kv.world import PAGE_TOKENS, Clock, FakeRows, contents, manager, small_arena


def words(*numbers: int, tail: int = 1) -> list[int]:
    """A page of tokens for each number, and `tail` tokens more."""
    return [number for number in numbers for _ in range(PAGE_TOKENS)] + [99] * tail


class World:
    """A manager, its rows and its worker."""

    def __init__(self, n_pages: int = 8, **options: object) -> None:
        self.rows = FakeRows()
        self.clock = Clock()
        self.arena = small_arena(n_pages)
        self.options = options
        self.m = self.new()
        self.tokens: dict[str, list[int]] = {}

    def new(self) -> Manager:
        return manager(self.arena, self.rows, clock_ns=self.clock, **self.options)  # type: ignore[arg-type]

    def acquire(self, who: str, tokens: list[int], ahead: int = 0, salt: str = "") -> Grant | Denial:
        row = len(self.tokens)
        serial = self.rows.take(row, tokens)
        self.tokens[who] = tokens
        return self.m.acquire(who, np.array(tokens, np.int32), len(tokens) + ahead, row, serial, salt)

    def run(self, who: str, tokens: list[int], salt: str = "") -> int:
        """A whole request; returns the number of its pages that were cached."""
        answer = self.acquire(who, tokens, salt=salt)
        assert isinstance(answer, Grant)
        for i in range(answer.cached_tokens // PAGE_TOKENS, len(tokens) // PAGE_TOKENS):
            self.arena.pages[answer.pages[i]] = contents(tokens, i, salt)
        self.m.release(who, len(tokens))
        self.m.check()
        return answer.cached_tokens // PAGE_TOKENS

    def restart(self) -> None:
        self.m = self.new()
        found = scan(PageHeaders(self.arena.headers), len(self.arena.pages))
        self.m.pool.table.adopt(found.full, found.unclaimed)
        self.m.is_reconciled = False

    def counts(self) -> tuple[int, int, int]:
        pool = self.m.pool
        return pool.free, pool.cached, pool.leased
