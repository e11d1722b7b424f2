"""The page table against a table of plain dicts: every page has one state, and the headers agree with it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shm.pages import PAGE_FREE, PAGE_FULL, PAGE_LEASED
from shm.prefix_hash import PageHash
from stages.kv.pool.arena import scan
from stages.kv.pool.page_headers import PageIdentity, checksum
from stages.kv.pool.page_table import CACHED, FREE, LEASED, UNCLAIMED, PageTable
from tests.kv.world import small_arena

TOTAL = 6
ROOT = PageHash(b"r" * 16)


@dataclass
class ModelPage:
    """What the table must store of one page."""

    state: int = FREE
    refs: int = 0
    page_hash: PageHash | None = None


class TableRules(RuleBasedStateMachine):
    """Any order of operations, valid or not: the table conserves pages and refuses what is invalid."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.arena = small_arena(TOTAL)
        self.table = PageTable(self.arena, self.policy)
        self.may_free = True
        self.pages = [ModelPage() for _ in range(TOTAL)]
        self.now = 1000
        self.n_hashes = 0

    def _with_state(self, *states: int) -> list[int]:
        return [page for page, model in enumerate(self.pages) if model.state in states]

    def _tick(self) -> int:
        self.now += 1
        return self.now

    # -------------------------------------------------------------- operations

    @rule(count=st.integers(0, TOTAL + 1))
    def get_new_pages(self, count: int) -> None:
        if count > len(self._with_state(FREE)):
            with pytest.raises(ValueError, match=f"{count} pages requested"):
                self.table.get_new_pages(count, ROOT, 7, self.now, self.now)
            return
        new = self.table.get_new_pages(count, ROOT, 7, self._tick(), self.now)
        assert len(set(new)) == count
        for page in new:
            assert self.pages[page].state == FREE
            self.pages[page] = ModelPage(LEASED, 1)

    @rule(page=st.integers(0, TOTAL - 1))
    def cache_full_page(self, page: int) -> None:
        self.n_hashes += 1
        page_hash = PageHash(self.n_hashes.to_bytes(16, "big"))
        identity = PageIdentity(ROOT, ROOT, page_hash, checksum(self.arena.pages[page]), self.n_hashes, 16)
        model = self.pages[page]
        if model.state != LEASED or model.page_hash is not None:
            with pytest.raises(ValueError, match="is not leased, or it or its hash is cached already"):
                self.table.cache_full_page(page, identity)
            return
        self.table.cache_full_page(page, identity)
        model.page_hash = page_hash

    @rule(page=st.integers(0, TOTAL - 1))
    def cache_a_hash_twice(self, page: int) -> None:
        known = [model.page_hash for model in self.pages if model.page_hash is not None]
        if known:
            identity = PageIdentity(ROOT, ROOT, known[0], 0, 0, 16)
            with pytest.raises(ValueError, match="cached already"):
                self.table.cache_full_page(page, identity)

    @rule(page=st.integers(0, TOTAL - 1))
    def acquire_ref(self, page: int) -> None:
        model = self.pages[page]
        if model.state not in (LEASED, CACHED):
            with pytest.raises(ValueError, match="neither leased nor cached"):
                self.table.acquire_ref([page])
        elif model.page_hash is not None:  # only full pages are shared
            self.table.acquire_ref([page])
            self.table.record_use([page], self._tick())
            model.state, model.refs = LEASED, model.refs + 1

    @rule(data=st.data())
    def release_ref(self, data: st.DataObject) -> None:
        leased = self._with_state(LEASED)
        if not leased:
            with pytest.raises(ValueError, match="page 0 is not leased"):
                self.table.release_ref([0], self.now)
            return
        pages = data.draw(st.lists(st.sampled_from(leased), min_size=1, unique=True))
        self.table.release_ref(pages, self._tick())
        for page in pages:
            model = self.pages[page]
            model.refs -= 1
            if model.refs == 0:
                model.state = FREE if model.page_hash is None else CACHED

    @rule(page=st.integers(0, TOTAL - 1))
    def evict(self, page: int) -> None:
        if not self.may_free:
            with pytest.raises(ValueError, match="may hold cached pages"):
                self.table.evict(page)
            return
        if self.pages[page].state != CACHED:
            with pytest.raises(ValueError, match=f"page {page} is not cached"):
                self.table.evict(page)
            return
        self.table.evict(page)
        self.pages[page] = ModelPage()

    @rule(data=st.data())
    def evict_next(self, data: st.DataObject) -> None:
        order = self.table.evictable_pages()
        if not self.may_free:
            with pytest.raises(ValueError, match="may hold cached pages"):
                self.table.evict_next(len(order))
            return
        count = data.draw(st.integers(0, len(order)))
        saved: list[int] = []
        self.table.evict_next(count, saved.append)
        assert saved == order[:count]
        for page in saved:
            self.pages[page] = ModelPage()

    @rule(page=st.integers(0, TOTAL - 1))
    def invalidate(self, page: int) -> None:
        if self.pages[page].state != CACHED:
            with pytest.raises(ValueError, match=f"page {page} is not cached"):
                self.table.invalidate(page)
            return
        self.table.invalidate(page)
        self.pages[page] = ModelPage(UNCLAIMED)

    @rule(page=st.integers(0, TOTAL - 1))
    def damage(self, page: int) -> None:
        """A cached page whose bytes change is damaged, until it is evicted here."""
        model = self.pages[page]
        self.arena.pages[page, 17] ^= 1
        assert self.table.is_damaged(page) == (model.state == CACHED)
        if model.state == CACHED and model.page_hash is not None:
            assert self.table.get_cached_pages([model.page_hash]) == []
            self.arena.pages[page, 17] ^= 1
            assert self.table.get_cached_pages([model.page_hash]) == [page]
        else:
            self.arena.pages[page, 17] ^= 1

    @rule()
    def restart(self) -> None:
        """SIGKILL: a new table adopts the headers. Leases are lost; full pages stay."""
        self.table = PageTable(self.arena, self.policy)
        adopted = scan(self.table.headers, TOTAL)
        assert adopted.n_torn == 0
        self.table.adopt(adopted.full, adopted.unclaimed)
        self.may_free = False
        for model in self.pages:
            if model.state == LEASED:
                model.state, model.refs = UNCLAIMED if model.page_hash is None else CACHED, 0

    @precondition(lambda self: self._with_state(UNCLAIMED) or not self.may_free)
    @rule(data=st.data())
    def reconcile(self, data: st.DataObject) -> None:
        claimed = data.draw(st.sets(st.sampled_from(self._with_state(UNCLAIMED, CACHED) or [-1]))) - {-1}
        for page in claimed:
            self.table.claim(page)
            self.pages[page].state, self.pages[page].refs = LEASED, 1
        self.table.free_unclaimed()
        self.may_free = True
        for page in self._with_state(UNCLAIMED):
            self.pages[page] = ModelPage()

    # -------------------------------------------------------------- after every operation

    @invariant()
    def conserves_pages(self) -> None:
        table = self.table
        table.check()
        assert table.free + table.cached + table.leased == table.total == TOTAL
        assert table.free == len(self._with_state(FREE))
        assert table.cached == len(self._with_state(CACHED))
        assert table.leased == len(self._with_state(LEASED, UNCLAIMED))

    @invariant()
    def stores_one_state_for_each_page(self) -> None:
        for page, model in enumerate(self.pages):
            found = ModelPage(self.table.state(page), self.table.refs(page), self.table.hash_of(page))
            assert found == model
            if model.page_hash is not None:
                assert self.table.get_cached_page(model.page_hash) == page
        assert set(self.table.hashes()) == {model.page_hash for model in self.pages} - {None}
        assert sorted(self.table.evictable_pages()) == self._with_state(CACHED)
        assert self.table.unclaimed_pages() == self._with_state(UNCLAIMED)

    @invariant()
    def writes_every_change_through_to_the_headers(self) -> None:
        if self._with_state(UNCLAIMED):
            return  # until the reconciliation the reference counts in the headers are a predecessor's
        refs = self.table.headers.states_and_refs()[1]
        for page, model in enumerate(self.pages):
            full = PAGE_FULL if model.page_hash is not None else PAGE_LEASED
            assert self.table.headers.state(page) == (PAGE_FREE if model.state == FREE else full)
            identity = self.table.headers.identity(page) if model.page_hash is not None else None
            assert (identity.page_hash if identity is not None else None) == model.page_hash
            if model.state == LEASED:
                assert refs[page] == model.refs


