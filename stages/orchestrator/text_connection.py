"""A client's connection while it has plain requests for text (text_request.py), which need nothing of aiohttp.

    TextServer        all connections, and the application
    TextConnection    a connection: one request at a time; others wait unread
    OtherConnection   one of aiohttp
    PlainRequest      what the handlers of http_app.py use of aiohttp's request

With the first request that is not plain, the connection becomes one of aiohttp, which gets the same bytes, and stays
one.  From its bytes to its handler a plain request takes half of aiohttp's time.  client_connections.py bounds both.

A client that has closed its sending side gets the answer to a plain request, as from a server; aiohttp cancels others.
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

from pipeline.api import sse
from pipeline.api.malformed_http import HttpConnection
from stages.orchestrator.client_connections import Client, ClientConnections
from stages.orchestrator.event_response import IN_EVENTS, UNDRAINED_BYTES, date_field, while_read
from stages.orchestrator.head_facts import FACTS, HeadFacts, facts_of
from stages.orchestrator.http_app import own_headers
from stages.orchestrator.text_request import Head, HeadReader

log = logging.getLogger("starling.orchestrator.http")

KEPT_S = 75.0  # a connection without a request
PART_S = 1.0  # for the rest of a request; then aiohttp waits for it
CANCEL_S = 1.0  # for requests that are cancelled at the end
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # a client skips it; the host of a client that has left answers with RST
COMMENT = sse.http_chunk(sse.COMMENT)  # the same between two events
MAX_AHEAD_BYTES = 64 << 10  # received while a request is answered; then nothing more is read

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PlainRequest(dict[Any, Any]):
    """A plain request. As in aiohttp's, the handlers store their objects in it by key."""

    method = "POST"
    version = HttpVersion11

    def __init__(self, connection: TextConnection, head: Head, body: bytes) -> None:
        super().__init__()
        self.writer = connection
        self.path = head.path
        self[FACTS] = connection.facts_of(head)
        self.remote = connection.remote
        self.app = connection.server.app
        self.match_info = connection.server.matches[head.path]
        self.content = self  # the body's reader
        self.content_length = head.n_body
        self.is_answered = False  # whole
        self._head = head
        self._body = body

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The fields of its head."""
        return fields_of(self._head)

    @property
    def keep_alive(self) -> bool:
        """Whether the connection takes another request."""
        return not self.writer.is_last

    async def send(self, response: web.Response) -> None:
        """Send a whole answer, and wait until little is buffered. Raises `ConnectionResetError`."""
        self.is_answered = True
        await self.writer.send(response, self)

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

    def __init__(
        self,
        app: web.Application,
        server: web.Server,
        paths: dict[str, str],
        handle: Handle,
        clients: ClientConnections,
    ) -> None:
        """`server`: aiohttp's of the application. `paths`: for text; all have a route for POST."""
        self.app = app
        self.handle = handle
        self.clients = clients
        self.connections: set[TextConnection] = set()
        self.others: set[OtherConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # that answer plain requests of clients that have left
        self.is_stopping = False
        self.is_closing = False
        self._server = server
        self.matches = {
            route.resource.canonical: web.UrlMappingMatchInfo({}, route)
            for route in app.router.routes()
            if route.resource is not None and route.resource.canonical in paths and route.method == "POST"
        }

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return TextConnection(self)

    def other(self, client: Client, peer: str) -> OtherConnection:
        """The protocol of a connection that becomes one of aiohttp."""
        return OtherConnection(self, self._server, client, peer)

    def stop(self) -> None:
        """The process ends: connections without a request are closed, and others after their answer."""
        self.is_stopping = True
        for one in list(self.connections):
            if one.is_idle:
                one.end()
        for other in list(self.others):
            if not other.is_in_body:  # of which aiohttp would drop the rest
                other.end()

    async def close(self, wait_s: float) -> None:
        """Close the connections, and cancel the requests that have not ended after `wait_s`."""
        self.stop()
        self.is_closing = True  # what is received from now on is not read
        if running := self._running():
            await asyncio.wait(running, timeout=wait_s)
        running = self._running()
        for one in list(self.connections):
            one.end()
        for task in running:  # also those whose clients have left
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CANCEL_S)
        self.connections.clear()
        self.clients.close()

    def _running(self) -> set[asyncio.Task[None]]:
        """The tasks that answer plain requests."""
        return self.tasks | {one.task for one in self.connections if one.task is not None}


