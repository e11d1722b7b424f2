"""Pages on disk: what comes back is what was put, or nothing."""

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

from shm.pages import PAGE_FULL, PAGE_HEADER
from stages.kv.headers import Headers, PageName, checksum
from stages.kv.prefix import PageDigest
from stages.kv.spill import BLOCK, PAUSE_S, SLOTS, PageStore

PAGE_BYTES = 8192
EXTENT = BLOCK + SLOTS * PAGE_BYTES
IDENTITY = {"digest": "ab" * 32, "kv_type": "f16"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def page(i: int) -> tuple[PageDigest, bytes, np.ndarray]:
    """(digest, record, content) of a page that one can tell apart."""
    content = np.random.default_rng(i).integers(0, 256, PAGE_BYTES, np.uint8)
    digest = PageDigest(i.to_bytes(16, "big"))
    raw = np.zeros((1, PAGE_HEADER), np.uint8)
    headers = Headers(raw)
    headers.lease([0], PageDigest(bytes(16)), 1, now_ns=1000 + i, born_ns=1)
    headers.publish(0, PageName(PageDigest(bytes(16)), digest, digest, checksum(content), i, 16))
    assert headers.state(0) == PAGE_FULL
    return digest, headers.record(0), content


def open_store(path: Path, max_bytes: int = BLOCK + 2 * EXTENT, **options: Any) -> PageStore:
    return PageStore(path, options.pop("identity", IDENTITY), PAGE_BYTES, max_bytes, 1, **options)


def fetch(store: PageStore, i: int) -> bool:
    """Whether page `i` comes back; if so, it is what it was."""
    digest, _, content = page(i)
    out = np.zeros(PAGE_BYTES, np.uint8)
    found = store.fetch(digest, out)
    if found is None:
        return False
    assert found.digest == digest
    np.testing.assert_array_equal(out, content)
    return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "m.pages"


def test_round_trip_and_again_after_reopening(path: Path) -> None:
    store = open_store(path)
    for i in range(40):  # more than an extent
        assert store.put(*page(i))
    assert all(fetch(store, i) for i in range(40))
    assert not fetch(store, 99)
    store.close()
    assert path.stat().st_mode & 0o777 == 0o600
    again = open_store(path)
    assert len(again) == 40
    assert all(fetch(again, i) for i in range(40))
    again.close()


def test_the_bound_holds_and_the_longest_unused_goes(path: Path) -> None:
    store = open_store(path)
    assert store.capacity == 2 * SLOTS
    for i in range(2 * SLOTS):
        assert store.put(*page(i))
    assert fetch(store, 0)  # used: now the last to go
    assert store.put(*page(100))
    assert not fetch(store, 1)
    assert fetch(store, 0)
    assert path.stat().st_size == BLOCK + 2 * EXTENT == store.file_bytes
    assert store.counters.replaced == 1
    store.close()
    smaller = open_store(path, BLOCK + EXTENT)
    assert path.stat().st_size == BLOCK + EXTENT
    assert 0 < len(smaller) <= SLOTS
    smaller.close()


def test_a_bound_below_an_extent_has_smaller_ones(path: Path) -> None:
    store = open_store(path, 2 * BLOCK + 3 * PAGE_BYTES)
    assert store.capacity == 3
    assert all(store.put(*page(i)) for i in range(5))
    assert [fetch(store, i) for i in range(5)] == [False, False, True, True, True]
    assert path.stat().st_size <= 2 * BLOCK + 3 * PAGE_BYTES
    store.close()
    nothing = open_store(path, 100)
    assert nothing.capacity == 0
    assert not nothing.put(*page(1))
    nothing.close()


@pytest.mark.parametrize("where", ["page", "digest", "checksum", "check"])
def test_a_flipped_bit_costs_the_page_and_only_it(
    path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(path)
    store.put(*page(1))
    store.put(*page(2))
    offset = {
        "page": BLOCK + BLOCK + 4000, "digest": BLOCK + 32, "checksum": BLOCK + 50, "check": BLOCK + 66
    }[where]  # fmt: skip
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), offset)
    with caplog.at_level(logging.WARNING):
        assert not fetch(store, 1)
    assert "damaged" in caplog.text
    assert store.counters.damaged == 1
    assert fetch(store, 2)
    assert store.put(*page(1))  # its slot is used again
    assert fetch(store, 1)
    store.close()


