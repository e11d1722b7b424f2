"""The page file behind a thread: what was queued is there, in order, and a slow disk delays no call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.faults import points
from shm.prefix_hash import PageHash
from stages.kv.storage import threaded_store
from stages.kv.storage.threaded_store import ThreadedPageStore
from tests.kv.disk_pages import PAGE_BYTES, open_store, page

CALL_S = 5.0  # half of the time that the disk stands still


@pytest.fixture
def lost() -> list[PageHash]:
    return []


@pytest.fixture
def store(tmp_path: Path, lost: list[PageHash]) -> Iterator[ThreadedPageStore]:
    path = tmp_path / "pages"
    store = ThreadedPageStore(path, 1, lambda: open_store(path), on_lost=lost.append)
    store.wait_opened(60)
    yield store
    store.close()
    store.join(60)


def wait(store: ThreadedPageStore, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        store.poll()
        time.sleep(0.001)


def read(store: ThreadedPageStore, i: int) -> bytes | None:
    """Read ahead, wait, fetch."""
    hashes = store.read_ahead([page(i)[0]])
    wait(store, lambda: not any(map(store.is_reading, hashes)))
    out = np.zeros(PAGE_BYTES, np.uint8)
    identity = store.fetch(page(i)[0], out)
    store.release(hashes)
    return out.tobytes() if identity is not None else None


def test_pages_are_there_before_and_after_they_are_written(store: ThreadedPageStore) -> None:
    for i in range(8):
        assert store.save(*page(i))
        assert page(i)[0] in store
        assert read(store, i) == page(i)[2].tobytes()
    wait(store, lambda: not store.is_busy)
    assert len(store) == 8
    for i in range(8):
        assert read(store, i) == page(i)[2].tobytes()
    assert read(store, 9) is None


def test_the_page_is_copied_before_save_returns(store: ThreadedPageStore) -> None:
    page_hash, record, content = page(1)
    own = content.copy()
    assert store.save(page_hash, record, own)
    own[:] = 0  # the arena gives the page to another sequence
    wait(store, lambda: not store.is_busy)
    assert read(store, 1) == content.tobytes()


def test_a_damaged_page_is_not_served_before_it_is_written(store: ThreadedPageStore, gate: threading.Event) -> None:
    page_hash, record, content = page(1)
    damaged = content.copy()
    damaged[100] ^= 1
    assert store.save(page_hash, record, damaged)
    out = np.zeros(PAGE_BYTES, np.uint8)
    assert page_hash in store
    assert store.fetch(page_hash, out) is None
    gate.set()
    wait(store, lambda: not store.is_busy)
    assert read(store, 1) is None


def test_removal_and_saving_again(store: ThreadedPageStore) -> None:
    for _ in range(50):
        store.save(*page(1))
        store.remove(page(1)[0])
        assert page(1)[0] not in store
    store.save(*page(1))
    assert page(1)[0] in store
    wait(store, lambda: not store.is_busy and not store._removed and not store._n_queued)
    assert read(store, 1) == page(1)[2].tobytes()
    store.remove(page(1)[0])
    wait(store, lambda: not store._removed)
    assert len(store) == 0


def test_a_page_that_more_sequences_have_held_is_not_removed(store: ThreadedPageStore, gate: threading.Event) -> None:
    """Before it is written, and in the file, where its record has uses that were added."""
    page_hash, record, content = page(1)
    assert store.save(page_hash, record, content)
    store.remove(page_hash, 0)
    assert page_hash in store
    gate.set()
    store.add_uses([(page_hash, 5, 1)])
    store.remove(page_hash, 5)
    wait(store, lambda: not store.is_busy and not store._removed)
    assert read(store, 1) == content.tobytes()
    store.remove(page_hash, 6)
    assert page_hash not in store
    wait(store, lambda: not store._removed)
    assert len(store) == 0


def test_a_page_that_cannot_be_written_is_reported(store: ThreadedPageStore, lost: list[PageHash]) -> None:
    def fail(_: int) -> bool:
        raise OSError(28, "No space left on device")

    point = points.fault_point("disk", "spill")
    point.trigger = fail
    try:
        assert store.save(*page(1))
        wait(store, lambda: not store.is_busy)
    finally:
        point.trigger = None
    assert lost == [page(1)[0]]
    assert page(1)[0] not in store
    assert not store.save(*page(2))  # the file pauses


class Gate(threading.Event):
    """The disk stands still until it is set; `reached` is set when an operation waits."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def stop(self, _: int) -> bool:
        self.reached.set()
        return not self.wait(60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    reads, writes = points.fault_point("disk", "spill_read"), points.fault_point("disk", "spill")
    reads.trigger = writes.trigger = gate.stop
    yield gate
    gate.set()
    reads.trigger = writes.trigger = None


def test_no_call_waits_for_the_disk_and_the_queue_is_bounded(
    store: ThreadedPageStore, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threaded_store, "QUEUED_BYTES", 4 * PAGE_BYTES)
    begin = time.monotonic()
    assert [store.save(*page(i)) for i in range(6)] == [True] * 4 + [False] * 2
    store.touch(page(0)[0])
    store.remove(page(3)[0])
    store.compact(4)
    store.poll()
    assert time.monotonic() - begin < CALL_S
    gate.set()
    wait(store, lambda: not store.is_busy and not store._removed)
    assert [read(store, i) is not None for i in range(6)] == [True] * 3 + [False] * 3


def test_reading_ahead_is_bounded_and_shared(
    store: ThreadedPageStore, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.set()
    for i in range(8):
        store.save(*page(i))
    wait(store, lambda: not store.is_busy)
    gate.clear()
    monkeypatch.setattr(threaded_store, "STAGED_BYTES", 3 * PAGE_BYTES)
    hashes = [page(i)[0] for i in range(8)]
    begin = time.monotonic()
    first, second = store.read_ahead(hashes), store.read_ahead(hashes)
    assert time.monotonic() - begin < CALL_S
    assert first == second == hashes[:3]
    gate.set()
    wait(store, lambda: not any(map(store.is_reading, first)))
    store.release(first)
    out = np.zeros(PAGE_BYTES, np.uint8)
    assert all(store.fetch(page_hash, out) for page_hash in second)
    store.release(second)
    assert not store._staged
    assert not store._wanted


def test_a_page_that_was_read_ahead_before_it_was_written_is_fetched_afterwards(
    store: ThreadedPageStore, gate: threading.Event
) -> None:
    page_hash, _, content = page(1)
    store.save(*page(1))
    wanted = store.read_ahead([page_hash])
    assert wanted == [page_hash] and not store.is_reading(page_hash), "the thread need not read it"
    gate.set()
    wait(store, lambda: not store.is_busy)
    out = np.zeros(PAGE_BYTES, np.uint8)
    assert store.fetch(page_hash, out) is not None
    assert out.tobytes() == content.tobytes()
    store.release(wanted)
    assert not store._staged


def test_a_page_that_is_saved_again_waits_for_its_own_write(store: ThreadedPageStore) -> None:
    may_write = threading.Semaphore(0)
    point = points.fault_point("disk", "spill")
    point.trigger = lambda _: not may_write.acquire(timeout=60)
    try:
        store.save(*page(1))
        store.remove(page(1)[0])
        store.save(*page(1))
        may_write.release()
        wait(store, lambda: not store._removed)  # the first copy has been written and removed
        assert page(1)[0] in store and store.is_busy
        assert store.fetch(page(1)[0], np.zeros(PAGE_BYTES, np.uint8)) is not None
        may_write.release()
        wait(store, lambda: not store.is_busy)
    finally:
        may_write.release(2)
        point.trigger = None
    assert read(store, 1) == page(1)[2].tobytes()


def test_closing_does_not_wait_for_the_disk_and_the_next_user_does(store: ThreadedPageStore, gate: Gate) -> None:
    store.save(*page(0))
    store.save(*page(1))
    assert gate.reached.wait(60)  # the first page is being written
    begin = time.monotonic()
    store.close()
    following = ThreadedPageStore(store.path, 1, lambda: open_store(store.path))
    assert not following.save(*page(2))
    assert page(0)[0] not in following
    assert following.read_ahead([page(0)[0]]) == []
    assert len(following) == following.capacity == following.file_bytes == 0
    assert time.monotonic() - begin < CALL_S
    assert not following.is_open
    gate.set()
    following.wait_opened(60)
    assert following.error is None
    assert read(following, 0) == page(0)[2].tobytes()  # it was being written
    assert page(1)[0] not in following
    store.join(60)
    assert not store._thread.is_alive()
    following.close()
    following.join(60)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    woken = threading.Event()
    path = tmp_path / "file" / "pages"
    store = ThreadedPageStore(path, 1, lambda: open_store(path), woken.set)
    store.wait_opened(60)
    assert woken.wait(60)
    assert isinstance(store.error, OSError)
    assert not store.save(*page(1))
    store.close()
    store.join(60)
    assert not store._thread.is_alive()
