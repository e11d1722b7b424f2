"""Memory of the KV arena that is reserved as it is needed, with the real file."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig, ServerConfig
from pipeline.models import capacity
from shm import arena as arena_module
from shm import huge_pages
from shm.arena import HEADER_BYTES, Arena, ArenaError, unreserved_bytes
from shm.memory_nodes import TURN_BYTES
from shm.pages import PAGE_HEADER, kv_arena_bytes, pages_offset
from stages.kv.lease import Denial, Grant
from stages.kv.manager import Manager
from stages.kv.pool import extents
from stages.kv.pool.arena import OpenedArena, open_arena
from stages.kv.pool.extents import EXTENT_BYTES
from stages.kv.pool.page_pool import PagePool
from tests.emulated_machine import memory_nodes
from tests.kv.world import DIGEST, GEOMETRY, PAGE_TOKENS, FakeRows, manager

BUDGET = 3 * EXTENT_BYTES
PAGES_OF_AN_EXTENT = EXTENT_BYTES // GEOMETRY.page_bytes


def blocks(path: Path) -> int:
    """Bytes that the file system has given to a file."""
    return path.stat().st_blocks * 512


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenedArena]:
    arena = open_arena(tmp_path / "m.kv", GEOMETRY, DIGEST, BUDGET, 1)
    yield arena
    arena.arena.close()


def manager_of(opened: OpenedArena) -> Manager:
    return manager(opened.views, FakeRows(), memory=opened.memory)


def take(pages: Manager, name: str, n_pages: int) -> Grant | Denial:
    return pages.acquire(name, np.array([1], np.int32), n_pages * PAGE_TOKENS)


def test_memory_follows_the_pages_in_use(opened: OpenedArena) -> None:
    path, pages = opened.arena.path, manager_of(opened)
    total = pages.pool.total
    assert blocks(path) < EXTENT_BYTES
    assert path.stat().st_size == HEADER_BYTES + kv_arena_bytes(GEOMETRY, total)
    assert (pages.pool.free, pages.pool.table.reserved) == (total, 0)
    assert isinstance(take(pages, "a", 1), Grant)
    assert pages.pool.table.reserved == PAGES_OF_AN_EXTENT
    assert isinstance(take(pages, "b", PAGES_OF_AN_EXTENT), Grant)
    assert blocks(path) >= 2 * EXTENT_BYTES
    assert isinstance(take(pages, "c", total), Denial)
    assert isinstance(take(pages, "c", total - PAGES_OF_AN_EXTENT - 1), Grant)
    assert pages.pool.free == 0
    pages.release("b", 0)
    pages.pool.shrink()
    assert pages.pool.table.reserved == total  # the last page is in use
    pages.release("c", 0)
    pages.pool.shrink()
    assert pages.pool.table.reserved == PAGES_OF_AN_EXTENT
    assert blocks(path) < 2 * EXTENT_BYTES
    pages.check()


def test_a_successor_continues_with_the_same_memory(tmp_path: Path) -> None:
    def predecessor() -> None:
        """Has no view left at its end: views keep the lock."""
        first = open_arena(tmp_path / "m.kv", GEOMETRY, DIGEST, BUDGET, 1)
        take(manager_of(first), "a", PAGES_OF_AN_EXTENT + 1)
        first.views.pages[PAGES_OF_AN_EXTENT] = 7
        first.arena.close()

    predecessor()
    gc.collect()
    second = open_arena(tmp_path / "m.kv", GEOMETRY, DIGEST, BUDGET, 2)
    assert second.adopted is not None
    # With those in the last huge page behind the extent: a predecessor that had no more memory may have given them out.
    in_memory = (second.arena.reserved - pages_offset(len(second.views.pages))) // GEOMETRY.page_bytes
    assert second.memory.n_pages == in_memory >= 2 * PAGES_OF_AN_EXTENT
    assert len(second.adopted.unclaimed) == PAGES_OF_AN_EXTENT + 1
    assert (second.views.pages[PAGES_OF_AN_EXTENT] == 7).all()
    second.arena.close()


@pytest.mark.parametrize("is_full", [False, True])
def test_a_successor_has_the_pages_behind_the_last_extent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """Few pages behind a whole extent lie in its last huge page: the arena's, or what a full file system left."""
    total = (2 if is_full else 1) * PAGES_OF_AN_EXTENT + 50
    budget = total * (GEOMETRY.page_bytes + PAGE_HEADER) + 8192

    def predecessor() -> Grant | Denial:
        """Has no view left at its end: views keep the lock."""
        first = open_arena(tmp_path / "m.kv", GEOMETRY, DIGEST, budget, 1)
        pages = manager_of(first)
        take(pages, "a", PAGES_OF_AN_EXTENT)
        with monkeypatch.context() as patch:
            if is_full:
                patch.setattr(os, "posix_fallocate", raise_no_space)
            granted = take(pages, "b", 50)
        first.arena.close()
        return granted

    def raise_no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    granted = predecessor()
    assert isinstance(granted, Grant)
    gc.collect()
    second = open_arena(tmp_path / "m.kv", GEOMETRY, DIGEST, budget, 2)
    assert second.adopted is not None
    assert set(granted.pages) <= set(second.adopted.unclaimed)
    second.arena.close()


