"""Files in huge pages: aligned maps, what the kernel grants, what a reservation that fails leaves."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm import huge_pages
from shm.arena import HEADER_BYTES, Arena
from shm.huge_pages import HUGE_BYTES

NBYTES = 5 * HUGE_BYTES


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def area_of(address: int) -> dict[str, str]:
    """The fields of /proc/self/smaps of the map at an address; {}: there is none."""
    fields: dict[str, str] = {}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split()[0]:
            begin, _, end = name.split()[0].partition("-")
            is_inside = int(begin, 16) <= address < int(end, 16)
        elif is_inside:
            fields[name] = value.strip()
    return fields


def blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_map_is_aligned_and_goes_with_its_last_view(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(HUGE_BYTES) + b"end")
    with path.open("r+b") as file:
        map_ = huge_pages.map_file(file.fileno(), HUGE_BYTES + 3)
    view = np.frombuffer(map_, np.uint8)[HUGE_BYTES:]
    at = view.ctypes.data - HUGE_BYTES
    assert at % HUGE_BYTES == 0
    del map_
    gc.collect()
    assert bytes(view) == b"end"
    view[0] = ord("E")
    assert path.read_bytes()[-3:] == b"End"
    del view
    gc.collect()
    assert not area_of(at)


def test_a_file_that_cannot_be_mapped_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="Permission denied"):
        huge_pages.map_file(file.fileno(), 4096)  # opened for writing only


def test_reserved_memory_is_in_huge_pages_in_every_process_that_maps_it(tmpfs: Path) -> None:
    if not huge_pages.is_granted(tmpfs):
        pytest.skip("this kernel grants none")
    path = tmpfs / "a"
    owner = Arena.create(path, "test", 1, NBYTES, {}, reserved=4096)
    other = Arena.attach(path, "test", 1)
    before = blocks(path)
    end = 4 * HUGE_BYTES - HEADER_BYTES
    owner.reserve(end, huge=True)
    assert blocks(path) - before == 4 * HUGE_BYTES - before
    assert not other.buffer[:end].any()
    other.buffer[HUGE_BYTES] = 7
    assert owner.buffer[HUGE_BYTES] == 7
    for arena in (owner, other):
        # The first huge page has the header, which was reserved before.
        assert area_of(arena.buffer.ctypes.data)["ShmemPmdMapped"] == f"{3 * HUGE_BYTES >> 10} kB"
    owner.give_back(2 * HUGE_BYTES - HEADER_BYTES)
    assert blocks(path) == 2 * HUGE_BYTES
    other.close()
    owner.close()


def test_memory_that_is_no_whole_huge_pages_is_reserved_all_the_same(tmpfs: Path) -> None:
    arena = Arena.create(tmpfs / "a", "test", 1, NBYTES, {}, reserved=4096)
    arena.reserve(HUGE_BYTES + 12288, huge=True)
    arena.reserve(2 * HUGE_BYTES + 4096, huge=True)
    assert arena.reserved == 2 * HUGE_BYTES + 4096
    assert blocks(tmpfs / "a") == HEADER_BYTES + arena.reserved
    arena.close()


def test_a_file_system_without_huge_pages_has_ordinary_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "MADV_COLLAPSE", 250)  # an advice that no kernel knows: EINVAL
    arena = Arena.create(tmp_path / "a", "test", 1, NBYTES, {}, reserved=4096)
    arena.reserve(NBYTES, huge=True)
    assert arena.reserved == NBYTES
    assert not huge_pages.is_granted(tmp_path)
    arena.close()


@pytest.mark.parametrize("after", [0, 2])
def test_a_reservation_that_fails_leaves_nothing(tmpfs: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    arena = Arena.create(tmpfs / "a", "test", 1, NBYTES, {}, reserved=4096)
    before, calls, reserve = blocks(tmpfs / "a"), 0, os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        arena.reserve(NBYTES, huge=True)
    assert (arena.reserved, blocks(tmpfs / "a")) == (4096, before)
    arena.close()


def test_a_file_that_left_the_memory_is_read_into_huge_pages(tmp_path: Path) -> None:
    """Its pages in memory were small before: many short calls wrote it."""
    if not huge_pages.is_mapped_from(tmp_path):
        pytest.skip("this file system has no huge pages")
    content = np.random.default_rng(2).integers(0, 256, 2 * HUGE_BYTES + 100, np.uint8).tobytes()
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(content), 10_000):
            file.write(content[at : at + 10_000])
        os.fsync(file.fileno())
    with path.open("rb") as file:
        data = np.frombuffer(huge_pages.map_to_read(file.fileno(), len(content)), np.uint8)
        assert int(data[::4096].sum()) and huge_pages.mapped_in_huge_pages(data) == 0
        del data
        gc.collect()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        data = np.frombuffer(huge_pages.map_to_read(file.fileno(), len(content)), np.uint8)
    assert data.tobytes() == content
    assert huge_pages.mapped_in_huge_pages(data) == 2 * HUGE_BYTES
    assert int(area_of(data.ctypes.data)["FilePmdMapped"].split()[0]) == 2 * HUGE_BYTES >> 10


def test_a_map_to_read_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with path.open("rb") as file:
        data = np.frombuffer(huge_pages.map_to_read(file.fileno(), 3), np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
    assert {"rd", "wr"} & set(area_of(data.ctypes.data)["VmFlags"].split()) == {"rd"}
    assert data.ctypes.data % HUGE_BYTES == 0 and data.tobytes() == b"abc"
