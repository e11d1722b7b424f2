"""POST /v1/completions: reads OpenAI's parameters and writes OpenAI's objects."""

from __future__ import annotations

from typing import Any

from pipeline.api.fields import (
    TOKEN_ID,
    FieldTable,
    Reader,
    Unsupported,
    flag,
    integer,
    invalid_value,
    text,
    token_ids,
)
from pipeline.api.generation_fields import (
    COMMON_FIELDS,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_IDS,
    MAX_PROMPTS,
    read_stream_options,
)
from pipeline.api.json_schema import any_of, array_of, described
from pipeline.errors import InvalidRequest
from stages.gateway.endpoints.openai_formatter import OpenAIFormatter
from stages.gateway.endpoints.response_formatter import finite_logprob, token_key
from stages.gateway.requests.generation_request import (
    GenerationRequest,
    TextOrIds,
    check_combination,
    common_arguments,
    with_logprobs,
)
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes

# ------------------------------------------------------------------ request

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint
_PROMPT_KINDS = "a string, an array of strings, an array of token ids, or an array of such arrays"


_TOKENS = array_of(TOKEN_ID, most=MAX_PROMPT_IDS)


@described(
    any_of(
        {"type": "string"},
        array_of({"type": "string"}, least=1, most=MAX_PROMPTS),
        {**_TOKENS, "minItems": 1},
        array_of(_TOKENS, least=1, most=MAX_PROMPTS),
    )
)
def read_prompt(value: Any, name: str) -> list[TextOrIds]:
    """Read any of OpenAI's four kinds of prompt as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid_value(name, value, _PROMPT_KINDS)
    if not value:
        raise InvalidRequest(f"{name} is empty; send at least one token or one text", name)
    ids = token_ids(MAX_PROMPT_IDS)
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [ids(value, name)]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"{name} has {len(value)} prompts; at most {MAX_PROMPTS} are allowed", name)
    prompts: list[TextOrIds] = []
    for index, item in enumerate(value):
        where = f"{name}[{index}]"
        if type(item) is not type(value[0]) or not isinstance(item, str | list):
            raise invalid_value(where, item, f"of the same kind as the first: {name} is {_PROMPT_KINDS}")
        prompts.append(item if isinstance(item, str) else ids(item, where))
    return prompts


UNSUPPORTED = {
    "suffix": Unsupported("", hint="put the whole text into the prompt"),
}

FIELDS: dict[str, Reader] = {
    **COMMON_FIELDS,
    "prompt": read_prompt,
    "max_tokens": integer(1, MAX_OUTPUT_TOKENS),
    "logprobs": integer(0, 5),
    "echo": flag,
    "best_of": integer(1, 20),
    "stream_options": read_stream_options,
    "user": text(512),  # accepted for compatibility, without effect
}


BODY = FieldTable(FIELDS, ("model", "prompt"), UNSUPPORTED)


def read(body: dict[str, Any]) -> GenerationRequest:
    """Read the body of a completion request. Raises `InvalidRequest`."""
    values = BODY.read(body)
    arguments = common_arguments(values)
    if values.get("best_of", arguments["n"]) != arguments["n"]:
        raise InvalidRequest(
            f"best_of is {values['best_of']} and n is {arguments['n']}; this server returns every text that it "
            f"generates, so best_of must equal n: leave it out",
            "best_of",
        )
    if "stream_options" in values and not values.get("stream"):
        raise InvalidRequest("stream_options is given and stream is not true; leave it out", "stream_options")
    has_logprobs = "logprobs" in values
    if has_logprobs and values.get("echo"):
        raise InvalidRequest(
            "echo with logprobs is not supported by this server, which computes no logprobs of prompts; leave one out",
            "echo",
        )
    top = values.get("logprobs", 0)
    if has_logprobs:
        arguments["sampling"] = with_logprobs(arguments["sampling"], top)
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


# ------------------------------------------------------------------ response


class CompletionFormatter(OpenAIFormatter):
    """`text_completion`, streamed or whole."""

    ID_PREFIX = "cmpl-"
    WHOLE_OBJECT = EVENT_OBJECT = "text_completion"

    def __init__(self, request: RequestState, vocabulary: TokenBytes) -> None:
        super().__init__(request, vocabulary)
        self._offsets = [0] * len(request.sequences)  # characters of the tokens so far, for text_offset

    def _opening_part(self, sequence: SequenceState) -> dict[str, Any] | None:
        return self._text_part(sequence, self._echo(sequence)) if self._request.spec.generation.echo else None

    def _text_part(self, sequence: SequenceState, text: str) -> dict[str, Any]:
        return {"text": text, "index": sequence.index}

    def _finish_part(self, sequence: SequenceState) -> dict[str, Any]:
        return self._text_part(sequence, "")

    def _whole_part(self, sequence: SequenceState) -> dict[str, Any]:
        return self._text_part(sequence, self._echo(sequence) + "".join(sequence.text))

    def _echo(self, sequence: SequenceState) -> str:
        return self._request.spec.echoes[sequence.spec.prompt_index] if self._request.spec.generation.echo else ""

    def _logprobs(self, sequence: SequenceState, begin: int, end: int) -> dict[str, Any]:
        """Return OpenAI's four parallel lists; a token that is not UTF-8 is named by its bytes."""
        tokens, values, tops, offsets = [], [], [], []
        for token, logprob in zip(sequence.tokens[begin:end], sequence.logprobs[begin:end]):
            key = token_key(self._vocabulary.get(token))
            tokens.append(key)
            values.append(finite_logprob(logprob.logprob))
            top = {token_key(self._vocabulary.get(t)): finite_logprob(p) for t, p in logprob.top}
            tops.append(top | {key: values[-1]})
            offsets.append(self._offsets[sequence.index])
            self._offsets[sequence.index] += len(self._vocabulary.get(token).decode("utf-8", "ignore"))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
