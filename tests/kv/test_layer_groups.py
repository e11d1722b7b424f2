"""Leases where only the layers of some groups have a window: pages held, shared, restored and recognised."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shm import prefix_hash
from shm.layer_groups import NO_PAGE
from shm.pages import unpack_ordinal
from shm.prefix_hash import group_hash
from stages.kv.lease import Denial, Grant, LeaseClaim
from stages.kv.storage.disk_store import DiskPageStore
from stages.kv.storage.page_file import BLOCK
from stages.kv.storage.page_ranking import most_used
from tests.kv.grouped import AHEAD, GROUPS, TOKENS, UNREAD, GroupWorld
from tests.kv.world import PAGE_BYTES, PAGE_TOKENS


def test_pages_behind_the_window_are_released_in_groups_that_have_one() -> None:
    w = GroupWorld(120)
    assert w.run("a", TOKENS) == 0
    lease = w.m.leases["a"]
    assert lease.n_unread == UNREAD
    assert len(lease.held) == GROUPS.n_pages(41, UNREAD) == 41 + 2 * (41 - UNREAD)
    assert [page == NO_PAGE for page in lease.pages[:3]] == [False, True, True]
    assert w.m.count().leased == len(lease.held)
    w.release("a")
    w.m.check()
    assert w.m.count().leased == 0


def test_a_prefix_hits_with_all_pages_of_full_groups_and_the_window_of_the_others() -> None:
    w = GroupWorld(123)
    w.run("a", TOKENS)
    w.release("a")
    for place in range(UNREAD):  # nothing behind reads them
        w.evict(TOKENS, place, 1)
        w.evict(TOKENS, place, 2)
    answer = w.begin("b", [*TOKENS, 7, 7], 1)
    assert isinstance(answer, Grant)
    assert answer.cached_tokens == 40 * PAGE_TOKENS
    assert answer.pages[: 3 * UNREAD : 3].count(NO_PAGE) == 0
    assert answer.pages[1 : 3 * UNREAD : 3] == answer.pages[2 : 3 * UNREAD : 3] == (NO_PAGE,) * UNREAD
    w.release("b")
    w.evict(TOKENS, 35, 2)  # within the window of the last place, and of none before its split
    answer = w.begin("c", [*TOKENS, 7, 7], 1)
    assert isinstance(answer, Grant)
    assert answer.cached_tokens == 35 * PAGE_TOKENS
    w.release("c")
    w.evict(TOKENS, 3, 0)  # a page that every position reads
    answer = w.begin("d", [*TOKENS, 7, 7], 1)
    assert isinstance(answer, Grant)
    assert answer.cached_tokens == 0, "the windows before it are gone"
    w.m.check()


def test_a_damaged_page_of_any_group_is_not_shared() -> None:
    w = GroupWorld(123)
    w.run("a", TOKENS)
    table = w.tables["a"]
    w.release("a")
    w.arena.pages[table[3 * 39 + 2]] ^= 1
    answer = w.begin("b", [*TOKENS, 7, 7], 1)
    assert isinstance(answer, Grant)
    assert answer.cached_tokens == 39 * PAGE_TOKENS
    assert w.m.pool.counters.checksum_failures == 1
    w.m.check()


def restarted() -> tuple[GroupWorld, list[LeaseClaim]]:
    """A successor before the reconciliation, and the claims of two sequences."""
    w = GroupWorld(200)
    w.run("a", TOKENS)
    w.run("b", [5] * 300, 1)
    claims = [w.claim("a"), w.claim("b")]
    w.restart()
    return w, claims


def test_a_successor_recognises_leases() -> None:
    w, claims = restarted()
    before = {who: w.groups.held(w.tables[who], w.unread[who]) for who in "ab"}
    assert w.m.reconcile(claims) == []
    assert {who: w.m.leases[who].held for who in "ab"} == before
    hashes = prefix_hash.page_hashes(w.m.root_hash_of(""), np.array(TOKENS, np.int32), PAGE_TOKENS)
    assert w.m.leases["a"].hashes == hashes
    w.m.check()
    assert w.m.reconcile(claims) == []
    w.m.check()


def test_a_successor_refuses_leases_that_contradict_the_headers() -> None:
    w, (a, b) = restarted()
    for pages in (
        a.pages[:-1],  # no whole place
        (a.pages[1:3] + a.pages[:1] + a.pages[3:]),  # a gap in the group without a window
        a.pages[:-6] + a.pages[-5:-3] + a.pages[-6:-5] + a.pages[-3:],  # groups mixed up
        a.pages[:99] + b.pages[51:54] + a.pages[102:],  # pages of other tokens and of another place
        (),
    ):
        w, _ = restarted()
        assert w.m.reconcile([a._replace(pages=pages), b]) == ["a"], pages
        w.m.check()
        w.m.release("a", 0)
        w.m.check()


def test_a_lease_with_a_damaged_page_of_any_group_is_refused() -> None:
    for group in range(GROUPS.n_groups):
        w, claims = restarted()
        w.arena.pages[claims[0].pages[3 * 38 + group]] ^= 1
        assert w.m.reconcile(claims) == ["a"]
        w.m.release("a", 0)
        w.m.check()


def test_pages_of_all_groups_come_back_from_a_page_file(tmp_path: Path) -> None:
    store = DiskPageStore(tmp_path / "pages", {}, PAGE_BYTES, 200 * PAGE_BYTES, 1)
    w = GroupWorld(110, store=store)
    w.run("a", TOKENS)
    w.release("a")
    assert w.m.pool.make_room(110)
    assert w.m.pool.cached == 0
    assert w.run("b", [*TOKENS, 7, 7], 1) == 40 * PAGE_TOKENS
    assert w.m.pool.counters.restored == GROUPS.n_pages(40, UNREAD)
    w.release("b")
    # Without one of the window's pages nothing is shared that would need it.
    assert w.m.pool.make_room(110)
    hashes = prefix_hash.page_hashes(w.m.root_hash_of(""), np.array(TOKENS, np.int32), PAGE_TOKENS)
    store.remove(group_hash(hashes[39], 1))
    assert w.run("c", [*TOKENS, 7, 7], 2) == 39 * PAGE_TOKENS
    store.close()


def test_what_is_complete_before_a_page_that_cannot_be_read_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskPageStore(tmp_path / "pages", {}, PAGE_BYTES, 200 * PAGE_BYTES, 1)
    w = GroupWorld(110, store=store)
    tokens = TOKENS[: 10 * PAGE_TOKENS + 3]
    w.run("a", tokens)
    w.release("a")
    assert w.m.pool.make_room(110)
    hashes = prefix_hash.page_hashes(w.m.root_hash_of(""), np.array(tokens, np.int32), PAGE_TOKENS)
    fetch, unread = store.fetch, {group_hash(hashes[8], 2), group_hash(hashes[5], 0)}

    def slow(page_hash: prefix_hash.PageHash, *others: Any, **options: Any) -> Any:
        return None if page_hash in unread else fetch(page_hash, *others, **options)

    monkeypatch.setattr(store, "fetch", slow)
    assert w.run("b", tokens, 1) == 5 * PAGE_TOKENS
    w.release("b")
    w.m.check()
    store.close()


def test_a_session_that_is_closed_frees_the_pages_of_all_groups() -> None:
    w = GroupWorld(123)
    w.run("a", TOKENS)
    w.release("a")
    assert w.m.pool.cached == 120
    hashes = prefix_hash.page_hashes(w.m.root_hash_of(""), np.array(TOKENS, np.int32), PAGE_TOKENS)
    w.m.remove([(page_hash, 1) for page_hash in reversed(hashes)])
    assert w.m.count() == (123, 0, 0)


def test_the_order_of_eviction_survives_a_restart() -> None:
    w = GroupWorld(123)
    w.run("a", TOKENS)
    w.release("a")
    before = w.m.pool.table.evictable_pages()
    w.restart()
    assert w.m.pool.table.evictable_pages() == before
    places = [unpack_ordinal(w.m.pool.headers.identity(page).ordinal)[0] for page in before[2 * UNREAD :]]  # type: ignore[union-attr]
    assert places == sorted(places, reverse=True), "the end of a prefix before its start"


class Rules(RuleBasedStateMachine):
    """Prompts of several windows that share beginnings, in an arena that is always nearly full."""

    sequences: Bundle[str] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.n_opened = self.count = 0
        self.groups = GROUPS
        self.world = GroupWorld(130, self.groups, self._open())

    def _open(self) -> DiskPageStore:
        path = Path(self.directory.name) / "pages"
        return DiskPageStore(path, {}, PAGE_BYTES, 2 * BLOCK + 60 * PAGE_BYTES, 1, wall_ns=lambda: 0)

    def teardown(self) -> None:
        assert self.world.store is not None
        self.world.store.close()
        self.directory.cleanup()

    @rule(target=sequences, n_same=st.integers(0, 40), word=st.integers(1, 3), more=st.integers(1, 200))
    def acquire(self, n_same: int, word: int, more: int) -> str:
        who = f"s{self.count}"
        self.count += 1
        self.world.begin(who, TOKENS[: n_same * PAGE_TOKENS] + [100 + word] * more, self.count)
        return who

    @rule(who=sequences, count=st.integers(1, 400), commits=st.booleans())
    def step(self, who: str, count: int, commits: bool) -> None:
        while who in self.world.tables and count > 0 and self.world.step(who, min(count, AHEAD)):
            count -= AHEAD
            if commits:
                self.world.commit(who)

    @rule(who=sequences, count=st.integers(1, 400))
    def continue_and_commit(self, who: str, count: int) -> None:
        self.step(who, count, True)

    @rule(who=consumes(sequences))
    def release(self, who: str) -> None:
        if who in self.world.tables:
            self.world.release(who)

    @rule(count=st.integers(1, 130))
    def evict(self, count: int) -> None:
        self.world.m.pool.make_room(count)

    @rule(which=st.integers(0, 200), place=st.integers(0, PAGE_BYTES - 1))
    def damage_a_cached_page(self, which: int, place: int) -> None:
        cached = self.world.m.pool.table.evictable_pages()
        if cached:
            self.world.arena.pages[cached[which % len(cached)]][place] ^= 1

    @rule(which=st.integers(0, 200))
    def damage_a_page_on_disk(self, which: int) -> None:
        store = self.world.store
        if store is not None and len(store):
            cell = store._cell_of[store.hashes()[which % len(store)]]
            os.pwrite(store._fd, b"\xbb" * 100, store._file.layout.page_at(cell))

    @rule(lost=st.sets(st.integers(0, 9)), has_scheduler=st.booleans())
    def crash(self, lost: set[int], has_scheduler: bool) -> None:
        """SIGKILL of kv, and perhaps of the scheduler; some sequences end meanwhile, and their frames are lost."""
        w = self.world
        assert w.store is not None
        w.store.close()
        w.store = self._open()
        w.restart()
        w.m.check()
        assert isinstance(w.m.acquire("early", np.array([1], np.int32), 1), Denial)
        for i, who in enumerate(list(w.tables)):
            if not has_scheduler or i in lost:
                w.forget(who)
        claims = [w.claim(who) for who in w.tables]
        assert w.m.reconcile(claims) == []
        assert w.m.reconcile(claims) == []

    @invariant()
    def conserves_pages(self) -> None:
        w = self.world
        w.m.check()
        assert sum(w.m.count()) == len(w.arena.pages)
        held = {page for who in w.tables for page in w.groups.held(w.tables[who], w.unread[who])}
        assert w.m.count().leased == len(held)


def test_no_page_is_lost_and_every_step_reads_what_its_sequence_computed() -> None:
    case = Rules.TestCase
    case.settings = settings(
        max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()


def test_a_sequence_waits_while_the_prompts_of_others_will_take_the_pages() -> None:
    w = GroupWorld(130)
    assert isinstance(w.begin("a", TOKENS, 0), Grant)
    assert w.m.pool.free > 100
    denial = w.begin("b", [3, *TOKENS], 1)
    assert isinstance(denial, Denial)
    assert denial.fits
    assert isinstance(w.begin("short", [3] * 20, 1), Grant)
    w.release("a")
    assert isinstance(w.begin("b", [3, *TOKENS], 2), Grant)


@pytest.mark.parametrize("pages", [(NO_PAGE,) * 123, (-5,) * 3, (0, 1, 2, 3), (0, 0, 1), (500, 501, 502)])
def test_claims_that_no_grant_can_have_made_are_refused(pages: tuple[int, ...]) -> None:
    w = GroupWorld(130)
    w.restart()
    assert w.m.reconcile([LeaseClaim("a", 0, 16, pages)]) == ["a"]
    w.m.check()


def test_warming_loads_a_page_of_a_group_behind_the_first_groups_pages_up_to_its_place() -> None:
    w = GroupWorld(130)
    w.run("a", TOKENS)
    w.release("a")
    for place in range(UNREAD):
        for group in (1, 2):
            w.evict(TOKENS, place, group)
    records = w.m.pool.headers.snapshot()
    chosen = [page.page_hash for page in most_used(records, 1000, w.clock.now)]
    assert len(chosen) == GROUPS.n_pages(40, UNREAD)
    hashes = prefix_hash.page_hashes(w.m.root_hash_of(""), np.array(TOKENS, np.int32), PAGE_TOKENS)
    for place, page_hash in enumerate(hashes):
        for group in (1, 2) if place >= UNREAD else ():
            assert chosen.index(page_hash) < chosen.index(group_hash(page_hash, group))
