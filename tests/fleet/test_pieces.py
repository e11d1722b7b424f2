"""Agents give each other verified pieces; one that lies, is slow or dies costs a piece, and the store has the rest."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pipeline.coordination.memory import MemoryStore
from pipeline.errors import NotFound, StorageUnavailable
from pipeline.fleet import bodies, records
from shm.checkpoint import PIECE_BYTES, piece_checksum
from stages.agent.downloads import sources
from stages.agent.downloads import transfer as transfers
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.part_file import PartFile
from stages.agent.downloads.sources import PEER_REQUESTS, SourceTable
from stages.agent.downloads.transfer import Limits, Transfer
from stages.agent.peers import sharing
from stages.agent.peers.client import PeerSource
from stages.agent.peers.holdings import FileKey, Holdings
from stages.agent.peers.http_api import PieceApi
from stages.agent.peers.sharing import Sharing
from tests.fleet.coordination_stores import Clock, until
from tests.fleet.members import TOKEN, member
from tests.fleet.range_server import Handler
from tests.fleet.site import Site


@pytest.fixture(autouse=True)
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer may take long: no agent is dropped or overlooked for that."""
    monkeypatch.setattr(sharing, "FIRST_LOOK_S", 600.0)
    monkeypatch.setattr("stages.agent.peers.client.STATE_S", 600.0)


def without_weights(handler: Handler, body: bytes) -> bool:
    """The store has lost the weights."""
    if handler.path.endswith(".bin"):
        handler.refuse(404)
    return handler.path.endswith(".bin")


# ------------------------------------------------------------------ what is given


async def test_an_agent_that_has_the_file_gives_all_of_it(
    site: Site, records_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "FIRST_LOOK_S", 60.0)
    async with member(site, records_store, "a") as first, member(site, records_store, "b") as second:
        await first.pull()
        site.server.fault = without_weights
        arrival = await second.pull()
        assert arrival.report is not None
        assert arrival.report.by_source["agent a"] == (site.entry.weights_bytes, 0)
        assert second.is_right()


class Lying(Holdings):
    """Gives other bytes."""

    asked = 0

    def read(self, key: FileKey, piece: int) -> bytes:
        self.asked += 1
        return bytes(len(super().read(key, piece)))


async def test_a_lying_agent_costs_one_piece(
    site: Site, records_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "FIRST_LOOK_S", 60.0)
    monkeypatch.setattr(sources, "LEAST_LATE_S", 60.0)
    monkeypatch.setattr(transfers, "LEAST_LATE_S", 60.0)
    async with member(site, records_store, "a", Lying) as liar, member(site, records_store, "b") as honest:
        await liar.pull()
        arrival = await honest.pull()
        assert arrival.report is not None
        assert honest.is_right()
        assert (arrival.report.rejected, liar.holdings.asked) == (1, 1)  # type: ignore[attr-defined]
        assert arrival.report.by_source["agent a"] == (0, 1)


class Silent(PieceApi):
    """Takes the request for a piece, and never answers."""

    asked = 0

    async def piece(self, request: web.Request) -> web.StreamResponse:
        Silent.asked += 1
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_slow_agent_is_dropped_after_one_piece(
    site: Site, records_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerSource, "timeout_s", 0.3)
    Silent.asked = 0
    async with member(site, records_store, "a", api=Silent) as slow, member(site, records_store, "b") as fast:
        await slow.pull()
        arrival = await fast.pull()
        assert fast.is_right()
        assert arrival.report is not None
        assert arrival.report.by_source["agent a"] == (0, 0)
        assert Silent.asked <= 1


async def test_a_dead_agent_is_no_hindrance(site: Site, records_store: MemoryStore) -> None:
    async with member(site, records_store, "b") as living:
        async with member(site, records_store, "a") as dead:
            await dead.pull()
        arrival = await living.pull()
        assert living.is_right()
        assert arrival.report is not None
        assert arrival.report.by_source.get("agent a", (0, 0)) == (0, 0)


