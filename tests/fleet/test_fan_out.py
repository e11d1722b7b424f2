"""Agents that download a file at the same time find each other at once, and read few pieces twice."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline.coordination.interface import Item
from pipeline.coordination.memory import MemoryStore
from shm.checkpoint import PIECE_BYTES
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.part_file import PartFile
from stages.agent.downloads.pieces import PieceMap
from stages.agent.downloads.transfer import MOST_AGE_S, Limits, Transfer
from stages.agent.peers import sharing
from stages.agent.peers.holdings import FileKey
from stages.agent.peers.sharing import Sharing
from tests.fleet.coordination_stores import Clock, until
from tests.fleet.members import member
from tests.fleet.range_server import Handler
from tests.fleet.site import Site


class Noting(MemoryStore):
    """Notes whose announcements each look at a file has found."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, 100)
        self.found: list[set[str]] = []

    async def scan(self, prefix: str) -> tuple[list[Item], int]:
        items, revision = await super().scan(prefix)
        self.found.append({item.key.rpartition("/")[2] for item in items})
        return items, revision


@pytest.fixture
async def noting(clock: Clock) -> AsyncIterator[Noting]:
    async with Noting(clock) as store:
        yield store


@pytest.fixture(autouse=True)
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer may take long: no agent is dropped or overlooked for that."""
    monkeypatch.setattr(sharing, "FIRST_LOOK_S", 600.0)
    monkeypatch.setattr("stages.agent.peers.client.STATE_S", 600.0)
    monkeypatch.setattr("stages.agent.peers.announcements.TIMEOUT_S", 600.0)


async def test_a_download_is_announced_before_it_looks_for_others(site: Site, noting: Noting) -> None:
    async with member(site, noting, "a") as one:
        await one.pull()
    assert noting.found[0] == {"a"}


async def test_an_agent_that_asks_is_found_before_the_next_look(
    site: Site, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second agent begins when the first one has looked for the last time."""
    monkeypatch.setattr(sharing, "MOST_REFRESH_S", 1e6)
    asked, going_on = threading.Event(), threading.Event()
    begun: list[Sharing] = []
    refreshed = Sharing.is_refresh_due

    def once(self: Sharing) -> bool:
        if self not in begun:
            begun.append(self)
            self._refresh_s = 1e6
        return refreshed(self)

    def hold(handler: Handler, body: bytes) -> bool:
        if handler.path.endswith(".bin"):
            asked.set()
            going_on.wait(120)
        return False

    monkeypatch.setattr(Sharing, "is_refresh_due", once)
    site.server.fault = hold
    async with member(site, noting, "a") as first, member(site, noting, "b") as second:
        pulls = [asyncio.create_task(first.pull())]
        try:
            await asyncio.to_thread(asked.wait, 120)
            pulls.append(asyncio.create_task(second.pull()))
            await until(lambda: len(begun) == 2 and set(begun[0]._peers) == {"b"} and set(begun[1]._peers) == {"a"})
        finally:
            going_on.set()
            await asyncio.gather(*pulls)
        assert first.is_right()
        assert second.is_right()


def shared(clock: Clock) -> Sharing:
    return Sharing(None, FileKey("d" * 64, "c" * 32), lambda record: None, "a", clock)  # type: ignore


def test_agents_that_ask_cause_a_bounded_number_of_looks(clock: Clock) -> None:
    one, looks = shared(clock), 0
    while one._refresh_s < sharing.MOST_REFRESH_S:
        clock.now += 100.0
        assert one.is_refresh_due()
    for number in range(1000):
        one.note_question(f"agent-{number}")
        one.note_question("agent-0")
        looks += one.is_refresh_due()
        clock.now += sharing.REFRESH_S / 2
    assert sharing.MAX_STRANGERS / 3 < looks < sharing.MAX_STRANGERS + 1000 * sharing.REFRESH_S / 2 / 6 + 2


class Store:
    """A blob store that does not answer."""

    name, is_local, is_peer, timeout_s, expected_rate = "store", False, False, 0.0, 5e7

    def holds(self, piece: int) -> bool:
        return True

    async def read(self, offset: int, nbytes: int) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError


class Peer(Store):
    """An agent that does not answer, and has the first pieces."""

    name, is_peer, expected_rate = "peer", True, 2e8

    def holds(self, piece: int) -> bool:
        return piece < 4


class Others:
    """The other agents of a download."""

    def __init__(self, *new: Peer, own: bool) -> None:
        self._new, self._own = list(new), own

    def new_sources(self) -> list[Peer]:
        found, self._new = self._new, []
        return found

    def is_own(self, piece: int) -> bool:
        return self._own

    def is_expected(self, piece: int, request_s: float) -> bool:
        return False


def transfer(path: Path, clock: Clock, jitter: float = 0.5) -> Transfer:
    with PartFile(path / "part", 8 * PIECE_BYTES) as part:
        return Transfer(part, [0] * 8, [Store()], Bandwidth(0, clock), Limits(1), clock=clock, jitter=lambda: jitter)


def test_a_request_without_an_answer_counts_as_the_time_of_one(tmp_path: Path, clock: Clock) -> None:
    one = transfer(tmp_path, clock)
    assert one._store_request_s() == 0.0
    one._begun[3] = clock()
    one._tasks[object()] = 3, Store()  # type: ignore[index]
    clock.now += 5.0
    assert one._store_request_s() == 5.0
    clock.now += 1000.0
    assert one._store_request_s() == MOST_AGE_S


async def test_the_store_is_read_while_other_agents_are_asked(tmp_path: Path, clock: Clock) -> None:
    one = transfer(tmp_path, clock)
    one._pieces = PieceMap(8)
    one.sharing = Others(Peer(), own=True)  # type: ignore[assignment]
    one._start_requests()
    try:
        assert sorted((piece, source.name) for piece, source in one._tasks.values()) == [(0, "peer"), (4, "store")]
    finally:
        for task in one._tasks:
            task.cancel()
        await asyncio.gather(*one._tasks, return_exceptions=True)


def test_agents_without_a_part_read_different_pieces(tmp_path: Path, clock: Clock) -> None:
    """The first pieces are the next ones of those whose part they are."""
    chosen = Counter[int]()
    rng = random.Random(1)
    for _ in range(400):
        one = transfer(tmp_path, clock, rng.random())
        one._pieces = PieceMap(8, {0})
        one.sharing = Others(own=False)  # type: ignore[assignment]
        piece, _ = one._next()
        assert piece is not None
        chosen[piece] += 1
    assert set(chosen) == {4, 5, 6, 7}
    assert min(chosen.values()) > 50
