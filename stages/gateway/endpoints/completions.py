"""POST /v1/completions: OpenAI's parameters in, OpenAI's objects out."""

from __future__ import annotations

from typing import Any

from pipeline.errors import InvalidRequest
from stages.gateway.endpoints.chat import with_logprobs
from stages.gateway.endpoints.formatter import finite, split, to_json, token_key, usage
from stages.gateway.endpoints.generation_request import (
    COMMON_FIELDS,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_IDS,
    MAX_PROMPTS,
    GenerationRequest,
    TextOrIds,
    check_together,
    common,
    read_stream_options,
)
from stages.gateway.http.fields import Reader, Unsupported, flag, integer, read_fields, refuse, text, token_ids
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes

# ------------------------------------------------------------------ in

_PROMPT_KINDS = "a string, an array of strings, an array of token ids, or an array of such arrays"


def read_prompt(value: Any, name: str) -> list[TextOrIds]:
    """OpenAI's four kinds, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise refuse(name, value, _PROMPT_KINDS)
    if not value:
        raise InvalidRequest(f"{name} is empty; send at least one token or one text", name)
    ids = token_ids(MAX_PROMPT_IDS)
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [ids(value, name)]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"{name} has {len(value)} prompts; at most {MAX_PROMPTS} are taken", name)
    prompts: list[TextOrIds] = []
    for index, item in enumerate(value):
        where = f"{name}[{index}]"
        if type(item) is not type(value[0]) or not isinstance(item, str | list):
            raise refuse(where, item, f"of the kind of the others: {name} is {_PROMPT_KINDS}")
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
    "user": text(512),  # opaque: accepted as OpenAI has it, and without any effect
}


def read(body: dict[str, Any]) -> GenerationRequest:
    """Raises `InvalidRequest`."""
    values = read_fields(body, FIELDS, required=("model", "prompt"), unsupported=UNSUPPORTED)
    arguments = common(values)
    if values.get("best_of", arguments["n"]) != arguments["n"]:
        raise InvalidRequest(
            f"best_of is {values['best_of']} and n {arguments['n']}; this server returns every text it "
            f"generates, so best_of must equal n: leave it out",
            "best_of",
        )
    if "stream_options" in values and not values.get("stream"):
        raise InvalidRequest("stream_options is given and stream is not true; leave it out", "stream_options")
    has_logprobs = "logprobs" in values
    if has_logprobs and values.get("echo"):
        raise InvalidRequest(
            "echo with logprobs is not supported by this server: it has no logprobs of prompts; leave one of them out",
            "echo",
        )
    top = values.get("logprobs", 0)
    if has_logprobs:
        arguments["sampling"] = with_logprobs(arguments["sampling"], top)
    ask = GenerationRequest(
        endpoint="completions",
        prompts=values["prompt"],
        # OpenAI's default for this endpoint.
        max_tokens=values.get("max_tokens", 16),
        include_usage=values.get("stream_options", {}).get("include_usage", False),
        echo=values.get("echo", False),
        logprobs=has_logprobs,
        top_logprobs=top,
        **arguments,
    )
    return check_together(ask)


# ------------------------------------------------------------------ out


class CompletionFormatter:
    """`text_completion`, streamed or whole."""

    def __init__(self, request: RequestState, vocabulary: TokenBytes) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._base = {
            "id": f"cmpl-{request.hex}",
            "object": "text_completion",
            "created": request.created,
            "model": request.model,
            "system_fingerprint": request.fingerprint,
        }
        self._tail = {"usage": None} if request.ask.include_usage else {}
        self._pieces = [
            split(self._chunk(s.index, "\0text", "\0logprobs"), "\0text", "\0logprobs") for s in request.sequences
        ]
        self._offsets = [0] * len(request.sequences)  # characters of the tokens before, for text_offset

    def opening(self) -> list[bytes]:
        if not self._request.ask.echo:
            return []
        return [to_json(self._chunk(s.index, self._echo(s), None)) for s in self._request.sequences]

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> bytes | None:
        if sequence.logprobs:
            if not new and begin == end:
                return None
            logprobs = to_json(self._logprobs(sequence, begin, end))
        else:
            if not new:
                return None
            logprobs = b"null"
        before, between, after = self._pieces[sequence.index]
        return b"%b%b%b%b%b" % (before, to_json(new), between, logprobs, after)

    def ended(self, sequence: SequenceState) -> bytes:
        return to_json(self._chunk(sequence.index, "", None, sequence.finish))

    def closing(self) -> list[bytes]:
        if not self._request.ask.include_usage:
            return []
        return [to_json({**self._base, "choices": [], "usage": usage(self._request)})]

    def whole(self) -> bytes:
        request = self._request
        choices = [
            {
                "text": self._echo(s) + "".join(s.text),
                "index": s.index,
                "logprobs": self._logprobs(s, 0, s.end) if request.ask.logprobs else None,
                "finish_reason": s.finish,
            }
            for s in request.sequences
        ]
        return to_json({**self._base, "choices": choices, "usage": usage(request)})

    def _echo(self, sequence: SequenceState) -> str:
        return self._request.echoes[sequence.prompt_index] if self._request.ask.echo else ""

    def _chunk(self, index: int, text: str, logprobs: Any, finish: str | None = None) -> Any:
        choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}
        return {**self._base, "choices": [choice], **self._tail}

    def _logprobs(self, sequence: SequenceState, begin: int, end: int) -> Any:
        """OpenAI's four parallel lists; names of tokens that are no text are spelled in bytes."""
        tokens, values, tops, offsets = [], [], [], []
        for token, logprob in zip(sequence.tokens[begin:end], sequence.logprobs[begin:end]):
            key = token_key(self._vocabulary.get(token))
            tokens.append(key)
            values.append(finite(logprob.logprob))
            top = {token_key(self._vocabulary.get(t)): finite(p) for t, p in logprob.top}
            tops.append(top | {key: values[-1]})
            offsets.append(self._offsets[sequence.index])
            self._offsets[sequence.index] += len(self._vocabulary.get(token).decode("utf-8", "ignore"))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
