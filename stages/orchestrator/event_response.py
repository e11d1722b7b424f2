"""The response of a stream to its client. Its head and events go to the connection as they come, without aiohttp.

A client may read slowly: the engine's stream is held while `BUFFERED_BYTES` wait, and the connection ends only if the
client accepts less than `MIN_READ_BYTES` in `WRITE_TIMEOUT_S` then. The gateway has the same bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from typing import Any, Self

from aiohttp import HttpVersion11, web

from pipeline.api import sse
from pipeline.api.error_response import last_events
from pipeline.api.json_body import CONTENT_TYPE
from pipeline.errors import StarlingError
from pipeline.ipc.tcp_transport import tcp_state
from stages.orchestrator.slots import hold_answer

BEGUN = web.RequestKey("begun", bool)
IN_EVENTS = web.RequestKey("in_events", bool)  # a chunk with a comment may be sent: between the head and the end

WRITE_TIMEOUT_S = 30.0  # in which a client must accept
MIN_READ_BYTES = 32 << 10  # of what is buffered for it
BUFFERED_BYTES = 256 << 10  # written and not yet read by the client, before an engine's stream is held
UNDRAINED_BYTES = 16 << 10  # of them, when the stream ends: the client's next request waits while there are more


class _Sent(web.StreamResponse):
    """What aiohttp gets of the response: all of it has been sent."""

    def __init__(self, status: int, *, keeps_connection: bool) -> None:
        super().__init__(status=status)
        self._keeps_connection = keeps_connection

    @property
    def keep_alive(self) -> bool:
        """Whether the connection takes another request."""
        return self._keeps_connection

    async def prepare(self, request: web.BaseRequest) -> None:
        """Called by aiohttp, instead of sending the head."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Called by aiohttp, instead of sending the end."""


