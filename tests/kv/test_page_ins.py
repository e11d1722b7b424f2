"""What is read from a page file for a prompt with windows: the longest part that can be shared, whatever goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.protocol import messages as m
from stages.kv.lease import Grant
from stages.kv.page_ins import WAIT_S, PageIns
from stages.kv.pool.page_pool import Hit
from stages.kv.storage import threaded_store
from stages.kv.storage.disk_store import DiskPageStore
from stages.kv.storage.threaded_store import ThreadedPageStore
from tests.kv.grouped import AHEAD, GROUPS, TOKENS, UNREAD, WINDOW, GroupWorld
from tests.kv.world import PAGE_BYTES, PAGE_TOKENS

N_PLACES = len(TOKENS) // PAGE_TOKENS
N_PAGES = GROUPS.n_pages(N_PLACES, UNREAD)
OTHER = [500 + token for token in TOKENS]


class OnDisk:
    """Two prompts of 40 places whose pages are in a page file, and the grants that wait for them."""

    def __init__(self, path: Path) -> None:
        self.store: Any = ThreadedPageStore(
            path, 1, lambda: DiskPageStore(path, {}, PAGE_BYTES, 400 * PAGE_BYTES, 1, clock=lambda: 0.0)
        )
        self.store.wait_opened(60)
        store: Any = self.store
        self.w = GroupWorld(110, store=store)
        self.known: dict[int, tuple[np.ndarray, int]] = {}
        for row, tokens in enumerate((TOKENS, OTHER)):
            self.w.run("a", tokens)
            self.w.release("a")
            assert self.w.m.pool.make_room(110)
            self.settle(lambda: not self.store.is_busy)
            self.known[row] = np.array(tokens, np.int32), 1
        rows: Any = SimpleNamespace(known=lambda row, n_tokens: self.known[row])
        pages: Any = SimpleNamespace(manager=self.w.m, stores=lambda: [self.store], rows=rows)
        self.now = 0.0
        self.page_ins = PageIns(pages, clock=lambda: self.now)

    def begin(self, who: str, row: int = 0) -> None:
        n = len(TOKENS)
        assert self.page_ins.begin(m.Acquire(1, "tiny", who, row, n, n, window=WINDOW, ahead=AHEAD))

    def grant(self, who: str, row: int = 0) -> int:
        """The places that are shared; their contents are right."""
        granted = self.w.begin(who, [TOKENS, OTHER][row], row)
        assert isinstance(granted, Grant)
        self.page_ins.end(who)
        self.w.m.check()
        return granted.cached_tokens // PAGE_TOKENS

    def is_due(self, who: str) -> bool:
        return who in [frame.sequence for frame in self.page_ins.due()]

    def settle(self, is_done: Callable[[], bool]) -> None:
        """Take results of the page file's thread until the condition holds."""
        for _ in range(60_000):
            self.store.poll()
            if is_done():
                return
            self.store._thread.join(0.001)
        raise AssertionError("the thread of the page file did not finish")

    def close(self) -> None:
        assert not self.store._wanted and not self.store._staged
        self.store.close()
        self.store.join(60)


