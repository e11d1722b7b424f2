"""The prompts of an ask as token ids, and whether the ids that it names exist."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from pipeline.errors import InvalidRequest
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from stages.gateway.admission.lengths import Bounds, longest_prompt, too_long
from stages.gateway.endpoints.generation_request import GenerationRequest
from stages.gateway.tokenizer_client import TokenizerClient


async def tokens_of(
    ask: GenerationRequest,
    instance: ModelVersion,
    described: m.Described,
    questions: TokenizerClient,
    bounds: Bounds,
    n_held: int,
) -> list[tuple[int, ...]]:
    """One for each prompt, or one for the messages. Raises `InvalidRequest`, and what the tokenizer answers.

    n_held: tokens before the prompt, of the session.  A text that has too many tokens is refused for their number.
    """
    most = max(1, longest_prompt(bounds) - n_held)

    def taken(encoded: m.Encoded, index: int = 0) -> tuple[int, ...]:
        if encoded.too_many:
            raise too_long(n_held + encoded.too_many, bounds, field_of(ask, index), encoded.is_exact)
        return encoded.tokens

    if ask.messages is not None:
        if not described.chat:
            raise InvalidRequest(f"model {instance.name!r} has no chat template; use /v1/completions", "model")
        return [taken(await questions.render(instance.id, ask.messages, most))]
    asked: list[Awaitable[m.Encoded] | tuple[int, ...]] = [
        questions.encode(instance.id, prompt, add_bos=not n_held, most=most) if isinstance(prompt, str) else prompt
        for prompt in ask.prompts
    ]
    # All at once: a tokenizer that is asked for many answers them in one round.
    texts = iter(await asyncio.gather(*(item for item in asked if not isinstance(item, tuple))))
    return [item if isinstance(item, tuple) else taken(next(texts), index) for index, item in enumerate(asked)]


def check_ids(ask: GenerationRequest, prompts: list[tuple[int, ...]], vocab_size: int) -> None:
    """Raises `InvalidRequest` for the first id that the vocabulary does not have."""
    for given, prompt in zip(ask.prompts, prompts):
        if not isinstance(given, str):
            check_range(prompt, "prompt[{}]", "prompt", vocab_size)
    check_range([token for token, _ in ask.sampling.logit_bias], "a key of logit_bias", "logit_bias", vocab_size)
    check_range(ask.stop_token_ids, "an id in stop_token_ids", "stop_token_ids", vocab_size)


def check_range(ids: Sequence[int], what: str, param: str, vocab_size: int) -> None:
    """Raises `InvalidRequest` for the first id that is none; `what` is what it is called, {} its place."""
    if ids and max(ids) >= vocab_size:
        place = next(i for i, token in enumerate(ids) if token >= vocab_size)
        known = f"the model's vocabulary has the ids from 0 to {vocab_size - 1}"
        raise InvalidRequest(f"{what.format(place)} is {ids[place]}; {known}", param)


def field_of(ask: GenerationRequest, index: int) -> str:
    """What the caller calls the prompt `index`."""
    return f"prompt[{index}]" if len(ask.prompts) > 1 else ask.prompt_field
