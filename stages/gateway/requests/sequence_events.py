"""What is recorded of each sequence: its part of the timeline, and the gaps between its tokens.

Times are seconds of the gateway's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable

from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.tracing.timeline import Fact, Phase, RequestTrace, ms

# Counts the gap before some tokens that came together (None: there is none to measure), and their number.
GapCounter = Callable[[RequestState, float | None, int], None]


def record_start(sequence: SequenceState, now: float) -> None:
    """The sequence has left the scheduler's queue."""
    sequence.is_started = True
    if not sequence.started_at:
        # Its first tokens may have come in the same frame.
        sequence.started_at = sequence.first_token_at if sequence.last_token_at else now


def record_tokens(sequence: SequenceState, count: int, now: float, count_gaps: GapCounter | None) -> None:
    """`count` new tokens have come; call it before they are added to the sequence's tokens."""
    if not sequence.tokens:
        _record_first_token(sequence, now)
    last, sequence.last_token_at = sequence.last_token_at, now
    if count_gaps is not None:
        count_gaps(sequence.request, now - last if last else None, count)


def _record_first_token(sequence: SequenceState, now: float) -> None:
    sequence.first_token_at = now
    trace = sequence.request.trace
    if trace is not None:
        trace.add(now, "first token", choice=-1 if trace.is_single else sequence.index)
        if trace.phase is not Phase.DECODE:
            trace.advance(Phase.DECODE, now)


def record_decoding(trace: RequestTrace, sequence: SequenceState, now: float) -> None:
    """The summary of a sequence's output: tokens, and the time from the first to the last."""
    seconds = now - sequence.first_token_at if sequence.first_token_at else 0.0
    facts: dict[str, Fact] = {"tokens": sequence.n_used, "ms": ms(seconds), "reason": sequence.finish_reason}
    if seconds and sequence.n_used > 1:
        facts["tokens_per_s"] = round((sequence.n_used - 1) / seconds, 1)
    if sequence.accepted:
        facts["accepted_drafts"] = sequence.accepted
    trace.add(now, "decoded", facts, choice=-1 if trace.is_single else sequence.index)
