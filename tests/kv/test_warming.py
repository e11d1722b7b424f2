"""The most used prefixes are loaded before requests come: which ones, how many, and never beside a request."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm import prefix_hash
from shm.pages import HEADER, PAGE_FULL
from shm.prefix_hash import PageHash
from stages.kv.lease import Grant
from stages.kv.manager import Manager
from stages.kv.pool.older_version import OlderVersion
from stages.kv.storage import persist
from stages.kv.storage.disk_store import DiskPageStore
from stages.kv.storage.page_file import BLOCK
from stages.kv.storage.page_ranking import DAY_NS, most_used
from stages.kv.storage.threaded_store import ThreadedPageStore
from stages.kv.warming import Warming
from tests.kv.world import DIGEST, GEOMETRY, PAGE_BYTES, PAGE_TOKENS, Clock, FakeRows, contents, manager, small_arena

NOW = 1000 * DAY_NS

# -------------------------------------------------------------- which pages


def records(*chains: tuple[int, list[tuple[int, int]]]) -> np.ndarray:
    """Headers of prefixes: (root, [(uses, days since the last use) of each page])."""
    rows = np.zeros(sum(len(pages) for _, pages in chains), HEADER)
    at = 0
    for number, (root, pages) in enumerate(chains):
        parent = root.to_bytes(16, "big")
        for ordinal, (uses, days) in enumerate(pages):
            row = rows[at]
            digest = bytes([number + 1, ordinal + 1]) + bytes(14)
            row["root"], row["parent"], row["hash"] = map(np.void, (root.to_bytes(16, "big"), parent, digest))
            row["ordinal"], row["state"], row["uses"] = ordinal, PAGE_FULL, uses
            row["last_use"] = NOW - days * DAY_NS
            parent = digest
            at += 1
    return rows


def chosen(rows: np.ndarray, limit: int, present: tuple[PageHash, ...] = ()) -> list[tuple[int, int]]:
    """(prefix, ordinal) of the pages that are chosen, both from 1."""
    return [(page.page_hash[0], page.page_hash[1]) for page in most_used(rows, limit, NOW, present.__contains__)]


def test_the_most_used_prefixes_come_first() -> None:
    rows = records((9, [(2, 0)] * 2), (9, [(8, 0), (8, 0), (4, 0)]))
    assert chosen(rows, 10) == [(2, 1), (2, 2), (2, 3), (1, 1), (1, 2)]
    assert chosen(rows, 2) == [(2, 1), (2, 2)]


def test_a_day_halves_what_uses_count() -> None:
    rows = records((9, [(1000, 12)]), (9, [(2, 1)]))
    assert chosen(rows, 1) == [(2, 1)]
    assert chosen(records((9, [(1000, 2)]), (9, [(2, 1)])), 1) == [(1, 1)]


def test_a_page_behind_a_lost_one_is_of_no_use() -> None:
    rows = records((9, [(2, 0), (2, 0), (9, 0)]))
    assert chosen(rows[[0, 2]], 10) == [(1, 1)]
    second = PageHash(rows[1]["hash"].tobytes())
    assert chosen(rows[[0, 2]], 10, (second,)) == [(1, 3), (1, 1)]


def test_one_tenant_takes_at_most_half_while_others_want_the_rest() -> None:
    busy = [(1, [(100, 0)] * 4)] * 3
    assert Counter(number <= 3 for number, _ in chosen(records(*busy, (2, [(1, 0)] * 4)), 8)) == {True: 4, False: 4}
    assert Counter(number <= 3 for number, _ in chosen(records(*busy, (2, [(1, 0)])), 8)) == {True: 7, False: 1}


def test_each_page_is_looked_at_a_few_times_however_long_its_prefix_is() -> None:
    """The last pages come first: each of them needs its whole prefix, and most of these do not fit."""
    n_chains, length = 20, 1000
    rows = np.zeros(n_chains * length, HEADER)
    for at in range(len(rows)):
        chain, place = divmod(at, length)
        row = rows[at]
        root = (chain % 2 + 1).to_bytes(16, "big")
        digest = (at + 1000).to_bytes(16, "big")
        row["root"], row["hash"] = np.void(root), np.void(digest)
        row["parent"] = np.void((at + 999).to_bytes(16, "big") if place else root)
        row["ordinal"], row["state"], row["uses"], row["last_use"] = place, PAGE_FULL, 1 + place, NOW
    looked_at: Counter[PageHash] = Counter()

    def is_present(page_hash: PageHash) -> bool:
        looked_at[page_hash] += 1
        return False

    for limit in (100, 1500):
        looked_at.clear()
        assert len(most_used(rows, limit, NOW, is_present)) == limit
        assert looked_at.total() <= 3 * len(rows)


def plain_choice(rows: np.ndarray, limit: int, present: set[PageHash]) -> list[PageHash]:
    """As defined: one page after the other, each with all pages before it that are missing."""
    row_of = {row["hash"].tobytes(): row for row in rows}
    chosen: list[PageHash] = []

    def missing(row: np.void) -> list[PageHash]:
        found: list[PageHash] = []
        while (page_hash := PageHash(row["hash"].tobytes())) not in present and page_hash not in chosen:
            found.insert(0, page_hash)
            parent = row["parent"].tobytes()
            if parent == row["root"].tobytes() or parent in present:
                return found
            if parent not in row_of:
                return []
            row = row_of[parent]
        return found

    def rank(row: np.void) -> tuple[float, int]:
        age_days = np.float64(NOW - int(row["last_use"])) / DAY_NS
        return float(age_days - np.log2(row["uses"])), int(row["ordinal"])

    roots = Counter(row["root"].tobytes() for row in rows)
    share = limit if len(roots) < 2 else -(-limit // 2)
    room = dict.fromkeys(roots, share)
    ranked, left_over = sorted(rows, key=rank), []
    for row in ranked:
        root, chain = row["root"].tobytes(), missing(row)
        if len(chosen) + len(chain) > limit:
            continue
        if len(chain) <= room[root]:
            room[root] -= len(chain)
            chosen += chain
        else:
            left_over.append(row)
    for row in left_over:
        chain = missing(row)
        if len(chosen) + len(chain) <= limit:
            chosen += chain
    return chosen


pages = st.lists(st.tuples(st.integers(1, 99), st.integers(0, 9)), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), pages), max_size=6), st.integers(0, 12), st.sets(st.integers(0, 29)))
def test_pages_are_chosen_once_within_the_bound_and_behind_their_predecessors(
    chains: list[tuple[int, list[tuple[int, int]]]], limit: int, lost: set[int]
) -> None:
    rows = records(*chains)
    rows = rows[[i for i in range(len(rows)) if i not in lost]]
    found = chosen(rows, limit)
    assert len(found) == len(set(found)) <= limit
    for i, (number, ordinal) in enumerate(found):
        assert ordinal == 1 or (number, ordinal - 1) in found[:i]
    if limit >= len(rows):  # nothing is left out but what has no beginning
        there = {(row["hash"].tobytes()[0], row["hash"].tobytes()[1]) for row in rows}
        assert set(found) == {
            (number, ordinal) for number, ordinal in there if all((number, i) in there for i in range(1, ordinal))
        }


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), max_size=20)), max_size=4
    ),
    st.integers(0, 40),
    st.sets(st.integers(0, 79), max_size=3),
    st.sets(st.integers(0, 79), max_size=3),
)
def test_the_choice_is_that_of_the_definition(
    chains: list[tuple[int, list[tuple[int, int]]]], limit: int, lost: set[int], there: set[int]
) -> None:
    rows = records(*chains)
    present = {PageHash(row["hash"].tobytes()) for at, row in enumerate(rows) if at in there}
    rows = rows[[at for at in range(len(rows)) if at not in lost]]
    found = [page.page_hash for page in most_used(rows, limit, NOW, present.__contains__)]
    assert found == plain_choice(rows, limit, present)


# -------------------------------------------------------------- loading them


class World:
    """An arena with a page file behind it; `restart` empties the arena, as a reboot does."""

    def __init__(self, directory: Path, n_pages: int = 16) -> None:
        self.path = directory / "pages"
        self.n_pages = n_pages
        self.clock, self.rows = Clock(), FakeRows()
        self.count = 0
        self.start()

    def start(self) -> None:
        self.arena = small_arena(self.n_pages)
        self.store = ThreadedPageStore(self.path, 2, self._open)
        self.store.wait_opened(60)
        self.manager: Manager = manager(self.arena, self.rows, clock_ns=self.clock, stores=[self.store])
        geometry = GEOMETRY._replace(head_dim=PAGE_BYTES // (4 * PAGE_TOKENS))
        assert geometry.page_bytes == PAGE_BYTES
        self.pages: Any = SimpleNamespace(
            manager=self.manager,
            geometry=geometry,
            name="tiny",
            older_versions=[],
            stores=lambda: [self.store] if self.store is not None else [],
            clock_ns=self.clock,
            wake=lambda: None,
        )

    def _open(self) -> DiskPageStore:
        return DiskPageStore(self.path, {}, PAGE_BYTES, 64 * (PAGE_BYTES + BLOCK), 2, wall_ns=self.clock)

    def request(self, words: list[int], salt: str = "", is_ended: bool = True) -> int:
        """A sequence with a page for each word; returns its cached tokens."""
        tokens = [word for word in words for _ in range(PAGE_TOKENS)] + [99]
        self.count += 1
        who = f"s{self.count}"
        serial = self.rows.take(self.count, tokens)
        grant = self.manager.acquire(who, np.array(tokens, np.int32), len(tokens), self.count, serial, salt)
        assert isinstance(grant, Grant)
        for i, page in enumerate(grant.pages[: len(words)]):
            expected = contents(tokens, i, salt)
            if i * PAGE_TOKENS < grant.cached_tokens:
                np.testing.assert_array_equal(self.arena.pages[page], expected)
            self.arena.pages[page] = expected
        if is_ended:
            self.manager.release(who, len(tokens))
        return grant.cached_tokens

    def settle(self, is_done: Callable[[], bool]) -> None:
        """Take results of the page file's thread until the condition holds."""
        for _ in range(60_000):
            self.store.poll()
            if is_done():
                return
            self.store._thread.join(0.001)
        raise AssertionError("the thread of the page file did not finish")

    def save(self) -> None:
        persist.note_uses(self.manager.pool, [self.store])
        persist.save_recent(self.manager.pool, self.store, 1000)
        self.settle(lambda: not self.store.is_busy)

    def restart(self) -> None:
        self.store.close()
        self.store.join(60)
        self.start()

    def warm(self, max_pages: int = 100) -> Warming:
        warming = Warming(self.pages, max_pages * PAGE_BYTES)
        self.finish(warming)
        return warming

    def finish(self, warming: Warming) -> None:
        def is_done() -> bool:
            while warming.step():
                self.manager.check()
            return not len(warming) and not warming._n_listing

        self.settle(is_done)

    def warmed(self) -> set[PageHash]:
        return set(self.manager.pool.table.hashes())

    def hashes(self, words: list[int], salt: str = "") -> list[PageHash]:
        tokens = np.array([word for word in words for _ in range(PAGE_TOKENS)], np.int32)
        return prefix_hash.page_hashes(prefix_hash.root_hash(DIGEST, GEOMETRY, salt), tokens, PAGE_TOKENS)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.store.close()
    world.store.join(60)


