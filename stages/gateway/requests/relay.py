"""Tokens become text, and text becomes events: the gateway's part of every step and of every recovery.

    scheduler --Tokens--> on_tokens --> one decoder for each sequence --> the request's sink

Pure: frames leave through an injected function, text goes to each request's sink, and the clock is injected. Any
process may be lost at any time, because:

* Tokens are stored by output index. Tokens that were delivered before are dropped by `start`. After a gap, or when a
  scheduler has restarted, the sequence is submitted again with `forced` = the tokens that are stored.
* Text is made here, from the vocabularies that the tokenizer has described (`token_bytes.py`): a stream that has
  begun needs no tokenizer, and its text depends on its tokens alone, however they were grouped into frames.
* Every request ends once (`state.py`) and is then removed from the tables. Late frames are counted and ignored.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pipeline.errors import CODES, Conflict, InternalError, StarlingError
from pipeline.protocol.messages import Cancel, Frame, Rejected, SequenceTokens, Tokens
from stages.gateway.requests.output import SequenceOutput, restore_output
from stages.gateway.requests.overtime import OVERTIME_S, timeout_message
from stages.gateway.requests.reasoning_budget import end_reasoning, is_over_budget
from stages.gateway.requests.sequence_events import GapCounter, record_decoding, record_start, record_tokens
from stages.gateway.requests.sequence_text import emit, is_complete
from stages.gateway.requests.state import (
    Filter,
    IllegalTransitionError,
    Outcome,
    RequestState,
    SequencePhase,
    SequenceState,
    Sink,
    finish,
    submission,
)
from stages.gateway.requests.text_decoder import decoder_of
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.tracing.timeline import Fact, Phase

log = logging.getLogger("starling.gateway.relay")

RESUBMIT_AFTER_S = 1.0  # shortest time between two submissions of a sequence because of a gap
MEASURED = 16  # one frame in so many is timed for the timelines, and counts for all of them


class Counts(NamedTuple):
    """Totals since the start, for the metrics."""

    tokens: int  # received
    late: int  # frames for unknown or ended sequences
    gaps: int  # frames that came after a lost one
    resubmitted: int  # submissions beyond the first of a sequence


class Relay:
    """All requests in flight. `send_scheduler` returns False when it is down or its queue is full."""

    def __init__(
        self,
        send_scheduler: Callable[[Frame], bool],
        clock: Callable[[], float],
        on_end: Callable[[RequestState], None] = lambda request: None,
        on_text_complete: Callable[[RequestState], bool] = lambda request: False,
        on_other_end: Callable[[SequenceTokens], bool] = lambda part: False,
        open_filter: Callable[[SequenceState], Filter] | None = None,
    ) -> None:
        """Callbacks: `on_end` is called when a request has its outcome.

        `on_text_complete` is called when all text of a request has gone to its sink. If it returns True, the request
        ends when `complete` is called. `on_other_end` is called for a sequence that is not of a request here; it
        returns whether it has the sequence. `open_filter` returns the way of a text through plugins, and may raise
        `StarlingError`; None: there are no plugins.
        """
        self.requests: dict[str, RequestState] = {}
        self.sequences: dict[str, SequenceState] = {}
        self.vocabularies: dict[str, TokenBytes] = {}  # by `RequestSpec.vocabulary`, least recently used first
        self.count_gaps: GapCounter | None = None
        self.send_end: Callable[[RequestState, Sink], None] = lambda request, sink: finish(sink)  # of a whole answer
        self._send_scheduler = send_scheduler
        self._clock = clock
        self._on_end = on_end
        self._on_text_complete = on_text_complete
        self._on_other_end = on_other_end
        self._open_filter = open_filter
        self.unsubmitted: dict[str, SequenceState] = {}  # tried again at ticks
        self._described: set[str] = set()  # versions whose vocabularies the scheduler has, for constraints
        self._tokens = self._late = self._gaps = self._resubmitted = 0
        self._frames = 0

    @property
    def counts(self) -> Counts:
        """Totals since the start."""
        return Counts(self._tokens, self._late, self._gaps, self._resubmitted)

    # ---------------------------------------------------------------- beginning and ending

    def open(self, request: RequestState) -> None:
        """Register a request that has its sink, and submit its sequences, after the tokens that they have already."""
        self._register(request)
        request.n_open = len(request.sequences)
        if (trace := request.trace) is not None:
            now = self._clock()
            trace.add(now, "submitted", {"sequences": len(request.sequences)})
            trace.enter(Phase.QUEUE, now)
        self.sequences.update((sequence.id, sequence) for sequence in request.sequences)
        for sequence in request.sequences:
            if request.outcome is Outcome.OPEN:
                if sequence.tokens and not is_complete(sequence):  # of another server
                    sequence.move(SequencePhase.DECODING)
                    self._emit_text(sequence)
                if not sequence.is_over:
                    self._submit(sequence)

    def request_of(self, sequence_id: str) -> RequestState | None:
        """The request in flight that a sequence belongs to."""
        sequence = self.sequences.get(sequence_id)
        return sequence.request if sequence is not None else None

    def _register(self, request: RequestState) -> None:
        self.requests[request.id] = request
        vocabulary = self.vocabularies.pop(request.spec.vocabulary, None)
        if vocabulary is not None:
            vocabulary.is_used = True
            self.vocabularies[request.spec.vocabulary] = vocabulary  # last: most recently used

    def open_answered(self, request: RequestState, outputs: list[SequenceOutput]) -> None:
        """Register a request that has its sink, and end it with the response cache's answer when that is stored."""
        now = self._clock()
        self._register(request)
        for sequence, output in zip(request.sequences, outputs, strict=True):
            self.sequences[sequence.id] = sequence
            n = sequence.n_prompt  # nothing of the prompt is computed
            cached = msgspec.structs.replace(output, n_prompt=n, cached_tokens=n, first_token_at=now)
            restore_output(sequence, cached)
        sink = request.sink
        for sequence in request.sequences:
            if sink is not None:
                if sequence.n_emitted or sequence.text_length:
                    sink.text(sequence, "".join(sequence.text), 0, sequence.n_emitted)
                sink.ended(sequence)
        if not self._on_text_complete(request):
            self.complete(request)

    def abandon(self, request: RequestState) -> None:
        """The client has disconnected. Does nothing if the request has ended."""
        if request.outcome is Outcome.OPEN:
            self._end(request, Outcome.ABANDONED)

    def complete(self, request: RequestState) -> None:
        """End a request whose sequences have finished. Does nothing if the request has ended."""
        if request.outcome is not Outcome.OPEN:
            return
        sink = request.sink
        self._end(request, Outcome.FINISHED)
        if sink is not None:
            self.send_end(request, sink)

    def fail(self, request: RequestState, error: StarlingError) -> None:
        """End the request with an error. Does nothing if the request has ended."""
        if request.outcome is not Outcome.OPEN:
            return
        request.error, sink = error, request.sink
        self._end(request, Outcome.FAILED)
        if sink is not None:
            sink.failed(error)
            sink.flush()

    def drop(self, request: RequestState) -> None:
        """Forget a request. Unless it has ended, its sequences go on at the scheduler."""
        del self.requests[request.id]
        for sequence in request.sequences:
            del self.sequences[sequence.id]
            self.unsubmitted.pop(sequence.id, None)
            if sequence.filter is not None:
                sequence.filter.close()
            sequence.decoder = sequence.filter = None

    def _end(self, request: RequestState, outcome: Outcome) -> None:
        request.end(outcome)
        self.drop(request)
        for sequence in request.sequences:
            if not sequence.is_over:
                sequence.n_used = len(sequence.tokens)
                sequence.move(SequencePhase.FAILED)
                if sequence.is_submitted and not sequence.finish_reason:
                    self._send_scheduler(Cancel(sequence.id))
        self._on_end(request)

    # ---------------------------------------------------------------- from the scheduler

    def on_tokens(self, frame: Tokens) -> None:
        """New tokens of one step, or of several: a frame may have several entries of one sequence."""
        moved: dict[str, SequenceState] = {}
        for new in frame.sequences:
            sequence = self.sequences.get(new.sequence)
            if sequence is None or sequence.finish_reason:
                if sequence is not None or not self._on_other_end(new):
                    self._late += 1
                continue
            if self._append(sequence, new):
                moved[sequence.id] = sequence
                if new.scores and not sequence.request.waits_for_scores:
                    moved.update((other.id, other) for other in sequence.request.sequences)
        if frame.started:
            self._start(frame.started)
        self._frames += 1
        is_measured = not self._frames % MEASURED
        touched: dict[str, RequestState] = {}
        for sequence in moved.values():
            # A later entry of the same frame may have ended the request.
            if sequence.id in self.sequences and not sequence.is_over:
                request = sequence.request
                touched[request.id] = request
                if is_measured:
                    self._emit_measured(sequence)
                else:
                    self._emit_text(sequence)
        for request in touched.values():
            if request.sink is not None:
                if is_measured and request.trace is not None:
                    began = self._clock()
                    request.sink.flush()
                    request.trace.write_s += (self._clock() - began) * MEASURED
                else:
                    request.sink.flush()

    def _emit_measured(self, sequence: SequenceState) -> None:
        trace = sequence.request.trace
        began = self._clock()
        self._emit_text(sequence)
        if trace is not None:
            trace.detokenize_s += (self._clock() - began) * MEASURED

    def _start(self, ids: tuple[str, ...]) -> None:
        """Sequences have left the scheduler's queue."""
        for sequence in filter(None, map(self.sequences.get, ids)):
            record_start(sequence, self._clock())
            request = sequence.request
            if request.sink is not None and request.is_started:
                request.sink.started()

    def _append(self, sequence: SequenceState, new: SequenceTokens) -> bool:
        """Store the tokens that are new. False: there is nothing to emit."""
        if new.revision != sequence.revision:
            self._late += 1
            return False
        if new.finish and new.finish not in ("stop", "length"):
            self._on_bad_finish(sequence, new)
            return False
        tokens = sequence.tokens
        have = len(tokens)
        scores = sequence.scores
        has_gap = new.start > have
        if scores is not None:  # they come before the first token
            has_gap = has_gap or not scores.add(new.score_start, new.scores)
            has_gap = has_gap or bool((new.tokens or new.finish) and not scores.is_complete)
        if has_gap:
            self._gaps += 1
            self._resubmit(sequence)
            return False
        fresh = new.tokens[have - new.start :] if new.start < have else new.tokens
        if fresh:
            record_tokens(sequence, len(fresh), self._clock(), self.count_gaps)
            tokens.extend(fresh)
            self._tokens += len(fresh)
            if new.logprobs:
                sequence.logprobs.extend(new.logprobs[have - new.start :])
        if new.cached_tokens and not sequence.n_resubmitted:
            sequence.cached_tokens = new.cached_tokens
        if sequence.phase is SequencePhase.PENDING and tokens:
            sequence.move(SequencePhase.DECODING)
        sequence.finish_reason = new.finish
        if new.finish:
            sequence.accepted, sequence.attachment = new.accepted, new.attachment
        is_scored = bool(new.scores) and sequence.request.update_scores()
        return bool(fresh) or bool(new.finish) or is_scored

    def _on_bad_finish(self, sequence: SequenceState, new: SequenceTokens) -> None:
        if new.finish == "cancelled" and (sequence.n_resubmitted or not sequence.is_submitted):
            self._late += 1  # of the submission before, see `_resubmit`
            return
        if new.finish == "timeout":
            self._end_late(sequence.request)
            return
        message = new.message or {
            "cancelled": "the scheduler cancelled this request",
        }.get(new.finish, "the scheduler ended this request without giving a reason")
        self.fail(sequence.request, StarlingError(new.error or "INTERNAL", message, new.param))

    def _end_late(self, request: RequestState) -> None:
        is_waiting = not any(sequence.tokens for sequence in request.sequences)
        self.fail(request, StarlingError("TIMEOUT", timeout_message(request, self._clock(), is_waiting)))

    def on_rejected(self, frame: Rejected) -> None:
        """The scheduler did not admit a sequence: a new request fails, one that was running before is retried."""
        sequence = self.sequences.get(frame.sequence)
        if sequence is None or sequence.finish_reason:
            self._late += 1
            return
        known = CODES.get(frame.code)
        sequence.is_submitted = False
        if known is not None and known.retry and (sequence.n_resubmitted or sequence.tokens):
            sequence.not_before = self._clock() + max(0.1, frame.retry_after_s)
            self.unsubmitted[sequence.id] = sequence
            return
        error = StarlingError(frame.code, frame.message, frame.param, retry_after_s=frame.retry_after_s)
        self.fail(sequence.request, error)

    def on_scheduler_up(self) -> None:
        """A new scheduler process: submit every sequence that does not have its last token."""
        self._described.clear()
        for sequence in list(self.sequences.values()):
            if not sequence.finish_reason and not sequence.is_over:
                if sequence.is_submitted:
                    sequence.n_resubmitted += 1
                    self._resubmitted += 1
                self._submit(sequence)

    def _resubmit(self, sequence: SequenceState) -> None:
        """Tokens were lost: cancel the sequence and submit the rest. Its "cancelled" end is then ignored."""
        now = self._clock()
        if now < sequence.not_before:
            return
        sequence.not_before = now + RESUBMIT_AFTER_S
        sequence.n_resubmitted += 1
        self._resubmitted += 1
        facts = {**sequence.request.log_names, "sequence": sequence.id}
        log.warning("tokens of a sequence are missing, submitting it again", extra=facts)
        self._send_scheduler(Cancel(sequence.id))
        self._submit(sequence)

    def _submit(self, sequence: SequenceState) -> None:
        tokens = sequence.tokens
        if is_complete(sequence):
            # The finish reason was lost with the scheduler; the tokens determine it.
            sequence.finish_reason = "stop" if tokens[-1] in sequence.spec.stop_ids else "length"
            self.unsubmitted.pop(sequence.id, None)
            request = sequence.request
            self._emit_text(sequence)
            if request.sink is not None:
                request.sink.flush()
            return
        now = self._clock()
        frame = submission(sequence, array("i", tokens).tobytes(), now)
        is_ready = frame.constraint is None or self._send_vocabulary(sequence.request)
        if frame.sampling.dry_multiplier:
            vocabulary = self.vocabularies.get(sequence.request.spec.vocabulary)
            if vocabulary:
                breakers = vocabulary.breakers(frame.sampling.dry_sequence_breakers).mask
                frame = msgspec.structs.replace(frame, breakers=breakers)
            is_ready = is_ready and bool(vocabulary)
        sequence.is_submitted = is_ready and self._send_scheduler(frame)
        if sequence.is_submitted:
            self.unsubmitted.pop(sequence.id, None)
            trace = sequence.request.trace
            if trace is not None and sequence.n_resubmitted:
                facts: dict[str, Fact] = {"tokens": len(tokens)}
                trace.add(now, "resubmitted", facts, choice=-1 if trace.is_single else sequence.index)
                trace.advance(Phase.QUEUE, now)
        else:
            self.unsubmitted[sequence.id] = sequence

    def _send_vocabulary(self, request: RequestState) -> bool:
        """Give the scheduler what it compiles constraints for. False: try again later."""
        version = request.spec.version
        if version not in self._described:
            vocabulary = self.vocabularies.get(request.spec.vocabulary)
            if not vocabulary or not self._send_scheduler(vocabulary.frame(version)):
                return False
            self._described.add(version)
        return True

    # ---------------------------------------------------------------- tokens to text

    def _emit_text(self, sequence: SequenceState) -> None:
        """Decode the tokens that have no text yet and pass it to the sink, one call for each token."""
        request = sequence.request
        sink = request.sink
        if request.waits_for_scores:
            return
        sequence.count_predicted()  # in small parts
        if sink is None:
            raise IllegalTransitionError(f"{request.id} has no sink")
        vocabulary = self.vocabularies.get(request.spec.vocabulary)
        if not vocabulary:
            self.fail(request, InternalError(f"the vocabulary of {request.spec.version} is not loaded"))
            return
        decoder = sequence.decoder
        if decoder is None:
            decoder = sequence.decoder = decoder_of(request.spec)
            if request.spec.plugins and not self._begin_filter(sequence):
                return
        if sequence.filter is not None:
            sequence.filter.advance(decoder, vocabulary)
            return
        skip_special, kept = request.spec.generation.skip_special, request.spec.generation.kept_control
        tokens, visible = sequence.tokens, sequence.visible
        # "length" comes with the token that reached the limit. A stop token may come in a frame of its own, so the text
        # that it releases is always a separate call, however the frames were grouped.
        last = visible if sequence.finish_reason and visible == len(tokens) else -1
        limit = sequence.reasoning_limit
        for end in range(sequence.n_emitted + 1, visible + 1):
            text = decoder.push(vocabulary.shown(tokens[end - 1], skip_special, kept))
            if end >= limit and is_over_budget(sequence, decoder, end):
                sequence.n_reasoning = decoder.n_reasoning
                emit(sequence, sink, text, end)
                self.end_reasoning(sequence, end)
                if not sequence.is_over:
                    self._emit_text(sequence)
                return
            if end == last and not decoder.is_over:
                text += decoder.finish()
            sequence.is_flushed = end == last or decoder.is_over
            sequence.n_reasoning = decoder.n_reasoning
            emit(sequence, sink, text, end)
            if decoder.is_over:
                self._stop(sequence, decoder.stop_string)
                return
        if not sequence.finish_reason:
            return
        if not sequence.is_flushed:
            text, sequence.is_flushed = decoder.finish(), True
            if text:
                emit(sequence, sink, text, visible)
            if decoder.is_over:
                self._stop(sequence, decoder.stop_string)
                return
        self._finish(sequence, len(tokens))

    def _begin_filter(self, sequence: SequenceState) -> bool:
        """Let the text go through plugins. False: that is impossible, and the request has failed."""
        try:
            if self._open_filter is None:
                raise Conflict("the request was admitted with plugins, which are not configured any more")
            sequence.filter, sequence.text_ends = self._open_filter(sequence), array("I")
        except StarlingError as error:
            self.fail(sequence.request, error)
        return sequence.filter is not None

    def deliver(self, sequence: SequenceState, text: str, end: int, *, is_final: bool) -> None:
        """Text that has gone through the plugins; see `Outlet`."""
        sink, sequence.is_flushed = sequence.request.sink, is_final
        assert sink is not None and sequence.text_ends is not None
        if text or not is_final:
            emit(sequence, sink, text, end)
        if is_final:
            self._finish(sequence, sequence.n_emitted if sequence.stop_string else len(sequence.tokens))
        else:
            sequence.text_ends.append(sequence.text_length)
        sink.flush()

    def end_reasoning(self, sequence: SequenceState, at: int) -> None:
        """The reasoning has reached its budget: the answer goes on behind its end mark."""
        if end_reasoning(sequence, at) and sequence.is_submitted:
            sequence.n_resubmitted += 1
            self._submit(sequence)

    def _stop(self, sequence: SequenceState, stop_string: str) -> None:
        """A stop string was met, or the only call is complete (""): tokens past it do not count."""
        self.met_stop(sequence, stop_string, sequence.n_emitted)
        self._finish(sequence, sequence.n_emitted)

    def met_stop(self, sequence: SequenceState, stop_string: str, at: int) -> None:
        """No more tokens are needed than the first `at`."""
        if sequence.is_submitted and not sequence.finish_reason:
            self._send_scheduler(Cancel(sequence.id, at=at))
        self.unsubmitted.pop(sequence.id, None)
        sequence.finish_reason = "stop"
        sequence.stop_string = stop_string

    def _finish(self, sequence: SequenceState, used: int) -> None:
        request = sequence.request
        sink = request.sink
        sequence.n_used = used
        sequence.count_predicted()
        sequence.move(SequencePhase.FINISHED)
        if request.trace is not None:
            record_decoding(request.trace, sequence, self._clock())
        if sink is not None:
            sink.ended(sequence)
        request.n_open -= 1
        if request.n_open == 0 and not self._on_text_complete(request):
            self.complete(request)

    # ---------------------------------------------------------------- time

    def tick(self) -> None:
        """At each tick: end requests past their deadline, submit what could not be sent before."""
        now = self._clock()
        for request in [r for r in self.requests.values() if now >= r.deadline + OVERTIME_S]:
            self._end_late(request)
        for sequence in [s for s in self.unsubmitted.values() if now >= s.not_before]:
            if not sequence.is_over:
                self._submit(sequence)
