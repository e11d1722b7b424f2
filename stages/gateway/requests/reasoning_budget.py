"""The budget of a sequence's reasoning: when it is reached, and what the output then is.

The tokens after the budget are replaced by those of the reasoning's end mark, and the sequence is submitted again with
them (`revision` tells what is computed for it from what was computed before).  Where that happens is a function of the
tokens alone: a recovery, a resumed stream and another server end the reasoning at the same token.
"""

from __future__ import annotations

from pipeline.protocol.messages import Logprob
from stages.gateway.requests.state import NEVER, SequenceState
from stages.gateway.requests.text_decoder import StreamDecoder

MAX_WAIT = 16  # tokens by which the end of a character, or of what may be the mark, is awaited


def is_over_budget(sequence: SequenceState, decoder: StreamDecoder, end: int) -> bool:
    """Whether the reasoning ends after the first `end` output tokens, which the decoder has. They reach the budget."""
    if end >= sequence.spec.max_tokens:
        return False
    return decoder.is_reasoning(is_whole=end < sequence.reasoning_limit + MAX_WAIT)


def end_reasoning(sequence: SequenceState, at: int) -> bool:
    """Put the end mark behind the first `at` tokens. False: it was there, and what follows it is right.

    The mark was not sampled: its tokens have the log probability 0.
    """
    reasoning = sequence.request.spec.generation.reasoning
    mark = list(reasoning.end_ids[: sequence.spec.max_tokens - at]) if reasoning else []
    sequence.reasoning_limit = NEVER
    top = sequence.spec.sampling.logprobs
    end = at + len(mark)
    is_new = sequence.tokens[at:end] != mark
    if is_new:
        del sequence.tokens[at:]
        sequence.tokens += mark
        sequence.finish_reason = ""
        sequence.revision += 1
    if top >= 0:
        sequence.logprobs[at : None if is_new else end] = [Logprob(0.0, ((t, 0.0),) if top else ()) for t in mark]
    return is_new