class LfuTableRules(TableRules):
    policy = "lfu"


class FifoTableRules(TableRules):
    policy = "fifo"


@pytest.mark.parametrize("machine", [TableRules, LfuTableRules, FifoTableRules])
def test_rules(machine: type[TableRules]) -> None:
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    case("runTest").runTest()


def test_pages_are_given_out_in_order_and_come_back() -> None:
    table = PageTable(small_arena(5))
    assert table.get_new_pages(3, ROOT, 7, 1, 1) == [0, 1, 2]
    table.cache_full_page(1, PageIdentity(ROOT, ROOT, PageHash(b"1" * 16), 0, 0, 16))
    table.acquire_ref([1])
    assert table.refs(1) == 2
    table.release_ref([1], 2)
    assert table.refs(1) == 1
    table.release_ref([1], 3)
    assert table.refs(1) == 0
    table.release_ref([0], 4)
    assert table.refs(0) == 0
    table.check()
    assert (table.free, table.cached, table.leased) == (3, 1, 1)
    assert table.get_new_pages(1, ROOT, 7, 5, 5) == [0]  # the last one freed is given out first: it is in the caches
    with pytest.raises(ValueError, match="5 pages requested, 2 are free"):
        table.get_new_pages(5, ROOT, 7, 6, 6)
    with pytest.raises(ValueError, match="neither leased nor cached"):
        table.acquire_ref([4])
