"""POST /v1/completions: reads OpenAI's parameters and writes OpenAI's objects."""

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
    read_stream_options,
)
from pipeline.api.json_body import to_json
from pipeline.api.other_servers import OTHER_SERVERS
from pipeline.errors import InvalidRequest
from stages.gateway.endpoints import prompt_logprobs
from stages.gateway.endpoints.openai_formatter import OpenAIFormatter
from stages.gateway.endpoints.prompt_field import read_prompts
from stages.gateway.endpoints.prompt_logprobs import TOKENS_PER_EVENT, scored_prompt
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
MAX_SUFFIX_CHARACTERS = 16 << 20  # in the field; the model's context is the actual bound


FIELDS: dict[str, Reader] = {
    **COMMON_FIELDS,
    "prompt": read_prompts,
    "max_tokens": integer(0, MAX_OUTPUT_TOKENS, hint="0 generates nothing"),
    "logprobs": integer(0, 5),
    "echo": flag,
    "suffix": text(MAX_SUFFIX_CHARACTERS),
    "best_of": integer(1, 20),
    "prompt_logprobs": prompt_logprobs.READER,
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


# ------------------------------------------------------------------ response


class CompletionFormatter(OpenAIFormatter):
    """`text_completion`, streamed or whole."""

    ID_PREFIX = "cmpl-"
    WHOLE_OBJECT = EVENT_OBJECT = "text_completion"

    def __init__(self, request: RequestState, vocabulary: TokenBytes) -> None:
        super().__init__(request, vocabulary)
        # Characters of the tokens so far, for text_offset.
        self._offsets = [len(self._echo(sequence)) for sequence in request.sequences]

    def opening_events(self) -> list[bytes]:
        """See `ResponseFormatter`. A prompt with logprobs has several events; the first one has its text."""
        generation = self._request.spec.generation
        if not (generation.echo and generation.logprobs):
            return super().opening_events()
        events = []
        for sequence in self._request.sequences:
            lists = self._echo_logprobs(sequence)
            for begin in range(0, len(lists["tokens"]), TOKENS_PER_EVENT):
                part = self._text_part(sequence, "" if begin else self._echo(sequence))
                logprobs = {name: values[begin : begin + TOKENS_PER_EVENT] for name, values in lists.items()}
                events.append(to_json(self._event(part, logprobs)))
        return events

    def _opening_part(self, sequence: SequenceState) -> dict[str, Any] | None:
        return self._text_part(sequence, self._echo(sequence)) if self._request.spec.generation.echo else None

    def _text_part(self, sequence: SequenceState, text: str) -> dict[str, Any]:
        return {"text": text, "index": sequence.index}

    def _finish_part(self, sequence: SequenceState) -> dict[str, Any]:
        return self._text_part(sequence, "")

    def _whole_part(self, sequence: SequenceState) -> dict[str, Any]:
        part = self._text_part(sequence, self._echo(sequence) + "".join(sequence.text))
        generation = self._request.spec.generation
        prompt = scored_prompt(self._request, sequence, self._vocabulary) if generation.shows_prompt_logprobs else None
        return part if prompt is None else {**part, "prompt_logprobs": prompt.vllm()}

    def _whole_logprobs(self, sequence: SequenceState) -> dict[str, Any]:
        if not self._request.spec.generation.echo:
            return self._logprobs(sequence, 0, sequence.n_emitted)
        echo, output = self._echo_logprobs(sequence), self._logprobs(sequence, 0, sequence.n_emitted)
        return {name: values + output[name] for name, values in echo.items()}

    def _echo_logprobs(self, sequence: SequenceState) -> dict[str, list[Any]]:
        prompt = scored_prompt(self._request, sequence, self._vocabulary)
        if prompt is None:
            return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        tokens, values, tops = prompt.openai(0, len(prompt), self._request.spec.generation.top_logprobs)
        offsets = prompt.offsets(self._echo(sequence))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

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
