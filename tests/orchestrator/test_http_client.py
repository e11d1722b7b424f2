"""The client of engines, with real sockets: connections are kept, held back, and ended with what is not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.orchestrator import connecting, http_client
from stages.orchestrator.engine_connection import MAX_EARLY_BYTES, MAX_UNREAD_BYTES, Connection
from stages.orchestrator.http_client import Factory, HttpClient, request_head
from stages.orchestrator.opening import Opening
from stages.orchestrator.stage import connect
from stages.orchestrator.upstream import Answer, Unreachable, read_whole

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WAIT_S = 300.0  # of a test for an event
MOST_RECEIVED = 256 << 10  # by one call of the event loop


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A machine that stands still for some seconds makes no host unreachable."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (http_client, connecting):
            patch.setattr(module, "CONNECT_S", WAIT_S)
        yield


class Peer(asyncio.Protocol):
    """A connection at the server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.received = b""
        self.transport: asyncio.Transport
        self.has_request = asyncio.Event()
        self.is_paused = asyncio.Event()
        self.has_ended = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.server.peers.put_nowait(self)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        if end and f"Content-Length: {len(body)}\r\n".encode() in head + b"\r\n":
            self.has_request.set()
            if self.server.answer:
                self.received = b""
                self.transport.write(self.server.answer)

    def pause_writing(self) -> None:
        self.is_paused.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended.set()


class Server:
    """`answer`: to each request; b"": none."""

    def __init__(self, answer: bytes = WHOLE) -> None:
        self.answer = answer
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()
        self.port = 0

    async def peer(self) -> Peer:
        """The next connection, when a request has come."""
        async with asyncio.timeout(WAIT_S):
            peer = await self.peers.get()
            await peer.has_request.wait()
        return peer


@contextlib.asynccontextmanager
async def serving(server: Server) -> AsyncIterator[HttpClient]:
    """A client, and the server that it asks."""
    client = HttpClient(connect, time.monotonic)
    listening = await asyncio.get_running_loop().create_server(lambda: Peer(server), "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield client
    finally:
        await client.close()
        listening.close()


async def ask(client: HttpClient, server: Server, body: bytes = b"x", timeout_s: float = WAIT_S) -> Answer:
    url = f"http://127.0.0.1:{server.port}/v1/generate"
    return await client.open("POST", url, {"A": "b"}, body, timeout_s, agent_id="one")


async def ended(peer: Peer) -> None:
    async with asyncio.timeout(WAIT_S):
        await peer.has_ended.wait()


async def test_a_connection_is_used_again_when_its_response_has_ended() -> None:
    server = Server()
    async with serving(server) as client:
        for _ in range(3):
            answer = await ask(client, server)
            assert (answer.status, await read_whole(answer)) == (200, b"hello")
            answer.close()
        assert client.n_idle == server.peers.qsize() == 1
        answers = await asyncio.gather(*(ask(client, server) for _ in range(4)))
        assert [await read_whole(one) for one in answers] == 4 * [b"hello"]
        assert client.n_idle == server.peers.qsize() == 4


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE + b"HTTP/1.1 200 OK\r\n",
        WHOLE.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"),
        WHOLE.replace(b"1.1", b"1.0"),
    ],
)
async def test_a_connection_is_not_used_again_otherwise(answer: bytes) -> None:
    server = Server(answer)
    async with serving(server) as client:
        assert await read_whole(await ask(client, server)) == b"hello"
        await ended(await server.peer())
        assert client.n_idle == 0
        assert await read_whole(await ask(client, server)) == b"hello"


async def test_what_comes_unasked_ends_the_connection() -> None:
    server = Server()
    async with serving(server) as client:
        await read_whole(await ask(client, server))
        peer = await server.peer()
        peer.transport.write(WHOLE.replace(b"hello", b"wrong"))
        await ended(peer)
        assert await read_whole(await ask(client, server)) == b"hello"


async def test_a_connection_that_the_server_has_closed_is_not_used() -> None:
    server = Server()
    async with serving(server) as client:
        await read_whole(await ask(client, server))
        peer = await server.peer()
        peer.transport.close()
        await ended(peer)
        while client.n_idle:
            await asyncio.sleep(0)
        assert await read_whole(await ask(client, server)) == b"hello"


BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n%b\r\nbusy"


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("sent", [BUSY % b"Connection: close\r\n", BUSY % b"", BUSY[:30], b"x" * (MAX_EARLY_BYTES + 1)])
async def test_a_response_that_comes_before_its_request_is_read(sent: bytes, closes: bool) -> None:
    has_come = asyncio.Event()

    class Early(Peer):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.write(sent)
            if closes:
                transport.close()

    async def connect_late(factory: Factory, host: str, port: int, context: ssl.SSLContext | None) -> Connection:
        """The connection is used when everything has come."""
        made = await connect(factory, host, port, context)
        while made.is_open and (closes or len(made._early) < len(sent)):
            await asyncio.sleep(0)
        has_come.set()
        return made

    server = Server()
    client = HttpClient(connect_late, time.monotonic)
    listening = await asyncio.get_running_loop().create_server(lambda: Early(server), "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    asked = asyncio.ensure_future(ask(client, server))
    async with asyncio.timeout(WAIT_S):
        await has_come.wait()
        if sent.endswith(b"busy"):
            answer = await asked
            assert (answer.status, await read_whole(answer)) == (503, b"busy")
        else:
            if len(sent) < MAX_EARLY_BYTES and not closes:
                (await server.peers.get()).transport.abort()
            with pytest.raises(Unreachable, match="closed"):
                await asked
        while client._peers:
            await asyncio.sleep(0)
    assert client.n_idle == 0
    await client.close()
    listening.close()


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5), st.integers(0, 1000))
def test_of_a_response_that_breaks_anywhere_what_has_come_is_read(parts: list[bytes], place: int) -> None:
    whole = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    sent = whole[: place % len(whole)]

    async def check() -> None:
        server = Server(b"")
        async with serving(server) as client:
            asked = asyncio.ensure_future(ask(client, server))
            peer = await server.peer()
            peer.transport.write(sent)
            peer.transport.close()
            found: list[bytes] = []
            with pytest.raises(Unreachable, match="closed"):
                await _read_all(asked, found)
            assert b"".join(found) == _body_of(sent[len(HEAD) :])
            assert client.n_idle == 0

    asyncio.run(check())


async def _read_all(asked: Awaitable[Answer], found: list[bytes]) -> None:
    answer = await asked
    while data := await answer.read():
        found.append(data)


def _body_of(chunks: bytes) -> bytes:
    """What is in chunks, of which the last one may be cut."""
    body = b""
    while chunks:
        size, end, chunks = chunks.partition(b"\r\n")
        if not end:
            break
        body += chunks[: int(size, 16)]
        chunks = chunks[int(size, 16) + 2 :]
    return body


async def test_no_http_is_an_error() -> None:
    server = Server(b"SSH-2.0-OpenSSH_9.2\r\n")
    async with serving(server) as client:
        with pytest.raises(Unreachable, match="no HTTP response"):
            await ask(client, server)
        await ended(await server.peer())


async def test_a_reader_that_stops_holds_the_sender_back() -> None:
    size = 32 << 20
    server = Server(b"")
    async with serving(server) as client:
        asked = asyncio.ensure_future(ask(client, server))
        peer = await server.peer()
        peer.transport.write(HEAD)
        part = b"%x\r\n%b\r\n" % (1 << 16, b"x" * (1 << 16))
        for _ in range(size >> 16):
            peer.transport.write(part)
        peer.transport.write(b"0\r\n\r\n")
        answer = await asked
        async with asyncio.timeout(WAIT_S):
            await peer.is_paused.wait()
            while (left := peer.transport.get_write_buffer_size()) != await _later(peer):
                pass
        assert 0 < left < size  # the rest is in the kernel's buffers, and:
        first = await answer.read()
        assert len(first) <= MAX_UNREAD_BYTES + MOST_RECEIVED
        assert len(first) + len(await read_whole(answer)) == size
        answer.close()
        assert client.n_idle == 1


