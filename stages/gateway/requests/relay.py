"""Tokens become text become events: the gateway's part of every step, and of every recovery.

    scheduler --Tokens--> on_tokens --> a decoder for each sequence --> sinks

Pure: frames go out through the function it is given, text through each request's sink, time comes in.
What makes it safe to lose anybody at any moment:

* Tokens are kept in order by output index.  What was delivered already is dropped by `start`; after
  a gap, or when a scheduler has started afresh, the sequence is submitted again with `forced` = what is here.
* Text is made here, of the vocabularies that the tokenizer has described (`token_bytes.py`): a stream that has
  begun needs no tokenizer, and its text depends on its tokens alone, however they were grouped.
* Every request ends once (`record.py`), and is gone from the tables with it: frames that come later are
  counted and ignored.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import NamedTuple

from pipeline.errors import CODES, InternalError, StarlingError
from pipeline.protocol.messages import Cancel, Frame, Rejected, SequenceTokens, Tokens
from stages.gateway.requests.response_cache import Line, fill
from stages.gateway.requests.state import (
    IllegalTransitionError,
    Outcome,
    RequestState,
    SequencePhase,
    SequenceState,
    Sink,
    submission,
)
from stages.gateway.requests.text_decoder import StreamDecoder
from stages.gateway.requests.token_bytes import TokenBytes

log = logging.getLogger("starling.gateway.relay")

RESUBMIT_AFTER_S = 1.0  # not more often for the same sequence
MAX_PARTS = 512  # of a sequence's text: a string for each token takes ten times its characters
OVERTIME_S = 0.3  # beyond its time a request is ended here; the scheduler, which has the same one, comes first


class Counts(NamedTuple):
    """For the metrics; see `Relay.counts`."""

    tokens: int
    late: int
    gaps: int
    resubmitted: int


class Relay:
    """All requests in flight. `send_scheduler` returns False when it is down or its queue is full."""

    def __init__(
        self,
        send_scheduler: Callable[[Frame], bool],
        clock: Callable[[], float],
        on_end: Callable[[RequestState], None] = lambda request: None,
        on_last: Callable[[RequestState], bool] = lambda request: False,
    ) -> None:
        """`on_last`: all text of a request is out. True: it ends when `complete` is called."""
        self.requests: dict[str, RequestState] = {}
        self.sequences: dict[str, SequenceState] = {}
        self.pieces: dict[str, TokenBytes] = {}  # by vocabulary, see `RequestState.vocabulary`
        self._send_scheduler = send_scheduler
        self._clock = clock
        self._on_end = on_end
        self._on_last = on_last
        self._unsubmitted: dict[str, SequenceState] = {}
        self._tokens = self._late = self._gaps = self._resubmitted = 0

    @property
    def counts(self) -> Counts:
        return Counts(self._tokens, self._late, self._gaps, self._resubmitted)

    # ---------------------------------------------------------------- beginning and ending

    def open(self, request: RequestState) -> None:
        """Take a request with its sequences and sink, and submit it."""
        self._enter(request)
        request.left = len(request.sequences)
        for sequence in request.sequences:
            self.sequences[sequence.id] = sequence
            self._submit(sequence)

    def _enter(self, request: RequestState) -> None:
        self.requests[request.id] = request
        pieces = self.pieces.pop(request.vocabulary, None)
        if pieces is not None:
            pieces.is_used = True
            self.pieces[request.vocabulary] = pieces  # the one used last is the last

    def give(self, request: RequestState, lines: list[Line]) -> None:
        """Take a request with its sequences and sink, and end it with an answer that was kept."""
        now = self._clock()
        self._enter(request)
        request.left = 0
        for sequence, line in zip(request.sequences, lines, strict=True):
            self.sequences[sequence.id] = sequence
            fill(sequence, line, now)
        sink = request.sink
        for sequence in request.sequences:
            sequence.move(SequencePhase.FINISHED)
            if sink is not None:
                if sequence.end or sequence.text_length:
                    sink.text(sequence, "".join(sequence.text), 0, sequence.end)
                sink.ended(sequence)
        self.complete(request)

    def abandon(self, request: RequestState) -> None:
        """The client has gone. Late calls are harmless."""
        if request.outcome is Outcome.OPEN:
            self._end(request, Outcome.ABANDONED)

    def complete(self, request: RequestState) -> None:
        """All its sequences are finished, and so is it. Late calls are harmless."""
        if request.outcome is not Outcome.OPEN:
            return
        sink = request.sink
        self._end(request, Outcome.FINISHED)
        if sink is not None:
            sink.finished()
            sink.flush()

    def fail(self, request: RequestState, error: StarlingError) -> None:
        """End the request with an error. Late calls are harmless."""
        if request.outcome is not Outcome.OPEN:
            return
        request.error = error
        sink = request.sink
        self._end(request, Outcome.FAILED)
        if sink is not None:
            sink.failed(error)
            sink.flush()

    def _end(self, request: RequestState, outcome: Outcome) -> None:
        request.end(outcome)
        del self.requests[request.id]
        for sequence in request.sequences:
            del self.sequences[sequence.id]
            self._unsubmitted.pop(sequence.id, None)
            sequence.decoder = None
            if not sequence.is_over:
                sequence.used = len(sequence.tokens)
                sequence.move(SequencePhase.FAILED)
                if sequence.is_submitted and not sequence.finish:
                    self._send_scheduler(Cancel(sequence.id))
        self._on_end(request)

    # ---------------------------------------------------------------- from the scheduler

    def on_tokens(self, frame: Tokens) -> None:
        """All sequences that moved in a step, or in several: a sequence may then be named several times."""
        moved: dict[str, SequenceState] = {}
        for new in frame.sequences:
            sequence = self.sequences.get(new.sequence)
            if sequence is None or sequence.finish:
                self._late += 1
                continue
            if self._take(sequence, new):
                moved[sequence.id] = sequence
        touched: dict[str, RequestState] = {}
        for sequence in moved.values():
            # A request can have failed with a later entry of the same frame.
            if sequence.id in self.sequences and not sequence.is_over:
                request = sequence.request
                touched[request.id] = request
                self._show(sequence)
        for request in touched.values():
            if request.sink is not None:
                request.sink.flush()

    def _take(self, sequence: SequenceState, new: SequenceTokens) -> bool:
        """Add what is new to the record. False: nothing to show."""
        if new.finish and new.finish not in ("stop", "length"):
            self._stopped_badly(sequence, new)
            return False
        tokens = sequence.tokens
        have = len(tokens)
        if new.start > have:
            self._gaps += 1
            self._begin_again(sequence)
            return False
        fresh = new.tokens[have - new.start :] if new.start < have else new.tokens
        if fresh:
            if not have:
                sequence.begun_at = self._clock()
            tokens.extend(fresh)
            self._tokens += len(fresh)
            if new.logprobs:
                sequence.logprobs.extend(new.logprobs[have - new.start :])
        if new.cached_tokens and not sequence.resubmitted:
            sequence.cached_tokens = new.cached_tokens
        if sequence.state is SequencePhase.PENDING and tokens:
            sequence.move(SequencePhase.DECODING)
        sequence.finish = new.finish
        return bool(fresh) or bool(new.finish)

    def _stopped_badly(self, sequence: SequenceState, new: SequenceTokens) -> None:
        if new.finish == "cancelled" and (sequence.resubmitted or not sequence.is_submitted):
            self._late += 1  # of the incarnation before: see `_begin_again`
            return
        if new.finish == "timeout":
            self._end_late(sequence.request)
            return
        message = new.message or {
            "cancelled": "the scheduler cancelled this request",
        }.get(new.finish, "the scheduler ended this request without a reason")
        self.fail(sequence.request, StarlingError(new.error or "INTERNAL", message))

    def _end_late(self, request: RequestState) -> None:
        is_waiting = not any(sequence.tokens for sequence in request.sequences)
        message = _timeout_message(request, self._clock(), is_waiting)
        self.fail(request, StarlingError("TIMEOUT", message))

    def on_rejected(self, frame: Rejected) -> None:
        """Not admitted: an error for a new request; one that was running waits for its place."""
        sequence = self.sequences.get(frame.sequence)
        if sequence is None or sequence.finish:
            self._late += 1
            return
        known = CODES.get(frame.code)
        if known is not None and known.retry and (sequence.resubmitted or sequence.tokens):
            sequence.is_submitted = False
            sequence.not_before = self._clock() + max(0.1, frame.retry_after_s)
            self._unsubmitted[sequence.id] = sequence
            return
        sequence.is_submitted = False
        error = StarlingError(frame.code, frame.message, frame.param, retry_after_s=frame.retry_after_s)
        self.fail(sequence.request, error)

    def on_scheduler_up(self) -> None:
        """A scheduler that knows nothing of us: submit all that has not got its last token."""
        for sequence in list(self.sequences.values()):
            if not sequence.finish and not sequence.is_over:
                if sequence.is_submitted:
                    sequence.resubmitted += 1
                    self._resubmitted += 1
                self._submit(sequence)

    def _begin_again(self, sequence: SequenceState) -> None:
        """Tokens are missing: cancel what runs and submit the rest. Its cancelled end is ignored."""
        now = self._clock()
        if now < sequence.not_before:
            return
        sequence.not_before = now + RESUBMIT_AFTER_S
        sequence.resubmitted += 1
        self._resubmitted += 1
        log.warning("tokens of %s are missing, submitting it again", sequence.id)
        self._send_scheduler(Cancel(sequence.id))
        self._submit(sequence)

    def _submit(self, sequence: SequenceState) -> None:
        tokens = sequence.tokens
        if tokens and (len(tokens) >= sequence.max_tokens or tokens[-1] in sequence.stop_ids):
            # Its end was lost with the scheduler; what it must have been is plain.
            sequence.finish = "stop" if tokens[-1] in sequence.stop_ids else "length"
            self._unsubmitted.pop(sequence.id, None)
            request = sequence.request
            self._show(sequence)
            if request.sink is not None:
                request.sink.flush()
            return
        frame = submission(sequence, array("i", tokens).tobytes(), self._clock())
        sequence.is_submitted = self._send_scheduler(frame)
        if sequence.is_submitted:
            self._unsubmitted.pop(sequence.id, None)
        else:
            self._unsubmitted[sequence.id] = sequence

    # ---------------------------------------------------------------- tokens to text

    def _show(self, sequence: SequenceState) -> None:
        """Text of the tokens that its decoder has not seen, to its sink: a call for each token."""
        request = sequence.request
        sink = request.sink
        if sink is None:
            raise IllegalTransitionError(f"{request.id} has no sink")
        pieces = self.pieces.get(request.vocabulary)
        if not pieces:
            self.fail(request, InternalError(f"the vocabulary of {request.instance} is not known"))
            return
        decoder = sequence.decoder
        if decoder is None:
            decoder = sequence.decoder = StreamDecoder(request.ask.stop)
        skip_special = request.ask.skip_special
        tokens, visible = sequence.tokens, sequence.visible
        # A limit comes with the token that reached it; a stop token may come alone: what it ends is always told alone.
        last = visible if sequence.finish and visible == len(tokens) else -1
        for end in range(sequence.end + 1, visible + 1):
            text = decoder.push(pieces.shown(tokens[end - 1], skip_special))
            if end == last and not decoder.stop_string:
                text += decoder.finish()
            sequence.is_flushed = end == last or bool(decoder.stop_string)
            _emit(sequence, sink, text, end)
            if decoder.stop_string:
                self._stop(sequence, decoder.stop_string)
                return
        if not sequence.finish:
            return
        if not sequence.is_flushed:
            text, sequence.is_flushed = decoder.finish(), True
            if text:
                _emit(sequence, sink, text, visible)
            if decoder.stop_string:
                self._stop(sequence, decoder.stop_string)
                return
        self._finish(sequence, len(tokens))

    def _stop(self, sequence: SequenceState, stop_string: str) -> None:
        """A stop string: tokens past it were not used."""
        if sequence.is_submitted and not sequence.finish:
            self._send_scheduler(Cancel(sequence.id, at=sequence.end))
        self._unsubmitted.pop(sequence.id, None)
        sequence.finish = "stop"
        sequence.stop_string = stop_string
        self._finish(sequence, sequence.end)

    def _finish(self, sequence: SequenceState, used: int) -> None:
        request = sequence.request
        sink = request.sink
        sequence.used = used
        sequence.move(SequencePhase.FINISHED)
        if sink is not None:
            sink.ended(sequence)
        request.left -= 1
        if request.left == 0 and not self._on_last(request):
            self.complete(request)

    # ---------------------------------------------------------------- time

    def tick(self) -> None:
        """Every 100 ms: end what is over time, send what could not be sent."""
        now = self._clock()
        for request in [r for r in self.requests.values() if now >= r.deadline + OVERTIME_S]:
            self._end_late(request)
        for sequence in [s for s in self._unsubmitted.values() if now >= s.not_before]:
            if not sequence.is_over:
                self._submit(sequence)


def _emit(sequence: SequenceState, sink: Sink, text: str, end: int) -> None:
    """`text` has become certain with the output tokens up to `end`."""
    if text:
        parts = sequence.text
        parts.append(text)
        sequence.text_length += len(text)
        if len(parts) >= MAX_PARTS:
            parts[:] = ["".join(parts)]
    begin, sequence.end = sequence.end, end
    sink.text(sequence, text, begin, end)


def _timeout_message(request: RequestState, now: float, waiting: bool) -> str:
    seconds = now - request.started_at
    if waiting:
        return (
            f"no token after {seconds:.1f} s, the time a request may take (server.request_timeout_ms); "
            f"try again when it is less busy"
        )
    return (
        f"not finished after {seconds:.1f} s, the time a request may take (server.request_timeout_ms); "
        f"ask for fewer tokens"
    )