class TextConnection(asyncio.Protocol):
    """One connection. For the handlers it is the writer of its request, too."""

    def __init__(self, server: TextServer) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.remote = ""
        self.output_size = 0  # set by an `EventResponse`
        self._loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None  # that answers a request
        self._request: PlainRequest | None = None  # that it answers
        self._client: Client | None = None
        self._received: list[bytes] = []  # and not a request that is being answered
        self._n_received = 0  # bytes
        self._heads = HeadReader(server.matches)
        self._head: Head | None = None  # of what was received, if its body is not complete
        self._facts: tuple[int, HeadFacts] | None = None  # of the last request, and the number of its head
        self._is_held = False
        self._is_half_closed = False
        self._may_write: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it has no request, and no part of one."""
        return self.task is None and not self._received

    @property
    def is_last(self) -> bool:
        """Whether the connection closes after the answer."""
        return self.server.is_stopping

    # ---------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        own = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        peer = transport.get_extra_info("peername")
        self.remote = peer[0] if isinstance(peer, tuple) else ""
        self._client = self.server.clients.admit(own, self.remote, self._probe)
        if self._client is None:
            return
        self.transport = own
        self.server.connections.add(self)
        tcp_keepalive(self.transport)
        self._idle_since = self._loop.time()
        self._timer = self._loop.call_later(KEPT_S, self._look)

    def data_received(self, data: bytes) -> None:
        """A request, or a part of one."""
        if self.server.is_closing or self.transport is None:
            return
        self._received.append(data)
        self._n_received += len(data)
        if self.task is None:
            self._begin()
        elif self._n_received > MAX_AHEAD_BYTES and not self._is_held:
            self._is_held = True
            self.transport.pause_reading()
            self._watch_for_end()

    def eof_received(self) -> bool:
        """The client has closed its sending side, or has left. True: the connection stays open for the answer."""
        if self.task is None or self.transport is None:
            return False
        self._is_half_closed = True
        self._watch_for_end()
        return True

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
        if self._client is not None:
            self.server.clients.release(self._client)
        may_write = self._may_write
        if may_write is not None and not may_write.done():
            may_write.set_exception(ConnectionResetError("the client has disconnected"))
            may_write.exception()  # also if nothing waits for it
        if self.task is not None:
            self.server.tasks.add(self.task)
            self.task.add_done_callback(self.server.tasks.discard)
            self.task.cancel()

    # ---------------------------------------------------------------- requests

    def _begin(self) -> None:
        """Answer what was received, or let aiohttp do so."""
        head = self._head
        if head is None:
            data = b"".join(self._received) if len(self._received) > 1 else self._received[0]
            self._received = [data]
            head = self._head = self._heads.read(data)
        if head is None or self._n_received > (end := head.n_head + head.n_body):
            self._hand_over()
        elif self._n_received < end:
            if self._timer is not None and self._idle_since >= 0:  # a part: once for each request
                self._timer.cancel()
                self._idle_since = -1.0
                self._timer = self._loop.call_later(PART_S, self._hand_over)
        else:
            body = self._take()[head.n_head :]
            if self._idle_since < 0:
                self._restart_timer()
            self._request = PlainRequest(self, head, body)
            self.task = self._loop.create_task(self._answer(self._request))

    def facts_of(self, head: Head) -> HeadFacts:
        """What is used of the last head that was read."""
        if self._facts is not None and self._facts[0] == self._heads.number:
            return self._facts[1]
        facts = facts_of(fields_of(head))
        self._facts = (self._heads.number, facts) if self._heads.is_kept else None
        return facts

    def _take(self) -> bytes:
        """What was received."""
        data = b"".join(self._received)
        self._received, self._n_received, self._head = [], 0, None
        return data

    async def _answer(self, request: PlainRequest) -> None:
        try:
            response = await self.server.handle(cast(web.Request, request))
            if isinstance(response, web.Response) and not request.is_answered:
                await self.send(response, request)
        except BaseException as error:
            if self.transport is not None and isinstance(error, asyncio.CancelledError) and self.server.is_closing:
                self.transport.close()  # what was sent arrives
            elif self.transport is not None:
                self.transport.abort()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, ConnectionError):
                log.exception("internal error", extra={"path": request.path})
            return
        finally:
            self.task = self._request = None
        self._next()

    def _next(self) -> None:
        """A request was answered."""
        self._idle_since = self._loop.time()
        self.output_size = 0
        if self.transport is None:
            return
        if self._client is not None and not self._is_half_closed:
            self._client.probe_at = None
        if self._is_held:
            self._is_held = False
            self.transport.resume_reading()
        if self.is_last:
            self.transport.close()
        elif self._received:
            self._begin()
            if self._is_half_closed and self.task is None and self.transport is not None:
                self.transport.close()  # the rest of it does not come
        elif self._is_half_closed:
            self.transport.close()

    async def send(self, response: web.Response, request: PlainRequest) -> None:
        """Send a response that is complete, and wait until little is buffered.

        Raises `ConnectionResetError`, also for a client that does not read, and `ValueError`.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        body = response.body or b""
        assert isinstance(body, bytes)
        fields = {**response.headers, "Content-Length": str(len(body))}
        if body and "Content-Type" not in response.headers:
            fields["Content-Type"] = "application/octet-stream"
        fields["Date"] = date_field(int(time.time()))
        if self.is_last:
            fields["Connection"] = "close"
        fields.update(own_headers(cast(web.Request, request)))
        first = f"HTTP/1.1 {response.status} {response.reason}"
        lines = [first, *[f"{name}: {value}" for name, value in fields.items()]]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a field of a response has a line break")
        transport.write("\r\n".join([*lines, "\r\n"]).encode() + body)
        if transport.get_write_buffer_size() >= UNDRAINED_BYTES:
            await while_read(transport, self.drain())

    def _hand_over(self) -> None:
        """Let aiohttp have the connection, and what was received."""
        self._leave()
        transport, data = self.transport, self._take()
        self.transport = None
        if transport is not None and not transport.is_closing() and self._client is not None:
            self._client.probe_at = None
            other = self.server.other(self._client, self.remote)
            self._client = None
            transport.set_protocol(other)
            other.connection_made(transport)
            if self._may_write is not None:
                other.pause_writing()
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
        if self.transport is not None:
            self.transport.close()

    def _watch_for_end(self) -> None:
        """Nothing more is read, so that its client's end is not seen: what is sent finds out."""
        if self._client is not None:
            self._client.watch_for_end(self._loop.time())

    def _probe(self) -> None:
        """Send what a client skips: what comes back says whether it has left."""
        if self.task is None or self.transport is None:
            return
        if not self.output_size:
            self.transport.write(CONTINUE)
        elif self._request is not None and self._request.get(IN_EVENTS):  # of a stream whose next event may be late
            self.transport.write(COMMENT)

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
        elif self.transport is not None and self.transport.get_write_buffer_size():
            self.transport.abort()  # a close would wait until it is read
        elif self.transport is not None:
            self.transport.close()


class OtherConnection(HttpConnection):
    """A connection of aiohttp, within the same bounds."""

    def __init__(self, texts: TextServer, server: web.Server, client: Client, peer: str) -> None:
        super().__init__(server, peer, log)
        self._texts = texts
        self._client = client
        texts.others.add(self)

    @property
    def is_in_body(self) -> bool:
        """Whether the body of its request has not come completely."""
        request = self._current_request
        return bool(self._messages) or (request is not None and not request.content.is_eof())

    def end(self) -> None:
        """Close it after the answer to its request, if it has one."""
        if self._current_request is None and self.transport is not None:
            self.transport.close()
        else:
            self.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is closed."""
        super().connection_lost(exc)
        self._texts.others.discard(self)
        self._texts.clients.release(self._client)


def fields_of(head: Head) -> CIMultiDictProxy[str]:
    """The fields of a head, as aiohttp has them."""
    return CIMultiDictProxy(CIMultiDict(head.fields))