def test_requests_find_warmed_pages_without_the_disk(world: World) -> None:
    world.request([1, 2, 3])
    world.save()
    world.restart()
    world.warm()
    counters = world.manager.pool.counters
    assert (counters.warmed, counters.warm_hits) == (3, 0)
    world.store.close()  # nothing is read from here on
    assert world.request([1, 2, 3]) == 3 * PAGE_TOKENS
    assert (counters.restored, counters.warm_hits) == (0, 3)
    assert world.request([1, 2, 3]) == 3 * PAGE_TOKENS
    assert counters.warm_hits == 3  # each page once


def test_uses_are_counted_across_restarts(world: World) -> None:
    """The prefix of many requests comes first, also if they came before and after the page was saved."""
    world.request([1])
    world.request([2])
    world.save()
    for _ in range(3):
        world.request([1])
    for word in (3, 4, 5):
        world.request([word])
    world.save()
    world.restart()
    world.warm(max_pages=1)
    assert world.warmed() == set(world.hashes([1]))
    assert world.manager.pool.headers.take_unnoted() == []
    world.restart()  # this start has used none
    world.warm(max_pages=1)
    assert world.warmed() == set(world.hashes([1]))


def test_warmed_pages_take_no_page_from_others(world: World) -> None:
    for word in range(1, 13):
        world.request([word])
    world.save()
    world.restart()
    world.request([20, 21, 22, 23, 24, 25])
    before = world.warmed()
    world.warm()
    pool = world.manager.pool
    assert before < world.warmed()
    assert (pool.free, pool.counters.evictions) == (0, 0)
    world.request([30, 31, 32])  # these are the first to go
    assert before < world.warmed()


