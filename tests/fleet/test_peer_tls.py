"""Who may connect to whom with which certificate, and that nothing is sent to a peer that is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pipeline.config.schema import FleetTlsConfig
from pipeline.errors import ConfigError
from pipeline.fleet.denied_list import DeniedList, read_denied
from pipeline.fleet.peer_tls import PeerTls, Role, boot_clock, open_tls, peer_of
from pipeline.tls import follower
from stages.agent import stage as agent_stage
from tests.fleet.certificates import Authority
from tests.tls_files import DATA

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of another fleet."""
    return Authority(tmp_path_factory.mktemp("other"))


@pytest.fixture
def own(tmp_path: Path) -> Authority:
    """An authority whose certificates a test replaces."""
    return Authority(tmp_path / "own")


class Listener:
    """A server with a certificate, which keeps what it receives."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.connections = 0
        self.port = 0


@contextlib.asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[Listener]:
    found = Listener()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        with contextlib.suppress(OSError):
            while data := await reader.read(1000):
                found.received += data
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()


async def say(port: int, context: ssl.SSLContext) -> bytes:
    """Send some bytes; what comes back. Raises `OSError` if the connection is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"hello")
        return await reader.read(100)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def is_refused(port: int, context: ssl.SSLContext) -> bool:
    """Whether nothing is answered: the client sees an error, or the end, since it completes its handshake first."""
    try:
        return await say(port, context) == b""
    except OSError:
        return True


async def test_an_orchestrator_reaches_the_agent_that_it_means(authority: Authority) -> None:
    orchestrator, agent = authority.open("orchestrator", "o1"), authority.open("agent", "one")
    async with listening(agent.server_context("orchestrator")) as server:
        assert await say(server.port, orchestrator.client_context("one")) == b"hello"
        assert orchestrator.client_context("one") is orchestrator.client_context("one")  # connections are kept


@pytest.mark.parametrize("shown", ["other-id", "case", "orchestrator", "monitor", "another-fleet", "no-fleet"])
async def test_nothing_is_sent_to_another_host(authority: Authority, other: Authority, shown: str) -> None:
    servers: dict[str, Callable[[], ssl.SSLContext]] = {
        "other-id": lambda: authority.open("agent", "two").server_context("orchestrator"),
        "case": lambda: authority.open("agent", "ONE").server_context("orchestrator"),
        "orchestrator": lambda: authority.open("orchestrator", "one").server_context("orchestrator"),
        "monitor": lambda: authority.open("monitor", "one").server_context("orchestrator"),
        "another-fleet": lambda: other.open("agent", "one").server_context("orchestrator"),
        "no-fleet": plain_server,
    }
    orchestrator = authority.open("orchestrator", "o1")
    async with listening(servers[shown]()) as server:
        with pytest.raises(OSError, match=r"expected agent:one|verify failed|must name its holder"):
            await say(server.port, orchestrator.client_context("one"))
        assert not server.received


def plain_server() -> ssl.SSLContext:
    """A server of no fleet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(DATA / "one.pem", DATA / "one.key")
    return context


@pytest.mark.parametrize("shown", ["agent", "itself", "monitor", "another-fleet", "none"])
async def test_only_orchestrators_get_through_a_door(authority: Authority, other: Authority, shown: str) -> None:
    agent = authority.open("agent", "one")
    clients: dict[str, Callable[[], ssl.SSLContext]] = {
        "agent": lambda: authority.open("agent", "two").client_context("one"),
        "itself": lambda: agent.client_context("one"),
        "monitor": lambda: authority.open("monitor", "m").client_context("one"),
        "another-fleet": lambda: trusting_any(other.open("orchestrator", "o1"), other),
        "none": lambda: ssl._create_unverified_context(),
    }
    async with listening(agent.server_context("orchestrator")) as server:
        assert await is_refused(server.port, clients[shown]())
        assert (server.connections, bytes(server.received)) == (0, b"")
        # The next one, of an orchestrator, is served.
        assert await say(server.port, authority.open("orchestrator", "o1").client_context("one")) == b"hello"


def trusting_any(tls: PeerTls, authority: Authority) -> ssl.SSLContext:
    """A client of another fleet that accepts every server."""
    context = ssl._create_unverified_context()
    pem = authority.folder / "orchestrator-o1" / "o1.pem"
    context.load_cert_chain(pem, pem.with_suffix(".key"))
    return context


async def look(tls: PeerTls) -> None:
    """Let it look at its files until it has taken new ones."""
    before = tls.stamp
    while tls.stamp is before:
        tls.tick()
        await asyncio.sleep(0.001)


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other at once."""
    monkeypatch.setattr(follower, "CHECK_S", 0.0)


