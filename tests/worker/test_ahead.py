"""What a worker group prepares while scheduler and kv start: an activations arena, and mapped weights."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from shm.arena import Arena, ArenaError
from stages.worker.activations_arena import ActivationsGeometry
from stages.worker.ahead import Ahead
from stages.worker.mapped_weights import SLICE_BYTES, are_in_memory, can_ask, map_weights

NBYTES = 3 * SLICE_BYTES + 100


class Weights(NamedTuple):
    """A map of a file whose pages can leave the memory; all are in memory at first."""

    fd: int
    data: np.ndarray


@pytest.fixture
def weights() -> Iterator[Weights]:
    with tempfile.TemporaryFile(dir=Path(__file__).parent) as file:
        file.write(os.urandom(NBYTES))
        file.flush()
        os.fsync(file.fileno())
        data = np.frombuffer(mmap.mmap(file.fileno(), NBYTES, prot=mmap.PROT_READ), np.uint8)
        yield Weights(file.fileno(), data)


def resident_bytes(weights: np.ndarray) -> int:
    """How much of the map this process has mapped."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{weights.ctypes.data:x}-"))
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def test_weights_that_have_left_the_memory_are_found_and_read(weights: Weights) -> None:
    assert are_in_memory(weights.data)
    os.posix_fadvise(weights.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if are_in_memory(weights.data):
        pytest.skip("this file system keeps the pages in memory")
    map_weights(weights.data)
    assert are_in_memory(weights.data)
    assert resident_bytes(weights.data) >= NBYTES


def test_mapping_ends_when_it_need_not_go_on(weights: Weights) -> None:
    """A rank that must attach, and a group that ends, wait for one slice at most."""
    answers = iter([True, False])
    map_weights(weights.data, lambda: next(answers))
    assert SLICE_BYTES <= resident_bytes(weights.data) < 2 * SLICE_BYTES
    map_weights(weights.data)
    assert resident_bytes(weights.data) >= NBYTES


def test_a_file_of_another_user_counts_as_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would say that all of it is in memory."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    assert can_ask(path, os.geteuid())
    assert can_ask(path, os.geteuid() + 1)  # this process may write it
    assert not can_ask(tmp_path / "gone.bin", os.geteuid() + 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write every file
    assert not can_ask(path, os.geteuid() + 1)


def test_memory_of_the_process_needs_no_reading() -> None:
    assert are_in_memory(np.zeros(NBYTES, np.uint8)[1:])


GEOMETRY = ActivationsGeometry(8, 4, 4, 8, 64, 2)


def make(path: Path) -> Arena:
    return Arena.create(path, "test", 1, 4096, {})


def test_the_arena_is_taken_once_and_only_with_its_geometry(tmp_path: Path) -> None:
    path, weights = tmp_path / "m.act", np.zeros(8192, np.uint8)
    ahead = Ahead(GEOMETRY, lambda _: make(path), weights)
    arena = ahead.take(GEOMETRY)
    assert arena is not None
    assert ahead.take(GEOMETRY) is None
    ahead.close()
    assert path.exists(), "what was taken belongs to its taker"
    arena.close()
    other = Ahead(GEOMETRY, lambda _: make(path), weights)
    assert other.take(GEOMETRY._replace(ranks=3)) is None
    make(path).close()  # nothing holds the file


def test_an_arena_that_is_not_taken_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "m.act"
    ahead = Ahead(GEOMETRY, lambda _: make(path), np.zeros(8192, np.uint8))
    for _ in range(2):
        ahead.close()
        assert not path.exists()


def test_no_more_is_mapped_after_the_end(weights: Weights, tmp_path: Path) -> None:
    may_go_on = threading.Event()

    def wait(geometry: ActivationsGeometry) -> Arena:
        may_go_on.wait()
        return make(tmp_path / "m.act")

    ahead = Ahead(GEOMETRY, wait, weights.data)
    ending = threading.Thread(target=ahead.close)
    ending.start()
    while not ahead._is_closed:
        pass
    may_go_on.set()
    ending.join()
    ahead._thread.join()
    assert resident_bytes(weights.data) == 0


def test_an_arena_that_cannot_be_made_leaves_that_to_the_attachment() -> None:
    def fail(geometry: ActivationsGeometry) -> Arena:
        raise ArenaError("no room")

    ahead = Ahead(GEOMETRY, fail, np.zeros(8192, np.uint8))
    assert ahead.take(GEOMETRY) is None
    ahead.close()
