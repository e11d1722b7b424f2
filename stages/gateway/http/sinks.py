"""Sinks of HTTP responses: a stream of server-sent events, and a body that is sent when the request has ended.

An event stream writes to the transport directly, one write for everything that a step produced; it has no task or timer
per token.  Up to `MAX_BACKLOG_BYTES` wait for a client that reads more slowly than the model generates.  At more than
that its connection is dropped, so that memory is bounded and other clients are not affected.

Each event has an `id:`: the request's id, a colon, and for each choice the output index reached, joined by dots
(`req-5f..:17.9`); `event_cursor.py` defines it.  A client sends it as `Last-Event-ID` to continue a stream.  Of the
events before the first text only the last one has an id: a client that received it received them all.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

from pipeline.api import output_tokens, sse
from pipeline.api.error_response import error_event
from pipeline.errors import StarlingError
from stages.gateway.endpoints.response_formatter import ResponseFormatter
from stages.gateway.requests.event_cursor import DONE as CLOSED
from stages.gateway.requests.event_cursor import ENDED, FLUSHED, LEVELS, TOKENS, ChoiceCursor
from stages.gateway.requests.state import Outcome, RequestState, SequencePhase, SequenceState

MAX_BACKLOG_BYTES = 1 << 20  # written and not yet accepted by the kernel, for one connection


class WholeResponse:
    """The sink of a request that is not streamed. The text stays in the request; `over` is set at its end."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def started(self) -> None:
        """Ignored: the response is sent at the end."""

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        """Ignored: the request has the text."""

    def ended(self, sequence: SequenceState) -> None:
        """Ignored: the sequence has its finish reason."""

    def finished(self) -> None:
        """Set `over`."""
        if not self.over.done():
            self.over.set_result(None)

    def failed(self, error: StarlingError) -> None:
        """Set `over` to the error."""
        if not self.over.done():
            self.over.set_exception(error)

    def flush(self) -> None:
        """Nothing to write."""