def test_a_flipped_bit_while_it_was_closed(path: Path) -> None:
    store = open_store(path)
    store.put(*page(1))
    store.put(*page(2))
    store.close()
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), b"\xff\x00\xff", BLOCK + 33)
    again = open_store(path)
    assert (len(again), again.counters.damaged) == (1, 1)
    assert not fetch(again, 1)
    assert fetch(again, 2)
    again.close()


@pytest.mark.parametrize("left", [0, 100, BLOCK, BLOCK + 10, 2 * BLOCK + 100, BLOCK + EXTENT + 5])
def test_truncation_under_our_hands_is_no_signal(path: Path, left: int) -> None:
    store = open_store(path)
    for i in range(40):
        store.put(*page(i))
    os.truncate(path, left)
    came = [fetch(store, i) for i in range(40)]
    assert came.count(True) <= max(0, (left - 2 * BLOCK)) // PAGE_BYTES + 1
    store.close()
    again = open_store(path)  # and the file is usable afterwards
    assert again.put(*page(7))
    assert fetch(again, 7)
    again.close()


@pytest.mark.parametrize(
    "identity", [{"digest": "cd" * 32, "kv_type": "f16"}, {"digest": "ab" * 32, "kv_type": "f32"}]
)
def test_a_file_of_another_model_is_not_used(
    path: Path, identity: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(path, identity=identity)
    store.put(*page(1))
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
    assert store.put(*page(1))
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


def test_a_full_disk_makes_do_with_what_there_is(path: Path) -> None:
    clock = Clock()
    store = open_store(path, clock=clock)
    with file_size_limit(BLOCK + EXTENT):
        assert all(store.put(*page(i)) for i in range(SLOTS + 10))
    assert len(store) == SLOTS
    assert store.counters.errors == 1
    assert [i for i in range(SLOTS + 10) if fetch(store, i)] == list(range(10, SLOTS + 10))
    clock.now += PAUSE_S  # somebody made room
    assert all(store.put(*page(i)) for i in range(10))
    assert len(store) == SLOTS + 10
    store.close()


def test_a_disk_that_is_full_from_the_start_keeps_nothing(path: Path) -> None:
    clock = Clock()
    store = open_store(path, clock=clock)
    with file_size_limit(BLOCK):
        assert not store.put(*page(1))
        assert not store.put(*page(1))
    assert store.counters.errors == 1  # it is left alone for a while
    assert not store.put(*page(1))
    clock.now += PAUSE_S
    assert store.put(*page(1))
    store.close()


def test_a_failing_disk_is_an_error_of_one_page(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = open_store(path, clock=clock)
    store.put(*page(1))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        assert not store.put(*page(2))
        patch.setattr(os, "pread", fail)
        assert not fetch(store, 1)
    clock.now += PAUSE_S
    assert store.put(*page(2))
    assert fetch(store, 2)
    store.close()


def test_a_slow_disk_is_given_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = open_store(path, clock=clock)
    pwrite = os.pwrite

    def slow(*arguments: Any) -> int:
        clock.now += 0.2
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    assert store.put(*page(1))
    assert not store.put(*page(2))
    assert fetch(store, 1)
    clock.now += 60
    assert store.put(*page(2))
    store.close()


def test_half_written_pages_are_recognised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any of the writes of a page: the next start has the page, or has not."""
    pwrite = os.pwrite
    for allowed in range(4):
        path.unlink(missing_ok=True)
        store = open_store(path)
        store.put(*page(0))
        count = 0

        def killed(fd: int, data: Any, offset: int, limit: int = allowed) -> int:
            nonlocal count
            count += 1
            return pwrite(fd, data, offset) if count <= limit else len(data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", killed)
            store.put(*page(1))
        store.close()
        again = open_store(path)
        assert fetch(again, 0)
        assert fetch(again, 1) == (allowed == 3)
        again.close()
