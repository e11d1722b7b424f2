"""A connection to an engine or agent: one request at a time, and its response as it arrives.

    Connection   the protocol of the event loop; it is kept for the next request if a response has ended as it should
    Exchange     one request and its response, an `Answer` once its head has arrived

The bytes of a body are passed on as they come: to a function that is called at once (`pass_to`), or to a task that
reads them.  While more than `MAX_UNREAD_BYTES` wait for the task, nothing more is read from the socket, so that a
client that reads slowly holds its engine back.  No timers: http_client.py has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

from stages.orchestrator.http_response import ResponseError, ResponseReader
from stages.orchestrator.upstream import Begins, Take, Unreachable

MAX_UNREAD_BYTES = 128 << 10  # of a body
MAX_EARLY_BYTES = 64 << 10  # of a response that comes before its request is sent
MAX_JOINED_BYTES = 64 << 10  # of the body of a request: a larger one is not copied behind its head


class Connection(asyncio.Protocol):
    """One connection. `on_free(connection)`: it can take another request; `on_lost`: it has ended."""

    def __init__(self, on_free: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self.idle_since = 0.0  # set by who keeps it
        self._on_free = on_free
        self._on_lost = on_lost
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._is_used = False  # a request was sent
        self._early = b""  # came before the first request: a server at its bound answers, and closes, on its own

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_answered(self) -> bool:
        """Whether a response has begun before its request was sent."""
        return bool(self._early)

    def send(self, method: str, head: bytes, body: bytes, begins: Begins | None = None) -> Exchange:
        """Send a request. What has come before the first one is its response."""
        assert self._exchange is None
        exchange = self._exchange = Exchange(self, method, begins)
        self._is_used = True
        if self._transport is None or self._transport.is_closing():
            pass
        elif len(body) <= MAX_JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        if self._early:
            exchange.received(self._early)
        if self._transport is None:
            exchange.lost("the connection was closed")
        return exchange

    def abort(self) -> None:
        """Close it at once, whatever was sent on it."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def end(self, reason: str) -> None:
        """Close it at once. The request on it fails with the reason."""
        if self._exchange is not None:
            self._exchange.lost(reason)
        else:
            self.abort()

    def hold(self, is_held: bool) -> None:
        """Whether nothing is read."""
        if self._transport is not None and not self._transport.is_closing():
            if is_held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def ended(self, *, keeps: bool) -> None:
        """The response is complete. `keeps`: another request may follow."""
        self._exchange = None
        # A peer that answers before it has read the request does not read the rest as a request.
        has_read = self._transport is not None and not self._early and not self._transport.get_write_buffer_size()
        if keeps and has_read and self.is_open:
            self._on_free(self)
        else:
            self.abort()

    # ---------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """A part of the response has come."""
        if self._exchange is not None:
            self._exchange.received(data)
        elif not self._is_used and len(self._early) + len(data) <= MAX_EARLY_BYTES:
            self._early += data
        else:  # nothing was asked
            self._early = b""
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended."""
        exchange, self._exchange, self._transport = self._exchange, None, None
        self._on_lost(self)
        if exchange is not None:
            exchange.lost(f"the connection was closed{f': {error}' if error else ''}")


class Exchange:
    """A request that was sent, and its response."""

    def __init__(self, connection: Connection, method: str, begins: Begins | None = None) -> None:
        self.status = 0  # 0: the head has not arrived
        self.has_begun = False  # a byte of the response has come
        self.headers: Mapping[str, str] = {}
        self._connection: Connection | None = connection  # until the response has ended
        self._reader = ResponseReader(method)
        self._parts: list[bytes] = []
        self._n_unread = 0  # bytes of them
        self._is_held = False
        self._waiter: asyncio.Future[None] | None = None
        self._begins = begins  # until the head is there
        self._take: Take | None = None  # is given the body at once; no part waits then
        self._has_stopped = False  # what took the body wants no more at once
        self._failure = ""  # why nothing more comes
        self._aborted = ""

    # ---------------------------------------------------------------- an answer

    async def head(self) -> None:
        """Wait for the status and the headers. Raises `Unreachable`."""
        while not self.status:
            if self._failure:
                raise Unreachable(self._failure)
            await self._wait()

    async def read(self) -> bytes:
        """See `Answer`. What has come before a failure is read before it."""
        while not self._parts and not self._failure and not self._aborted and not self._reader.has_ended:
            await self._wait()
        if self._aborted:
            raise Unreachable(self._aborted)
        if not self._parts:
            if self._failure:
                raise Unreachable(self._failure)
            return b""
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._n_unread = 0
        if self._is_held and self._connection is not None:
            self._is_held = False
            self._connection.hold(False)
        return data

    async def pass_to(self, take: Take) -> bool:
        """See `Answer`. What has come before is given to `take` first."""
        try:
            while not self._has_stopped:
                if self._take is None or self._connection is None:
                    data = await self.read()
                    if not data:
                        return False
                    if not take(data):
                        return True
                    self._take = take
                else:
                    await self._wait()
        finally:
            self._take, self._has_stopped = None, False
        return True

    def abort(self, reason: str) -> None:
        """See `Answer`."""
        self._aborted = reason
        self.close()
        self._wake()

    def close(self) -> None:
        """See `Answer`. A response that has not ended takes its connection with it, which ends the engine's work."""
        if self._connection is not None:
            self.lost("the answer was closed")

    # ---------------------------------------------------------------- called by the connection

    def received(self, data: bytes) -> None:
        """The next bytes of the response."""
        assert self._connection is not None
        take, reader = self._take, self._reader
        if take is not None and (event := reader.whole_chunk(data)):
            if not take(event):
                self._take, self._has_stopped = None, True
                self._wake()
            return
        self.has_begun = True
        try:
            body = reader.feed(data)
        except ResponseError as error:
            self.lost(str(error))
            return
        is_passed = take is not None
        if reader.status and not self.status:
            self.status, self.headers = reader.status, reader.fields
            if self._begins is not None:
                take, self._begins = self._begins(self), None
                self._take = take
        if take is not None:
            if body and not take(body):
                self._take, self._has_stopped, is_passed = None, True, False
        elif body:
            self._parts.append(body)
            self._n_unread += len(body)
        if reader.has_ended:
            connection, self._connection = self._connection, None
            if self._is_held:
                connection.hold(False)
            connection.ended(keeps=reader.keeps_connection)
        elif self._n_unread > MAX_UNREAD_BYTES and not self._is_held:
            self._is_held = True
            self._connection.hold(True)
        if self.status and not (is_passed and self._connection is not None):
            self._wake()

    def lost(self, reason: str) -> None:
        """Nothing more comes."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._failure = reason
            connection.abort()
        self._wake()

    # ---------------------------------------------------------------- parts

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
