"""A download reads the next piece while the one before is written, and keeps few pieces in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.checkpoint import PIECE_BYTES, piece_checksum
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.part_file import PartFile
from stages.agent.downloads.transfer import MOST_STORING, Limits, Transfer
from tests.fleet.coordination_stores import until

N_PIECES = 6
PIECE = bytes(PIECE_BYTES)
WAIT_S = 60.0


class HeldDisk(PartFile):
    """Writes nothing until the test lets it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, N_PIECES * PIECE_BYTES)
        self.is_asked, self.may_write = threading.Event(), threading.Event()

    def write(self, piece: int, data: bytes) -> None:
        self.is_asked.set()
        assert self.may_write.wait(WAIT_S)
        super().write(piece, data)


class MemorySource:
    """Gives every piece at once."""

    name, expected_rate, timeout_s = "memory", 1e8, 0.0
    is_local = is_peer = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def holds(self, piece: int) -> bool:
        return True

    async def read(self, offset: int, nbytes: int) -> bytes:
        self.asked.append(offset // PIECE_BYTES)
        return PIECE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[HeldDisk]:
    with HeldDisk(tmp_path / "part") as disk:
        yield disk


def transfer(disk: HeldDisk, source: MemorySource) -> Transfer:
    """Over one connection."""
    checksums = [piece_checksum(PIECE)] * N_PIECES
    return Transfer(disk, checksums, [source], Bandwidth(0, time.monotonic), Limits(connections=1))


async def test_a_connection_does_not_wait_for_the_disk(disk: HeldDisk) -> None:
    source = MemorySource()
    one = transfer(disk, source)
    running = asyncio.create_task(one.run())
    await until(lambda: len(source.asked) > 1, WAIT_S)
    assert not one.present
    assert set(one.claimed) >= {0}  # it has been read, and other agents are to wait for it
    disk.may_write.set()
    report = await running
    assert report.received == N_PIECES * PIECE_BYTES
    assert source.asked == list(range(N_PIECES))


async def test_a_slow_disk_bounds_the_pieces_in_memory(disk: HeldDisk) -> None:
    source = MemorySource()
    one = transfer(disk, source)
    running = asyncio.create_task(one.run())
    await until(lambda: len(one._storing) == 1 + MOST_STORING, WAIT_S)
    assert not one._tasks
    assert len(source.asked) == 1 + MOST_STORING
    disk.may_write.set()
    await running
    assert len(one.present) == N_PIECES


async def test_a_cancelled_download_waits_for_the_piece_that_is_written(disk: HeldDisk) -> None:
    """The file is closed afterwards."""
    one = transfer(disk, MemorySource())
    running = asyncio.create_task(one.run())
    await until(disk.is_asked.is_set, WAIT_S)
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=0.2)
    assert not done
    disk.may_write.set()
    with pytest.raises(asyncio.CancelledError):
        await running
