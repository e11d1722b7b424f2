"""The response of a stream to its client. Its bytes go to the connection as they come, without aiohttp's buffers.

A client may read slowly: the engine's stream is held while `BUFFERED_BYTES` wait, and the connection ends only if the
client accepts less than `MIN_READ_BYTES` in `WRITE_TIMEOUT_S` then. The gateway has the same bound.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from pipeline.api import sse
from pipeline.api.error_response import error_event
from pipeline.errors import StarlingError
from pipeline.ipc.tcp_transport import tcp_state

BEGUN = web.RequestKey("begun", bool)

WRITE_TIMEOUT_S = 30.0  # in which a client must accept
MIN_READ_BYTES = 32 << 10  # of what is buffered for it
BUFFERED_BYTES = 256 << 10  # written and not yet read by the client, before an engine's stream is held
UNDRAINED_BYTES = 16 << 10  # that follow the head at once: after 64 KiB aiohttp would wait for the client


class _EventStream(web.StreamResponse):
    """Its head waits for the first events: often both have come at once, and make one packet."""

    _send_headers_immediately = False


class EventResponse:
    """The `Out` of one request for a stream."""

    def __init__(self, request: web.Request, request_id: str) -> None:
        self.is_begun = False
        self._request = request
        self._request_id = request_id
        self._response = _EventStream()
        self._is_chunked = request.version >= HttpVersion11
        self._writer: AbstractStreamWriter | None = None
        self._is_head_sent = False

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Prepare the head. The first event, or the next round of the event loop, sends it."""
        response = self._response
        response.set_status(status)
        response.headers.update(sse.HEADERS)
        response.headers["X-Starling-Request"] = self._request_id
        if not self._is_chunked:
            response.force_close()
        self.is_begun = self._request[BEGUN] = True
        self._writer = await response.prepare(self._request)
        asyncio.get_running_loop().call_soon(self._send_head)  # unless events follow before the task waits

    def _send_head(self) -> None:
        if self._writer is not None and not self._is_head_sent:
            self._is_head_sent = True
            with contextlib.suppress(ConnectionError):  # `write` reports it
                self._writer.send_headers()

    async def write(self, data: bytes) -> None:
        """Send events. Raises `ConnectionResetError` if the client has left or does not read."""
        transport, writer = self._request.transport, self._writer
        if transport is None or writer is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        if not self._is_head_sent:
            self._is_head_sent = True
            await writer.write(data[:UNDRAINED_BYTES])
            data = data[UNDRAINED_BYTES:]
        if data:  # what came from the engine at once is one chunk
            transport.write(sse.http_chunk(data) if self._is_chunked else data)
        if transport.get_write_buffer_size() >= BUFFERED_BYTES:
            await _while_read(transport, writer.drain())

    async def fail(self, error: StarlingError) -> None:
        """Send an event with the error."""
        await self.write(sse.event(error_event(error, [0])))

    async def end(self) -> web.StreamResponse:
        """Send the end, and wait until little is buffered. Raises `ConnectionResetError` as `write` does."""
        transport = self._request.transport
        if transport is None or transport.get_write_buffer_size() < UNDRAINED_BYTES:
            await self._response.write_eof()  # which does not wait: asyncio's bounds are 16 KiB and 64 KiB
        else:
            await _while_read(transport, self._response.write_eof())
        return self._response


async def _while_read(transport: asyncio.Transport, drained: Coroutine[Any, Any, None]) -> None:
    """Wait for `drained` while the client reads. Raises `ConnectionResetError` if it does not, or has left."""
    # A task of its own: aiohttp cannot wait for the same connection again once such a wait was cancelled.
    task = asyncio.ensure_future(drained)
    try:
        accepted = _accepted_bytes(transport)
        while not (await asyncio.wait((task,), timeout=WRITE_TIMEOUT_S))[0]:
            before, accepted = accepted, _accepted_bytes(transport)
            if accepted - before < MIN_READ_BYTES:
                transport.abort()
                raise ConnectionResetError("the client does not read")
        await task
    finally:
        task.cancel()


def _accepted_bytes(transport: asyncio.Transport) -> int:
    """A number that rises by each byte that the client's host accepts."""
    # What the kernel takes comes in large steps: it has buffers of some MB.
    state = tcp_state(transport)
    return state.acknowledged if state is not None else -transport.get_write_buffer_size()
