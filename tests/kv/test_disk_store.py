"""The page file: a fetched page has the bytes that were saved, or there is none."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.faults import points
from stages.kv.storage.disk_store import PAUSE_S, SLOW_FACTOR, DiskPageStore
from stages.kv.storage.page_file import BLOCK, EXTENT_CELLS
from tests.kv.disk_pages import EXTENT, PAGE_BYTES, open_store, page


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fetch(store: DiskPageStore, i: int) -> bool:
    """Fetch page `i`; returns whether it is there, and checks its bytes if so."""
    digest, _, content = page(i)
    out = np.zeros(PAGE_BYTES, np.uint8)
    found = store.fetch(digest, out)
    if found is None:
        return False
    assert found.page_hash == digest
    np.testing.assert_array_equal(out, content)
    return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "m.pages"


def test_round_trip_and_again_after_reopening(path: Path) -> None:
    store = open_store(path)
    for i in range(40):  # more than an extent
        assert store.save(*page(i))
    assert all(fetch(store, i) for i in range(40))
    assert not fetch(store, 99)
    store.close()
    assert path.stat().st_mode & 0o777 == 0o600
    again = open_store(path)
    assert len(again) == 40
    assert all(fetch(again, i) for i in range(40))
    again.close()


def test_at_the_bound_the_page_unused_longest_is_replaced(path: Path) -> None:
    store = open_store(path)
    assert store.capacity == 2 * EXTENT_CELLS
    for i in range(2 * EXTENT_CELLS):
        assert store.save(*page(i))
    assert fetch(store, 0)  # used: now the last one to be replaced
    assert store.save(*page(100))
    assert not fetch(store, 1)
    assert fetch(store, 0)
    assert path.stat().st_size == BLOCK + 2 * EXTENT == store.file_bytes
    assert store.counters.replaced == 1
    store.close()
    smaller = open_store(path, BLOCK + EXTENT)
    assert path.stat().st_size == BLOCK + EXTENT
    assert 0 < len(smaller) <= EXTENT_CELLS
    smaller.close()


def test_a_bound_below_an_extent_has_smaller_ones(path: Path) -> None:
    store = open_store(path, 2 * BLOCK + 3 * PAGE_BYTES)
    assert store.capacity == 3
    assert all(store.save(*page(i)) for i in range(5))
    assert [fetch(store, i) for i in range(5)] == [False, False, True, True, True]
    assert path.stat().st_size <= 2 * BLOCK + 3 * PAGE_BYTES
    store.close()
    nothing = open_store(path, 100)
    assert nothing.capacity == 0
    assert not nothing.save(*page(1))
    nothing.close()


@pytest.mark.parametrize("where", ["page", "digest", "checksum", "check"])
def test_a_flipped_bit_costs_the_page_and_only_it(path: Path, where: str, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(path)
    store.save(*page(1))
    store.save(*page(2))
    offset = {"page": BLOCK + BLOCK + 4000, "digest": BLOCK + 32, "checksum": BLOCK + 50, "check": BLOCK + 66}[where]
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), offset)
    with caplog.at_level(logging.WARNING):
        assert not fetch(store, 1)
    assert "damaged" in caplog.text
    assert store.counters.damaged == 1
    assert fetch(store, 2)
    assert store.save(*page(1))  # its cell is used again
    assert fetch(store, 1)
    store.close()


def test_a_flipped_bit_while_it_was_closed(path: Path) -> None:
    store = open_store(path)
    store.save(*page(1))
    store.save(*page(2))
    store.close()
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), b"\xff\x00\xff", BLOCK + 33)
    again = open_store(path)
    assert (len(again), again.counters.damaged) == (1, 1)
    assert not fetch(again, 1)
    assert fetch(again, 2)
    again.close()


def test_prefetched_pages_may_be_missing_or_truncated(path: Path) -> None:
    """Any order, across extents, with gaps; `prefetch` does not report a truncated file."""
    store = open_store(path)
    for i in range(EXTENT_CELLS + 4):
        store.save(*page(i))
    store.remove(page(3)[0])
    os.truncate(path, BLOCK + EXTENT + BLOCK + PAGE_BYTES)
    store.prefetch([page(i)[0] for i in reversed(range(EXTENT_CELLS + 8))])
    assert [i for i in range(EXTENT_CELLS + 4) if fetch(store, i)] == [0, 1, 2, *range(4, EXTENT_CELLS + 1)]
    store.close()


@pytest.mark.parametrize("left", [0, 100, BLOCK, BLOCK + 10, 2 * BLOCK + 100, BLOCK + EXTENT + 5])
def test_truncation_of_the_open_file_is_an_error_and_no_signal(path: Path, left: int) -> None:
    store = open_store(path)
    for i in range(40):
        store.save(*page(i))
    os.truncate(path, left)
    came = [fetch(store, i) for i in range(40)]
    assert came.count(True) <= max(0, (left - 2 * BLOCK)) // PAGE_BYTES + 1
    store.close()
    again = open_store(path)  # the file is usable afterwards
    assert again.save(*page(7))
    assert fetch(again, 7)
    again.close()


@pytest.mark.parametrize("identity", [{"digest": "cd" * 32, "kv_type": "f16"}, {"digest": "ab" * 32, "kv_type": "f32"}])
def test_a_file_of_another_model_is_not_used(
    path: Path, identity: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(path, identity=identity)
    store.save(*page(1))
    store.close()
    with caplog.at_level(logging.WARNING):
        mine = open_store(path)
    assert "another model" in caplog.text
    assert len(mine) == 0
    assert not fetch(mine, 1)
    mine.close()


def test_garbage_is_not_used(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(os.urandom(3 * EXTENT))
    store = open_store(path)
    assert len(store) == 0
    assert store.save(*page(1))
    assert fetch(store, 1)
    store.close()


def test_one_writer(path: Path) -> None:
    store = open_store(path)
    with pytest.raises(BlockingIOError):
        open_store(path)
    store.close()
    open_store(path).close()


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Writing past `nbytes` fails, as on a full disk (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_on_a_full_disk_pages_replace_older_ones(path: Path) -> None:
    clock = Clock()
    store = open_store(path, clock=clock)
    with file_size_limit(BLOCK + EXTENT):
        assert all(store.save(*page(i)) for i in range(EXTENT_CELLS + 10))
    assert len(store) == EXTENT_CELLS
    assert store.counters.errors == 1
    assert [i for i in range(EXTENT_CELLS + 10) if fetch(store, i)] == list(range(10, EXTENT_CELLS + 10))
    clock.now += PAUSE_S  # there is room again
    assert all(store.save(*page(i)) for i in range(10))
    assert len(store) == EXTENT_CELLS + 10
    store.close()


def test_a_disk_that_is_full_from_the_start_saves_no_page(path: Path) -> None:
    clock = Clock()
    store = open_store(path, clock=clock)
    with file_size_limit(BLOCK):
        assert not store.save(*page(1))
        assert not store.save(*page(1))
    assert store.counters.errors == 1  # the store pauses
    assert not store.save(*page(1))
    clock.now += PAUSE_S
    assert store.save(*page(1))
    store.close()


def test_a_failing_disk_costs_one_page(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = open_store(path, clock=clock)
    store.save(*page(1))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        assert not store.save(*page(2))
        patch.setattr(os, "pread", fail)
        assert not fetch(store, 1)
    clock.now += PAUSE_S
    assert store.save(*page(2))
    assert fetch(store, 2)
    store.close()


def test_a_slow_disk_pauses_writing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = open_store(path, clock=clock)
    pwrite = os.pwrite

    def slow(*arguments: Any) -> int:
        clock.now += 0.2
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    assert store.save(*page(1))
    assert not store.save(*page(2))
    assert fetch(store, 1)
    clock.now += 60
    assert store.save(*page(2))
    store.close()


def test_half_written_pages_are_recognised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any of the writes of a page: the next start finds the page, or none."""
    pwrite = os.pwrite
    for allowed in range(4):
        path.unlink(missing_ok=True)
        store = open_store(path)
        store.save(*page(0))
        count = 0

        def killed(fd: int, data: Any, offset: int, limit: int = allowed) -> int:
            nonlocal count
            count += 1
            return pwrite(fd, data, offset) if count <= limit else len(data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", killed)
            store.save(*page(1))
        store.close()
        again = open_store(path)
        assert fetch(again, 0)
        assert fetch(again, 1) == (allowed == 3)
        again.close()


# ------------------------------------------------------------------ holes


def full_store(path: Path, extents: int, **options: Any) -> DiskPageStore:
    store = open_store(path, BLOCK + extents * EXTENT, **options)
    assert all(store.save(*page(i)) for i in range(extents * EXTENT_CELLS))
    return store


def test_holes_are_closed_and_their_bytes_given_back(path: Path) -> None:
    store = full_store(path, 4)
    kept = [i for i in range(4 * EXTENT_CELLS) if i % 4 == 3]  # a quarter of the pages, spread over the file
    for i in set(range(4 * EXTENT_CELLS)) - set(kept):
        store.remove(page(i)[0])
    assert store.hole_bytes == 3 * EXTENT_CELLS * PAGE_BYTES
    assert path.stat().st_size == BLOCK + 4 * EXTENT
    rounds = 0
    while store.compact(3):
        rounds += 1
        assert store.hashes() == [page(i)[0] for i in kept]  # the order of use is unchanged
    assert rounds >= 4
    assert path.stat().st_size == store.file_bytes == BLOCK + 2 * EXTENT
    assert store.hole_bytes == EXTENT_CELLS * PAGE_BYTES  # so that the next page need not grow the file
    assert store.counters.returned_bytes == 2 * EXTENT
    assert all(fetch(store, i) for i in kept)
    store.close()
    store = open_store(path, BLOCK + 4 * EXTENT)
    assert len(store) == len(kept)
    assert all(fetch(store, i) for i in kept)
    assert all(store.save(*page(i)) for i in range(1000, 1000 + 3 * EXTENT_CELLS))
    assert len(store) == 4 * EXTENT_CELLS
    assert all(fetch(store, i) for i in [*kept, *range(1000, 1000 + 3 * EXTENT_CELLS)])
    store.close()


def test_a_full_file_has_no_holes_to_close(path: Path) -> None:
    store = full_store(path, 2)
    for i in range(2 * EXTENT_CELLS - 1):
        assert not store.compact(10)
        store.remove(page(i)[0])
    assert store.counters.moved == 0
    store.remove(page(2 * EXTENT_CELLS - 1)[0])
    assert not store.compact(10)  # nothing to move: the last extent is cut off at once
    assert path.stat().st_size == BLOCK + EXTENT
    store.close()


def test_a_damaged_page_is_not_moved(path: Path) -> None:
    store = full_store(path, 3)
    for i in range(2 * EXTENT_CELLS):
        store.remove(page(i)[0])
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), b"\x00\x01\x02", BLOCK + 2 * EXTENT + BLOCK + 5)
    while store.compact(4):
        pass
    damaged = [i for i in range(2 * EXTENT_CELLS, 3 * EXTENT_CELLS) if not fetch(store, i)]
    assert len(damaged) == store.counters.damaged == 1
    store.close()


