"""Doors of engines: bytes pass unchanged in both directions, each side is held back, and ends are passed on."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
import pytest

from pipeline.errors import ModelUnavailable
from pipeline.fleet.bodies import HeartbeatResponse, LoadedModel, LoadModelResponse
from pipeline.fleet.peer_tls import PeerTls
from stages.agent import doors as doors_module
from stages.agent.doors import Doors, Factory, Server
from tests.fleet.certificates import Authority

pytestmark = pytest.mark.timeout(300)

PATH = "/v1/chat/completions"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Site:
    """An agent's doors, an engine, and an orchestrator with its certificate."""

    def __init__(self, agent: PeerTls, orchestrator: PeerTls) -> None:
        self.agent = agent
        self._context = agent.server_context("orchestrator")
        self._orchestrator = orchestrator
        self.now = 0.0
        self.shutdown_s = 10.0  # for what is left when a connection ends
        self.broken: Exception | None = None  # raised instead of listening
        self.may_listen = asyncio.Event()
        self.may_listen.set()
        self.n_listened = 0
        self.doors = Doors(self._listen, self._connect, lambda: self.now)
        self.arrived: asyncio.Queue[Streams] = asyncio.Queue()  # connections at the engine
        self.engine = ""
        self._writers: list[asyncio.StreamWriter] = []

    async def _listen(self, factory: Factory) -> tuple[Server, str]:
        await self.may_listen.wait()
        if self.broken is not None:
            raise self.broken
        self.n_listened += 1
        server = await asyncio.get_running_loop().create_server(
            factory, "127.0.0.1", 0, ssl=self._context, ssl_shutdown_timeout=self.shutdown_s
        )
        return server, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _connect(self, factory: Factory, url: str) -> None:
        parts = urlsplit(url)
        await asyncio.get_running_loop().create_connection(factory, parts.hostname, parts.port)

    async def on_engine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await self.arrived.put((reader, writer))

    async def door(self) -> str:
        """The URL of the engine's door."""
        found = (await self.doors.report(heartbeat(self.engine))).loaded_models[0]
        assert found.inference_endpoint_url == found.engine_url + PATH
        return found.engine_url

    async def client(self, door: str = "") -> Streams:
        """A connection of the orchestrator."""
        parts = urlsplit(door or await self.door())
        streams = await asyncio.open_connection(
            parts.hostname, parts.port, ssl=self._orchestrator.client_context("one")
        )
        self._writers.append(streams[1])
        return streams

    def close(self) -> None:
        self.doors.close()
        for writer in self._writers:
            writer.close()


def heartbeat(*engines: str) -> HeartbeatResponse:
    models = tuple(
        LoadedModel(
            model_id=f"m{i}",
            model_state="READY" if url else "DOWNLOADING",
            cache_level="CPU_RESIDENT",
            engine_url=url,
            inference_endpoint_url=url + PATH if url else "",
        )
        for i, url in enumerate(engines)
    )
    return HeartbeatResponse(agent_id="one", incarnation="1", state="IDLE", loaded_models=models)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
async def site(authority: Authority) -> AsyncIterator[Site]:
    made = Site(authority.open("agent", "one"), authority.open("orchestrator", "o1"))
    server = await asyncio.start_server(made.on_engine, "127.0.0.1", 0)
    made.engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        made.close()
        server.close()


async def test_bytes_pass_in_both_directions(site: Site) -> None:
    reader, writer = await site.client()
    to_engine, to_client = random.Random(1).randbytes(300_000), random.Random(2).randbytes(3_000_000)
    writer.write(to_engine)
    engine_reader, engine_writer = await site.arrived.get()
    assert await engine_reader.readexactly(len(to_engine)) == to_engine
    engine_writer.write(to_client)
    engine_writer.close()  # what it has sent still arrives, and then the end
    assert await reader.read(-1) == to_client


