"""The text of one sequence while it is generated: storing it, passing it on, and whether more follows."""

from __future__ import annotations

from stages.gateway.requests.state import SequenceState, Sink

MAX_TEXT_PARTS = 512  # of a sequence; one string for each token would take ten times the memory of its characters


def is_complete(sequence: SequenceState) -> bool:
    """Whether its tokens say that no more follow."""
    tokens = sequence.tokens
    return bool(tokens) and (len(tokens) >= sequence.spec.max_tokens or tokens[-1] in sequence.spec.stop_ids)


def emit(sequence: SequenceState, sink: Sink, text: str, end: int) -> None:
    """Store and pass on the text that became certain with the output tokens before `end`."""
    if text:
        parts = sequence.text
        parts.append(text)
        sequence.text_length += len(text)
        if len(parts) >= MAX_TEXT_PARTS:
            parts[:] = ["".join(parts)]
    begin, sequence.n_emitted = sequence.n_emitted, end
    sink.text(sequence, text, begin, end)