async def _later(peer: Peer) -> int:
    """What is left to send after everything that could happen meanwhile has happened."""
    for _ in range(100):
        await asyncio.sleep(0)
    return peer.transport.get_write_buffer_size()


async def test_a_response_that_is_not_read_to_its_end_ends_its_connection() -> None:
    server = Server(HEAD + b"5\r\nhello\r\n")
    async with serving(server) as client:
        answer = await ask(client, server)
        assert await answer.read() == b"hello"
        answer.close()
        await ended(await server.peer())
        with pytest.raises(Unreachable, match="closed"):
            await answer.read()
        assert client.n_idle == 0


async def test_a_caller_that_leaves_ends_the_connection() -> None:
    server = Server(b"")
    async with serving(server) as client:
        asked = asyncio.ensure_future(ask(client, server))
        peer = await server.peer()
        asked.cancel()
        await ended(peer)
        assert asked.cancelled()


async def test_a_request_or_an_answer_is_aborted_with_a_reason() -> None:
    server = Server(b"")
    async with serving(server) as client:
        opening = Opening()
        asked = asyncio.ensure_future(opening.answer(ask(client, server)))
        peer = await server.peer()
        opening.abort("the agent has died")
        opening.abort("again")
        with pytest.raises(Unreachable, match="^the agent has died$"):
            await asked
        assert not asked.cancelled()
        await ended(peer)
        # The caller's own end is another thing.
        opening = Opening()
        asked = asyncio.ensure_future(opening.answer(ask(client, server)))
        await server.peer()
        opening.abort("the agent has died")
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

        server.answer = HEAD + b"5\r\nhello\r\n"
        answer = await ask(client, server)
        reading = asyncio.ensure_future(read_whole(answer))
        peer = await server.peer()
        answer.abort("the agent has died")
        with pytest.raises(Unreachable, match="^the agent has died$"):
            await reading
        await ended(peer)


async def test_the_time_for_a_head_is_bounded() -> None:
    server = Server()
    async with serving(server) as client:
        await read_whole(await ask(client, server))
        peer = await server.peer()
        server.answer = b""
        with pytest.raises(Unreachable, match=r"no answer within 0.05 s"):
            await ask(client, server, timeout_s=0.05)
        await ended(peer)


async def test_kept_connections_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_IDLE", 2)
    server = Server()
    async with serving(server) as client:
        answers = await asyncio.gather(*(ask(client, server) for _ in range(5)))
        assert [await read_whole(one) for one in answers] == 5 * [b"hello"]
        assert client.n_idle == 2
        monkeypatch.setattr(http_client, "IDLE_S", 0.0)
        client._expire()
        for _ in range(5):
            await ended(await server.peer())
        assert client.n_idle == 0 and not client._peers


async def test_a_large_request_is_sent_whole() -> None:
    server = Server(b"")
    body = bytes(range(256)) * 20_000
    async with serving(server) as client:
        asked = asyncio.ensure_future(ask(client, server, body))
        peer = await server.peer()
        head, _, sent = peer.received.partition(b"\r\n\r\n")
        assert sent == body and head.startswith(b"POST /v1/generate HTTP/1.1\r\nHost: 127.0.0.1:")
        peer.transport.write(WHOLE)
        assert await read_whole(await asked) == b"hello"


