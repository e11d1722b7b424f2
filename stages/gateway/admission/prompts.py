"""The prompts of a request as token ids, and the check that all ids it names are in the vocabulary."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from pipeline.api.requests.generation_request import GenerationRequest, TemplateArguments
from pipeline.api.requests.tool_history import with_short_ids
from pipeline.errors import InvalidRequest
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from stages.gateway.admission.lengths import Bounds, longest_prompt, too_long
from stages.gateway.reasoning.switch import with_switches
from stages.gateway.tokenizer_client import TextOwner, TokenizerClient
from stages.gateway.tool_calls.fallback_prompt import as_text, has_tools


async def tokenize_prompts(
    generation: GenerationRequest,
    version: ModelVersion,
    described: m.Described,
    tokenizer: TokenizerClient,
    bounds: Bounds,
    n_held: int,
    owner: TextOwner,
) -> list[tuple[int, ...]]:
    """Token ids of each prompt, or of the chat messages. Raises `InvalidRequest`, and the tokenizer's errors.

    `n_held`: tokens that the session holds before the prompt. A prompt that is too long is refused with its number
    of tokens.
    """
    limit = max(1, longest_prompt(bounds) - n_held)

    def checked(encoded: m.Encoded, index: int = 0) -> tuple[int, ...]:
        if encoded.too_many:
            count, field = n_held + encoded.too_many, prompt_field(generation, index)
            raise too_long(count, bounds, field, encoded.is_exact, is_anthropic=generation.is_anthropic)
        return encoded.tokens

    if generation.messages is not None:
        if not described.chat:
            raise InvalidRequest(f"model {version.name!r} has no chat template; use /v1/completions", "model")
        _check_prefill(generation, described)
        date = generation.template_date or ""
        messages, arguments = chat_of(generation, described)
        field = generation.prompt_field
        return [checked(await tokenizer.render(version.id, messages, arguments, limit, date, owner, field))]
    prompts: list[Awaitable[m.Encoded] | tuple[int, ...]] = [
        tokenizer.encode(
            version.id,
            prompt,
            add_bos=not n_held,
            token_limit=limit,
            owner=owner,
            suffix=generation.suffix or "",
            field=prompt_field(generation, index),
        )
        if isinstance(prompt, str)
        else prompt
        for index, prompt in enumerate(generation.prompts)
    ]
    for index, prompt in enumerate(generation.prompts):
        if not isinstance(prompt, str) and len(prompt) > limit:  # before anything looks at each of its ids
            raise too_long(n_held + len(prompt), bounds, prompt_field(generation, index))
    # All at once: the tokenizer answers several requests in one round.
    texts = iter(await asyncio.gather(*(prompt for prompt in prompts if not isinstance(prompt, tuple))))
    return [
        prompt if isinstance(prompt, tuple) else checked(next(texts), index) for index, prompt in enumerate(prompts)
    ]


async def tokenize_prediction(
    generation: GenerationRequest, version_id: str, tokenizer: TokenizerClient, bounds: Bounds, owner: TextOwner
) -> bytes:
    """Token ids (i32 little-endian) of the text that the answer may be. Raises `InvalidRequest`."""
    if not generation.prediction:
        return b""
    field = "prediction.content"
    encoded = await tokenizer.encode(
        version_id, generation.prediction, add_bos=False, token_limit=bounds.context, owner=owner, field=field
    )
    if encoded.too_many:
        count = f"{'' if encoded.is_exact else 'at least '}{encoded.too_many}"
        raise InvalidRequest(
            f"{field} has {count} tokens; at most {bounds.context} are allowed, the model's context: shorten it",
            field,
        )
    return array("i", encoded.tokens).tobytes()


def chat_of(generation: GenerationRequest, described: m.Described) -> tuple[list[dict[str, Any]], TemplateArguments]:
    """The messages and arguments for the model's template, which may have no place for tools.

    Raises `InvalidRequest` for a demand on reasoning that the template cannot meet.
    """
    messages, arguments = generation.messages or [], generation.template or TemplateArguments()
    if generation.thinking:
        variables = with_switches(arguments.variables, generation.thinking, described)
        arguments = msgspec.structs.replace(arguments, variables=variables)
    tool_format = described.tool_format
    if tool_format:
        return (with_short_ids(messages) if tool_format == "mistral" else messages), arguments
    if arguments.tools or has_tools(messages):
        messages = as_text(messages, arguments.tools or [])
        arguments = msgspec.structs.replace(arguments, tools=None)
    return messages, arguments


def _check_prefill(generation: GenerationRequest, described: m.Described) -> None:
    """Raises `InvalidRequest` for JSON that the last message begins: the schema is that of the new text alone."""
    constraint, arguments = generation.constraint, generation.template
    if not constraint or constraint.kind != "json_schema" or not (arguments and arguments.continue_final_message):
        return
    last = (generation.messages or [{}])[-1]
    if last.get("role") != "assistant" or (generation.tools and generation.tools.forced):
        return
    text = str(last.get("content", ""))
    if described.reasoning and described.reasoning[0] in text:  # reasoning may be continued: JSON follows it
        text = text.partition(described.reasoning[1])[2]
    if text.strip():
        raise InvalidRequest(
            f"{constraint.field} constrains the answer, and the last message of the assistant has begun it: message "
            f"and answer together would not be JSON. Leave {constraint.field} or that message out",
            constraint.field,
        )


def check_ids(generation: GenerationRequest, prompts: list[tuple[int, ...]], vocab_size: int) -> None:
    """Raises `InvalidRequest` for the first token id that is not in the vocabulary."""
    for index, (given, prompt) in enumerate(zip(generation.prompts, prompts)):
        if not isinstance(given, str):
            check_range(prompt, prompt_field(generation, index) + "[{}]", "prompt", vocab_size)
    bias_ids = [token for token, _ in generation.sampling.logit_bias]
    check_range(bias_ids, "a key of logit_bias", "logit_bias", vocab_size)
    check_range(generation.stop_token_ids, "an id in stop_token_ids", "stop_token_ids", vocab_size)


def check_range(ids: Sequence[int], name: str, param: str, vocab_size: int) -> None:
    """Raises `InvalidRequest` for the first id outside the vocabulary. `name`: how to call it, {} is its index."""
    if ids and max(ids) >= vocab_size:
        index = next(i for i, token in enumerate(ids) if token >= vocab_size)
        known = f"the model's vocabulary has the ids from 0 to {vocab_size - 1}"
        raise InvalidRequest(f"{name.format(index)} is {ids[index]}; {known}", param)


def prompt_field(generation: GenerationRequest, index: int) -> str:
    """The name of a prompt in error messages."""
    return f"prompt[{index}]" if len(generation.prompts) > 1 else generation.prompt_field
