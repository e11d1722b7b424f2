"""The response of a stream: its head comes with the first events, or without them, and every byte once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from stages.orchestrator.forward import Forward
from stages.orchestrator.front import Ticket
from stages.orchestrator.http_app import BUFFERED_BYTES, UNDRAINED_BYTES, _Response
from stages.orchestrator.http_response import ResponseReader
from tests.orchestrator.agents import request as routed

WAIT_S = 300.0


class Stream:
    """A server of one stream. The parts are put into `parts`; b"" ends it."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self.written = 0
        self.failure: BaseException | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        forward = Forward(routed=routed(), path="/", body=b"", headers={})
        response = _Response(request, Ticket(forward, "mine"))
        await response.begin(200, {})
        try:
            while part := await self.parts.get():
                await response.write(part)
                self.written += len(part)
        except BaseException as error:
            self.failure = error
            raise
        return await response.end()


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


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async with streaming(b"1.0") as (stream, client, _), asyncio.timeout(WAIT_S):
        for part in (b"data: 1\n\n", b"data: 2\n\n", b""):
            stream.parts.put_nowait(part)
        head, _, body = (await client.read()).partition(b"\r\n\r\n")
        assert body == b"data: 1\n\ndata: 2\n\n" and b"chunked" not in head


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


async def _later(stream: Stream) -> int:
    for _ in range(1000):
        await asyncio.sleep(0)
    return stream.parts.qsize()