def test_a_request_interrupts_the_reading_and_it_continues(world: World) -> None:
    words = list(range(1, 9))
    world.request(words)
    world.save()
    world.restart()
    warming = Warming(world.pages, 1 << 30)
    warming.step()
    world.settle(lambda: len(warming) == 8)
    warming.step()
    assert warming._reads
    warming.pause()
    assert len(warming) == 8
    assert not world.store._wanted
    assert world.request([40, 41]) == 0
    world.finish(warming)
    assert set(world.hashes(words)) <= world.warmed()
    assert not world.store._wanted
    assert not world.store._staged


def test_a_page_that_is_wanted_again_after_it_was_skipped_is_read(world: World) -> None:
    world.request([1, 2, 3])
    world.save()
    world.restart()
    (page,) = world.hashes([1])
    gate = threading.Event()
    world.store._jobs.put(lambda: assert_set(gate))
    world.store.release(world.store.read_ahead([page], is_use=False))
    gate.set()
    while not world.store._results:  # the thread has come to the page, which no one wants now
        world.store._thread.join(0.001)
    wanted = world.store.read_ahead([page])
    world.settle(lambda: not world.store.is_reading(page))
    assert world.store.fetch(page, np.empty(PAGE_BYTES, np.uint8)) is not None
    world.store.release(wanted)


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_nothing_is_loaded_before_the_leases_are_known_or_after_a_clear(world: World) -> None:
    world.request([1])
    world.save()
    world.restart()
    world.manager.is_reconciled = False
    warming = Warming(world.pages, 1 << 30)
    assert not warming.step()
    assert not world.store._results
    world.manager.is_reconciled = True
    warming.step()
    world.settle(lambda: len(warming) == 1)
    warming.stop()
    assert not warming.step()
    assert not world.warmed()


