"""Sinks: a stream of server-sent events on a connection, and a body that waits for its end.

Events are built as bytes and written to the transport at once, one chunk for all that a step brought;
there is no task and no timer for a token.  A reader that is slower than the model is kept up to
`MAX_BACKLOG_BYTES`, then its connection is dropped: memory is bounded, nobody else waits.

Each event has an `id:`: the request's id and, after a colon, the output index reached, joined by dots
for several choices (`req-5f..:17.9`).  It says from where a stream would be taken up again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pipeline.errors import StarlingError
from stages.gateway.record import Request, Sequence
from stages.gateway.shape import Shape, error_json

MAX_BACKLOG_BYTES = 1 << 20  # written and not yet taken by the kernel, for one connection
RETRY_MS = 1000  # what a reconnecting reader should wait
DONE = b"data: [DONE]\n\n"


class WholeAnswer:
    """For requests that are not streamed: the record keeps the text, `over` tells the end."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def text(self, sequence: Sequence, new: str, begin: int, end: int) -> None: ...

    def ended(self, sequence: Sequence) -> None: ...

    def finished(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def failed(self, error: StarlingError) -> None:
        if not self.over.done():
            self.over.set_exception(error)

    def flush(self) -> None: ...


class EventStream:
    """`begun` is set with the first event, so that an error before it still has a status of its own.

    `attach` gives it the transport once the headers are out.
    """

    def __init__(self, request: Request, shape: Shape, drop: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.bytes_sent = 0
        self._shape = shape
        self._drop = drop  # called once, with the reason, when the reader is too slow
        self._is_dropped = False
        self._transport: asyncio.WriteTransport | None = None
        self._is_chunked = True
        self._pending: list[bytes] = []
        self._is_open = False
        self._id = f"id: {request.id}:".encode()
        self._ends = [0] * len(request.sequences)

    # ---------------------------------------------------------------- from the relay

    def text(self, sequence: Sequence, new: str, begin: int, end: int) -> None:
        self._open()
        self._ends[sequence.index] = end
        event = self._shape.text(sequence, new, begin, end)
        if event is not None:
            self._event(event)

    def ended(self, sequence: Sequence) -> None:
        self._open()
        self._event(self._shape.ended(sequence))

    def finished(self) -> None:
        for event in self._shape.closing():
            self._event(event)
        self._close(DONE)

    def failed(self, error: StarlingError) -> None:
        if not self._is_open:
            self._is_open = True
            if not self.begun.done():
                self.begun.set_exception(error)
            self.over.set_result(None)
            return
        self._event(error_json(error))
        self._close(DONE)

    def flush(self) -> None:
        if self._transport is None or not self._pending or self._is_dropped:
            return
        data = b"".join(self._pending)
        self._pending.clear()
        self.bytes_sent += len(data)
        transport = self._transport
        if transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        backlog = transport.get_write_buffer_size()
        if backlog > MAX_BACKLOG_BYTES:
            self._is_dropped = True
            self._drop(
                f"the client reads too slowly: {backlog} bytes wait for it, at most {MAX_BACKLOG_BYTES} may"
            )

    # ---------------------------------------------------------------- from the handler

    def attach(self, transport: asyncio.WriteTransport, is_chunked: bool) -> None:
        """The headers are out: write what has come meanwhile, and from now on at once."""
        self._transport = transport
        self._is_chunked = is_chunked
        self.flush()

    # ----------------------------------------------------------------

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._pending.append(b"retry: %d\n" % RETRY_MS)
        for event in self._shape.opening():
            self._event(event)
        if not self.begun.done():
            self.begun.set_result(None)

    def _event(self, event: bytes) -> None:
        ends = self._ends
        if len(ends) == 1:
            self._pending.append(b"%b%d\ndata: %b\n\n" % (self._id, ends[0], event))
        else:
            where = ".".join(map(str, ends)).encode()
            self._pending.append(b"%b%b\ndata: %b\n\n" % (self._id, where, event))

    def _close(self, last: bytes) -> None:
        self._pending.append(last)
        if not self.over.done():
            self.over.set_result(None)