@pytest.mark.parametrize("entry", ["name", "serial"])
async def test_a_denied_agent_gets_no_connection(own: Authority, looking: None, tmp_path: Path, entry: str) -> None:
    denied = tmp_path / "denied"
    denied.write_text("# none\n")
    agent, second = own.open("agent", "one"), own.open("agent", "two")
    orchestrator = own.open("orchestrator", "o1", denied=str(denied))
    async with listening(agent.server_context()) as first, listening(second.server_context()) as other:
        context = orchestrator.client_context("one")
        assert await say(first.port, context) == b"hello"
        serial = own.serial("agent", "one")
        denied.write_text({"name": "agent:one", "serial": f"00{serial.lower()}"}[entry] + "  # stolen\n")
        await look(orchestrator)
        assert orchestrator.client_context("one") is not context
        with pytest.raises(OSError, match=f"{serial} of agent:one is denied"):
            await say(first.port, orchestrator.client_context("one"))
        assert await say(other.port, orchestrator.client_context("two")) == b"hello"


async def test_a_denied_orchestrator_is_refused(own: Authority, looking: None, tmp_path: Path) -> None:
    denied = tmp_path / "denied"
    denied.write_text("")
    agent = own.open("agent", "one", denied=str(denied))
    context = own.open("orchestrator", "o1").client_context("one")
    async with listening(agent.server_context("orchestrator")) as server:
        assert await say(server.port, context) == b"hello"
        denied.write_text("orchestrator:o1\n")
        await look(agent)
        assert await is_refused(server.port, context)
        assert await say(server.port, own.open("orchestrator", "o2").client_context("one")) == b"hello"


async def test_new_certificates_are_taken_without_a_restart(own: Authority, looking: None) -> None:
    agent, orchestrator = own.open("agent", "one"), own.open("orchestrator", "o1")
    async with listening(agent.server_context("orchestrator")) as server:
        before = await serial_shown(server.port, orchestrator)
        after = own.replace("agent", "one")
        await look(agent)
        assert await serial_shown(server.port, orchestrator) == after != before
        own.replace("orchestrator", "o1")
        await look(orchestrator)
        assert await say(server.port, orchestrator.client_context("one")) == b"hello"


async def serial_shown(port: int, orchestrator: PeerTls) -> str:
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=orchestrator.client_context("one"))
    peer = peer_of(writer.get_extra_info("peercert"))
    writer.close()
    await writer.wait_closed()
    assert peer is not None
    return peer.serial


async def test_a_certificate_of_another_agent_is_not_taken(
    own: Authority, looking: None, caplog: pytest.LogCaptureFixture
) -> None:
    agent, orchestrator = own.open("agent", "one"), own.open("orchestrator", "o1")
    two = own.issue("agent", "two")
    async with listening(agent.server_context("orchestrator")) as server:
        for ending in (".key", ".pem"):
            os.replace(two.with_suffix(ending), own.folder / "agent-one" / f"one{ending}")
        while not caplog.records:
            agent.tick()
            await asyncio.sleep(0.001)
        assert "is of agent:two, expected agent:one" in str(caplog.records[0].__dict__["reason"])
        assert await say(server.port, orchestrator.client_context("one")) == b"hello"


@pytest.mark.parametrize("side", ["agent", "orchestrator"])
async def test_an_expired_certificate_is_refused(own: Authority, side: str, caplog: pytest.LogCaptureFixture) -> None:
    """As it is when a host was forgotten at the renewal. The host itself starts, and says why it is refused."""
    own.issue("agent", "one", age_days=2 if side == "agent" else 0)
    own.issue("orchestrator", "o1", age_days=2 if side == "orchestrator" else 0)
    agent, orchestrator = own.open("agent", "one"), own.open("orchestrator", "o1")
    assert [record.__dict__["reason"] for record in caplog.records] == ["has expired"]
    async with listening(agent.server_context("orchestrator")) as server:
        assert await is_refused(server.port, orchestrator.client_context("one"))
        assert not server.received


