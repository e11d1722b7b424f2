"""Admission checks: refusals with the error code, the field, the bound and what to do.

Pure functions of a submission and the model's limits.  Limits that are not known yet (no worker has reported its
context length, kv has not reported its pages) are not checked; the sequence is checked again before it is scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.errors import CODES
from pipeline.protocol.messages import POOLINGS, Submit
from shm.sampler_steps import order_problem
from shm.step_ring import MAX_BIAS, MAX_MASK, MAX_POOLED_POSITIONS, MAX_TOP
from stages.scheduler.core.sequence import SequenceState


def log_fields(code: str, message: str, param: str) -> dict[str, str | None]:
    """An error's fields in the log. Messages about a request's fields quote their values: schemas, patterns, texts."""
    known = CODES.get(code, CODES["INTERNAL"])
    reason = {"reason": message} if known.status >= 500 or known.status == 429 else {}
    return {"code": code, "param": param or None, **reason}


class Refusal(NamedTuple):
    """Why a sequence is not admitted. `code` as in pipeline/errors.py; `param` names the field of the request."""

    code: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0


@dataclass(slots=True)
class Limits:
    """Bounds of one model; 0: no bound, or not known yet. The engine updates them when worker or kv report."""

    max_prompt_tokens: int = 0
    max_output_tokens: int = 0
    context_length: int = 0  # positions
    vocab_size: int = 0
    kv_pages: int = 0  # of the whole KV arena
    most_pages: Callable[[int], int] = int  # (positions of a sequence) -> pages that it holds at once
    page_tokens: int = 0
    adapters: frozenset[str] | None = None  # digests of the LoRA adapters that the worker has; None: not known yet
    whole_prompt_tokens: int = 0  # above 0 prompts are only pooled, each in one step of so many; 0: a causal model


def check_frame(frame: Submit) -> Refusal | None:
    """Errors that do not depend on the model; None if there are none."""
    sampling = frame.sampling
    for name, tokens in (("prompt", frame.prompt), ("forced", frame.forced), ("prediction", frame.prediction)):
        if len(tokens) % 4:
            return Refusal("INVALID_REQUEST", f"{name} has {len(tokens)} bytes, not a multiple of 4", name)
    if not frame.prompt:
        return Refusal("INVALID_REQUEST", "prompt has no tokens: give at least one", "prompt")
    if frame.pooling not in ("", *POOLINGS) or (frame.pooling and (frame.max_tokens != 1 or frame.forced)):
        return Refusal("INVALID_REQUEST", f"pooling is {frame.pooling!r}, which is not one of {', '.join(POOLINGS)}")
    if frame.max_tokens < 0:
        return Refusal("INVALID_REQUEST", f"max_tokens is {frame.max_tokens}, must not be negative", "max_tokens")
    if frame.prompt_logprobs > MAX_TOP:
        n = frame.prompt_logprobs
        return Refusal("INVALID_REQUEST", f"prompt_logprobs is {n}, must be at most {MAX_TOP}", "prompt_logprobs")
    if frame.prompt_logprobs >= 0 and frame.forced and 4 * frame.scored < len(frame.prompt):
        return Refusal("INVALID_REQUEST", f"{frame.scored} prompt tokens are scored, and output is forced", "forced")
    if len(frame.stop_ids) > MAX_MASK:
        return Refusal(
            "INVALID_REQUEST", f"{len(frame.stop_ids)} stop token ids, at most {MAX_MASK} are allowed", "stop_token_ids"
        )
    if len(sampling.logit_bias) > MAX_BIAS:
        n = len(sampling.logit_bias)
        return Refusal("INVALID_REQUEST", f"logit_bias has {n} tokens, at most {MAX_BIAS} are allowed", "logit_bias")
    if sampling.logprobs > MAX_TOP:
        return Refusal("INVALID_REQUEST", f"logprobs is {sampling.logprobs}, must be at most {MAX_TOP}", "logprobs")
    if wrong := order_problem(sampling.order):
        return Refusal("INVALID_REQUEST", f"order: {wrong}", "order")
    return None


def lacks_adapter(sequence: SequenceState, limits: Limits) -> Refusal | None:
    """Why the worker cannot compute the sequence with its LoRA adapter; None if it can, or if it has none."""
    if not sequence.adapter or limits.adapters is None or sequence.adapter in limits.adapters:
        return None
    return Refusal(
        "CONFLICT",
        "the adapter of this request was replaced or unloaded, and the answer would differ; send the request again",
        "model",
    )


def check_limits(sequence: SequenceState, limits: Limits) -> Refusal | None:
    """Why this model can never compute the sequence; None if it can."""
    if refusal := lacks_adapter(sequence, limits):
        return refusal
    prompt, output = sequence.prompt_len, sequence.max_tokens
    is_pooled = sequence.pooled is not None  # the last position is computed, and no token follows it
    if is_pooled:
        output = 0
        if prompt > MAX_POOLED_POSITIONS:
            most = f"at most {MAX_POOLED_POSITIONS} can be pooled"
            return Refusal("CONTEXT_LENGTH_EXCEEDED", f"prompt has {prompt} tokens, {most}", "prompt")
    if whole := limits.whole_prompt_tokens:
        if not is_pooled:
            return Refusal("INVALID_REQUEST", "this model generates no text: it has embeddings alone", "model")
        if prompt > whole:
            return Refusal(
                "CONTEXT_LENGTH_EXCEEDED",
                f"prompt has {prompt} tokens; this model computes an input in one step, of at most {whole} "
                f"(scheduler.max_step_tokens): shorten it",
                "prompt",
            )
    if limits.max_prompt_tokens and prompt > limits.max_prompt_tokens:
        return Refusal(
            "INVALID_REQUEST",
            f"prompt has {prompt} tokens, at most {limits.max_prompt_tokens} (scheduler.max_prompt_tokens)",
            "prompt",
        )
    if limits.max_output_tokens and output > limits.max_output_tokens:
        return Refusal(
            "INVALID_REQUEST",
            f"max_tokens is {output}, at most {limits.max_output_tokens} (scheduler.max_output_tokens)",
            "max_tokens",
        )
    context = limits.context_length
    if context and prompt >= context + is_pooled:
        return Refusal(
            "CONTEXT_LENGTH_EXCEEDED",
            f"prompt has {prompt} tokens, the model's context is {context}: shorten it",
            "prompt",
        )
    if context and prompt + output > context:
        return Refusal(
            "CONTEXT_LENGTH_EXCEEDED",
            f"prompt of {prompt} and max_tokens of {output} exceed the model's context of {context}: "
            f"ask for at most {context - prompt}",
            "max_tokens",
        )
    vocab = limits.vocab_size
    if vocab and not 0 <= min(sequence.run.tokens) <= max(sequence.run.tokens) < vocab:
        return Refusal("INVALID_REQUEST", f"prompt has a token id outside 0..{vocab - 1}", "prompt")
    predicted = memoryview(sequence.prediction).cast("i")
    if vocab and predicted and not 0 <= min(predicted) <= max(predicted) < vocab:
        return Refusal("INVALID_REQUEST", f"prediction has a token id outside 0..{vocab - 1}", "prediction")
    for name, ids in (
        ("stop_token_ids", sequence.stop_ids),
        ("logit_bias", [token for token, _ in sequence.sampling.logit_bias]),
    ):
        if vocab and any(not 0 <= token < vocab for token in ids):
            return Refusal("INVALID_REQUEST", f"{name} has a token id outside 0..{vocab - 1}", name)
    if vocab and sequence.breakers and len(sequence.breakers) != 4 * -(-vocab // 32):
        n = len(sequence.breakers)
        return Refusal("INVALID_REQUEST", f"breakers has {n} bytes, not one bit for each token", "breakers")
    # The last token is sampled and never computed, so it needs no position.
    need, have = 0, limits.kv_pages
    if have:
        need = limits.most_pages(prompt + max(0, output - 1))
    if need > have:
        return Refusal(
            "INSUFFICIENT_RESOURCES",
            f"prompt of {prompt} and max_tokens of {output} need {need} KV pages of {limits.page_tokens} "
            f"tokens, the arena has {have}: ask for less, or raise kv_cache_mb",
            "max_tokens",
        )
    return None
