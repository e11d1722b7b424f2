"""Requests that another server has begun: their output so far is forced, and the rest is computed here.

The tokens are stored in the new state as if the scheduler had sent them, and go to it with the submission, as after a
restart of the scheduler.  A request with logprobs, of its output or its prompts, is computed from its beginning: its
tokens alone do not have them.
"""

from __future__ import annotations

from array import array

from pipeline.api.output_tokens import OUTPUT, Output
from pipeline.errors import InvalidRequest, ModelUnavailable
from stages.gateway.requests.state import RequestState, SequenceState


def force_output(
    request: RequestState, output: Output, version: str, vocab_size: int, context: int, now: float
) -> None:
    """Give an admitted request that has not been started its output so far.

    version: the name of what computes here.  context: the most tokens of prompt and output together.
    Raises `InvalidRequest`, or `ModelUnavailable` if it is another version.
    """
    if output.version != version:
        raise ModelUnavailable(
            f"the output is of version {output.version[:200]}, and this server computes {version}; another one may "
            "continue it"
        )
    if request.spec.generation.session_id is not None:
        raise InvalidRequest("the request belongs to a session, whose state is on one server: do not move it", OUTPUT)
    if len(output.tokens) > len(request.sequences):
        raise InvalidRequest(
            f"the output has {len(output.tokens)} sequences, the request {len(request.sequences)}", OUTPUT
        )
    if request.scores or any(sequence.spec.sampling.logprobs >= 0 for sequence in request.sequences):
        return
    for sequence, data in zip(request.sequences, output.tokens):
        tokens = array("i")
        tokens.frombytes(data)
        if tokens:
            has_room = sequence.n_prompt + len(tokens) <= context
            if request.spec.generation.max_tokens is None and has_room:  # the limit of the other server was higher
                request.allow_tokens(sequence.index, len(tokens))
            _check(sequence, tokens, vocab_size)
            sequence.tokens = tokens.tolist()
            sequence.first_token_at = now
            # As usage showed it: what the cache holds here is not counted, nor after another recovery.
            sequence.n_resubmitted = 1
            cached = output.cached[sequence.index] if sequence.index < len(output.cached) else 0
            sequence.cached_tokens = max(0, min(cached, sequence.n_prompt))


def _check(sequence: SequenceState, tokens: array[int], vocab_size: int) -> None:
    if len(tokens) > sequence.spec.max_tokens:
        raise InvalidRequest(
            f"the output of sequence {sequence.index} has {len(tokens)} tokens, and the request is for "
            f"{sequence.spec.max_tokens}",
            OUTPUT,
        )
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidRequest(
            f"the output of sequence {sequence.index} has a token id outside 0..{vocab_size - 1}", OUTPUT
        )
    stops = set(sequence.spec.stop_ids)
    if any(token in stops for token in tokens[:-1]):
        raise InvalidRequest(f"the output of sequence {sequence.index} goes on after its stop token", OUTPUT)