@pytest.mark.parametrize("side", ["agent", "orchestrator"])
async def test_a_connection_ends_with_the_certificate_of_its_peer(own: Authority, side: str) -> None:
    agent, orchestrator = own.open("agent", "one"), own.open("orchestrator", "o1")
    async with (
        listening(agent.server_context("orchestrator")) as server,
        connected(server.port, orchestrator.client_context("one")) as (reader, writer),
    ):
        assert await echoed(reader, writer)
        checking = {"agent": agent, "orchestrator": orchestrator}[side]
        checking._wall = lambda: time.time() + 2 * 86400  # a clock that is set ends nothing
        assert await echoed(reader, writer)
        checking._clock = lambda: boot_clock() + 2 * 86400
        assert not await echoed(reader, writer)
        assert bytes(server.received) == b"hello" * 2


@contextlib.asynccontextmanager
async def connected(
    port: int, context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether bytes still pass through a connection; if not, it has ended."""
    try:
        writer.write(b"hello")
        return await reader.read(100) == b"hello"
    except OSError:
        return False


@pytest.mark.parametrize("side", ["agent", "orchestrator"])
async def test_connections_end_when_an_authority_is_removed(
    own: Authority, other: Authority, looking: None, side: str
) -> None:
    """In a change of the authority, peers with certificates of the old one are refused as soon as it is removed."""
    ca = own.folder / "ca.pem"
    ca.write_bytes((own.folder / "authority.pem").read_bytes() + (other.folder / "authority.pem").read_bytes())
    tls = {"agent": own.open("agent", "one"), "orchestrator": own.open("orchestrator", "o1")}
    other.issue(side, {"agent": "one", "orchestrator": "o1"}[side], into="changed")  # type: ignore[arg-type]
    files = {"cert": "pem", "key": "key"}
    section = {name: str(next((other.folder / "changed").glob(f"*.{end}"))) for name, end in files.items()}
    changing = open_tls(FleetTlsConfig(**section, ca=str(ca)), side, "one" if side == "agent" else "")  # type: ignore[arg-type]
    assert changing is not None
    tls[side] = changing
    both = next(one for name, one in tls.items() if name != side)
    pem = own.folder / "authority.pem"
    old = pem.read_bytes()
    pem.write_bytes(ca.read_bytes())  # the side that has not changed yet accepts both
    await look(both)
    try:
        async with (
            listening(tls["agent"].server_context("orchestrator")) as server,
            connected(server.port, tls["orchestrator"].client_context("one")) as (reader, writer),
        ):
            assert await echoed(reader, writer)
            pem.write_bytes(old)
            await look(both)
            assert not await echoed(reader, writer)
            assert await is_refused(server.port, tls["orchestrator"].client_context("one"))
            assert bytes(server.received) == b"hello"
    finally:
        shutil.rmtree(other.folder / "changed")


async def test_a_denial_needs_no_usable_certificate(own: Authority, looking: None, tmp_path: Path) -> None:
    """The files of the own certificate are damaged, and a certificate is denied: both are seen at once."""
    denied = tmp_path / "denied"
    denied.write_text("")
    agent = own.open("agent", "one", denied=str(denied))
    orchestrator = own.open("orchestrator", "o1")
    async with (
        listening(agent.server_context("orchestrator")) as server,
        connected(server.port, orchestrator.client_context("one")) as (reader, writer),
    ):
        assert await echoed(reader, writer)
        (own.folder / "agent-one" / "one.pem").write_text("damaged")
        denied.write_text("orchestrator:o1\n")
        await look(agent)
        assert not await echoed(reader, writer)
        assert bytes(server.received) == b"hello"
        assert await say(server.port, own.open("orchestrator", "o2").client_context("one")) == b"hello"


async def test_a_list_with_an_error_changes_nothing(
    own: Authority, looking: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    denied = tmp_path / "denied"
    denied.write_text("orchestrator:o1\n")
    agent = own.open("agent", "one", denied=str(denied))
    async with listening(agent.server_context("orchestrator")) as server:
        denied.write_text("orchestrator o2\n")
        while not any("neither a serial number" in str(record.__dict__.get("reason")) for record in caplog.records):
            agent.tick()
            await asyncio.sleep(0.001)
        assert await is_refused(server.port, own.open("orchestrator", "o1").client_context("one"))


def test_a_list_that_could_not_be_used_is_read_again(tmp_path: Path) -> None:
    """What was wrong may leave size and time of the file as they were, as permissions do."""
    denied = tmp_path / "denied"
    denied.write_text("")
    following = DeniedList(str(denied))
    denied.write_text("orchestrator o1\n")
    times = denied.stat().st_atime_ns, denied.stat().st_mtime_ns
    assert [following._read_changed() for _ in range(3)] == [None] * 3
    denied.write_text("orchestrator:o1\n")
    os.utime(denied, ns=times)
    assert [following._read_changed() for _ in range(2)][-1] == {"orchestrator:o1"}
    assert following._read_changed() is None


async def test_plain_bytes_and_silence_hold_up_no_handshake(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the agent listens: with a bound for the handshake."""
    monkeypatch.setattr(agent_stage, "HANDSHAKE_S", 3.0)
    agent, orchestrator = authority.open("agent", "one"), authority.open("orchestrator", "o1")
    received = bytearray()

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            received.extend(data)
            self.transport.write(data)  # type: ignore[attr-defined]

    listener = socket.create_server(("127.0.0.1", 0))
    server = await agent_stage._serve_tls(Echo, listener, agent.server_context("orchestrator"))
    port = listener.getsockname()[1]
    try:
        async with contextlib.AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(connected(port)) for _ in range(20)]
            reader, writer = await stack.enter_async_context(connected(port))
            writer.write(b"GET /health HTTP/1.1\r\nHost: one\r\n\r\n")
            assert await say(port, orchestrator.client_context("one")) == b"hello"
            with contextlib.suppress(ConnectionError):
                assert b"200" not in await reader.read()
            for reader, _ in silent:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
    finally:
        server.close()
    assert bytes(received) == b"hello"
    assert [record.__dict__["reason"] for record in caplog.records] == ["HTTP_REQUEST"]


