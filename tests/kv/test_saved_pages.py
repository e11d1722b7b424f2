"""Copies of pages in the state directory: which of them are replaced, and which pages are saved again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm.prefix_hash import PageHash
from stages.kv.storage import persist
from stages.kv.storage.disk_store import DiskPageStore
from stages.kv.storage.page_file import BLOCK
from stages.kv.storage.persist import IN_STATE, REPLACED_AFTER_NS
from stages.kv.storage.threaded_store import ThreadedPageStore
from tests.kv.manager_world import World, words
from tests.kv.world import PAGE_BYTES

CELLS = 3


class Saving:
    """An arena, and a file with room for three of its pages."""

    def __init__(self, path: Path) -> None:
        self.w = World(n_pages=16)
        self.pool = self.w.m.pool
        self.n_requests = 0

        def open_file() -> DiskPageStore:
            most = 2 * BLOCK + CELLS * PAGE_BYTES
            return DiskPageStore(path, {}, PAGE_BYTES, most, IN_STATE, lambda: 0.0, wall_ns=self.w.clock)

        self.store = ThreadedPageStore(path, IN_STATE, open_file, on_lost=self._unmark)
        self.store.wait_opened(60)
        assert self.store.capacity == CELLS
        self.pool.stores = [self.store]

    def _unmark(self, page_hash: PageHash) -> None:
        page = self.pool.table.get_cached_page(page_hash)
        if page is not None:
            self.pool.headers.unmark_copy(page, IN_STATE)

    def use(self, *prefixes: int) -> None:
        """A request for each of these prefixes, which have one page."""
        for number in prefixes:
            self.n_requests += 1
            self.w.run(f"r{self.n_requests}", words(number))

    def settle(self) -> None:
        """Take the results of all that is queued."""
        done = threading.Event()
        self.store._jobs.put(done.set)
        assert done.wait(60)
        self.store.poll()

    def save(self) -> int:
        """One round of the periodic work; returns the number of pages saved."""
        persist.note_uses(self.pool, [self.store])
        self.settle()
        count = persist.save_proven(self.pool, self.store, 4)
        self.settle()
        return count

    def page_hash(self, number: int) -> PageHash:
        (found,) = self.w.m.sharable_hashes(np.array(words(number), np.int32))
        return found

    def saved(self) -> list[int]:
        return [number for number in range(1, 10) if self.page_hash(number) in self.store]


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Saving]:
    saving = Saving(tmp_path / "pages")
    yield saving
    saving.store.close()
    saving.store.join(60)


def test_the_copy_of_a_page_that_every_request_uses_in_memory_is_not_replaced(saving: Saving) -> None:
    for number in (1, 2, 3):
        saving.use(number, number)
        assert saving.save() == 1
    saving.w.clock.now += REPLACED_AFTER_NS
    saving.use(1)
    saving.use(4, 4)
    assert saving.save() == 1
    assert saving.saved() == [1, 3, 4]
    # The page that was replaced is saved when it is used again and another one is not.
    page = saving.pool.table.get_cached_page(saving.page_hash(2))
    assert saving.pool.headers.without_copy(IN_STATE, 2) == [page]
    saving.w.clock.now += REPLACED_AFTER_NS
    assert saving.save() == 0
    saving.use(1, 4, 2)
    assert saving.save() == 1
    assert saving.saved() == [1, 2, 4]


def test_pages_in_use_that_do_not_all_fit_are_not_written_again_and_again(saving: Saving) -> None:
    for _ in range(3):
        saving.use(*range(1, 8))
    assert saving.save() == CELLS
    saved = saving.saved()
    assert saved == [5, 6, 7]  # used last
    for _ in range(3):
        saving.use(*range(1, 8))
        saving.w.clock.now += REPLACED_AFTER_NS // 2
        assert saving.save() == 0
    assert saving.saved() == saved


def test_an_evicted_page_that_has_a_copy_is_the_last_to_be_replaced(saving: Saving) -> None:
    saving.pool.spill = saving.store
    for number in (1, 2, 3):
        saving.use(number, number)
        assert saving.save() == 1
    saving.use(1)
    for number in (2, 3, 1):
        page = saving.pool.table.get_cached_page(saving.page_hash(number))
        assert page == saving.pool.table.evictable_pages()[0]
        assert saving.pool.make_room(saving.pool.free + 1)
    saving.settle()
    saving.use(4)
    assert saving.pool.make_room(saving.pool.free + 1)
    saving.settle()
    assert saving.saved() == [1, 3, 4]