def test_a_page_that_cannot_be_read_keeps_no_other_from_its_hole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it pause writing, at each attempt to move it."""
    store = full_store(path, 3)
    for i in range(2 * EXTENT_CELLS):
        store.remove(page(i)[0])
    preadv = os.preadv

    def read(fd: int, buffers: Any, offset: int) -> int:
        if offset == BLOCK + 2 * EXTENT + BLOCK:
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    while store.compact(4):
        pass
    assert path.stat().st_size == BLOCK + 2 * EXTENT
    assert (len(store), store.counters.damaged, store.counters.errors) == (EXTENT_CELLS - 1, 1, 0)
    assert store.save(*page(0))
    store.close()


def interrupted_move(path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> DiskPageStore:
    """A store of the last of three extents, whose move of a page has ended before the write of number `written`."""
    store = full_store(path, 3)
    for i in range(2 * EXTENT_CELLS):
        store.remove(page(i)[0])
    done = []

    def write(fd: int, data: Any, offset: int) -> int:
        if len(done) == written:
            raise OSError(5, "injected")
        done.append(offset)
        return os_pwrite(fd, data, offset)

    os_pwrite = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        assert not store.compact(4)
    return store


def check_last_extent(store: DiskPageStore) -> None:
    assert len(store) == EXTENT_CELLS
    assert all(fetch(store, i) for i in range(2 * EXTENT_CELLS, 3 * EXTENT_CELLS))


def check_removal(path: Path, store: DiskPageStore) -> None:
    """What is removed is gone for the next process: no second copy was left."""
    for digest in store.hashes():
        store.remove(digest)
    store.close()
    cleared = open_store(path, BLOCK + 3 * EXTENT)
    assert len(cleared) == 0
    cleared.close()


@pytest.mark.parametrize("written", range(4))
def test_a_crash_while_a_page_is_moved_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    """The page is moved with four writes; the process ends before the one of number `written`."""
    store = interrupted_move(path, monkeypatch, written)
    check_last_extent(store)  # this process continues
    store.close()  # writes nothing
    again = open_store(path, BLOCK + 3 * EXTENT)
    check_last_extent(again)
    check_removal(path, again)


def test_a_second_copy_that_cannot_be_cleared_takes_no_page_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_move(path, monkeypatch, 3).close()

    def fail(fd: int, data: Any, offset: int) -> int:
        raise OSError(30, "injected")

    with monkeypatch.context() as patch:  # a disk that can only be read
        patch.setattr(os, "pwrite", fail)
        again = open_store(path, BLOCK + 3 * EXTENT)
        check_last_extent(again)
        assert (again.is_write_paused, again.counters.errors) == (True, 1)
        assert not again.save(*page(0))
        again.close()
    repaired = open_store(path, BLOCK + 3 * EXTENT)
    assert repaired.counters.errors == 0
    check_last_extent(repaired)
    check_removal(path, repaired)


def test_age_on_disk_is_since_the_last_use(path: Path) -> None:
    now = [0]
    store = open_store(path, wall_ns=lambda: now[0])
    for i in range(4):
        now[0] = i
        store.save(*page(i))
    now[0] = 10
    assert fetch(store, 0)
    assert store.idle(3) == [page(1)[0], page(2)[0]]
    assert store.idle(100) == [page(i)[0] for i in (1, 2, 3, 0)]
    store.close()
    store = open_store(path)
    assert store.idle(1002) == [page(0)[0], page(1)[0]]  # from the pages' records
    store.close()


def test_a_disk_that_reads_slower_than_computing_pauses_reading(path: Path) -> None:
    clock = Clock()
    store = open_store(path, clock=clock, name="slow_test")
    for i in range(3):
        assert store.save(*page(i))
    fault = points.fault_point("disk", "slow_test_read")

    def strike(number: int) -> bool:
        clock.now += 0.4
        return False

    fault.trigger = strike
    assert fetch(store, 0)
    # No page is lost or counted as damaged: it is not read.
    assert not fetch(store, 1)
    assert store.counters.damaged == 0
    fault.trigger = None
    clock.now += 0.4 * SLOW_FACTOR
    assert all(fetch(store, i) for i in range(3))
    store.close()


@pytest.mark.parametrize("access", ["slow_test", "slow_test_read"])
@pytest.mark.parametrize("waited_s", [0.0, 0.35])
def test_a_thread_without_a_core_is_no_slow_disk(path: Path, access: str, waited_s: float) -> None:
    """An access of 0.4 s, in which the thread could not run for `waited_s`."""
    clock, waits = Clock(), Clock()
    waits.now = 5.0  # until now
    store = open_store(path, clock=clock, core_wait_s=waits, name="slow_test")
    assert store.save(*page(0))
    fault = points.fault_point("disk", access)

    def strike(number: int) -> bool:
        clock.now += 0.4
        waits.now += waited_s
        return False

    fault.trigger = strike
    assert store.save(*page(1)) and fetch(store, 0)
    fault.trigger = None
    is_paused = store.is_read_paused if access.endswith("read") else store.is_write_paused
    assert is_paused == (not waited_s)
    store.close()
