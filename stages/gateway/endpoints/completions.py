"""POST /v1/completions: reads OpenAI's parameters and writes OpenAI's objects."""

from __future__ import annotations

from typing import Any

from pipeline.api.fields import (
    FieldTable,
    Reader,
    Unsupported,
    flag,
    integer,
)
from pipeline.api.generation_fields import (
    COMMON_FIELDS,
    COMMON_UNSUPPORTED,
    HINT_FIELDS,
    MAX_OUTPUT_TOKENS,
    read_stream_options,
)
from pipeline.errors import InvalidRequest
from stages.gateway.endpoints.openai_formatter import OpenAIFormatter
from stages.gateway.endpoints.prompt_field import read_prompts
from stages.gateway.endpoints.response_formatter import finite_logprob, token_key
from stages.gateway.requests.generation_request import (
    GenerationRequest,
    check_combination,
    common_arguments,
    with_logprobs,
)
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes

# ------------------------------------------------------------------ request

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint

UNSUPPORTED = {
    **COMMON_UNSUPPORTED,
    "suffix": Unsupported("", hint="put the whole text into the prompt"),
}

FIELDS: dict[str, Reader] = {
    **COMMON_FIELDS,
    "prompt": read_prompts,
    "max_tokens": integer(1, MAX_OUTPUT_TOKENS),
    "logprobs": integer(0, 5),
    "echo": flag,
    "best_of": integer(1, 20),
    "stream_options": read_stream_options,
    **HINT_FIELDS,
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
    if "stream_options" in values and not values.get("stream"):
        raise InvalidRequest("stream_options is given and stream is not true; leave it out", "stream_options")
    has_logprobs = "logprobs" in values
    if has_logprobs and values.get("echo"):
        raise InvalidRequest(
            "echo with logprobs is not supported by this server, which computes no logprobs of prompts; leave one out",
            "echo",
        )
    top = values.get("logprobs", 0)
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
