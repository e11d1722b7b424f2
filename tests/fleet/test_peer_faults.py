"""Agents and stores that fail in the middle of a download: each piece is asked elsewhere, or the download ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.schema import AgentConfig
from pipeline.errors import NotFound, StorageUnavailable
from shm.checkpoint import PIECE_BYTES, piece_checksum
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.part_file import PartFile
from stages.agent.downloads.pieces import PieceMap
from stages.agent.downloads.sources import BUSY_S, SourceTable
from stages.agent.downloads.transfer import LOST_S, Limits, Transfer
from stages.agent.peers.client import PIECE_S
from stages.agent.peers.http_api import QUEUE_S, PieceApi
from tests.fleet.coordination_stores import Clock

RESET = StorageUnavailable("reset")


class Place:
    """A source that answers with what a test gives it."""

    is_local, expected_rate, timeout_s = False, 1e8, 0.0

    def __init__(self, name: str, is_peer: bool = True, *present: int) -> None:
        self.name = name
        self.is_peer = is_peer
        self.present = set(present)

    def holds(self, piece: int) -> bool:
        return not self.is_peer or piece in self.present

    async def read(self, offset: int, nbytes: int) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError


@contextlib.contextmanager
def transfer(path: Path, clock: Clock, total: int, *sources: Place) -> Iterator[Transfer]:
    with PartFile(path / "part", total * PIECE_BYTES) as part:
        yield Transfer(part, [0] * total, list(sources), Bandwidth(0, clock), Limits(), clock=clock)


async def test_a_piece_asked_twice_is_still_late_when_one_of_the_two_is_dropped(tmp_path: Path, clock: Clock) -> None:
    store, first, second = Place("store", False), Place("a", True, 0), Place("b", True, 0)
    with transfer(tmp_path, clock, 1, store, first, second) as one:
        one._pieces = PieceMap(1)
        one._begun[0] = clock()
        for peer in (first, second):
            one._pieces.begin(0)
            one._sources.begin(peer)
            one._tasks[asyncio.create_task(one._fetch(0, peer))] = 0, peer
        await asyncio.sleep(0)
        one._sources.drop(first, 0, RESET)
        one._drop(first, RESET)
        await one._one_result()
        clock.now += 100.0
        assert one._late() == (0, store)
        (task,) = one._tasks
        task.cancel()


def test_one_event_that_ends_several_requests_is_one_failure(clock: Clock) -> None:
    store, peer = Place("store", False), Place("a", True, *range(9))
    table = SourceTable([store, peer], clock)  # type: ignore[list-item]
    for piece in range(4):
        table.failed(peer, piece, RESET)
    assert not table.is_dropped(peer)
    clock.now += 1.0
    table.failed(peer, 4, RESET)
    assert table.is_dropped(peer)


class Found:
    """The other agents of a download: one, which has what its `Place` has."""

    def __init__(self, peer: Place, hope: bool) -> None:
        self.new, self.hope = [peer], hope

    def new_sources(self) -> list[Place]:
        found, self.new = self.new, []
        return found

    def ordered(self, pieces: list[int]) -> list[int]:
        return pieces

    def is_own(self, piece: int) -> bool:
        return True

    def is_expected(self, piece: int, request_s: float) -> bool:
        return False

    def is_hopeful(self) -> bool:
        return self.hope

    def drop(self, source: Place) -> None:
        pass


class Gone(Place):
    async def read(self, offset: int, nbytes: int) -> bytes:
        raise NotFound("gone")


class Busy(Place):
    """Is busy once, then gives the pieces that it has, and leaves."""

    asked = 0

    async def read(self, offset: int, nbytes: int) -> bytes:
        self.asked += 1
        if self.asked == 1:
            raise StorageUnavailable("busy", retry_after_s=1.0)
        return bytes(nbytes)


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("hope", [True, False])
async def test_a_download_ends_when_the_store_refuses_and_no_agent_has_the_rest(
    tmp_path: Path, clock: Clock, hope: bool, leaves: bool
) -> None:
    """The store refuses while an agent still has the piece that it was asked for."""
    store, peer = Gone("store", False), Busy("a", True, 0)
    slept = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds
        clock.now += seconds
        if leaves:
            peer.present.clear()
        assert slept < 100.0, "the download does not end"
        await asyncio.sleep(0)

    with PartFile(tmp_path / "part", 2 * PIECE_BYTES) as part:
        one = Transfer(
            part,
            [piece_checksum(bytes(PIECE_BYTES)), 1],
            [store],
            Bandwidth(0, clock),
            Limits(1),
            clock=clock,
            sleep=sleep,  # type: ignore[list-item]
        )
        one.sharing = Found(peer, hope)  # type: ignore[assignment]
        with pytest.raises(NotFound, match="gone"):
            await one.run()
    assert len(one.present) == (0 if leaves else 1)
    assert slept >= LOST_S if hope else slept < LOST_S


def test_an_agent_that_is_always_busy_is_dropped(clock: Clock) -> None:
    store, peer = Place("store", False), Place("a", True, *range(9))
    table = SourceTable([store, peer], clock)  # type: ignore[list-item]
    busy = StorageUnavailable("busy", retry_after_s=1.0)
    table.failed(peer, 0, busy)
    clock.now += BUSY_S - 1.0
    table.failed(peer, 0, busy)
    table.succeeded(peer, PIECE_BYTES, 0.1)
    clock.now += 2.0
    table.failed(peer, 1, busy)
    assert not table.is_dropped(peer)
    clock.now += BUSY_S
    table.failed(peer, 1, busy)
    assert table.is_dropped(peer)


@pytest.mark.parametrize("rate", [1, 2, 4, 16, 1000])
def test_no_more_pieces_are_taken_on_than_are_sent_in_time(rate: int) -> None:
    api = PieceApi(AgentConfig(peer_mb_per_s=rate), None)
    assert 1 <= api._most <= PieceApi(AgentConfig(), None)._most
    assert api._most * PIECE_BYTES / (rate << 20) <= QUEUE_S < PIECE_S
