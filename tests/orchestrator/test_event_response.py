"""The response of a stream: its head comes with the first events, or without them, and every byte once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from stages.orchestrator import event_response
from stages.orchestrator.event_response import BUFFERED_BYTES, MIN_READ_BYTES, UNDRAINED_BYTES, EventResponse
from stages.orchestrator.http_response import ResponseReader

WAIT_S = 300.0
HEADERS = {"X-Starling-Request": "req-1"}
accepted_bytes = event_response.accepted_bytes


class Stream:
    """A server of one stream. The parts are put into `parts`; b"" ends it."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self.written = 0
        self.failure: BaseException | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = EventResponse(request, HEADERS)
        response.begin(200, {})
        try:
            while part := await self.parts.get():
                await response.write(part)
                self.written += len(part)
            return await response.end()
        except BaseException as error:
            self.failure = error
            raise


@contextlib.asynccontextmanager
async def streaming(version: bytes) -> AsyncIterator[tuple[Stream, asyncio.StreamReader, asyncio.StreamWriter]]:
    stream, app = Stream(), web.Application()
    app.router.add_get("/", stream.answer)
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/" + version + b"\r\nHost: a\r\n\r\n")
        try:
            yield stream, reader, writer
        finally:
            stream.parts.put_nowait(b"")
            writer.close()


SIZES = [1, 100, UNDRAINED_BYTES, UNDRAINED_BYTES + 1, 3 * BUFFERED_BYTES]


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("is_early", [False, True])
async def test_every_byte_comes_once_behind_one_head(first: int, is_early: bool) -> None:
    parts = [bytes([number]) * size for number, size in enumerate([first, *SIZES])]
    async with streaming(b"1.1") as (stream, client, _), asyncio.timeout(WAIT_S):
        received = ResponseReader("GET")
        if is_early:  # no event is there yet
            while not received.status:
                assert not received.feed(await client.read(1 << 16))
        for part in (*parts, b""):
            stream.parts.put_nowait(part)
        body = b""
        while not received.has_ended:
            body += received.feed(await client.read(1 << 16))
        assert body == b"".join(parts) and received.fields["X-Starling-Request"] == "req-1"
        assert received.keeps_connection


@pytest.mark.parametrize("error", [RuntimeError("a fault"), ConnectionError("the store has gone")])
async def test_after_an_error_no_other_response_follows_in_the_stream(error: Exception) -> None:
    async def fail(request: web.Request) -> web.StreamResponse:
        response = EventResponse(request, HEADERS)
        response.begin(200, {})
        await response.write(b"data: 1\n\n")
        raise error

    app = web.Application()
    app.router.add_get("/", fail)
    async with TestServer(app) as server, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.endswith(b"data: 1\n\n\r\n")


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async with streaming(b"1.0") as (stream, client, _), asyncio.timeout(WAIT_S):
        for part in (b"data: 1\n\n", b"data: 2\n\n", b""):
            stream.parts.put_nowait(part)
        head, _, body = (await client.read()).partition(b"\r\n\r\n")
        assert body == b"data: 1\n\ndata: 2\n\n" and b"chunked" not in head


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_client_for_whom_nothing_comes_gets_comments(version: bytes) -> None:
    may_go_on = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        with EventResponse(request, HEADERS, silent_s=0.001) as response:
            await may_go_on.wait()
            assert response.is_begun
            await response.write(b"data: 1\n\n")
            return await response.end()

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/" + version + b"\r\nHost: a\r\nConnection: close\r\n\r\n")
        received = b""
        while received.count(b":\n") < 3:
            part = await reader.read(1 << 16)
            assert part, received
            received += part
        may_go_on.set()
        received += await reader.read()
        writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    if version == b"1.1":
        body = ResponseReader("GET").feed(received)
    assert b"X-Starling-Request: req-1" in head and body.lstrip(b":\n") == b"data: 1\n\n"


async def test_a_client_that_does_not_read_is_waited_for() -> None:
    part = b"x" * BUFFERED_BYTES
    async with streaming(b"1.1") as (stream, _, writer), asyncio.timeout(WAIT_S):
        for _ in range(200):
            stream.parts.put_nowait(part)
        while stream.parts.qsize() != await _later(stream):  # until nothing more is taken
            pass
        assert 0 < stream.written < 200 * len(part)
        writer.transport.abort()
        while stream.failure is None:
            await asyncio.sleep(0)
        assert isinstance(stream.failure, ConnectionError | asyncio.CancelledError)


class SlowClient:
    """A client of one stream that reads only when the server looks whether it does."""

    def __init__(self, *, waits_at_end: bool, reads: bool) -> None:
        self.waits_at_end = waits_at_end
        self.reads = reads
        self.received = b""
        self.n_looks = self.written = 0
        self.failure: BaseException | None = None
        self.has_ended = asyncio.Event()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)

    def accepted_bytes(self, transport: asyncio.Transport) -> int:
        """As in the module, after the client has read until as much as it must read was accepted."""
        self.n_looks += 1
        before = accepted_bytes(transport)
        while self.reads and accepted_bytes(transport) - before < MIN_READ_BYTES:
            with contextlib.suppress(BlockingIOError):
                self.received += self.socket.recv(1 << 12)
        return accepted_bytes(transport)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The server's handler."""
        response, transport = EventResponse(request, HEADERS), request.transport
        assert transport is not None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
        most = BUFFERED_BYTES // 2 if self.waits_at_end else 1 << 30
        try:
            response.begin(200, {})
            while transport.get_write_buffer_size() < most and self.written < 4 * BUFFERED_BYTES:
                part = UNDRAINED_BYTES if self.waits_at_end else 2 * BUFFERED_BYTES
                await response.write(b"x" * part)
                self.written += part
            return await response.end()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.has_ended.set()


@pytest.mark.parametrize("waits_at_end", [False, True])
@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_may_read_slowly_but_must_read(
    waits_at_end: bool, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, app, loop = SlowClient(waits_at_end=waits_at_end, reads=reads), web.Application(), asyncio.get_running_loop()
    monkeypatch.setattr(event_response, "WRITE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(event_response, "accepted_bytes", slow.accepted_bytes)
    app.router.add_get("/", slow.answer)
    async with TestServer(app) as server, asyncio.timeout(WAIT_S):
        with slow.socket as client:
            client.connect(("127.0.0.1", server.port))
            client.setblocking(False)
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await slow.has_ended.wait()
            if not reads:
                assert (
                    isinstance(slow.failure, ConnectionResetError) and str(slow.failure) == "the client does not read"
                )
                assert slow.n_looks == 2
                return
            assert slow.failure is None and slow.n_looks > 3  # it was waited for again and again
            response = ResponseReader("GET")
            body = response.feed(slow.received)
            while not response.has_ended:
                body += response.feed(await loop.sock_recv(client, 1 << 16))
            assert body == slow.written * b"x"


async def _later(stream: Stream) -> int:
    for _ in range(1000):
        await asyncio.sleep(0)
    return stream.parts.qsize()