class EventResponse:
    """The `Out` of one request for a stream."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        *,
        is_anthropic: bool = False,
        is_last: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        """`headers`: of the response, besides those of its form. `is_last`: the connection closes after it.

        `is_anthropic`: the form of errors. `silent_s`: without a byte, at most; 0: for any time. Until the `with`
        statement ends, or the response.
        """
        self.is_begun = False
        self._request = request
        self._headers = headers
        self._is_anthropic = is_anthropic
        self._status = 200
        self._is_chunked = request.version >= HttpVersion11
        self._keeps_connection = self._is_chunked and request.keep_alive and not is_last
        self._prepared = ""  # the head of status 200, without its last field
        self._head = b""  # until it is sent
        self._silent_s = silent_s
        self._is_silent = False  # nothing was sent since the last look
        self._timer: asyncio.TimerHandle | None = None
        self._look_later()
        asyncio.get_running_loop().call_soon(self._prepare)  # when the request is on its way to an engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_looks()

    def _end_looks(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        if self._silent_s:  # two looks in the time, so that no clock is read for an event
            self._timer = asyncio.get_running_loop().call_later(self._silent_s / 2, self._look)

    def _look(self) -> None:
        """Send a comment if nothing was sent since the last look, and nothing waits."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return
        if self._is_silent and not transport.get_write_buffer_size():
            if not self.is_begun:
                self.begin(200, {})
            self._send(transport, sse.COMMENT)
        else:
            self._is_silent = True
        self._look_later()

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Prepare the head. The first event, or the next round of the event loop, sends it."""
        self._status = status
        if status != 200 or not self._prepared:
            self._prepare(status)
        self._head = f"{self._prepared}Date: {date_field(int(time.time()))}\r\n\r\n".encode()
        self.is_begun = self._request[BEGUN] = True
        asyncio.get_running_loop().call_soon(self._send_head)  # unless events follow before the task waits

    def _prepare(self, status: int = 200) -> None:
        own = "".join([f"{name}: {value}\r\n" for name, value in self._headers.items()])
        self._prepared = _head_begin(status, self._is_chunked, self._keeps_connection) + own

    def _send_head(self) -> None:
        transport = self._request.transport
        if self._head and transport is not None and not transport.is_closing():  # else `write` reports it
            self._send(transport, b"")

    def _send(self, transport: asyncio.Transport, data: bytes) -> None:
        self._is_silent = False
        if data and self._is_chunked:  # what came from the engine at once is one chunk
            data = sse.http_chunk(data)
        head, self._head = self._head, b""
        if head:
            data = head + data
            self._request.writer.output_size = len(head)  # tells aiohttp that no other response may follow
            self._request[IN_EVENTS] = self._is_chunked
        transport.write(data)

    def write_now(self, data: bytes) -> bool:
        """See `Out`."""
        transport = self._request.transport
        if (
            transport is None
            or transport.is_closing()
            or transport.get_write_buffer_size() + len(data) >= BUFFERED_BYTES
        ):
            return False
        self._send(transport, data)
        return True

    async def write(self, data: bytes) -> None:
        """Send events. Raises `ConnectionResetError` if the client has left or does not read."""
        transport = self._open_transport()
        self._send(transport, data)
        if transport.get_write_buffer_size() >= BUFFERED_BYTES:
            await while_read(transport, self._request.writer.drain())

    def _open_transport(self) -> asyncio.Transport:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        return transport

    async def fail(self, error: StarlingError, open_choices: Sequence[int]) -> None:
        """Send the last events, with the error."""
        name = self._headers.get("X-Request-Id", "")
        await self.write(last_events(error, open_choices, is_anthropic=self._is_anthropic, request_id=name))

    async def end(self) -> web.StreamResponse:
        """Send the end, and wait until little is buffered. Raises `ConnectionResetError` as `write` does."""
        self._end_looks()
        transport = self._open_transport()
        if self._head:
            self._send(transport, b"")
        self._request[IN_EVENTS] = False
        if self._is_chunked:
            transport.write(b"0\r\n\r\n")
        if transport.get_write_buffer_size() >= UNDRAINED_BYTES:
            await while_read(transport, self._request.writer.drain())
        return _Sent(self._status, keeps_connection=self._keeps_connection)


@lru_cache(maxsize=64)
def _head_begin(status: int, is_chunked: bool, keeps_connection: bool) -> str:
    """The lines of a head that do not depend on the request."""
    fields = dict(sse.HEADERS)
    if is_chunked:
        fields["Transfer-Encoding"] = "chunked"
        if not keeps_connection:
            fields["Connection"] = "close"
    first = f"HTTP/1.{int(is_chunked)} {status} {web.StreamResponse(status=status).reason}\r\n"
    return first + "".join([f"{name}: {value}\r\n" for name, value in fields.items()])


@lru_cache(maxsize=1)
def date_field(seconds: int) -> str:
    """The field of a time, s since 1970."""
    return formatdate(seconds, usegmt=True)


async def send_whole(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Send a large whole answer now, while its request is counted, and wait as for a stream. A small one follows later.

    Raises `ConnectionResetError` if the client does not read, or has left.
    """
    if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
        return response
    if len(response.body) < UNDRAINED_BYTES:
        return response
    request[BEGUN] = True
    if (send := getattr(request, "send", None)) is not None:  # a `PlainRequest`'s
        await send(response)
        return response
    await response.prepare(request)
    if request.transport is None:
        raise ConnectionResetError("the client has disconnected")
    await while_read(request.transport, response.write_eof())
    return response


async def send_stored(request: web.Request, body: bytes) -> web.StreamResponse:
    """Send what is stored as `send_whole` does; its bytes count meanwhile. Raises `Overloaded`, too."""
    hold_answer(len(body))
    return await send_whole(request, web.Response(body=body, content_type=CONTENT_TYPE))


async def while_read(transport: asyncio.Transport, drained: Coroutine[Any, Any, None]) -> None:
    """Wait for `drained` while the client reads. Raises `ConnectionResetError` if it does not, or has left."""
    # A task of its own: aiohttp cannot wait for the same connection again once such a wait was cancelled.
    task = asyncio.ensure_future(drained)
    try:
        accepted = accepted_bytes(transport)
        while not (await asyncio.wait((task,), timeout=WRITE_TIMEOUT_S))[0]:
            before, accepted = accepted, accepted_bytes(transport)
            if accepted - before < MIN_READ_BYTES:
                transport.abort()
                raise ConnectionResetError("the client does not read")
        await task
    finally:
        task.cancel()


def accepted_bytes(transport: asyncio.Transport) -> int:
    """A number that rises by each byte that the client's host accepts."""
    # What the kernel takes comes in large steps: it has buffers of some MB.
    state = tcp_state(transport)
    return state.acknowledged if state is not None else -transport.get_write_buffer_size()
