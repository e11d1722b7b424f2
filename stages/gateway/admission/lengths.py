"""Does it fit? Prompt, output and number of texts against the model's context and the configured bounds. Pure."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import InvalidRequest

CONTEXT = "CONTEXT_LENGTH_EXCEEDED"


class Bounds(NamedTuple):
    """`context` positions hold prompt and output together."""

    context: int
    max_prompt_tokens: int  # configured; 0: what the context leaves
    max_output_tokens: int


def longest_prompt(bounds: Bounds) -> int:
    """Most tokens that a prompt may have."""
    return min(bounds.context - 1, bounds.max_prompt_tokens or bounds.context)


def too_long(n_prompt: int, bounds: Bounds, prompt_field: str, is_exact: bool = True) -> InvalidRequest:
    """For a prompt of `n_prompt` tokens, or at least so many, which is more than `longest_prompt`."""
    longest = longest_prompt(bounds)
    name = "the bound scheduler.max_prompt_tokens"
    if longest == bounds.context - 1:
        name = f"the model's context of {bounds.context} tokens, which must hold at least one more"
    count = n_prompt if is_exact else f"at least {n_prompt}"
    return InvalidRequest(
        f"{prompt_field} has {count} tokens; at most {longest} are taken ({name}): shorten it",
        prompt_field,
        code=CONTEXT,
    )


def output_budget(n_prompt: int, max_tokens: int | None, bounds: Bounds, prompt_field: str, max_field: str) -> int:
    """How many tokens may be generated. Raises `InvalidRequest` naming the bound that is exceeded."""
    if n_prompt == 0:
        raise InvalidRequest(
            f"{prompt_field} has no tokens, and a model needs at least one to go on from; send some text",
            prompt_field,
        )
    if n_prompt > longest_prompt(bounds):
        raise too_long(n_prompt, bounds, prompt_field)
    left = bounds.context - n_prompt
    most = bounds.max_output_tokens
    if max_tokens is None:
        return min(left, most) if most else left
    if most and max_tokens > most:
        raise InvalidRequest(
            f"{max_field} is {max_tokens}; at most {most} are generated (scheduler.max_output_tokens): ask for fewer",
            max_field,
        )
    if max_tokens > left:
        raise InvalidRequest(
            f"{prompt_field} has {n_prompt} tokens and {max_field} is {max_tokens}, together "
            f"{n_prompt + max_tokens}; the model's context holds {bounds.context}: shorten {prompt_field} or "
            f"set {max_field} to at most {left}",
            max_field,
            code=CONTEXT,
        )
    return max_tokens


def check_number(n_prompts: int, n: int, config: Config, model: ModelConfig) -> None:
    """More texts than queue and batch hold would be overload for ever. Raises `InvalidRequest`."""
    key, depth = "scheduler.max_queue_depth", config.scheduler.max_queue_depth
    if 0 < config.rate_limits.max_queue_depth < depth:
        key, depth = "rate_limits.max_queue_depth", config.rate_limits.max_queue_depth
    batch = config.max_batch_size(model)
    if n_prompts * n > depth + batch:
        what = f"n = {n}" if n_prompts == 1 else f"{n_prompts} prompts with n = {n}"
        raise InvalidRequest(
            f"{what} is {n_prompts * n} texts; at most {depth + batch} are taken at once ({key} = {depth} wait, "
            f"max_batch_size = {batch} compute): ask for fewer, in several requests",
            "n" if n > 1 else "prompt",
        )