@pytest.mark.parametrize("slow", ["client", "engine"])
async def test_the_faster_side_is_held_back(site: Site, slow: str) -> None:
    client = await site.client()
    client[1].write(b"x")
    engine = await site.arrived.get()
    await engine[0].readexactly(1)
    (fast, (reader, _)) = (engine, client) if slow == "client" else (client, engine)
    data = random.Random(3).randbytes(1 << 20)
    total = 40
    sent = 0

    async def send() -> None:
        nonlocal sent
        for _ in range(total):
            fast[1].write(data)
            await fast[1].drain()
            sent += 1

    sending = asyncio.create_task(send())
    # Everything between fills up, of bounded size, and the writer waits.
    still = -1
    while still != sent or sent == 0:
        still = sent
        await asyncio.sleep(0.3)
    assert sent < total
    for _ in range(total):
        assert await reader.readexactly(len(data)) == data
    await sending


@pytest.mark.parametrize("side", ["client", "engine"])
async def test_the_end_of_one_side_ends_the_other(site: Site, side: str) -> None:
    reader, writer = await site.client()
    writer.write(b"x")
    engine_reader, engine_writer = await site.arrived.get()
    assert await engine_reader.readexactly(1) == b"x"
    (writer if side == "client" else engine_writer).transport.abort()
    with contextlib.suppress(ConnectionError):
        assert await (engine_reader if side == "client" else reader).read(1) == b""


async def test_a_connection_of_a_denied_orchestrator_ends(site: Site) -> None:
    reader, writer = await site.client()
    writer.write(b"x")
    engine_reader, _ = await site.arrived.get()
    assert await engine_reader.readexactly(1) == b"x"
    site.doors.check()
    writer.write(b"y")
    assert await engine_reader.readexactly(1) == b"y"
    site.agent._list.entries = frozenset({"orchestrator:o1"})
    site.doors.check()
    with contextlib.suppress(ConnectionError):
        assert await engine_reader.read(1) == b""
    with contextlib.suppress(ConnectionError):
        assert await reader.read(1) == b""


async def test_connections_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors_module, "MAX_CONNECTIONS", 1)
    _, writer = await site.client()
    writer.write(b"x")
    await site.arrived.get()
    await ends(site.client)
    writer.transport.abort()
    while not await answers(site):  # its place is free again
        pass


async def ends(connect: Callable[[], Awaitable[Streams]]) -> None:
    """A connection that is closed before anything comes."""
    with contextlib.suppress(ConnectionError):
        reader, _ = await connect()
        assert await reader.read(1) == b""


