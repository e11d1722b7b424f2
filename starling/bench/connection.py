"""Connections to the measured server: one request at a time each, kept open between requests.

    Sender.send(request) ─> Connection ─> data_received: the time, then ResponseReader for where the response ends

The time of received data is taken before anything else is done with it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple, cast

from starling.bench.framing import ResponseReader
from starling.bench.response import BROKEN, MAX_ID, NO_CONNECTION, TIMEOUT, ClientRequest, Response
from starling.client.address import ServerAddress

TIMEOUT_S = 330.0  # for a whole response; a request waits up to server.request_timeout_ms (300 s) in queues
MAX_UNPARSED = 256 << 20  # bytes of complete responses that are kept for the end of the run; then the oldest are read


class Target(NamedTuple):
    """Where requests go."""

    host: str
    port: int = 0
    unix_path: str = ""
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, address: ServerAddress) -> Target:
        """The target at an address that a user gave."""
        if address.scheme == "unix":
            return cls("localhost", unix_path=address.path)
        return cls(address.host, address.port, tls=address.tls())

    @property
    def authority(self) -> str:
        """The value of the field `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else host


class Connection(asyncio.Protocol):
    """One connection. `clock`: seconds; `on_data` is called after each part that was received."""

    def __init__(self, clock: Callable[[], float], on_data: Callable[[Response], None]) -> None:
        self._clock = clock
        self._on_data = on_data
        self._response: Response | None = None
        self._ended: asyncio.Future[None] | None = None
        self._reader = ResponseReader()
        self._transport: asyncio.Transport | None = None
        self.is_open = False
        self.uses = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.is_open = True

    async def exchange(self, message: bytes, response: Response) -> None:
        """Send a request and wait for the end of its response, or for what fails it."""
        assert self._transport is not None
        self.uses += 1
        self._reader = ResponseReader()
        self._response = response
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            await self._ended
        finally:
            self._response = self._ended = None
            if not self._reader.keeps_connection:
                self.close()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        now = self._clock()
        response = self._response
        if response is None:  # nothing was asked
            self.close()
            return
        response.head_at = response.head_at or now
        try:
            body = self._reader.feed(data)
        except ValueError as error:
            response.fail(BROKEN, str(error))
            self._end(now)
            return
        if not response.status and self._reader.status:
            response.status = self._reader.status
            response.id = (self._reader.headers.get("X-Request-Id") or "")[:MAX_ID]
        if body:
            response.parts.append((now, body))
        if self._reader.has_ended:
            self._end(now)
        self._on_data(response)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self.is_open = False
        if self._response is None or self._reader.has_ended:
            return
        if not self._reader.end():
            self._response.fail(BROKEN, f"the connection was closed{f': {error}' if error else ''}")
        self._end(self._clock())

    def close(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _end(self, now: float) -> None:
        if self._response is not None:
            self._response.ended = self._response.ended or now
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class Sender:
    """Sends requests and keeps every response. An async context manager: closes its connections.

    clock: seconds; latencies are differences of its values.
    timeout_s: from the sending of a request; then its response has failed.
    """

    def __init__(
        self,
        target: Target,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.perf_counter,
        on_data: Callable[[Response], None] = lambda response: None,
        max_unparsed: int = MAX_UNPARSED,
    ) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_data = on_data
        self._max_unparsed = max_unparsed
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []
        self._unparsed = 0  # bytes of complete responses that are not parsed
        self._parsed = 0  # responses from the front
        self.responses: list[Response] = []
        self.ended = 0  # of these

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0)  # the transports close their sockets in the next round of the loop

    async def open(self, count: int) -> None:
        """Connect in advance. Raises `OSError`."""
        for _ in range(count):
            self._idle.append(await self._connect())

    async def send(self, request: ClientRequest, due: float | None = None) -> Response:
        """The response to `request`, good or not. `due`: when it should have been sent; None: now."""
        response = Response(request, self._clock(), due)
        self.responses.append(response)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(request.encode(self._target.authority), response)
        except TimeoutError:
            response.fail(TIMEOUT, f"not complete within {self._timeout_s:g} s")
        except OSError as error:  # and ssl.SSLError
            response.fail(NO_CONNECTION, error.strerror or str(error))
        response.ended = response.ended or self._clock()
        self.ended += 1
        self._unparsed += sum(len(data) for _, data in response.parts)
        self._bound_memory()
        return response

    async def _send(self, message: bytes, response: Response) -> None:
        while True:
            while self._idle and not self._idle[-1].is_open:
                self._idle.pop()
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                await connection.exchange(message, response)
            finally:
                if connection.is_open:
                    self._idle.append(connection)
                else:
                    self._connections.discard(connection)
            if connection.uses > 1 and response.failure == BROKEN and not response.head_at:
                # The server has closed an idle connection while the request was on its way.
                response.failure = response.error = ""
                response.ended = 0.0
                continue
            return

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        to = self._target

        def factory() -> Connection:
            return Connection(self._clock, self._on_data)

        if to.unix_path:
            _, connection = await loop.create_unix_connection(factory, to.unix_path)
        else:
            _, connection = await loop.create_connection(factory, to.host, to.port, ssl=to.tls)
        self._connections.add(connection)
        return connection

    def _bound_memory(self) -> None:
        """Parse the oldest responses when those that wait for it are too large, up to one that runs."""
        while self._unparsed > self._max_unparsed and self._parsed < len(self.responses):
            oldest = self.responses[self._parsed]
            if not oldest.ended:
                return
            self._unparsed -= sum(len(data) for _, data in oldest.parts)
            oldest.parse()
            self._parsed += 1

    def parse(self) -> list[Response]:
        """All responses, parsed: those that run have failed as unfinished."""
        for response in self.responses[self._parsed :]:
            response.parse()
        self._parsed = len(self.responses)
        return self.responses
