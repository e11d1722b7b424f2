"""A kv manager and a worker for tests of layer groups: page contents name their tokens, place and group."""

from __future__ import annotations

import numpy as np

from shm import prefix_hash
from shm.layer_groups import LayerGroups
from shm.pages import KV_SPLIT, first_read
from shm.prefix_hash import group_hash
from stages.kv.lease import Denial, Grant, LeaseClaim
from stages.kv.manager import Manager
from stages.kv.pool.arena import scan
from stages.kv.pool.page_headers import PageHeaders
from stages.kv.pool.page_pool import PagePool
from stages.kv.storage.disk_store import DiskPageStore
from tests.kv.world import DIGEST, GEOMETRY, PAGE_TOKENS, Clock, FakeRows, contents, small_arena

GROUPS = LayerGroups(3, 1)
WINDOW = 40
AHEAD = 2 * PAGE_TOKENS
SPLIT = KV_SPLIT // PAGE_TOKENS  # places
TOKENS = [1 + i // PAGE_TOKENS for i in range(40 * PAGE_TOKENS + 3)]
UNREAD = 2 * SPLIT  # places before the window of the last token


def page_of(tokens: list[int], place: int, group: int) -> np.ndarray:
    return contents(tokens, place, f"group {group}")


class GroupWorld:
    """A manager with groups, its rows and its worker."""

    def __init__(self, n_pages: int, groups: LayerGroups = GROUPS, store: DiskPageStore | None = None) -> None:
        self.rows, self.clock, self.groups, self.store = FakeRows(), Clock(), groups, store
        self.arena = small_arena(n_pages)
        self.tables: dict[str, tuple[int, ...]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.rows_of: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.unread: dict[str, int] = {}  # places
        self.m = self.new()

    def new(self) -> Manager:
        stores = [] if self.store is None else [self.store]
        pool = PagePool(self.arena, clock_ns=self.clock, spill=self.store, stores=stores)
        root_hash_of = prefix_hash.root_hasher(DIGEST, GEOMETRY)
        return Manager(pool, PAGE_TOKENS, root_hash_of, self.rows.read, groups=self.groups)

    def restart(self) -> None:
        self.m = self.new()
        found = scan(PageHeaders(self.arena.headers), len(self.arena.pages))
        assert found.n_torn == 0
        self.m.pool.table.adopt(found.full, found.unclaimed)
        self.m.is_reconciled = False

    def begin(self, who: str, tokens: list[int], row: int) -> Grant | Denial:
        serial = self.rows.take(row, tokens)
        answer = self.m.acquire(who, np.array(tokens, np.int32), len(tokens), row, serial, window=WINDOW, ahead=AHEAD)
        if isinstance(answer, Grant):
            self.tokens[who], self.rows_of[who], self.tables[who] = tokens, row, answer.pages
            self.computed[who] = answer.cached_tokens
            self.unread[who] = first_read(answer.cached_tokens, WINDOW) // PAGE_TOKENS
            self.read(who, answer.cached_tokens)
        return answer

    def read(self, who: str, position: int) -> None:
        """What a step from `position` reads is what the sequence computed."""
        groups, low = self.groups, first_read(position, WINDOW) // PAGE_TOKENS
        for at, page in enumerate(self.tables[who][: position // PAGE_TOKENS * groups.n_groups]):
            place, group = divmod(at, groups.n_groups)
            if group < groups.full or place >= low:
                np.testing.assert_array_equal(self.arena.pages[page], page_of(self.tokens[who], place, group))

    def step(self, who: str, count: int) -> bool:
        """Compute `count` positions; False: there are no pages for them."""
        begin = self.computed[who]
        end = min(begin + count, len(self.tokens[who]))
        answer = self.m.extend(who, end)
        if isinstance(answer, Denial):
            return False
        held = self.groups.held(answer.pages, self.unread[who])
        known = self.groups.held(self.tables[who], self.unread[who])
        assert held[: len(known)] == known
        self.tables[who] = answer.pages
        self.read(who, begin)
        for at in range(begin // PAGE_TOKENS * self.groups.n_groups, end // PAGE_TOKENS * self.groups.n_groups):
            place, group = divmod(at, self.groups.n_groups)
            self.arena.pages[self.tables[who][at]] = page_of(self.tokens[who], place, group)
        self.computed[who] = end
        return True

    def commit(self, who: str) -> None:
        unread = first_read(self.computed[who], WINDOW)
        self.m.commit(who, self.computed[who], unread)
        n_places = len(self.tables[who]) // self.groups.n_groups
        self.unread[who] = max(self.unread[who], min(unread // PAGE_TOKENS, n_places - 1))

    def run(self, who: str, tokens: list[int], row: int = 0) -> int:
        """A whole sequence; returns the tokens that were cached."""
        answer = self.begin(who, tokens, row)
        assert isinstance(answer, Grant), answer
        while self.computed[who] < len(tokens):
            assert self.step(who, AHEAD)
            self.commit(who)
            self.m.check()
        return answer.cached_tokens

    def claim(self, who: str) -> LeaseClaim:
        table = self.groups.without_unread(self.tables[who], self.unread[who])
        return LeaseClaim(who, self.rows_of[who], self.computed[who], table)

    def release(self, who: str) -> None:
        self.m.release(who, self.computed[who])
        self.forget(who)

    def forget(self, who: str) -> None:
        for known in (self.tables, self.tokens, self.rows_of, self.computed, self.unread):
            known.pop(who, None)  # type: ignore[attr-defined]

    def evict(self, tokens: list[int], place: int, group: int) -> None:
        hashes = prefix_hash.page_hashes(self.m.root_hash_of(""), np.array(tokens, np.int32), PAGE_TOKENS)
        page = self.m.pool.table.get_cached_page(group_hash(hashes[place], group))
        assert page is not None
        self.m.pool.table.evict(page)
