"""The output of one ended sequence, in the form that the replay buffer and the response cache store."""

from __future__ import annotations

from array import array

import msgspec

from pipeline.protocol.messages import Logprob
from stages.gateway.requests.state import SequencePhase, SequenceState


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """Tokens, text and end of a sequence. It has as many used tokens as there are in `tokens`."""

    tokens: bytes  # i32 little-endian; those that count, up to and including a stop token
    logprobs: list[Logprob]  # one for each token, or none
    text: str
    n_emitted: int  # output tokens whose text is in `text`
    finish_reason: str  # "": the sequence failed
    stop_string: str = ""
    n_prompt: int = 0
    cached_tokens: int = 0
    first_token_at: float = 0.0  # of the gateway's monotonic clock, s
    scores: bytes = b""  # of its prompt, see requests/prompt_scores.py
    n_reasoning: int = 0
    predicted: tuple[int, int] = (0, 0)
    text_ends: bytes = b""  # u32 little-endian, see `SequenceState`; b"": none


def output_of(sequence: SequenceState) -> SequenceOutput:
    """The output of a sequence that has ended, without tokens past a stop string."""
    return SequenceOutput(
        array("i", sequence.tokens[: sequence.n_used]).tobytes(),
        sequence.logprobs[: sequence.n_used],
        "".join(sequence.text),
        sequence.n_emitted,
        sequence.finish_reason if sequence.phase is SequencePhase.FINISHED else "",
        sequence.stop_string,
        sequence.n_prompt,
        sequence.cached_tokens,
        sequence.first_token_at,
        bytes(sequence.scores.data) if sequence.scores is not None else b"",
        sequence.n_reasoning,
        sequence.predicted,
        sequence.text_ends.tobytes() if sequence.text_ends is not None else b"",
    )


def restore_output(sequence: SequenceState, output: SequenceOutput) -> None:
    """Give a sequence that has not begun its whole output, and end it."""
    tokens = array("i")
    tokens.frombytes(output.tokens)
    sequence.tokens, sequence.logprobs = tokens.tolist(), output.logprobs
    sequence.text, sequence.text_length = [output.text], len(output.text)
    sequence.n_emitted, sequence.n_used = output.n_emitted, len(tokens)
    sequence.n_prompt, sequence.cached_tokens = output.n_prompt, output.cached_tokens
    sequence.first_token_at, sequence.n_reasoning = output.first_token_at, output.n_reasoning
    sequence.finish_reason, sequence.stop_string = output.finish_reason, output.stop_string
    sequence.is_flushed = bool(output.finish_reason)
    sequence.predicted = output.predicted
    sequence.count_predicted()  # the answer may be one that the cache has of a request with another prediction
    if output.text_ends:
        sequence.text_ends = array("I", output.text_ends)
    if sequence.scores is not None:
        sequence.scores.add(1, output.scores)
        sequence.request.update_scores()
    sequence.move(SequencePhase.FINISHED if output.finish_reason else SequencePhase.FAILED)
