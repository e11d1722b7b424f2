"""Checks of prompt length, output length and number of texts against context and configuration. Pure."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import InvalidRequest

CONTEXT_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
MAX_PROMPT_LOGPROBS = 1 << 18  # values of a request; 2 MB, and as JSON about 10 MB
MAX_OUTPUT_LOGPROBS = 1 << 19  # values of a request; 60 MB, and as JSON about 40 MB


class Bounds(NamedTuple):
    """The bounds of a version, in tokens. Prompt and output share the context."""

    context: int
    max_prompt_tokens: int  # configured; 0: as many as the context leaves
    max_output_tokens: int  # configured; 0: as many as the context leaves
    max_positions: int = 0  # for which the KV arena has room; 0: for the whole context


def longest_prompt(bounds: Bounds) -> int:
    """Return the most tokens that a prompt may have."""
    return min(bounds.context - 1, bounds.max_prompt_tokens or bounds.context)


def _context(bounds: Bounds) -> str:
    """In the words by which clients recognize this error: litellm, and agents that then shorten their history."""
    return f"this model's maximum context length is {bounds.context} tokens"


def too_long(
    n_prompt: int, bounds: Bounds, prompt_field: str, is_exact: bool = True, *, is_anthropic: bool = False
) -> InvalidRequest:
    """Return the error for a prompt longer than `longest_prompt`: of `n_prompt` tokens, or more unless `is_exact`.

    is_anthropic: it begins as that of Anthropic's API, by which clients recognize it and then shorten their history.
    """
    longest = longest_prompt(bounds)
    reason = "scheduler.max_prompt_tokens"
    if longest == bounds.context - 1:
        reason = f"{_context(bounds)}, at least one of them generated"
    count = f"{prompt_field} has {'' if is_exact else 'at least '}{n_prompt} tokens"
    message = f"{count}; at most {longest} are allowed ({reason}): shorten it"
    if is_anthropic:
        message = f"prompt is too long: {n_prompt} tokens > {longest} maximum ({reason}); {count}: shorten it"
    return InvalidRequest(message, prompt_field, code=CONTEXT_EXCEEDED)


def output_budget(
    n_prompt: int,
    max_tokens: int | None,
    bounds: Bounds,
    prompt_field: str,
    max_field: str,
    *,
    ends_at_context: bool = False,
) -> int:
    """Return how many tokens may be generated. Raises `InvalidRequest` that names the exceeded bound.

    Without `max_tokens` an answer may also end where the KV arena does.
    ends_at_context: as without `max_tokens` an answer may end before it; it then says so.
    """
    if n_prompt == 0:
        raise InvalidRequest(
            f"{prompt_field} has no tokens; a model needs at least one to continue from: send some text",
            prompt_field,
        )
    if n_prompt > longest_prompt(bounds):
        raise too_long(n_prompt, bounds, prompt_field)
    left = bounds.context - n_prompt
    limit = bounds.max_output_tokens
    room = max(1, min(left, bounds.max_positions - n_prompt)) if bounds.max_positions else left
    if max_tokens is None:
        return min(room, limit) if limit else room
    if limit and max_tokens > limit:
        raise InvalidRequest(
            f"{max_field} is {max_tokens}; at most {limit} are allowed (scheduler.max_output_tokens): lower it",
            max_field,
        )
    if max_tokens > room and ends_at_context:
        return room
    if max_tokens > left:
        raise InvalidRequest(
            f"{prompt_field} has {n_prompt} tokens and {max_field} is {max_tokens}, together "
            f"{n_prompt + max_tokens}; {_context(bounds)}: shorten {prompt_field} or "
            f"set {max_field} to at most {left}",
            max_field,
            code=CONTEXT_EXCEEDED,
        )
    return max_tokens


def check_prompt_logprobs(n_tokens: int, top: int, field: str) -> None:
    """Raise `InvalidRequest` for too many log probabilities of prompts of `n_tokens` tokens, each with `top` others."""
    if n_tokens * (1 + top) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{field} asks for {1 + top} values of each of {n_tokens} prompt tokens; at most {MAX_PROMPT_LOGPROBS} "
            f"values are allowed in a request: ask for fewer, or send several requests",
            field,
        )


def bound_logprobs(budgets: list[int], n: int, top: int, max_field: str, *, is_given: bool) -> list[int]:
    """Return how many tokens may be generated for each prompt with log probabilities of each token and `top` others.

    budgets: without this bound, of `n` texts each.  is_given: the client asks for them, and gets `InvalidRequest` for
    too many values; otherwise answers end earlier.
    """
    values = n * (1 + top)
    if sum(budgets) * values <= MAX_OUTPUT_LOGPROBS:
        return budgets
    most = max(1, MAX_OUTPUT_LOGPROBS // (values * len(budgets)))
    if is_given:
        raise InvalidRequest(
            f"{max_field} is {max(budgets)}, with {1 + top} log probabilities of each token, in all choices together "
            f"{sum(budgets) * values}; at most {MAX_OUTPUT_LOGPROBS} values are allowed in a request: "
            f"set {max_field} to at most {most}, or ask for fewer",
            max_field,
        )
    return [min(budget, most) for budget in budgets]


def check_text_count(n_prompts: int, n: int, config: Config, model: ModelConfig) -> None:
    """Raise `InvalidRequest` for more texts than queue and batch hold: they could never be admitted."""
    key, depth = "scheduler.max_queue_depth", config.scheduler.max_queue_depth
    if 0 < config.rate_limits.max_queue_depth < depth:
        key, depth = "rate_limits.max_queue_depth", config.rate_limits.max_queue_depth
    batch = config.max_batch_size(model)
    if n_prompts * n > depth + batch:
        what = f"n = {n}" if n_prompts == 1 else f"{n_prompts} prompts with n = {n}"
        raise InvalidRequest(
            f"{what} is {n_prompts * n} texts; at most {depth + batch} are allowed ({key} = {depth} waiting, "
            f"max_batch_size = {batch} running): send several requests",
            "n" if n > 1 else "prompt",
        )