async def answers(site: Site, door: str = "") -> bool:
    """Whether a connection to the door (of the engine) reaches the engine."""
    reader, writer = await site.client(door)
    writer.write(b"x")
    arriving = asyncio.create_task(site.arrived.get())
    ending = asyncio.create_task(reader.read(1))
    await asyncio.wait({arriving, ending}, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    arriving.cancel()
    return arriving.done() and not arriving.cancelled()


async def test_without_an_engine_the_connection_is_closed(site: Site) -> None:
    with contextlib.closing(await asyncio.start_server(site.on_engine, "127.0.0.1", 0)) as gone:
        site.engine = f"http://127.0.0.1:{gone.sockets[0].getsockname()[1]}"
    await gone.wait_closed()
    await ends(site.client)


async def test_doors_come_and_go_with_engines(site: Site) -> None:
    door = await site.door()
    assert await site.door() == door
    answer = LoadModelResponse(
        status="success", model_id="m0", model_state="READY", inference_endpoint_url=site.engine + PATH
    )
    assert (await site.doors.loaded(answer, site.engine)).inference_endpoint_url == door + PATH
    loading = LoadModelResponse(status="loading", model_id="m0", model_state="DOWNLOADING")
    assert await site.doors.loaded(loading, "") == loading
    # Another engine has another door; one that is not ready has none.
    found = (await site.doors.report(heartbeat("http://127.0.0.1:1", ""))).loaded_models
    assert found[0].engine_url.startswith("https://") and found[0].engine_url != door
    assert found[1].engine_url == found[1].inference_endpoint_url == ""
    # One that gets no more requests keeps its door for those that it has.
    ready = heartbeat(site.engine)
    (one,) = ready.loaded_models
    withdrawn = msgspec.structs.replace(one, model_state="DOWNLOADING", inference_endpoint_url="")
    (shown,) = (await site.doors.report(msgspec.structs.replace(ready, loaded_models=(withdrawn,)))).loaded_models
    assert (shown.model_state, shown.engine_url, shown.inference_endpoint_url) == ("DOWNLOADING", door, "")
    # The door of the engine that has ended is there for what is still sent to it, and is closed later.
    site.now += doors_module.CLOSE_S
    await site.doors.report(heartbeat("http://127.0.0.1:1"))
    assert await answers(site, door)
    site.now += 0.1
    await site.doors.report(heartbeat("http://127.0.0.1:1"))
    parts = urlsplit(door)
    with pytest.raises(OSError):
        await asyncio.open_connection(parts.hostname, parts.port)


async def test_a_model_that_became_ready_during_a_report_keeps_its_door(site: Site) -> None:
    site.may_listen.clear()
    reporting = asyncio.create_task(site.doors.report(heartbeat("http://127.0.0.1:1")))
    answer = LoadModelResponse(
        status="success", model_id="m0", model_state="READY", inference_endpoint_url=site.engine + PATH
    )
    loading = asyncio.create_task(site.doors.loaded(answer, site.engine))
    again = asyncio.create_task(site.doors.loaded(answer, site.engine))
    await asyncio.sleep(0)
    site.may_listen.set()
    door = (await loading).inference_endpoint_url.removesuffix(PATH)
    await reporting
    assert (await again).inference_endpoint_url == door + PATH
    assert site.n_listened == 2
    await site.doors.report(heartbeat("http://127.0.0.1:1"))  # of before it was ready
    assert await answers(site, door)


async def test_a_door_that_cannot_be_opened_leaves_the_report_of_the_others(site: Site) -> None:
    door = await site.door()
    site.broken = OSError("too many open files")
    report = await site.doors.report(heartbeat(site.engine, "http://127.0.0.1:1"))
    one, two = report.loaded_models
    assert (one.model_state, one.engine_url) == ("READY", door)
    assert (two.model_state, two.engine_url, two.inference_endpoint_url) == ("LOADING_TO_GPU", "", "")
    assert "too many open files" in two.error
    answer = LoadModelResponse(
        status="success", model_id="m1", model_state="READY", inference_endpoint_url=f"http://127.0.0.1:1{PATH}"
    )
    with pytest.raises(ModelUnavailable, match="too many open files"):
        await site.doors.loaded(answer, "http://127.0.0.1:1")
    site.broken = None
    two = (await site.doors.report(heartbeat(site.engine, "http://127.0.0.1:1"))).loaded_models[1]
    assert two.model_state == "READY" and two.engine_url.startswith("https://")


async def test_what_an_engine_has_sent_arrives_when_the_agent_ends(site: Site) -> None:
    reader, _ = await site.client()
    _, engine_writer = await site.arrived.get()
    data = random.Random(1).randbytes(6 << 20)  # more than the sockets between them hold
    engine_writer.write(data)
    engine_writer.close()
    ending = asyncio.create_task(site.doors.finish(30.0))
    await asyncio.sleep(0)
    assert not ending.done()
    assert await reader.read(-1) == data
    await ending
    assert not site.doors._connections


async def test_an_agent_that_ends_waits_for_no_silent_connection(site: Site) -> None:
    reader, writer = await site.client()
    writer.write(b"x")
    await site.arrived.get()
    await site.doors.finish(0.05)
    with contextlib.suppress(ConnectionError):
        assert await reader.read(-1) == b""


async def test_a_connection_that_is_held_back_ends_with_its_engine(site: Site) -> None:
    site.shutdown_s = 0.2
    _, writer = await site.client()
    writer.write(b"x")
    engine_reader, engine_writer = await site.arrived.get()
    assert await engine_reader.readexactly(1) == b"x"
    (connection,) = site.doors._connections
    paused = asyncio.Event()
    hold = connection.transport.pause_reading  # type: ignore[union-attr]

    def pause_reading() -> None:
        hold()
        paused.set()

    connection.transport.pause_reading = pause_reading  # type: ignore[union-attr, method-assign]
    while not paused.is_set():  # the engine does not read
        writer.write(bytes(1 << 20))
        await asyncio.wait([asyncio.ensure_future(paused.wait())], timeout=0.05)
    engine_writer.transport.abort()
    while site.doors._connections:
        await asyncio.sleep(0.01)
    writer.transport.abort()