def test_of_a_prefix_that_cannot_be_read_at_once_the_longest_part_with_its_window_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place needs pages of all groups, and those of the window before it: what is read is chosen for one place."""
    disk = OnDisk(tmp_path / "pages")
    monkeypatch.setattr(threaded_store, "STAGED_BYTES", 30 * PAGE_BYTES)
    disk.begin("b")
    disk.settle(lambda: disk.is_due("b"))
    searches, find_last = [], disk.w.m.pool.find_last

    def counted(*others: Any) -> Hit:
        searches.append(find_last(*others))
        return searches[-1]

    monkeypatch.setattr(disk.w.m.pool, "find_last", counted)
    # 20 pages of the group without a window, and of each of the others those of the places from 16 on.
    assert disk.grant("b") == 20
    assert len(searches) == 1
    disk.close()


@pytest.mark.parametrize("n_late", [16, 20, 28, 55, 56])
def test_after_late_pages_the_window_of_those_that_came_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_late: int
) -> None:
    disk = OnDisk(tmp_path / "pages")
    fetch, n_fetched, disk_works = DiskPageStore.fetch, 0, threading.Event()

    def slow(store: DiskPageStore, *others: Any) -> Any:
        nonlocal n_fetched
        n_fetched += 1
        if n_fetched > N_PAGES - n_late:
            disk_works.wait(60)
        return fetch(store, *others)

    monkeypatch.setattr(DiskPageStore, "fetch", slow)
    disk.begin("b")
    disk.settle(lambda: len(disk.store._reading) == n_late)
    assert not disk.is_due("b")
    disk.now += WAIT_S
    # The first places have a page of one group each, those of the window behind them one of each group.
    came = N_PAGES - n_late
    expected = min(came, UNREAD) + -(-max(0, came - UNREAD) // GROUPS.n_groups)
    assert disk.is_due("b") == (not expected)
    disk_works.set()
    disk.settle(lambda: disk.is_due("b"))
    assert disk.grant("b") == expected
    disk.settle(lambda: not disk.store._reading)
    disk.close()


def test_a_grant_waits_for_late_pages_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = OnDisk(tmp_path / "pages")
    fetch, n_fetched, disk_works = DiskPageStore.fetch, 0, threading.Event()

    def slow(store: DiskPageStore, *others: Any) -> Any:
        nonlocal n_fetched
        n_fetched += 1
        if n_fetched > 20:
            disk_works.wait(60)
        return fetch(store, *others)

    monkeypatch.setattr(DiskPageStore, "fetch", slow)
    disk.begin("b")
    disk.settle(lambda: len(disk.store._reading) == N_PAGES - 20)
    for is_due in (False, True):
        assert not disk.is_due("b")
        disk.now += WAIT_S
        assert disk.is_due("b") == is_due
    assert disk.grant("b") == 0
    disk_works.set()
    disk.settle(lambda: not disk.store._reading)
    disk.close()


@pytest.mark.parametrize("room", [N_PAGES + 4, 400])
@pytest.mark.parametrize("damaged", [0, 10, 30, 45, 55])
def test_after_a_damaged_page_the_window_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: int, room: int
) -> None:
    disk = OnDisk(tmp_path / "pages")
    monkeypatch.setattr(threaded_store, "STAGED_BYTES", room * PAGE_BYTES)
    read, n_read = DiskPageStore._read, 0

    def fail(store: DiskPageStore, *others: Any) -> Any:
        nonlocal n_read
        n_read += 1
        return read(store, *others) if n_read != damaged + 1 else None

    monkeypatch.setattr(DiskPageStore, "_read", fail)
    disk.begin("b")
    disk.settle(lambda: disk.is_due("b"))
    place = damaged if damaged < UNREAD else UNREAD + (damaged - UNREAD) // GROUPS.n_groups
    is_windowed = damaged >= UNREAD and (damaged - UNREAD) % GROUPS.n_groups >= GROUPS.full
    shared = disk.grant("b")
    # Behind a damaged page of a window there may be a place that does not need it.
    assert shared >= place if is_windowed else shared == place
    disk.close()


def test_a_prompt_shares_the_longest_part_for_which_others_leave_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = OnDisk(tmp_path / "pages")
    monkeypatch.setattr(threaded_store, "STAGED_BYTES", (N_PAGES + 30) * PAGE_BYTES)
    disk.begin("b")
    disk.begin("c", 1)
    disk.begin("same")  # what is read for another prompt takes no more room
    disk.settle(lambda: disk.is_due("b") and disk.is_due("c") and disk.is_due("same"))
    assert disk.grant("c", 1) == 20
    disk.w.release("c")
    assert disk.grant("b") == N_PLACES
    assert disk.grant("same") == N_PLACES
    disk.close()
