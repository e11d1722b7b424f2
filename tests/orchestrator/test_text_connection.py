"""Plain requests for text are answered without aiohttp, everything else with it, on the same connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import HttpRequestParser
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.forwarded import TrustedProxies
from stages.orchestrator import client_connections, event_response, text_connection
from stages.orchestrator.client_connections import ClientConnections
from stages.orchestrator.event_response import BUFFERED_BYTES, EventResponse
from stages.orchestrator.http_app import REQUEST_ID
from stages.orchestrator.http_response import ResponseReader
from stages.orchestrator.text_connection import PlainRequest, TextServer
from stages.orchestrator.text_request import MAX_BODY_BYTES, MAX_FIELDS, MAX_HEAD_BYTES, read_head

WAIT_S = 300.0
PATH = "/v1/generate"
HOST = b"Host: a\r\n"
LARGE_BYTES = 40_000_000  # more than the kernel holds of a connection
THE_OTHERS = b"A: 1\r\nA: 2\r\n"  # a request with them is aiohttp's


def request(body: bytes = b"hello", fields: bytes = b"", method: bytes = b"POST", path: bytes = PATH.encode()) -> bytes:
    return b"%b %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n%b" % (method, path, HOST, fields, len(body), body)


class Site:
    """An application whose handler sends the body back, and says who has read the request."""

    def __init__(self) -> None:
        self.port = 0
        self.server: TextServer
        self.begun: asyncio.Queue[Any] = asyncio.Queue()
        self.ended: asyncio.Queue[BaseException | None] = asyncio.Queue()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_plain = isinstance(request, PlainRequest)
        body = request.content.read_nowait() if is_plain else await request.read()
        request[REQUEST_ID] = "r-1"
        self.begun.put_nowait(request)
        failure: BaseException | None = None
        try:
            if body == b"wait":
                await asyncio.get_running_loop().create_future()
            if body == b"fail":
                raise RuntimeError("a fault")
            if body == b"quiet stream":  # its head is sent, and no event follows
                quiet = EventResponse(request, {"By": "stream"})
                quiet.begin(200, {})
                await quiet.write(b": begun\n\n")
                await asyncio.get_running_loop().create_future()
            if body == b"stream":
                response = EventResponse(request, {"By": "stream"})
                response.begin(200, {})
                for _ in range(8):
                    await response.write(b"x" * BUFFERED_BYTES)
                return await response.end()
            if body == b"large":
                body *= LARGE_BYTES // 5
            by = "plain" if is_plain else "aiohttp"
            return web.Response(body=body, headers={"By": by, "Seen": request.headers.get("seen", "")})
        except BaseException as error:
            failure = error
            raise
        finally:
            self.ended.put_nowait(failure)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._rest = b""

    async def answer(self) -> tuple[int, str, bytes]:
        """Status, who has answered, and the body of the next answer."""
        read, body = ResponseReader("POST"), b""
        while not read.has_ended:
            data, self._rest = self._rest or await self.reader.read(1 << 16), b""
            assert data, "the connection was closed"
            # Of answers that come together, one at a time.
            for at in range(len(data)):
                body += read.feed(data[at : at + 1]) if len(data) < 4096 else read.feed(data[at:])
                if read.has_ended or len(data) >= 4096:
                    self._rest = data[at + 1 :] if len(data) < 4096 else b""
                    break
        return read.status, read.fields.get("By", ""), body


@contextlib.asynccontextmanager
async def serving(clients: ClientConnections | None = None) -> AsyncIterator[tuple[Site, Client]]:
    site, app, clients = Site(), web.Application(), clients if clients is not None else ClientConnections(64, 64)
    app.router.add_post(PATH, site.handle)
    app.router.add_get(PATH, site.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    assert runner.server is not None
    site.server = TextServer(app, runner.server, {PATH: "generate"}, site.handle, clients)
    listening = await asyncio.get_running_loop().create_server(site.server, "127.0.0.1", 0)
    site.port = listening.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    try:
        async with asyncio.timeout(WAIT_S):
            yield site, Client(reader, writer)
    finally:
        writer.close()
        listening.close()
        await site.server.close(0.0)
        await runner.cleanup()
        assert not site.server.connections


@given(st.lists(st.integers(0, 400), max_size=4), st.integers(1, 3))
def test_however_requests_are_cut_each_is_answered(places: list[int], count: int) -> None:
    async def check() -> None:
        async with serving() as (_, client):
            for number in range(count):
                data = request(b"%d" % number, b"Seen: yes\r\n")
                bounds = [0, *sorted(place % len(data) for place in places), len(data)]
                for begin, end in itertools.pairwise(bounds):
                    client.writer.write(data[begin:end])
                    await asyncio.sleep(0)
                status, _, body = await client.answer()
                assert (status, body) == (200, b"%d" % number)

    asyncio.run(check())


async def test_a_head_and_its_body_that_come_one_after_the_other_are_a_plain_request() -> None:
    async with serving() as (site, client):
        data = request(b"hello")
        client.writer.write(data[:-5])
        for _ in range(20):  # rounds of the loop, in which the head is received
            await asyncio.sleep(0)
        assert site.begun.empty()
        client.writer.write(b"hello")
        assert await client.answer() == (200, "plain", b"hello")
        client.writer.write(request(b"again"))
        assert await client.answer() == (200, "plain", b"again")


@pytest.mark.parametrize(
    "data",
    [
        request(b"", method=b"GET"),
        b"POST %b HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" % (PATH.encode(), HOST),
        request(fields=b"Expect: 100-continue\r\n"),
        request(fields=b"A: 1\r\nA: 2\r\n"),
        request(path=PATH.encode() + b"?a=b"),
        request(fields=b"Long: " + b"x" * 6000 + b"\r\nLonger: " + b"x" * 6000 + b"\r\n"),
        request(b"x" * (MAX_BODY_BYTES + 1)),
    ],
)
async def test_other_requests_are_aiohttps(data: bytes) -> None:
    async with serving() as (_, client):
        client.writer.write(request(b"before"))
        assert await client.answer() == (200, "plain", b"before")
        client.writer.write(data)
        if b"Expect" in data:
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        status, by, _ = await client.answer()
        assert (status, by) == (200, "aiohttp")
        client.writer.write(request(b"after"))  # it stays there
        assert await client.answer() == (200, "aiohttp", b"after")


async def test_requests_that_come_together_are_answered_in_order() -> None:
    async with serving() as (_, client):
        client.writer.write(b"".join(request(b"%d" % number) for number in range(3)))
        assert [(await client.answer())[2] for _ in range(3)] == [b"0", b"1", b"2"]
        client.writer.write(request(b"4"))
        assert (await client.answer())[2] == b"4"


@pytest.mark.parametrize("data", [b"\0\n\n", request().replace(b"\r\n", b"\n"), request(fields=b"A b: c\r\n")])
async def test_what_is_no_http_is_refused_by_aiohttp(data: bytes) -> None:
    async with serving() as (site, client):
        client.writer.write(data)
        head = await client.reader.read(1 << 16)
        assert head.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400")) or b" 200 " in head
        assert site.begun.empty() or not isinstance(site.begun.get_nowait(), PlainRequest)


@pytest.mark.parametrize(("field", "reason"), [(b"A: " + b"x" * 9000, "8190 bytes"), (b"no colon", "not valid HTTP")])
async def test_malformed_http_is_refused_as_others_and_not_quoted(caplog: Any, field: bytes, reason: str) -> None:
    async with serving() as (_, client):
        client.writer.write(request(fields=b"Authorization: secret\r\n%b\r\n" % field))
        head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
    assert b" 400 " in head and b"\r\nContent-Type: application/json\r\n" in head and b"secret" not in body
    error = json.loads(body)["error"]
    assert error["code"] == "INVALID_REQUEST" and reason in error["message"]
    (line,) = caplog.records
    assert (line.levelname, line.message, line.client) == ("WARNING", "a client sent malformed HTTP", "127.0.0.1")
    assert line.exc_info is None


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with serving() as (site, client):
        client.writer.write(request(b"wait"))
        await site.begun.get()
        client.writer.transport.abort()
        assert isinstance(await site.ended.get(), asyncio.CancelledError)


async def test_a_request_that_waits_is_cancelled_at_the_end() -> None:
    async with serving() as (site, client):
        client.writer.write(request(b"wait"))
        await site.begun.get()
        await site.server.close(0.0)
        assert isinstance(await site.ended.get(), asyncio.CancelledError)
        with contextlib.suppress(ConnectionResetError):
            assert await client.reader.read() == b""


async def test_a_request_that_ends_in_time_is_answered_at_the_end() -> None:
    async with serving() as (site, client):
        client.writer.write(request(b"stream"))
        await site.begun.get()
        closing = asyncio.ensure_future(site.server.close(WAIT_S))
        received, body = ResponseReader("POST"), 0
        while not received.has_ended:
            body += len(received.feed(await client.reader.read(1 << 16)))
        assert body == 8 * BUFFERED_BYTES
        await closing


async def test_after_a_fault_the_connection_ends() -> None:
    async with serving() as (_, client):
        client.writer.write(request(b"fail"))
        with contextlib.suppress(ConnectionResetError):
            assert await client.reader.read() == b""


async def test_a_stream_waits_for_its_client_and_loses_nothing() -> None:
    async with serving() as (site, client):
        client.writer.write(request(b"stream"))
        await site.begun.get()
        received, body = ResponseReader("POST"), 0
        while not received.has_ended:
            body += len(received.feed(await client.reader.read(1 << 16)))
        assert body == 8 * BUFFERED_BYTES and received.fields["By"] == "stream"
        assert await site.ended.get() is None
        client.writer.write(request(b"after"))
        assert await client.answer() == (200, "plain", b"after")


async def test_much_that_comes_ahead_is_left_unread_until_the_answer() -> None:
    async with serving() as (site, client):
        client.writer.write(request(b"stream"))
        await site.begun.get()
        ahead = [request(b"%d" % number + b"y" * 60_000) for number in range(4)]
        client.writer.write(b"".join(ahead))
        received = ResponseReader("POST")
        rest = b""
        while not received.has_ended:
            data = await client.reader.read(1 << 16)
            at = data.find(b"HTTP/1.1 ", 1)
            if at > 0 and data[:at].endswith(b"0\r\n\r\n"):
                data, rest = data[:at], data[at:]
            received.feed(data)
        client._rest = rest
        while rest.count(b"HTTP/1.1 200") < 4:
            rest += await client.reader.read(1 << 16)
        assert [rest.find(b"%dyyy" % number) for number in range(4)] == sorted(
            rest.find(b"%dyyy" % number) for number in range(4)
        )


async def test_a_connection_without_requests_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_connection, "KEPT_S", 0.01)
    async with serving() as (_, client):
        assert await client.reader.read() == b""


async def test_a_request_whose_rest_does_not_come_is_aiohttps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_connection, "PART_S", 0.01)
    async with serving() as (site, client):
        data = request(b"hello")
        while not site.server.connections:  # until it is accepted
            await asyncio.sleep(0)
        client.writer.write(data[:-3])
        while site.server.connections:  # until it is handed over
            await asyncio.sleep(0)
        client.writer.write(data[-3:])
        assert await client.answer() == (200, "aiohttp", b"hello")


# ------------------------------------------------------------------ bounds, and the end


@pytest.mark.parametrize("fields", [b"", THE_OTHERS])
async def test_a_client_that_does_not_read_its_answer_loses_the_connection(
    monkeypatch: pytest.MonkeyPatch, fields: bytes
) -> None:
    monkeypatch.setattr(client_connections, "CHECK_S", 0.01)
    for module in (client_connections, event_response):
        monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.05)
    async with serving() as (site, client):
        client.writer.transport.pause_reading()
        client.writer.write(request(b"large", fields))
        await site.ended.get()
        while len(site.server.clients) or site.server.tasks or site.server.others:
            await asyncio.sleep(0)


async def test_a_connection_beyond_the_bound_is_refused() -> None:
    async with serving(ClientConnections(4, 1)) as (site, client):
        client.writer.write(request())
        assert (await client.answer())[0] == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()
        client.writer.write(request(fields=THE_OTHERS))  # it counts when it is aiohttp's, too
        assert await client.answer() == (200, "aiohttp", b"hello")
        assert len(site.server.clients) == 1
        client.writer.close()
        while len(site.server.clients):
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        other = Client(reader, writer)
        writer.write(request())
        assert (await other.answer())[0] == 200
        writer.close()


async def test_connections_of_a_trusted_proxy_are_bounded_in_total_only() -> None:
    """They are those of many clients."""
    clients = ClientConnections(3, 1, TrustedProxies(["127.0.0.2"]))
    async with serving(clients) as (site, client), contextlib.AsyncExitStack() as stack:

        async def connect(address: str) -> tuple[Client, bool]:
            """A connection from an address, and whether it was accepted."""
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port, local_addr=(address, 0))
            stack.callback(writer.close)
            other = Client(reader, writer)
            writer.write(request())
            return other, (await other.answer())[0] == 200

        client.writer.write(request())
        assert (await client.answer())[0] == 200
        for address, is_accepted in (("127.0.0.1", False), ("127.0.0.2", True), ("127.0.0.2", True)):
            assert (await connect(address))[1] is is_accepted
        assert not (await connect("127.0.0.2"))[1], "the total holds for proxies, too"


async def test_a_client_that_sends_no_more_gets_its_answer() -> None:
    async with serving() as (_, client):
        client.writer.write(request(b"stream"))
        client.writer.write_eof()
        received, body = ResponseReader("POST"), 0
        while not received.has_ended:
            data = await client.reader.read(1 << 16)
            assert data
            body += len(received.feed(data))
        assert body == 8 * BUFFERED_BYTES and await client.reader.read() == b""


@pytest.mark.parametrize(("body", "ahead"), [(b"wait", b""), (b"wait", request() * 2000), (b"quiet stream", b"")])
async def test_a_client_that_sends_no_more_and_leaves_ends_its_request(
    monkeypatch: pytest.MonkeyPatch, body: bytes, ahead: bytes
) -> None:
    for name in ("CHECK_S", "PROBE_S", "PROBE_AGAIN_S"):
        monkeypatch.setattr(client_connections, name, 0.01)
    async with serving() as (site, client):
        client.writer.write(request(body))
        await site.begun.get()
        if body == b"quiet stream":
            assert (await client.reader.readuntil(b": begun\n\n")).startswith(b"HTTP/1.1 200")
            await client.reader.readexactly(2)  # with bytes that were not read its host would send RST
        client.writer.write(ahead)
        client.writer.close()  # its host sends FIN, and RST for what is sent to it
        assert isinstance(await site.ended.get(), asyncio.CancelledError)


@pytest.mark.parametrize("fields", [b"", THE_OTHERS])
async def test_a_server_that_stops_ends_connections_without_requests(fields: bytes) -> None:
    async with serving() as (site, client):
        client.writer.write(request(fields=fields))
        assert (await client.answer())[0] == 200
        site.server.stop()
        assert await client.reader.read() == b""


async def test_the_last_answer_of_a_server_that_stops_says_so() -> None:
    async with serving() as (site, client):
        data = request()
        client.writer.write(data[:-1])
        while all(one.is_idle for one in site.server.connections):
            await asyncio.sleep(0)
        site.server.stop()
        client.writer.write(data[-1:])
        received = ResponseReader("POST")
        while not received.has_ended:
            received.feed(await client.reader.read(1 << 16))
        assert (received.status, received.fields["Connection"]) == (200, "close")
        assert await client.reader.read() == b""


async def test_a_request_that_has_not_begun_ends_with_its_connection() -> None:
    async with serving() as (site, client):
        while not site.server.connections:
            await asyncio.sleep(0)
        (one,) = site.server.connections
        one.data_received(request())
        one.end()
        assert await client.reader.read() == b""
        assert site.begun.empty()


async def test_no_request_is_taken_while_the_server_closes() -> None:
    async with serving() as (site, client):
        client.writer.write(request(b"wait"))
        await site.begun.get()
        closing = asyncio.ensure_future(site.server.close(0.2))
        client.writer.write(request(b"late"))
        await closing
        assert await client.reader.read() == b"" and site.begun.empty()


async def test_the_head_is_aiohttps() -> None:
    async with serving() as (_, client):
        heads = []
        for fields in (b"Seen: a\r\n", b"Seen: a\r\n" + THE_OTHERS):
            client.writer.write(request(b"hello", fields))
            head = (await client.reader.readuntil(b"\r\n\r\n")).replace(b": aiohttp", b": plain")
            assert await client.reader.readexactly(5) == b"hello"
            lines = [line for line in head.split(b"\r\n") if not line.startswith((b"Date", b"Server", b"X-Request"))]
            heads.append(lines)
        assert heads[0] == heads[1]


# ------------------------------------------------------------------ heads

NAMES = st.sampled_from(
    ["Seen", "a", "X-Request-Id", "content-type", "Authorization", "Connection", "Cookie", "TE", "Proxy-Connection"]
)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), max_size=20)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6), st.binary(max_size=40), st.sampled_from(["", " ", "\t "]))
def test_a_plain_request_is_what_aiohttp_reads(fields: list[tuple[str, str]], body: bytes, blank: str) -> None:
    data = request(body, b"".join(f"{name}:{blank}{value}{blank}\r\n".encode() for name, value in fields))
    head = read_head(data, (PATH,))
    if head is None:
        names = [name.lower() for name, _ in fields]
        assert (
            not body or len(set(names)) != len(names) or not {"te", "connection", "proxy-connection"}.isdisjoint(names)
        )
        return

    async def check() -> None:
        loop = asyncio.get_running_loop()
        parser = HttpRequestParser(BaseProtocol(loop), loop, 1 << 16)
        ((message, payload),), *_ = parser.feed_data(data)
        assert (message.method, message.path, message.should_close) == ("POST", PATH, False)
        found = [(name.lower(), value) for name, value in message.headers.items()]  # aiohttp spells some of them anew
        assert found == [(name.lower(), value) for name, value in head.fields]
        assert payload.read_nowait() == data[head.n_head :] == body and head.n_body == len(body)

    asyncio.run(check())


@pytest.mark.parametrize(
    "data",
    [
        request()[:20],
        request().replace(b"HTTP/1.1", b"HTTP/1.0"),
        request(fields=b"Connection: close\r\n"),
        request(fields=b"Proxy-Connection: close\r\n"),
        request(fields=b"Sec-WebSocket-Key1: a\r\n"),
        request(fields=b"Transfer-Encoding: chunked\r\n"),
        request(fields=b"Content-Length: 5\r\n"),
        request(fields=b"a: b\r\n c: d\r\n"),
        request(fields=b"a: b\rc: d\r\n"),
        request(fields=b"a: b\0\r\n"),
        request(fields=b"a : b\r\n"),
        request(fields=b"".join(b"a%d: b\r\n" % number for number in range(MAX_FIELDS))),
        request(fields=b"a: " + b"b" * MAX_HEAD_BYTES + b"\r\n"),
        request().replace(HOST, b""),
        request().replace(b"Content-Length: 5", b"Content-Length: +5"),
        request().replace(b"Content-Length: 5", b"Content-Length: 05"),
        request(path=b"/v1/models"),
        b"",
    ],
)
def test_nothing_else_is_plain(data: bytes) -> None:
    assert read_head(data, (PATH,)) is None
