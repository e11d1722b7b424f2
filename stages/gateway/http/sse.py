"""Sinks: a stream of server-sent events on a connection, and a body that waits for its end.

Events are built as bytes and written to the transport at once, one chunk for all that a step brought;
there is no task and no timer for a token.  A reader that is slower than the model is kept up to
`MAX_BACKLOG_BYTES`, then its connection is dropped: memory is bounded, nobody else waits.

Each event has an `id:`: the request's id and, after a colon, the output index reached, joined by dots
for several choices (`req-5f..:17.9`); `event_cursor.py` has the whole of it.  It says from where the stream is
taken up again.  Of events before the first text only the last one has it: who has seen it has seen all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Sequence_

from pipeline.errors import StarlingError
from stages.gateway.endpoints.formatter import ResponseFormatter, error_json
from stages.gateway.requests.event_cursor import DONE as CLOSED
from stages.gateway.requests.event_cursor import ENDED, FLUSHED, LEVELS, TOKENS, ChoiceCursor
from stages.gateway.requests.state import Outcome, RequestState, SequencePhase, SequenceState

MAX_BACKLOG_BYTES = 1 << 20  # written and not yet taken by the kernel, for one connection
RETRY_MS = 1000  # what a reconnecting reader should wait
DONE = b"data: [DONE]\n\n"


class WholeAnswer:
    """For requests that are not streamed: the record keeps the text, `over` tells the end."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None: ...

    def ended(self, sequence: SequenceState) -> None: ...

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

    def __init__(self, request: RequestState, shape: ResponseFormatter, drop: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.bytes_sent = 0
        self._shape = shape
        self._drop = drop  # called once, with the reason, when the reader is too slow
        self._is_dropped = False
        self._max_backlog = MAX_BACKLOG_BYTES
        self._transport: asyncio.WriteTransport | None = None
        self._is_chunked = True
        self._pending: list[bytes] = []
        self._is_open = False
        self._id = f"id: {request.id}:".encode()
        self._places = ["0"] * len(request.sequences)

    # ---------------------------------------------------------------- from the relay

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        self._open()
        self._reach(sequence, end, FLUSHED if sequence.is_flushed else TOKENS)
        event = self._shape.text(sequence, new, begin, end)
        if event is not None:
            self._event(event)

    def ended(self, sequence: SequenceState) -> None:
        self._open()
        self._reach(sequence, sequence.end, ENDED)
        self._event(self._shape.ended(sequence))

    def finished(self) -> None:
        self._places = [place.rstrip("fed") + LEVELS[CLOSED] for place in self._places]
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
        over = (LEVELS[ENDED], LEVELS[CLOSED])
        cut = [index for index, place in enumerate(self._places) if not place.endswith(over)]
        self._event(error_json(error, cut))
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
        if backlog > self._max_backlog:
            self._is_dropped = True
            self._drop(f"the client reads too slowly: {backlog} bytes wait for it, at most {self._max_backlog} may")

    # ---------------------------------------------------------------- from the handler

    def take_up(self, request: RequestState, places: Sequence_[ChoiceCursor], received: Sequence_[int]) -> None:
        """Say what the record has beyond `places`, of whose tokens the reader has `received` characters.

        Without places all of it. Then the stream is as if it had been here from the beginning.
        """
        if places:
            self._is_open = True
            self._pending.append(b"retry: %d\n\n" % RETRY_MS)
            self.begun.set_result(None)
        for sequence in request.sequences:
            if not places:
                if sequence.end or sequence.text_length or sequence.is_flushed:
                    self._go_on(sequence, ChoiceCursor(0), 0)
            else:
                self._go_on(sequence, places[sequence.index], received[sequence.index])
        if request.outcome is Outcome.FINISHED:
            if places and all(place.level == CLOSED for place in places):
                self._close(DONE)
            else:
                self.finished()
        elif request.error is not None:
            self.failed(request.error)

    def _go_on(self, sequence: SequenceState, place: ChoiceCursor, received: int) -> None:
        text = "".join(sequence.text)
        begin = min(place.tokens, sequence.end) if place.level == TOKENS else sequence.end
        received = received if place.level == TOKENS else len(text)
        self._reach(sequence, begin, place.level)
        if begin or received:
            self._shape.text(sequence, text[:received], 0, begin)  # for what it counts; it is not sent
        if sequence.end > begin or len(text) > received:
            self.text(sequence, text[received:], begin, sequence.end)
        if sequence.state is SequencePhase.FINISHED and place.level < ENDED:
            self.ended(sequence)

    def attach(self, transport: asyncio.WriteTransport, is_chunked: bool) -> None:
        """The headers are out: write what has come meanwhile, and from now on at once."""
        self._transport = transport
        self._is_chunked = is_chunked
        # What came before the reader could take anything is not held against it.
        self._max_backlog += sum(map(len, self._pending))
        self.flush()

    # ----------------------------------------------------------------

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._pending.append(b"retry: %d\n" % RETRY_MS)
        *before, last = self._shape.opening() or (b"",)
        self._pending.extend(b"data: %b\n\n" % event for event in before)
        if last:
            self._event(last)
        if not self.begun.done():
            self.begun.set_result(None)

    def _reach(self, sequence: SequenceState, tokens: int, level: int) -> None:
        self._places[sequence.index] = f"{tokens}{LEVELS[level]}"

    def _event(self, event: bytes) -> None:
        places = self._places
        where = places[0] if len(places) == 1 else ".".join(places)
        self._pending.append(b"%b%b\ndata: %b\n\n" % (self._id, where.encode(), event))

    def _close(self, last: bytes) -> None:
        self._pending.append(last)
        if not self.over.done():
            self.over.set_result(None)