class StreamSink(abc.ABC):
    """The sink of a streamed request. Collects events until `attach` provides the transport.

    A subclass formats the events.  `begun` is set when the request has left the queue, or with the first event: an
    error before it is reported with its own HTTP status.  `over` is set at the end of the stream.
    """

    END: bytes  # the last event, after which the client closes the connection; b"": there is none

    def __init__(self, request: RequestState, drop: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.bytes_sent = 0
        self._drop = drop  # called once, with the reason, if the client reads too slowly
        self._is_dropped = False
        self._max_backlog = MAX_BACKLOG_BYTES
        self._transport: asyncio.WriteTransport | None = None
        self._is_chunked = True
        self._pending: list[bytes] = []
        self._is_open = False
        self._id = f"{request.id}:".encode()
        self._places = ["0"] * len(request.sequences)
        # Output tokens of each sequence that comments have named; None: the reader does not ask for them.
        self._named: list[int] | None = None
        self._sequences = request.sequences
        self.is_relayed = False  # the reader forwards the stream to a client

    def name_tokens(self) -> None:
        """Send a comment for the tokens of each step, for a reader that may continue the stream elsewhere."""
        if all(sequence.spec.sampling.logprobs < 0 and sequence.scores is None for sequence in self._sequences):
            self._named = [0] * len(self._sequences)

    # ---------------------------------------------------------------- from the relay

    def started(self) -> None:
        """Let the headers be sent: they tell the client the request's id."""
        if not self.begun.done():
            self.begun.set_result(None)

    @abc.abstractmethod
    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        """Add the events of new text."""

    @abc.abstractmethod
    def ended(self, sequence: SequenceState) -> None:
        """Add the events with the finish reason."""

    def finished(self) -> None:
        """Add the closing events and end the stream."""
        self._places = [place.rstrip("fed") + LEVELS[CLOSED] for place in self._places]
        self._add_closing_events()
        self._close()

    def failed(self, error: StarlingError) -> None:
        """End the stream with an error event; while the headers are not sent, `begun` raises the error instead."""
        if not self.begun.done():
            self._is_open = True
            self.begun.set_exception(error)
            self.over.set_result(None)
            return
        if self._opens_before_error:
            self._open()
        elif not self._is_open:
            self._is_open = True
            self._pending.append(sse.retry_field())
        self._add_error(error)
        self._close()

    def flush(self) -> None:
        """Write the pending events in one piece. Drops the connection if the client reads too slowly."""
        if self._transport is None or not self._pending or self._is_dropped:
            return
        if self._named is not None:
            self._add_comments(self._named)
        data = b"".join(self._pending)
        self._pending.clear()
        self.bytes_sent += len(data)
        transport = self._transport
        if transport.is_closing():
            return
        transport.write(sse.http_chunk(data) if self._is_chunked else data)
        backlog = transport.get_write_buffer_size()
        if backlog > self._max_backlog:
            self.drop(f"the client reads too slowly: {backlog} bytes wait for it, the limit is {self._max_backlog}")

    def _add_comments(self, named: list[int]) -> None:
        """Add comments for the tokens that none has named, if an event would not be cut by them."""
        if self.over.done() or not self._pending[-1].endswith(b"\n\n"):
            return
        for sequence in self._sequences:
            tokens, first = sequence.tokens, named[sequence.index]
            if len(tokens) > first:
                self._pending.append(
                    output_tokens.comment(sequence.index, first, sequence.cached_tokens, tokens[first:])
                )
                named[sequence.index] = len(tokens)

    @property
    def backlog(self) -> int:
        """Bytes that wait for the client."""
        return self._transport.get_write_buffer_size() if self._transport is not None and not self._is_dropped else 0

    def probe(self) -> None:
        """Write a comment, which clients skip: the host of a client that has left answers with RST."""
        if self._transport is not None and not self._transport.is_closing():
            self.bytes_sent += len(sse.COMMENT)
            self._transport.write(sse.http_chunk(sse.COMMENT) if self._is_chunked else sse.COMMENT)

    async def until_over(self, silent_s: float) -> None:
        """Wait for the end, with a comment when nothing was written for `silent_s`, at most; 0: without.

        There are two looks in that time, so that no clock is read for a token.
        """
        sent = -1  # at the last look
        while not self.over.done():
            if sent != self.bytes_sent or self.backlog:
                sent = self.bytes_sent
            else:
                self.probe()
            await asyncio.wait({self.over}, timeout=silent_s / 2 or None)

    def drop(self, reason: str) -> None:
        """Drop the connection; the request goes on where it can be resumed."""
        self._is_dropped = True
        self._drop(reason)

    # ---------------------------------------------------------------- from the handler

    def resume(self, request: RequestState, places: SequenceABC[ChoiceCursor], received: SequenceABC[int]) -> None:
        """Add the events after `places`, where the client has `received` characters of each choice.

        Without places, all events.  Afterwards the sink is in the same state as one that was there from the start.
        """
        if places:
            self._is_open = True
            self._pending.append(sse.retry_field())
            self.begun.set_result(None)
        for sequence in request.sequences:
            if not places:
                if sequence.n_emitted or sequence.text_length or sequence.is_flushed:
                    self._resume_sequence(sequence, ChoiceCursor(0), 0)
            else:
                self._resume_sequence(sequence, places[sequence.index], received[sequence.index])
        if request.outcome is Outcome.FINISHED:
            if places and all(place.level == CLOSED for place in places):
                self._close()
            else:
                self.finished()
        elif request.error is not None:
            if self._opens_before_error and request.is_started and not self.begun.done():
                self.started()  # its first client got events, too
            self.failed(request.error)
        elif request.is_started:
            self.started()

    def _resume_sequence(self, sequence: SequenceState, place: ChoiceCursor, received: int) -> None:
        text = "".join(sequence.text)
        begin = min(place.tokens, sequence.n_emitted) if place.level == TOKENS else sequence.n_emitted
        received = received if place.level == TOKENS else len(text)
        self._reach(sequence, begin, place.level)
        if begin or received:
            self._skip(sequence, text[:received], begin, is_whole=place.level != TOKENS)
        if sequence.n_emitted > begin or len(text) > received:
            self.text(sequence, text[received:], begin, sequence.n_emitted)
        if sequence.phase is SequencePhase.FINISHED and place.level < ENDED:
            self.ended(sequence)

    def attach(self, transport: asyncio.WriteTransport, is_chunked: bool) -> None:
        """Write the events collected so far to `transport`, and later ones at each `flush`. The headers are sent."""
        self._transport = transport
        self._is_chunked = is_chunked
        # Events from before the connection could accept any do not count as backlog.
        self._max_backlog += sum(map(len, self._pending))
        self.flush()

    def detach(self) -> None:
        """Write nothing more: the connection is free for another response."""
        self._transport = None

    # ----------------------------------------------------------------

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._pending.append(sse.retry_field())
        self._add_opening_events()
        if self._transport is not None:  # a client need not read a whole prompt at once
            self._max_backlog += sum(map(len, self._pending))
        if not self.begun.done():
            self.begun.set_result(None)

    def _reach(self, sequence: SequenceState, tokens: int, level: int) -> None:
        self._places[sequence.index] = f"{tokens}{LEVELS[level]}"

    def _event(self, data: bytes, name: bytes = b"") -> None:
        places = self._places
        position = places[0] if len(places) == 1 else ".".join(places)
        self._pending.append(sse.event(data, self._id + position.encode(), name))

    def _close(self) -> None:
        if self.END:
            self._pending.append(self.END)
        if not self.over.done():
            self.over.set_result(None)

    # ---------------------------------------------------------------- of the subclasses

    @property
    def _opens_before_error(self) -> bool:
        """Whether a stream that fails before its first text has the opening events before the error."""
        return False

    @abc.abstractmethod
    def _add_opening_events(self) -> None: ...

    @abc.abstractmethod
    def _add_closing_events(self) -> None: ...

    @abc.abstractmethod
    def _add_error(self, error: StarlingError) -> None: ...

    @abc.abstractmethod
    def _skip(self, sequence: SequenceState, text: str, end: int, *, is_whole: bool) -> None:
        """Count `text`, from the beginning on, and the output tokens before `end` as sent."""


class EventStream(StreamSink):
    """A stream whose tokens have one event each, and that ends with `[DONE]`, as in OpenAI's API."""

    END = sse.DONE

    def __init__(self, request: RequestState, formatter: ResponseFormatter, drop: Callable[[str], None]) -> None:
        super().__init__(request, drop)
        self._formatter = formatter

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        """Add an event of new text."""
        self._open()
        self._reach(sequence, end, FLUSHED if sequence.is_flushed else TOKENS)
        event = self._formatter.text_event(sequence, new, begin, end)
        if event is not None:
            self._event(event)

    def ended(self, sequence: SequenceState) -> None:
        """Add the event with the finish reason, after one with the text that the formatter has held back."""
        self._open()
        rest = self._formatter.rest_event(sequence)
        if rest is not None:
            self._reach(sequence, sequence.n_emitted, FLUSHED)
            self._event(rest)
        self._reach(sequence, sequence.n_emitted, ENDED)
        self._event(self._formatter.finish_event(sequence))

    def _add_opening_events(self) -> None:
        *before, last = self._formatter.opening_events() or (b"",)
        self._pending.extend(sse.event(event) for event in before)
        if last:
            self._event(last)

    def _add_closing_events(self) -> None:
        for event in self._formatter.closing_events():
            self._event(event)

    def _add_error(self, error: StarlingError) -> None:
        over = (LEVELS[ENDED], LEVELS[CLOSED])
        open_choices = [index for index, place in enumerate(self._places) if not place.endswith(over)]
        self._event(error_event(error, open_choices))

    def _skip(self, sequence: SequenceState, text: str, end: int, *, is_whole: bool) -> None:
        self._formatter.skip(sequence, text, end, is_whole=is_whole)