def test_without_memory_cached_pages_make_room_and_requests_wait(
    opened: OpenedArena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = manager_of(opened)
    assert isinstance(take(pages, "a", 1), Grant)
    reserve = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert isinstance(take(pages, "b", PAGES_OF_AN_EXTENT - 1), Grant)  # the rest of the extent
    in_last_huge_page = (opened.arena.reserved - pages_offset(pages.pool.total)) // GEOMETRY.page_bytes
    assert isinstance(take(pages, "e", in_last_huge_page - PAGES_OF_AN_EXTENT), Grant)
    for name in ("c", "d"):
        denied = take(pages, name, 1)
        assert isinstance(denied, Denial)
        assert denied.fits  # it will, as soon as there is memory or another sequence ends
    assert caplog.text.count("no memory for more KV pages") == 1
    pages.check()
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    assert isinstance(take(pages, "c", 1), Grant)
    pages.check()


def test_room_for_less_than_an_extent_is_used(opened: OpenedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, reserve = manager_of(opened), os.posix_fallocate

    def nearly_full(fd: int, offset: int, size: int) -> None:
        if size >= EXTENT_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    assert isinstance(take(pages, "a", 3), Grant)
    assert pages.pool.table.reserved == 3
    pages.check()


@pytest.mark.parametrize(("is_granted", "took_s"), [(False, 0.0), (True, 2 * extents.MAX_HUGE_S)])
def test_no_huge_pages_are_asked_for_until_a_while_after_a_refusal_or_a_slow_one(
    opened: OpenedArena, monkeypatch: pytest.MonkeyPatch, is_granted: bool, took_s: float
) -> None:
    asked: list[tuple[int, int]] = []
    now = 0.0

    def collapse(fd: int, address: int, begin: int, end: int) -> bool:
        nonlocal now
        now += took_s
        asked.append((begin, end))
        return is_granted

    monkeypatch.setattr(huge_pages, "collapse", collapse)
    memory = extents.Extents(opened.arena, GEOMETRY, len(opened.views.pages), EXTENT_BYTES // 4, clock=lambda: now)
    each = PAGES_OF_AN_EXTENT // 4
    memory.grow(3 * each)
    assert len(asked) == 1  # of three extents
    now += extents.HUGE_RETRY_S - 0.1
    memory.grow(4 * each)
    assert len(asked) == 1
    now += 0.2
    memory.grow(6 * each)
    assert len(asked) == 2
    assert all(end % huge_pages.HUGE_BYTES == 0 for _, end in asked)


def test_a_large_growth_is_in_huge_pages_and_reports_each_extent(
    opened: OpenedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long all of it takes: the time of each extent counts."""
    now, grown = 0.0, []
    asked: list[int] = []

    def collapse(fd: int, address: int, begin: int, end: int) -> bool:
        nonlocal now
        now += 0.9 * extents.MAX_HUGE_S
        asked.append(end)
        return True

    monkeypatch.setattr(huge_pages, "collapse", collapse)
    memory = extents.Extents(opened.arena, GEOMETRY, len(opened.views.pages), EXTENT_BYTES // 4, clock=lambda: now)
    memory.grow(2 * PAGES_OF_AN_EXTENT, lambda: grown.append(len(asked)))
    assert grown == list(range(1, 9))


def test_what_arenas_have_yet_to_reserve_is_not_free(tmp_path: Path) -> None:
    """A second arena is refused that would fit only because the first one has not grown yet."""
    config = Config(models=[ModelConfig(name="m")], server=ServerConfig(arena_dir=str(tmp_path)))
    directory = paths.arena_dir(config)
    opened = open_arena(directory / "m.kv", GEOMETRY, DIGEST, BUDGET, 1)
    total = PagePool(opened.views, memory=opened.memory).total
    holes = kv_arena_bytes(GEOMETRY, total) - pages_offset(total)
    assert abs(unreserved_bytes(directory) - holes) <= 8192
    with_holes = capacity.measure(config).arenas
    opened.arena.unlink()
    without = capacity.measure(config).arenas
    assert without - with_holes > holes // 2  # other programs use the disk as well
    opened.arena.close()
    with (directory / "other.kv").open("wb") as sparse:
        sparse.truncate(1 << 42)
    with pytest.raises(ArenaError, match="has 0 free"):
        Arena.create(directory / "a.act", "test", 1, 4096, {})


def test_memory_that_is_given_back_is_zero_again(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "m", "test", 1, 1 << 20, {}, reserved=1 << 20)
    assert arena.reserved == 1 << 20
    arena.buffer[:] = 9
    arena.give_back(4096)
    assert arena.reserved == 4096
    assert (arena.buffer[:4096] == 9).all()
    arena.reserve(1 << 20)
    assert not arena.buffer[4096:].any()
    with pytest.raises(ArenaError, match="cannot be reserved"):
        arena.reserve((1 << 20) + 1)
    arena.close()


def test_a_kill_while_the_reservation_is_stored_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 would name all memory: a successor would give out pages that are holes."""
    path, found = tmp_path / "m", []

    class Watched:
        """The number of bytes. A store takes its value last: then the process is killed."""

        def __init__(self, value: int) -> None:
            self.value = value

        def __radd__(self, other: int) -> Watched:
            return Watched(self.value + other)

        def __rsub__(self, other: int) -> int:
            return other - self.value

        def __sub__(self, other: int) -> int:
            return self.value - other

        def __le__(self, other: int) -> bool:
            return self.value <= other

        def __gt__(self, other: int) -> bool:
            return self.value > other

        def __ge__(self, other: int) -> bool:
            return self.value >= other

        def __index__(self) -> int:
            successor = Arena.attach(path, "test", 1)
            found.append(successor.reserved)
            successor.close()
            return self.value

        __int__ = __index__

    arena = Arena.create(path, "test", 1, 1 << 20, {}, reserved=4096)
    monkeypatch.setattr(arena_module, "align", lambda nbytes, to: Watched(nbytes))
    monkeypatch.setattr(Arena, "_punch", lambda self, begin, end: None)
    arena.reserve(65536)
    arena.give_back(8192)
    assert arena.reserved == 8192
    assert found
    assert set(found) <= {4096, 65536}
    arena.close()


def test_memory_is_taken_from_memory_nodes_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated nodes: beside which CPUs memory is reserved, and that pages and bounds are those of one node."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a node needs a CPU")
    nodes = [cpus[::2], cpus[1::2]]
    lists = {node: ",".join(map(str, some)) for node, some in enumerate(nodes)}
    monkeypatch.setenv("STARLING_NODES", str(memory_nodes(tmp_path / "nodes", lists)))
    seen: list[tuple[int, set[int]]] = []
    real = Arena.reserve

    def reserve(self: Arena, nbytes: int, huge: bool = False) -> bool:
        is_granted = real(self, nbytes, huge)
        seen.append((nbytes, os.sched_getaffinity(0)))
        return is_granted

    monkeypatch.setattr(Arena, "reserve", reserve)
    opened = open_arena(tmp_path / "m.kv", GEOMETRY, DIGEST, BUDGET, 1)
    pages = manager_of(opened)
    assert isinstance(take(pages, "a", 1), Grant)
    assert isinstance(take(pages, "b", PAGES_OF_AN_EXTENT), Grant)
    assert pages.pool.table.reserved == 2 * PAGES_OF_AN_EXTENT
    assert len(seen) > EXTENT_BYTES // TURN_BYTES
    assert all(allowed == set(nodes[(end - 1) // TURN_BYTES % 2]) for end, allowed in seen)
    assert blocks(tmp_path / "m.kv") >= 2 * EXTENT_BYTES
    opened.arena.close()
    del opened, pages
    gc.collect()
    adopted = open_arena(tmp_path / "m.kv", GEOMETRY, DIGEST, BUDGET, 1)
    assert adopted.memory.n_pages == 2 * PAGES_OF_AN_EXTENT
    assert adopted.memory.grow(2 * PAGES_OF_AN_EXTENT + 1) > 2 * PAGES_OF_AN_EXTENT
    assert all(allowed == set(nodes[(end - 1) // TURN_BYTES % 2]) for end, allowed in seen)
    adopted.arena.close()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_pages_are_placed_on_the_nodes_of_the_models_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    """Although this process may run beside all nodes."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a node needs a CPU")
    lists = {0: str(cpus[0]), 1: ",".join(map(str, cpus[1:]))}
    monkeypatch.setenv("STARLING_NODES", str(memory_nodes(tmp_path / "nodes", lists)))
    seen: set[frozenset[int]] = set()
    asked: set[bool] = set()
    real = Arena.reserve

    def reserve(self: Arena, nbytes: int, huge: bool = False) -> bool:
        is_granted = real(self, nbytes, huge)
        seen.add(frozenset(os.sched_getaffinity(0)))
        asked.add(huge)
        return is_granted

    opened = open_arena(tmp_path / "m.kv", GEOMETRY, DIGEST, BUDGET, 1, [cpus[1]] if is_pinned else cpus)
    pages = manager_of(opened)
    monkeypatch.setattr(Arena, "reserve", reserve)
    assert isinstance(take(pages, "a", 1), Grant)
    expected = [{cpus[1]}] if is_pinned else [{cpus[0]}, set(cpus[1:])]
    assert seen == {frozenset(some) for some in expected}
    assert asked == {is_pinned}  # huge pages where one node has all
    assert sorted(os.sched_getaffinity(0)) == cpus
    opened.arena.close()
