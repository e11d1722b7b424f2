"""Tokens become text become events: the gateway's part of every step, and of every recovery.

    scheduler --Tokens--> on_tokens --Detokenize--> tokenizer --Detokenized--> on_text --> sinks

One Detokenize frame for all sequences that moved in a step.  Pure: frames go out through the two
functions it is given, text through each request's sink, time comes in.  What makes it safe to lose
anybody at any moment:

* Tokens are kept in order by output index.  What was delivered already is dropped by `start`; after
  a gap, or when a scheduler has started afresh, the sequence is submitted again with `forced` = what is here.
* Text is kept by characters.  When a decoder is gone the sequence is sent again from its first token
  (`replay_id` names the frame; older answers do not count) and the characters that are out are skipped.
* Every request ends once (`record.py`), and is gone from the tables with it: frames that come later are
  counted and ignored.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import NamedTuple

from pipeline.errors import CODES, StarlingError
from pipeline.messages import (
    Cancel,
    Detokenize,
    Detokenized,
    Forget,
    Frame,
    Rejected,
    SequenceTokens,
    StreamText,
    StreamTokens,
    Tokens,
)
from stages.gateway.record import IllegalTransitionError, Outcome, Request, Sequence, State, submission
from stages.gateway.responses import Line, fill

log = logging.getLogger("starling.gateway.relay")

RESUBMIT_AFTER_S = 1.0  # not more often for the same sequence
OVERTIME_S = 0.3  # beyond its time a request is ended here; the scheduler, which has the same one, comes first
UNANSWERED_S = 3.0  # tokens without text for longer: the answer is lost, send them again
TokenBytes = dict[int, bytes]


class Counts(NamedTuple):
    """For the metrics; see `Relay.counts`."""

    tokens: int
    late: int
    gaps: int
    resubmitted: int
    replayed: int


class Relay:
    """All requests in flight. `send_*` return False when the peer is down or its queue is full."""

    def __init__(
        self,
        send_scheduler: Callable[[Frame], bool],
        send_tokenizer: Callable[[Frame], bool],
        clock: Callable[[], float],
        on_end: Callable[[Request], None] = lambda request: None,
        on_last: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        """`on_last`: all text of a request is out. True: it ends when `complete` is called."""
        self.requests: dict[str, Request] = {}
        self.sequences: dict[str, Sequence] = {}
        self.token_bytes: dict[str, TokenBytes] = {}  # by vocabulary; for logprobs, bounded by its size
        self._send_scheduler = send_scheduler
        self._send_tokenizer = send_tokenizer
        self._clock = clock
        self._on_end = on_end
        self._on_last = on_last
        self._next_id = 1  # of Detokenize frames; grows, so that an answer tells its age
        self._wanted: dict[int, dict[str, tuple[int, ...]]] = {}  # frame -> sequence -> ids asked for
        self._unsubmitted: dict[str, Sequence] = {}
        self._unshown: dict[str, Sequence] = {}  # their tokens could not be sent to the tokenizer
        self._behind: dict[str, tuple[tuple[int, int], float]] = {}  # (end, replay_id) and since when
        self._tokens = self._late = self._gaps = self._resubmitted = self._replayed = 0

    @property
    def counts(self) -> Counts:
        return Counts(self._tokens, self._late, self._gaps, self._resubmitted, self._replayed)

    # ---------------------------------------------------------------- beginning and ending

    def open(self, request: Request) -> None:
        """Take a request with its sequences and sink, and submit it."""
        self.requests[request.id] = request
        request.left = len(request.sequences)
        for sequence in request.sequences:
            self.sequences[sequence.id] = sequence
            self._submit(sequence)

    def give(self, request: Request, lines: list[Line]) -> None:
        """Take a request with its sequences and sink, and end it with an answer that was kept."""
        now = self._clock()
        self.requests[request.id] = request
        request.left = 0
        for sequence, line in zip(request.sequences, lines, strict=True):
            self.sequences[sequence.id] = sequence
            fill(sequence, line, now)
        sink = request.sink
        for sequence in request.sequences:
            sequence.move(State.FINISHED)
            if sink is not None:
                if sequence.end or sequence.text_length:
                    sink.text(sequence, "".join(sequence.text), 0, sequence.end)
                sink.ended(sequence)
        self.complete(request)

    def abandon(self, request: Request) -> None:
        """The client has gone. Late calls are harmless."""
        if request.outcome is Outcome.OPEN:
            self._end(request, Outcome.ABANDONED)

    def complete(self, request: Request) -> None:
        """All its sequences are finished, and so is it. Late calls are harmless."""
        if request.outcome is not Outcome.OPEN:
            return
        sink = request.sink
        self._end(request, Outcome.FINISHED)
        if sink is not None:
            sink.finished()
            sink.flush()

    def fail(self, request: Request, error: StarlingError) -> None:
        """End the request with an error. Late calls are harmless."""
        if request.outcome is not Outcome.OPEN:
            return
        request.error = error
        sink = request.sink
        self._end(request, Outcome.FAILED)
        if sink is not None:
            sink.failed(error)
            sink.flush()

    def _end(self, request: Request, outcome: Outcome) -> None:
        request.end(outcome)
        del self.requests[request.id]
        forget = []
        for sequence in request.sequences:
            del self.sequences[sequence.id]
            self._unsubmitted.pop(sequence.id, None)
            self._unshown.pop(sequence.id, None)
            if not sequence.is_over:
                sequence.used = len(sequence.tokens)
                sequence.move(State.FAILED)
                if sequence.is_submitted and not sequence.finish:
                    self._send_scheduler(Cancel(sequence.id))
                if sequence.shown and not sequence.final_id:
                    forget.append(sequence.id)
        if forget:
            self._send_tokenizer(Forget(forget))
        self._on_end(request)

    # ---------------------------------------------------------------- from the scheduler

    def on_tokens(self, frame: Tokens) -> None:
        """All sequences that moved in a step, or in several: a sequence may then be named several times."""
        moved: dict[str, Sequence] = {}
        for new in frame.sequences:
            sequence = self.sequences.get(new.sequence)
            if sequence is None or sequence.finish:
                self._late += 1
                continue
            if self._take(sequence, new):
                moved[sequence.id] = sequence
        wanted: dict[str, tuple[int, ...]] = {}
        streams = [
            self._show(sequence, wanted)
            for sequence in moved.values()
            # A request can have failed with a later entry of the same frame: its decoders are forgotten.
            if sequence.id in self.sequences and (sequence.shown < len(sequence.tokens) or sequence.finish)
        ]
        if streams:
            self._detokenize(frame.model, streams, wanted)

    def _take(self, sequence: Sequence, new: SequenceTokens) -> bool:
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
        if sequence.state is State.PENDING and tokens:
            sequence.move(State.DECODING)
        sequence.finish = new.finish
        return bool(fresh) or bool(new.finish)

    def _stopped_badly(self, sequence: Sequence, new: SequenceTokens) -> None:
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

    def _end_late(self, request: Request) -> None:
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

    def _begin_again(self, sequence: Sequence) -> None:
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

    def _submit(self, sequence: Sequence) -> None:
        tokens = sequence.tokens
        if tokens and (len(tokens) >= sequence.max_tokens or tokens[-1] in sequence.stop_ids):
            # Its end was lost with the scheduler; what it must have been is plain.
            sequence.finish = "stop" if tokens[-1] in sequence.stop_ids else "length"
            self._unsubmitted.pop(sequence.id, None)
            self._unshown[sequence.id] = sequence
            self._show_later(list(self._unshown.values()))
            return
        frame = submission(sequence, array("i", tokens).tobytes(), self._clock())
        sequence.is_submitted = self._send_scheduler(frame)
        if sequence.is_submitted:
            self._unsubmitted.pop(sequence.id, None)
        else:
            self._unsubmitted[sequence.id] = sequence

    # ---------------------------------------------------------------- to the tokenizer

    def _show(self, sequence: Sequence, wanted: dict[str, tuple[int, ...]]) -> StreamTokens:
        """The tokens that the decoder has not seen; `shown` moves on when the frame is sent."""
        ask = sequence.request.ask
        begin, end = sequence.shown, sequence.visible
        new = tuple(sequence.tokens[begin:end])
        extra: tuple[int, ...] = ()
        if sequence.logprobs:
            extra = self._unknown_ids(sequence, begin, end)
            if extra:
                wanted[sequence.id] = extra
        final = bool(sequence.finish)
        return StreamTokens(
            sequence.id, begin, new, ask.stop, final, ask.skip_special, False, False, extra
        )

    def _unknown_ids(self, sequence: Sequence, begin: int, end: int) -> tuple[int, ...]:
        """Ids in the logprobs of tokens [begin, end) whose bytes have never been asked for."""
        known = self.token_bytes.setdefault(sequence.request.vocabulary, {})
        ids = dict.fromkeys(sequence.tokens[begin:end])
        for logprob in sequence.logprobs[begin:end]:
            ids.update(dict.fromkeys(token for token, _ in logprob.top))
        return tuple(token for token in ids if token not in known)

    def _detokenize(
        self, model: str, streams: list[StreamTokens], wanted: dict[str, tuple[int, ...]]
    ) -> None:
        number = self._next_id
        self._next_id += 1
        sent = self._send_tokenizer(Detokenize(str(number), model, streams))
        if sent and wanted:
            self._wanted[number] = wanted
        for stream in streams:
            sequence = self.sequences[stream.sequence]
            if not sent:
                self._unshown[stream.sequence] = sequence
                continue
            if stream.start == 0:
                # The decoder begins here: what older frames return is of another one.
                sequence.replay_id = number
                sequence.decoded = 0
                sequence.asked.clear()
            sequence.asked.append(number)
            sequence.shown = stream.start + len(stream.tokens)
            if stream.final:
                sequence.final_id = number

    def _show_later(self, sequences: list[Sequence]) -> None:
        """Send what the tokenizer has not got, one frame for each model."""
        by_model: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            self._unshown.pop(sequence.id, None)
            if sequence.id in self.sequences and (sequence.tokens or sequence.finish):
                by_model.setdefault(sequence.request.instance, []).append(sequence)
        for model, group in by_model.items():
            wanted: dict[str, tuple[int, ...]] = {}
            streams = [self._show(sequence, wanted) for sequence in group]
            self._detokenize(model, streams, wanted)

    def _replay(self, sequences: list[Sequence]) -> None:
        """Their decoders are gone: from the first token."""
        for sequence in sequences:
            if sequence.shown or sequence.final_id:
                self._replayed += 1
            sequence.shown = 0
            sequence.final_id = 0
        self._show_later(sequences)

    def on_tokenizer_up(self) -> None:
        """A tokenizer that knows no stream."""
        self._wanted.clear()
        self._replay([sequence for sequence in self.sequences.values() if not sequence.is_over])

    # ---------------------------------------------------------------- from the tokenizer

    def on_text_failed(self, number: int, error: StarlingError) -> None:
        """A Detokenize frame was refused (its model cannot be opened): who waits for it, fails."""
        self._wanted.pop(number, None)
        for sequence in list(self.sequences.values()):
            if number in sequence.asked and sequence.id in self.sequences:
                self.fail(sequence.request, error)

    def on_text(self, frame: Detokenized) -> None:
        """Text of all sequences that moved in a step, to their sinks."""
        number = int(frame.id)
        wanted = self._wanted.pop(number, None)
        while self._wanted and (oldest := next(iter(self._wanted))) < number:
            del self._wanted[oldest]  # answers come in order: that one is lost
        lost: list[Sequence] = []
        touched: dict[str, Request] = {}
        for new in frame.streams:
            sequence = self.sequences.get(new.sequence)
            if sequence is None or sequence.is_over or number < sequence.replay_id:
                self._late += 1
                continue
            # An answer that was skipped is lost, and its text with it.
            if new.lost or not sequence.asked or sequence.asked.popleft() != number:
                lost.append(sequence)
                continue
            request = sequence.request
            if wanted and new.sequence in wanted:
                known = self.token_bytes.setdefault(request.vocabulary, {})
                known.update(zip(wanted[new.sequence], new.extra_bytes))
            touched[request.id] = request
            self._emit(sequence, new, number)
        if lost:
            self._replay(lost)
        for request in touched.values():
            if request.sink is not None:
                request.sink.flush()

    def _emit(self, sequence: Sequence, new: StreamText, number: int) -> None:
        request = sequence.request
        sink = request.sink
        if sink is None:
            raise IllegalTransitionError(f"{request.id} has no sink")
        text = new.text
        skip = sequence.text_length - sequence.decoded  # characters that were out before a replay
        sequence.decoded += len(text)
        if skip:
            text = text[skip:]
        if text:
            sequence.text.append(text)
            sequence.text_length += len(text)
        is_final = bool(sequence.final_id) and number >= sequence.final_id
        begin, end = sequence.end, new.used if new.stopped else new.end
        if new.cuts and not skip and end - begin == len(new.cuts) + 1:
            # A reader sees the same events, however many tokens came at once.
            out = 0
            for cut in new.cuts:
                sequence.end = begin + 1
                sink.text(sequence, text[out:cut], begin, begin + 1)
                begin, out = begin + 1, cut
            text = text[out:]
        sequence.is_flushed = new.stopped or is_final
        if end > begin:
            sequence.end = end
            sink.text(sequence, text, begin, end)
        elif text:
            sink.text(sequence, text, begin, begin)
        if new.stopped:
            self._stop(sequence, new)
        elif is_final:
            self._finish(sequence, len(sequence.tokens))

    def _stop(self, sequence: Sequence, new: StreamText) -> None:
        """A stop string: tokens past it were not used."""
        if sequence.is_submitted and not sequence.finish:
            self._send_scheduler(Cancel(sequence.id, at=new.used))
        self._unsubmitted.pop(sequence.id, None)
        sequence.finish = "stop"
        sequence.stop_string = new.stop_string
        self._finish(sequence, new.used)

    def _finish(self, sequence: Sequence, used: int) -> None:
        request = sequence.request
        sink = request.sink
        sequence.used = used
        sequence.move(State.FINISHED)
        self._unshown.pop(sequence.id, None)
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
            self._submit(sequence)
        if self._unshown:
            self._show_later(list(self._unshown.values()))
        self._repeat_unanswered(now)

    def _repeat_unanswered(self, now: float) -> None:
        """A full queue at the tokenizer's side loses its answers."""
        behind: dict[str, tuple[tuple[int, int], float]] = {}
        overdue = []
        for sequence in self.sequences.values():
            if not sequence.final_id and sequence.end >= sequence.shown:
                continue
            place = (sequence.end, sequence.replay_id)
            before = self._behind.get(sequence.id)
            since = before[1] if before is not None and before[0] == place else now
            behind[sequence.id] = (place, since)
            if now - since > UNANSWERED_S:
                overdue.append(sequence)
        self._behind = behind
        if overdue:
            self._replay(overdue)


def _timeout_message(request: Request, now: float, waiting: bool) -> str:
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


