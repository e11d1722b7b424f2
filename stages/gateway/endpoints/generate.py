"""POST /v1/generate: the server's own endpoint. One prompt, everything the server can do with it.

Request:
    {"model": "...",                     optional: the first model
     "prompt": "text" | [ids],           required; a text gets the model's BOS token, ids do not
     "max_tokens": 100,                  default: what the context leaves
     "temperature": 1, "top_k": 0, "top_p": 1, "repetition_penalty": 1, "frequency_penalty": 0,
     "presence_penalty": 0, "logit_bias": {"id": bias}, "order": ["mask", ...], "seed": 7,
     "min_tokens": 0, "ignore_eos": false, "stop": "text" | [texts], "stop_token_ids": [ids],
     "cache_salt": "...",                cached prompts are shared only under the same salt
     "speculate": 4,                     most draft tokens in a step, 0: none; never changes the text
     "n": 1, "logprobs": 5,              the sampled token's and the 5 highest
     "skip_special_tokens": true, "stream": false,
     "session_id": "...",                a turn of that session: the prompt goes after what it holds; "": a new one
     "create_session": false,            a session of that id may be new
     "session_ttl_s": 3600}              of a new one: closed when unused for so long; 0: never; default: as configured

Answer:
    {"id": "req-...", "object": "generation", "created": 1, "model": "...", "seed": 7,
     "choices": [{"index": 0, "text": "...", "tokens": [ids], "finish_reason": "stop" | "length",
                  "stop_string": "..." | null, "logprobs": [...] | null}],
     "session_id": "...",                in turns of sessions
     "usage": {...}}

Stream: an event for each piece of text, `{"index", "text", "tokens", "start", "logprobs"?}` with the
output index of its first token; for each choice `{"index", "finish_reason", "stop_string"}`; then
`{"id", "object", "created", "model", "seed", "session_id"?, "usage"}` and
`[DONE]`.
"""

from __future__ import annotations

from typing import Any

from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import MAX_SESSION_ID
from stages.gateway.endpoints.chat import with_logprobs
from stages.gateway.endpoints.formatter import finite, to_json, token_text, usage
from stages.gateway.endpoints.generation_request import (
    COMMON_FIELDS,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_IDS,
    MAX_TOP_LOGPROBS,
    MAX_TTL_S,
    GenerationRequest,
    TextOrIds,
    check_together,
    common,
)
from stages.gateway.http.fields import (
    Reader,
    Unsupported,
    flag,
    integer,
    read_fields,
    refuse,
    text,
    token_ids,
)
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes

# ------------------------------------------------------------------ in


def read_prompt(value: Any, name: str) -> TextOrIds:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(name, value, "a string or an array of token ids")
    if not value:
        raise InvalidRequest(f"{name} is empty; send at least one token", name)
    ids: TextOrIds = token_ids(MAX_PROMPT_IDS)(value, name)
    return ids


UNSUPPORTED = {
    "best_of": Unsupported(1, hint="use n"),
}

FIELDS: dict[str, Reader] = {
    **COMMON_FIELDS,
    "prompt": read_prompt,
    "max_tokens": integer(1, MAX_OUTPUT_TOKENS),
    "logprobs": integer(0, MAX_TOP_LOGPROBS),
    "session_id": text(MAX_SESSION_ID),
    "create_session": flag,
    "session_ttl_s": integer(0, MAX_TTL_S, hint="0 is never"),
}


def read(body: dict[str, Any]) -> GenerationRequest:
    """Raises `InvalidRequest`."""
    values = read_fields(body, FIELDS, required=("prompt",), unsupported=UNSUPPORTED)
    arguments = common(values)
    has_logprobs = "logprobs" in values
    if has_logprobs:
        arguments["sampling"] = with_logprobs(arguments["sampling"], values["logprobs"])
    ask = GenerationRequest(
        endpoint="generate",
        prompts=[values["prompt"]],
        max_tokens=values.get("max_tokens"),
        logprobs=has_logprobs,
        top_logprobs=values.get("logprobs", 0),
        **_session(values),
        **arguments,
    )
    if ask.session_id is not None and ask.n > 1:
        raise InvalidRequest(f"n is {ask.n}; a session goes on with one answer: leave n out", "n")
    return check_together(ask)


def _session(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `GenerationRequest`."""
    creates = values.get("create_session", False)
    name = values.get("session_id", "" if creates else None)
    if "session_ttl_s" in values and not creates and name != "":
        raise InvalidRequest(
            'session_ttl_s is for a new session; send it with "create_session": true or with an empty session_id',
            "session_ttl_s",
        )
    return {
        "session_id": name,
        "creates_session": creates,
        "session_ttl_s": values.get("session_ttl_s"),
    }


# ------------------------------------------------------------------ out


class GenerateFormatter:
    """As drawn at the top of this file."""

    def __init__(self, request: RequestState, vocabulary: TokenBytes) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._base = {
            "id": request.id,
            "object": "generation",
            "created": request.created,
            "model": request.model,
            "seed": request.seed,
        }
        if request.ask.turn is not None:
            self._base["session_id"] = request.ask.turn.session

    def opening(self) -> list[bytes]:
        return []

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> bytes | None:
        if not new and begin == end:
            return None
        event: dict[str, Any] = {
            "index": sequence.index,
            "text": new,
            "tokens": sequence.tokens[begin:end],
            "start": begin,
        }
        if sequence.logprobs:
            event["logprobs"] = self._logprobs(sequence, begin, end)
        return to_json(event)

    def ended(self, sequence: SequenceState) -> bytes:
        return to_json(
            {
                "index": sequence.index,
                "finish_reason": sequence.finish,
                "stop_string": sequence.stop_string or None,
            }
        )

    def closing(self) -> list[bytes]:
        return [to_json({**self._base, "usage": usage(self._request)})]

    def whole(self) -> bytes:
        request = self._request
        choices = [
            {
                "index": s.index,
                "text": "".join(s.text),
                "tokens": s.tokens[: s.end],
                "finish_reason": s.finish,
                "stop_string": s.stop_string or None,
                "logprobs": self._logprobs(s, 0, s.end) if request.ask.logprobs else None,
            }
            for s in request.sequences
        ]
        return to_json({**self._base, "choices": choices, "usage": usage(request)})

    def _logprobs(self, sequence: SequenceState, begin: int, end: int) -> list[dict[str, Any]]:
        entries = []
        for token, logprob in zip(sequence.tokens[begin:end], sequence.logprobs[begin:end]):
            entry = self._entry(token, logprob.logprob)
            entry["top"] = [self._entry(t, p) for t, p in logprob.top]
            entries.append(entry)
        return entries

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._vocabulary.get(token)
        return {"id": token, "token": token_text(piece), "bytes": list(piece), "logprob": finite(logprob)}