@pytest.fixture
def broken(own: Authority, other: Authority, tmp_path: Path) -> Callable[[str], PeerTls]:
    def make(what: str) -> PeerTls:
        role: Role = "agent"
        section = own.section(role, "one")
        denied = tmp_path / "denied"
        match what:
            case "id":
                section |= own.section(role, "two")
            case "role":
                section |= own.section("orchestrator", "one")
            case "authority":
                section["ca"] = str(other.folder / "authority.pem")
            case "denied":
                denied.write_text("agent:one\n")
                section["denied"] = str(denied)
            case "list":
                denied.write_text("\nagent one\n")
                section["denied"] = str(denied)
            case "missing":
                section["denied"] = str(denied)
        found = open_tls(FleetTlsConfig(**section), role, "one")
        assert found is not None
        return found

    return make


@pytest.mark.parametrize(("what", "words"), [
    ("id", "is of agent:two, expected agent:one: issue one with `starling fleet certificate agent one`"),
    ("role", "is of orchestrator:one, expected agent:one"),
    ("authority", "is not accepted by the authority"),
    ("denied", "of agent:one is denied by"),
    ("list", "line 2: 'agent one' is neither a serial number"),
    ("missing", "fleet.tls.denied: .*/denied cannot be read"),
])  # fmt: skip
def test_an_error_names_file_and_remedy(broken: Callable[[str], PeerTls], what: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        broken(what)


def test_an_agent_without_an_id_takes_that_of_its_certificate(authority: Authority) -> None:
    section = authority.section("agent", "one")
    found = open_tls(FleetTlsConfig(**section), "agent")
    assert found is not None and found.name == "one"
    shared = {key: path.replace("one", "{id}") for key, path in section.items()}
    assert open_tls(FleetTlsConfig(**shared), "agent", "one") is not None
    with pytest.raises(ConfigError, match="set fleet.agent.id"):
        open_tls(FleetTlsConfig(**shared), "agent")


@pytest.mark.parametrize("names", [
    (),
    (("DNS", "starling:agent:one"),),
    (("URI", "starling:agent:one"), ("URI", "starling:orchestrator:one")),
    (("URI", "starling:admin:one"),),
    (("URI", "starling:agent:"),),
    (("URI", "starling:agent:one\n"),),
    (("URI", "starling:agent:../one"),),
])  # fmt: skip
def test_a_certificate_without_exactly_one_name_is_of_no_one(names: tuple[tuple[str, str], ...]) -> None:
    assert peer_of({"subjectAltName": names, "serialNumber": "01"}) is None
    assert peer_of({"subjectAltName": (("URI", "starling:agent:one"), ("DNS", "host")), "serialNumber": "0A"}) == (
        "agent",
        "one",
        "A",
    )


def test_lists_have_comments_names_and_serial_numbers() -> None:
    data = "# stolen\u2028by a thief\n\n 0a:0B \nagent:one # since May\norchestrator:o-1\n".encode()
    assert read_denied(data, "denied") == {"A0B", "agent:one", "orchestrator:o-1"}
