"""POST /v1/completions: reads OpenAI's parameters."""

from __future__ import annotations

from typing import Any

from pipeline.api.fields import (
    FieldTable,
    Reader,
    Unsupported,
    flag,
    integer,
    text,
)
from pipeline.api.generation_fields import (
    COMMON_FIELDS,
    COMMON_UNSUPPORTED,
    HINT_FIELDS,
    MAX_OUTPUT_TOKENS,
    read_prompt_logprobs,
    read_stream_options,
)
from pipeline.api.other_servers import OTHER_SERVERS
from pipeline.api.requests.generation_request import (
    GenerationRequest,
    check_combination,
    common_arguments,
    with_logprobs,
)
from pipeline.api.requests.prompt_field import read_prompts
from pipeline.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint
MAX_SUFFIX_CHARACTERS = 16 << 20  # in the field; the model's context is the actual bound


FIELDS: dict[str, Reader] = {
    **COMMON_FIELDS,
    "prompt": read_prompts,
    "max_tokens": integer(0, MAX_OUTPUT_TOKENS, hint="0 generates nothing"),
    "logprobs": integer(0, 5),
    "echo": flag,
    "suffix": text(MAX_SUFFIX_CHARACTERS),
    "best_of": integer(1, 20),
    "prompt_logprobs": read_prompt_logprobs,
    "stream_options": read_stream_options,
    **HINT_FIELDS,
}


UNSUPPORTED = {
    **COMMON_UNSUPPORTED,
    **OTHER_SERVERS,
    "add_special_tokens": Unsupported(True, hint="send token ids, to which nothing is added"),
}
BODY = FieldTable(FIELDS, ("model", "prompt"), UNSUPPORTED)


def read(body: dict[str, Any]) -> GenerationRequest:
    """Read the body of a completion request. Raises `InvalidRequest`."""
    values = BODY.read(body)
    arguments = common_arguments(values)
    n, best_of = arguments["n"], values.get("best_of", arguments["n"])
    if best_of < n:
        raise InvalidRequest(f"best_of is {best_of} and n is {n}; best_of must be at least n", "best_of")
    if best_of > n and values.get("stream"):
        raise InvalidRequest(
            f"best_of is {best_of} and n is {n}; texts are chosen when all have ended: leave out stream or best_of",
            "best_of",
        )
    if suffix := values.get("suffix"):
        arguments["suffix"] = suffix
        if values.get("echo"):
            raise InvalidRequest("echo is true and suffix is given; leave one out", "echo")
        if not all(isinstance(prompt, str) for prompt in values["prompt"]):
            raise InvalidRequest("suffix is given and prompt has token ids; send prompt as text", "suffix")
    if "stream_options" in values and not values.get("stream"):
        raise InvalidRequest("stream_options is given and stream is not true; leave it out", "stream_options")
    has_logprobs = "logprobs" in values
    top = values.get("logprobs", 0)
    prompt_top = [values["prompt_logprobs"]] if "prompt_logprobs" in values else []
    if prompt_top and values.get("stream"):
        raise InvalidRequest(
            "prompt_logprobs is given and stream is true; leave stream out, or send echo with logprobs",
            "prompt_logprobs",
        )
    if has_logprobs and values.get("echo"):
        prompt_top.append(top)
    if prompt_top:
        arguments |= {"prompt_logprobs": max(prompt_top), "shows_prompt_logprobs": "prompt_logprobs" in values}
    if has_logprobs or best_of > n:
        arguments["sampling"] = with_logprobs(arguments["sampling"], top)
    if best_of > n:
        arguments |= {"n": best_of, "n_returned": n}
    request = GenerationRequest(
        endpoint="completions",
        prompts=values["prompt"],
        max_tokens=values.get("max_tokens", DEFAULT_MAX_TOKENS),
        include_usage=values.get("stream_options", {}).get("include_usage", False),
        echo=values.get("echo", False),
        logprobs=has_logprobs,
        top_logprobs=top,
        **arguments,
    )
    return check_combination(request)
