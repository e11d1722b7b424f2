"""Between a restart of kv and the reconciliation no page becomes free, and none loses its memory."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm import huge_pages
from shm.pages import attach_kv, create_kv
from stages.kv.clearing import Clearing
from stages.kv.lease import Grant, LeaseClaim
from stages.kv.pool.arena import scan
from stages.kv.pool.extents import Extents
from stages.kv.pool.page_headers import PageHeaders
from stages.kv.storage.disk_store import DiskPageStore
from tests.kv.manager_world import World, words
from tests.kv.world import DIGEST, GEOMETRY, PAGE_BYTES, PAGE_TOKENS, Clock, FakeRows, contents, manager


def test_nothing_becomes_free_before_the_scheduler_has_named_its_leases() -> None:
    """After a kill a sequence may hold pages whose last use is long ago: its steps go on reading them."""
    w = World(ttl_ns=1000)
    held = w.acquire("a", words(1, 2, 3))
    assert isinstance(held, Grant)
    w.m.commit("a", 49)
    w.run("b", words(7))
    w.clock.now += 2000
    w.restart()
    hashes = w.m.sharable_hashes(np.array(words(1, 2, 3), np.int32))
    for page in held.pages[:3]:
        with pytest.raises(ValueError, match="may hold"):
            w.m.pool.table.evict(page)
    assert w.m.pool.expire() == 0
    w.m.remove([(page_hash, 99) for page_hash in hashes])  # sessions expire meanwhile
    pages: Any = SimpleNamespace(manager=w.m, geometry=GEOMETRY, model=SimpleNamespace(name="m"), stores=list)
    clearing = Clearing([pages], None, frozenset())
    for _ in range(100):
        clearing.step()
    assert clearing.is_done
    assert (clearing.reports[0].arena, clearing.reports[0].in_use, clearing.reports[0].later) == (0, 0, 4)
    assert w.counts() == (3, 4, 1)
    assert w.m.reconcile([LeaseClaim("a", 0, 49, held.pages)]) == []
    w.m.check()
    assert w.counts() == (4, 0, 4)  # b's is dropped: nothing else is unused


def test_pages_that_are_unused_for_too_long_expire_after_the_reconciliation() -> None:
    w = World(ttl_ns=1000)
    held = w.acquire("a", words(1, 2, 3))
    assert isinstance(held, Grant)
    w.m.commit("a", 49)
    w.run("b", words(7))
    w.clock.now += 2000
    w.restart()
    assert w.m.pool.expire() == 0
    assert w.m.reconcile([LeaseClaim("a", 0, 49, held.pages)]) == []
    assert w.m.pool.expire() == 1
    assert w.counts() == (4, 0, 4)


def test_a_model_whose_leases_are_not_named_keeps_no_other_from_being_cleared(tmp_path: Path) -> None:
    """Its worker may never become ready."""
    down, up = World(), World()
    store = DiskPageStore(tmp_path / "pages", {}, PAGE_BYTES, 400 * PAGE_BYTES, 1)
    down.m.pool.stores = [store]
    down.run("a", words(1, 2))
    up.run("b", words(3))
    (page,) = down.m.sharable_hashes(np.array(words(1), np.int32))
    at = down.m.pool.table.get_cached_page(page)
    assert at is not None
    assert store.save(page, down.m.pool.headers.record(at), down.arena.pages[at])
    down.restart()
    down.m.pool.stores = [store]

    def pages(w: World, name: str) -> Any:
        return SimpleNamespace(manager=w.m, geometry=GEOMETRY, model=SimpleNamespace(name=name), stores=list)

    clearing = Clearing([pages(down, "down"), pages(up, "up")], None, frozenset())
    for _ in range(100):
        clearing.step()
    assert clearing.is_done
    assert [(one.model, one.arena, one.later) for one in clearing.reports] == [("down", 0, 2), ("up", 1, 0)]
    assert up.counts() == (8, 0, 0)
    assert down.counts() == (6, 2, 0) and page in store
    down.m.reconcile([])
    assert down.counts() == (8, 0, 0) and page not in store
    down.m.check()
    store.close()


def test_pages_of_sessions_that_end_before_the_reconciliation_are_dropped_after_it() -> None:
    w = World()
    w.run("a", words(1, 2))
    w.restart()
    w.m.remove([(page_hash, 1) for page_hash in w.m.sharable_hashes(np.array(words(1, 2), np.int32))])
    assert w.counts() == (6, 2, 0)
    w.m.reconcile([])
    assert w.counts() == (8, 0, 0)
    w.m.check()


def test_a_stream_older_than_the_time_to_live_keeps_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt has pages behind those of a request that has expired, and its answer has these."""
    monkeypatch.setattr(huge_pages, "HUGE_BYTES", PAGE_BYTES)
    path, total, rows, clock = tmp_path / "m.kv", 12, FakeRows(), Clock()
    tokens = words(1, 2, 3, 4, tail=0)

    def predecessor() -> tuple[int, ...]:
        """Has no view left at its end: views keep the lock."""
        file, arena = create_kv(path, GEOMETRY, total, DIGEST, 1, grows=True)
        m = manager(arena, rows, clock_ns=clock, ttl_ns=1000, memory=Extents(file, GEOMETRY, total, 3 * PAGE_BYTES))
        first = m.acquire("first", np.array(words(7, 8, 9, tail=0), np.int32), 3 * PAGE_TOKENS)
        stream = m.acquire("stream", np.array(tokens[:-16], np.int32), 3 * PAGE_TOKENS, 0, rows.take(0, tokens))
        assert isinstance(first, Grant) and isinstance(stream, Grant)
        m.release("first", 3 * PAGE_TOKENS)
        clock.now += 2000
        assert m.pool.expire() == 3
        stream = m.extend("stream", 4 * PAGE_TOKENS)
        assert isinstance(stream, Grant)
        assert stream.pages[3] < min(stream.pages[:3])
        for place, page in enumerate(stream.pages):
            arena.pages[page] = contents(tokens, place)
        m.commit("stream", 4 * PAGE_TOKENS)
        file.close()
        return stream.pages

    pages = predecessor()
    gc.collect()
    file, arena, _ = attach_kv(path, DIGEST, own=True)
    memory = Extents(file, GEOMETRY, total, 3 * PAGE_BYTES)
    m = manager(arena, rows, clock_ns=clock, ttl_ns=1000, memory=memory)
    found = scan(PageHeaders(arena.headers), memory.n_pages)
    m.pool.table.adopt(found.full, found.unclaimed)
    m.is_reconciled = False
    reserved = file.reserved
    assert m.pool.expire() == 0
    assert file.reserved == reserved
    assert m.reconcile([LeaseClaim("stream", 0, 4 * PAGE_TOKENS, pages)]) == []
    assert m.pool.expire() == 0
    for place, page in enumerate(pages):
        np.testing.assert_array_equal(arena.pages[page], contents(tokens, place))
    m.check()
    file.close()