def test_a_reloaded_model_gets_the_pages_of_the_version_before(world: World, tmp_path: Path) -> None:
    world.request([1, 2])
    older = OlderVersion(world.manager.pool)
    (tmp_path / "new").mkdir()
    new = World(tmp_path / "new")
    new.pages.older_versions = [older]
    new.warm()
    assert new.request([1, 2]) == 2 * PAGE_TOKENS
    assert new.manager.pool.counters.warm_hits == 2
    new.store.close()
    new.store.join(60)


def test_a_version_that_was_removed_is_not_read(world: World, tmp_path: Path) -> None:
    world.request([1, 2])
    (tmp_path / "new").mkdir()
    new = World(tmp_path / "new")
    new.pages.older_versions = [OlderVersion(world.manager.pool)]
    warming = Warming(new.pages, 1 << 30)
    new.settle(warming.step)
    new.pages.older_versions = []
    new.finish(warming)
    assert new.manager.pool.counters.warmed == 1
    new.store.close()
    new.store.join(60)


@pytest.mark.parametrize("is_ranked", [False, True])
def test_a_version_that_was_removed_leaves_nothing_behind(world: World, tmp_path: Path, is_ranked: bool) -> None:
    """Its arena would stay mapped. No step follows while sequences hold pages, nor after a clear."""
    world.request([1, 2])
    (tmp_path / "new").mkdir()
    new = World(tmp_path / "new")
    older = world.manager.pool
    new.pages.older_versions = [OlderVersion(older)]
    warming = Warming(new.pages, 1 << 30)
    if is_ranked:
        new.settle(warming.step)
    else:
        warming.step()
        warming.stop()
    new.pages.older_versions = []
    warming.forget_removed()
    assert not any(one is older for one in warming._listed)
    assert not len(warming)
    new.store.close()
    new.store.join(60)