class Claiming(Holdings):
    """Says that it reads everything from the store, and never has anything."""

    def state(self, key: FileKey) -> bodies.PieceState:
        total = len(self._file(key).checksums)
        return bodies.PieceState(pieces=total, present=bytes(-(-total // 8)), claimed=tuple(range(total)))


async def test_a_piece_that_another_agent_keeps_promising_is_read_from_the_store(
    site: Site, records_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LEAST_PATIENCE_S", 0.05)
    monkeypatch.setattr(sharing, "PATIENCE", 0.0)
    async with member(site, records_store, "a", Claiming) as liar, member(site, records_store, "b") as honest:
        await liar.pull()
        await honest.pull()
        assert honest.is_right()


async def test_a_damaged_file_is_not_given(site: Site, records_store: MemoryStore) -> None:
    async with member(site, records_store, "a") as one:
        await one.pull()
        path = one.models_dir / f"{site.entry.digest}.bin"
        data = bytearray(path.read_bytes())
        data[PIECE_BYTES + 5] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
        key = FileKey.of(site.entry)
        assert piece_checksum(one.holdings.read(key, 0))
        with pytest.raises(NotFound, match="damaged"):
            one.holdings.read(key, 1)
        with pytest.raises(NotFound, match="12 pieces"):
            one.holdings.read(key, 12)
        with pytest.raises(NotFound, match="no file"):
            one.holdings.read(FileKey(key.digest, "0" * 32), 0)


async def test_a_file_that_was_prepared_here_is_not_given(site: Site, records_store: MemoryStore) -> None:
    async with member(site, records_store, "a") as one:
        await one.pull()
        for record in (one.models_dir / "catalog").iterdir():
            record.unlink()
        assert one.holdings.keys() == []
        with pytest.raises(NotFound):
            Holdings(one.models_dir).state(FileKey.of(site.entry))


async def test_pieces_are_given_while_they_arrive(site: Site, records_store: MemoryStore) -> None:
    """The store stops after three pieces; those are given."""
    left, going_on = iter(range(3)), threading.Event()

    def stop(handler: Handler, body: bytes) -> bool:
        with site.server.lock:
            is_over = handler.path.endswith(".bin") and next(left, None) is None
        if is_over:
            going_on.wait(120)
        return False

    site.server.fault = stop
    key = FileKey.of(site.entry)
    async with member(site, records_store, "a") as one:
        pulling = asyncio.create_task(one.pull())
        try:

            def present() -> bytes:
                with contextlib.suppress(NotFound):
                    return one.holdings.state(key).present
                return b""

            await until(lambda: sum(byte.bit_count() for byte in present()) == 3)
            bits = present()
            pieces = [piece for piece in range(12) if bits[piece >> 3] >> (piece & 7) & 1]
            assert all(len(one.holdings.read(key, piece)) == PIECE_BYTES for piece in pieces)
            with pytest.raises(NotFound):
                one.holdings.read(key, next(piece for piece in range(12) if piece not in pieces))
            assert set(one.holdings.state(key).claimed).isdisjoint(pieces)
            assert one.holdings.state(key).claimed
        finally:
            going_on.set()
            await pulling
        assert one.holdings.state(key) == bodies.PieceState(pieces=12, is_complete=True)


async def test_too_many_pieces_at_once_are_refused(site: Site, records_store: MemoryStore) -> None:
    reading, going_on = threading.Semaphore(0), threading.Event()

    class Slow(Holdings):
        def read(self, key: FileKey, piece: int) -> bytes:
            reading.release()
            going_on.wait(60)
            return super().read(key, piece)

    async with member(site, records_store, "a", Slow, peer_connections=1) as one:
        await one.pull()
        ((_, value, _),), _ = await records_store.scan("pieces/")
        url = records.decode("agents/a", value).url + "/pieces/{}/{}/0".format(*FileKey.of(site.entry))
        async with aiohttp.ClientSession() as session:

            async def status() -> int:
                async with session.get(url) as response:
                    await response.read()
                    return response.status

            first = asyncio.create_task(status())
            await asyncio.to_thread(reading.acquire)
            more = [asyncio.create_task(status()) for _ in range(3)]
            await until(lambda: sum(one.done() for one in more) == 2)
            assert not first.done()
            going_on.set()
            answers = [await one for one in (first, *more)]
    assert answers.count(200) == 2


# ------------------------------------------------------------------ who reads what from the store


class Peer:
    """What a download uses of another agent."""

    is_local, is_peer, timeout_s, expected_rate = False, True, 1.0, 2e8

    def __init__(self, name: str, *present: int) -> None:
        self.agent_id = self.name = name
        self.is_dropped = self.is_complete = False
        self.claimed: frozenset[int] = frozenset()
        self.present = set(present)

    def holds(self, piece: int) -> bool:
        return piece in self.present

    async def read(self, offset: int, nbytes: int) -> bytes:
        raise AssertionError("the table reads nothing")


class Store(Peer):
    is_peer, expected_rate = False, 5e7

    def holds(self, piece: int) -> bool:
        return True


def test_what_a_download_reads_may_change_while_another_thread_looks(tmp_path: Path) -> None:
    with PartFile(tmp_path / "part", PIECE_BYTES) as part:
        transfer = Transfer(part, [0], [], Bandwidth(0, time.monotonic), Limits())

        class Busy(Store):
            @property
            def is_peer(self) -> bool:  # type: ignore[override]
                transfer._tasks[object()] = 7, self  # type: ignore[index]
                return False

        transfer._tasks = {object(): (3, Busy("store"))}  # type: ignore[dict-item]
        assert set(transfer.claimed) == {3}


async def test_a_compressed_answer_is_refused() -> None:
    async def answer(request: web.Request) -> web.Response:
        response = web.Response(body=bytes(4000))
        response.enable_compression(web.ContentCoding.gzip)
        return response

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        record = records.AgentRecord(agent_id="a", url=f"http://127.0.0.1:{runner.addresses[0][1]}", incarnation="1")
        async with aiohttp.ClientSession() as session:
            peer = PeerSource(session, TOKEN, record, FileKey("d" * 64, "c" * 32), 4)
            with pytest.raises(NotFound, match="gzip|deflate|zstd"):
                await peer.look()
    finally:
        await runner.cleanup()


def shared(clock: Clock, own: str, *peers: Peer) -> Sharing:
    found = Sharing(None, FileKey("d" * 64, "c" * 32), lambda record: None, own, clock)  # type: ignore
    found._peers = {one.agent_id: one for one in peers}  # type: ignore[misc]
    return found


def test_every_piece_is_the_part_of_one_agent(clock: Clock) -> None:
    names = ["a", "b", "c", "d"]
    parts = []
    for own in names:
        others = [Peer(name) for name in names if name != own]
        complete = Peer("e")
        complete.is_complete = True  # it reads nothing
        one = shared(clock, own, *others, complete)
        parts.append({piece for piece in range(40) if one.is_own(piece)})
    assert set.union(*parts) == set(range(40))
    assert sum(len(part) for part in parts) == 40
    alone = shared(clock, "a", complete)
    assert all(alone.is_own(piece) for piece in range(40))


def test_the_coordination_store_is_read_less_and_less_often(clock: Clock) -> None:
    peers = [Peer(str(number)) for number in range(sharing.MAX_PEERS)]
    one, full = shared(clock, "a", *peers[1:]), shared(clock, "a", *peers)
    looks = 0
    for _ in range(600):
        looks += one.is_refresh_due()
        assert not full.is_refresh_due()
        clock.now += 0.1
    assert 9 <= looks <= 17  # in 60 s
    peers[0].is_dropped = True
    assert full.is_refresh_due()


def test_a_promise_is_waited_for_once(clock: Clock) -> None:
    peer = Peer("b")
    one = shared(clock, "a", peer)
    peer.claimed = frozenset({3})
    assert one.is_expected(3, 0.0) and not one.is_expected(4, 0.0)
    clock.now += sharing.LEAST_PATIENCE_S
    assert not one.is_expected(3, 0.0)
    assert one.is_expected(3, 10.0)  # a slow store
    peer.claimed = frozenset()
    assert not one.is_expected(3, 10.0)
    clock.now += 100
    peer.claimed = frozenset({3})  # again: no more patience than before
    assert not one.is_expected(3, 10.0)
    peer.claimed = frozenset({5, 6, 7, 8})
    for piece in (5, 6):
        assert one.is_expected(piece, 0.0)
        clock.now += sharing.LEAST_PATIENCE_S
        assert not one.is_expected(piece, 0.0)
    assert not one.is_expected(7, 0.0)  # three were waited for in vain
    one._broken.clear()
    assert one.is_expected(8, 0.0)
    peer.is_dropped = True
    assert not one.is_expected(8, 0.0)
    peer.claimed = frozenset({5})
    assert not one.is_expected(5, 0.0)


def test_an_agent_is_tried_with_one_request_and_waited_for_only_so_long(clock: Clock) -> None:
    store, peer = Store("store"), Peer("b", *range(20))
    table = SourceTable([store, peer], clock)
    assert table.choose(0) is peer
    table.begin(peer)
    assert table.choose(1) is None  # its first answer is near
    clock.now += 1.0
    assert table.choose(1) is store
    table.ended(peer)
    table.succeeded(peer, PIECE_BYTES, 0.1)
    for piece in range(PEER_REQUESTS):
        assert table.choose(piece) is peer
        table.begin(peer)
    assert table.choose(9) is None
    assert table.choose(30) is store  # the agent does not have it


def test_a_store_that_is_much_faster_is_asked(clock: Clock) -> None:
    store, peer = Store("store"), Peer("b", *range(20))
    table = SourceTable([store, peer], clock)
    for _ in range(30):
        for source, seconds in ((store, 0.01), (peer, 1.0)):
            table.begin(source)
            table.ended(source)
            table.succeeded(source, PIECE_BYTES, seconds)
    assert table.choose(0) is store


def test_an_agent_is_dropped_by_its_second_failure_and_not_by_being_busy(clock: Clock) -> None:
    store, peer = Store("store"), Peer("b", *range(20))
    table = SourceTable([store, peer], clock)
    for _ in range(5):
        table.failed(peer, 0, StorageUnavailable("busy", retry_after_s=1.0))
        clock.now += 2.0
    assert table.choose(0) is peer
    table.failed(peer, 0, StorageUnavailable("reset"))
    assert not table.is_dropped(peer)
    clock.now += 100
    table.failed(peer, 1, StorageUnavailable("reset"))
    assert table.is_dropped(peer)
    assert table.choose(2) is store


def test_without_a_store_a_download_ends_when_no_agent_has_the_piece(clock: Clock) -> None:
    store, peer = Store("store"), Peer("b", 1)
    table = SourceTable([store, peer], clock)
    with pytest.raises(NotFound):
        table.failed(store, 0, NotFound("gone"))
    table = SourceTable([store, peer], clock)
    table.failed(store, 1, NotFound("gone"))
    assert table.choose(1) is peer