async def test_a_host_that_takes_no_connection_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    client = HttpClient(connect, time.monotonic)
    for url in (f"http://127.0.0.1:{port}/", "ftp://127.0.0.1/", "http://", "http://a@127.0.0.1/", "http://[::1/"):
        with pytest.raises(Unreachable):
            await client.open("GET", url, {}, b"", agent_id="one")
    await client.close()


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("http://127.0.0.1:1/a b", {}),
        ("http://127.0.0.1:1/\ud800", {}),
        ("http://127.0.0.1:1/", {"A": "b\r\nC: d"}),
        ("http://127.0.0.1:1/", {"A": "\ud800"}),
        (f"http://{'a' * 64}.test:1/", {}),
    ],
)
async def test_a_request_that_cannot_be_sent_is_unreachable(url: str, headers: dict[str, str]) -> None:
    client = HttpClient(connect, time.monotonic)
    with pytest.raises(Unreachable):
        await client.open("GET", url, headers, b"", agent_id="one")
    await client.close()


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "POST"])
async def test_a_request_on_a_kept_connection_that_is_lost_is_sent_once_more(method: str) -> None:
    server = Server()
    async with serving(server) as client:
        await read_whole(await ask(client, server))
        peer = await server.peer()
        server.answer = b""
        peer.has_request.clear()
        url, headers = f"http://127.0.0.1:{server.port}/", {"Content-Length": "0"} if method != "POST" else {}
        asked = asyncio.ensure_future(client.open(method, url, headers, b"", agent_id="one"))
        async with asyncio.timeout(WAIT_S):
            await peer.has_request.wait()
            peer.transport.abort()
            if method == "POST":  # the engine may have begun it
                with pytest.raises(Unreachable, match="closed"):
                    await asked
                assert server.peers.empty()
                return
            again = await server.peer()
            again.transport.abort()
            with pytest.raises(Unreachable, match="closed"):  # not a third time
                await asked
            assert server.peers.empty()


async def test_a_client_that_is_closed_ends_its_requests() -> None:
    server = Server(b"")
    async with serving(server) as client:
        asked = asyncio.ensure_future(ask(client, server))
        await server.peer()
        server.answer = HEAD + b"5\r\nhello\r\n"
        answer = await ask(client, server)
        assert await answer.read() == b"hello"
        reading = asyncio.ensure_future(answer.read())
        await asyncio.sleep(0)
        await client.close()
        async with asyncio.timeout(WAIT_S):
            for waiting in (asked, reading, ask(client, server)):
                with pytest.raises(Unreachable, match="^the client was closed$"):
                    await waiting


async def test_the_addresses_of_a_host_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    server, loop = Server(), asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def two(host: str, port: int, **options: int) -> list[object]:
        return [*(await resolve("127.0.0.2", port, **options)), *(await resolve("127.0.0.1", port, **options))]

    async with serving(server) as client:  # which listens at one of them alone
        monkeypatch.setattr(loop, "getaddrinfo", two)
        answer = await client.open("POST", f"http://engine:{server.port}/", {}, b"x", agent_id="one")
        assert await read_whole(answer) == b"hello"


async def test_an_attempt_that_ends_late_does_not_end_the_next_one() -> None:
    async def connect_twice(factory: Factory, host: str, port: int, context: ssl.SSLContext | None) -> Connection:
        loop = asyncio.get_running_loop()
        first, _ = await loop.create_connection(factory, host, port)
        _, second = await loop.create_connection(factory, host, port)
        first.abort()
        await asyncio.sleep(0)  # its protocol receives the end
        return second

    server = Server()
    async with serving(server):
        client = HttpClient(connect_twice, time.monotonic)
        assert await read_whole(await ask(client, server)) == b"hello"
        await client.close()


FIELD = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20)


@given(st.dictionaries(st.from_regex(r"[A-Za-z-]{1,12}", fullmatch=True), FIELD, max_size=5), st.integers(0, 9))
def test_heads_have_the_fields_that_were_given(headers: dict[str, str], n_body: int) -> None:
    head = request_head("POST", "/v1/x?a=b", "host:1", headers, n_body)
    lines = head.decode().removesuffix("\r\n\r\n").split("\r\n")
    assert lines == [
        "POST /v1/x?a=b HTTP/1.1",
        "Host: host:1",
        *(f"{name}: {value}" for name, value in headers.items()),
        f"Content-Length: {n_body}",
    ]


@given(FIELD, st.sampled_from(["\r\n", "\n", "\r", "\0", "\r\n\r\n"]), FIELD)
def test_no_field_can_add_another_one(before: str, evil: str, after: str) -> None:
    makers: list[Callable[[str], bytes]] = [
        lambda value: request_head("GET", "/", "host", {"A": value, "B": "c"}, 0),
        lambda value: request_head("GET", "/", "host", {"A": "b", value: "c"}, 0),
        lambda value: request_head("GET", "/" + value, "host", {}, 0),
    ]
    for make in makers:
        with pytest.raises(ValueError):
            make(before + evil + after)
