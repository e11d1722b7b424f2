"""A client's connection while it has plain requests for text (text_request.py), which need nothing of aiohttp.

    TextServer       all connections, and the application
    TextConnection   a connection: one request at a time; others wait unread
    PlainRequest     what the handlers of http_app.py use of aiohttp's request

With the first request that is not plain, the connection becomes one of aiohttp, which gets the same bytes, and stays
one.  From its bytes to its handler a plain request takes half of aiohttp's time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import HttpVersion11, web
from aiohttp.tcp_helpers import tcp_keepalive
from multidict import CIMultiDict, CIMultiDictProxy

from stages.orchestrator.event_response import date_field
from stages.orchestrator.http_app import own_headers
from stages.orchestrator.text_request import Head, read_head

log = logging.getLogger("starling.orchestrator.http")

KEPT_S = 75.0  # a connection without a request
PART_S = 1.0  # for the rest of a request; then aiohttp waits for it
MAX_AHEAD_BYTES = 64 << 10  # received while a request is answered; then nothing more is read

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PlainRequest(dict[Any, Any]):
    """A plain request. As in aiohttp's, the handlers store their objects in it by key."""

    method = "POST"
    version = HttpVersion11
    keep_alive = True

    def __init__(self, connection: TextConnection, head: Head, body: bytes) -> None:
        super().__init__()
        self.writer = connection
        self.path = head.path
        self.headers = CIMultiDictProxy(CIMultiDict(head.fields))
        self.remote = connection.remote
        self.app = connection.server.app
        self.match_info = connection.server.matches[head.path]
        self.content = self  # the body's reader
        self.content_length = head.n_body
        self._body = body

    @property
    def transport(self) -> asyncio.Transport | None:
        """That of the client; None when it has left."""
        return self.writer.transport

    def is_eof(self) -> bool:
        """Whether the body is complete."""
        return True

    def read_nowait(self) -> bytes:
        """The body."""
        return self._body


class TextServer:
    """Called for each connection that is accepted. `handle`: answers plain requests. Used in one event loop."""

    def __init__(self, app: web.Application, server: web.Server, paths: dict[str, str], handle: Handle) -> None:
        """`server`: aiohttp's of the application. `paths`: for text; all have a route for POST."""
        self.app = app
        self.handle = handle
        self.other = server
        self.connections: set[TextConnection] = set()
        self.matches = {
            route.resource.canonical: web.UrlMappingMatchInfo({}, route)
            for route in app.router.routes()
            if route.resource is not None and route.resource.canonical in paths and route.method == "POST"
        }

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return TextConnection(self)

    async def close(self, wait_s: float) -> None:
        """Close the connections, and cancel the requests that have not ended after `wait_s`."""
        running = [one.task for one in self.connections if one.task is not None]
        if running:
            await asyncio.wait(running, timeout=wait_s)
        for one in list(self.connections):
            one.end()
        await asyncio.gather(
            *[task for one in self.connections if (task := one.task) is not None], return_exceptions=True
        )
        self.connections.clear()


class TextConnection(asyncio.Protocol):
    """One connection. For the handlers it is the writer of its request, too."""

    def __init__(self, server: TextServer) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.remote = ""
        self.output_size = 0  # set by an `EventResponse`
        self._loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None  # that answers a request
        self._received = b""  # and not a request that is being answered
        self._is_held = False
        self._may_write: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    # ---------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.server.connections.add(self)
        tcp_keepalive(self.transport)
        peer = transport.get_extra_info("peername")
        self.remote = peer[0] if isinstance(peer, tuple) else ""
        self._idle_since = self._loop.time()
        self._timer = self._loop.call_later(KEPT_S, self._look)

    def data_received(self, data: bytes) -> None:
        """A request, or a part of one."""
        self._received = self._received + data if self._received else data
        if self.task is None:
            self._begin()
        elif len(self._received) > MAX_AHEAD_BYTES and self.transport is not None and not self._is_held:
            self._is_held = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self._may_write = self._loop.create_future()

    def resume_writing(self) -> None:
        """The client has read."""
        may_write, self._may_write = self._may_write, None
        if may_write is not None and not may_write.done():
            may_write.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """The client has left: its request is cancelled."""
        self._leave()
        self.transport = None
        may_write = self._may_write
        if may_write is not None and not may_write.done():
            may_write.set_exception(ConnectionResetError("the client has disconnected"))
            may_write.exception()  # also if nothing waits for it
        if self.task is not None:
            self.task.cancel()

    # ---------------------------------------------------------------- requests

    def _begin(self) -> None:
        """Answer what was received, or let aiohttp do so."""
        data = self._received
        head = read_head(data, self.server.matches)
        if head is None or len(data) > (end := head.n_head + head.n_body):
            self._hand_over()
        elif len(data) < end:
            if self._timer is not None and self._idle_since >= 0:  # a part: once for each request
                self._timer.cancel()
                self._idle_since = -1.0
                self._timer = self._loop.call_later(PART_S, self._hand_over)
        else:
            self._received = b""
            if self._idle_since < 0:
                self._restart_timer()
            body = data[head.n_head :]
            self.task = self._loop.create_task(self._answer(PlainRequest(self, head, body)))

    async def _answer(self, request: PlainRequest) -> None:
        try:
            response = await self.server.handle(cast(web.Request, request))
            if isinstance(response, web.Response):
                self._send(response, request)
                await self.drain()
        except BaseException as error:
            self._abort()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, ConnectionError):
                log.exception("internal error", extra={"path": request.path})
            return
        finally:
            self.task = None
        self._idle_since = self._loop.time()
        if self.transport is None:
            return
        if self._is_held:
            self._is_held = False
            self.transport.resume_reading()
        if self._received:
            self._begin()

    def _send(self, response: web.Response, request: PlainRequest) -> None:
        """Send a response that is complete. Raises `ConnectionResetError`, `ValueError`."""
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        body = response.body
        assert body is None or isinstance(body, bytes)
        fields = [
            *response.headers.items(),
            *own_headers(cast(web.Request, request)).items(),
            ("Content-Length", str(len(body or b""))),
            ("Date", date_field(int(time.time()))),
        ]
        lines = [f"HTTP/1.1 {response.status} {response.reason}", *[f"{name}: {value}" for name, value in fields]]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a field of a response has a line break")
        self.transport.write("\r\n".join([*lines, "\r\n"]).encode() + (body or b""))

    def _hand_over(self) -> None:
        """Let aiohttp have the connection, and what was received."""
        self._leave()
        transport, data = self.transport, self._received
        self.transport, self._received = None, b""
        if transport is not None and not transport.is_closing():
            other = self.server.other()
            transport.set_protocol(other)
            other.connection_made(transport)
            other.data_received(data)

    # ---------------------------------------------------------------- the writer of a request

    async def drain(self) -> None:
        """Wait until little is buffered. Raises `ConnectionResetError`."""
        if self._may_write is not None:
            await asyncio.shield(self._may_write)

    # ---------------------------------------------------------------- its end

    def end(self) -> None:
        """Close it: what was sent arrives, and a request that is being answered is cancelled."""
        if self.task is not None:
            self.task.cancel()
        elif self.transport is not None:
            self.transport.close()

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _leave(self) -> None:
        self.server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._idle_since = self._loop.time()
            self._timer = self._loop.call_later(KEPT_S, self._look)

    def _look(self) -> None:
        """Close the connection if it has had no request for `KEPT_S`."""
        left_s = KEPT_S if self.task is not None else self._idle_since + KEPT_S - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif self.transport is not None:
            self.transport.close()
