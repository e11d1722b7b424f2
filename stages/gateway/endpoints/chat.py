"""POST /v1/chat/completions: OpenAI's parameters in, OpenAI's objects out."""

from __future__ import annotations

from typing import Any

from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Sampling
from stages.gateway.endpoints.formatter import finite, split, to_json, token_text, usage
from stages.gateway.endpoints.generation_request import (
    COMMON_FIELDS,
    MAX_OUTPUT_TOKENS,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    check_together,
    common,
    read_stream_options,
)
from stages.gateway.http.fields import Reader, Unsupported, flag, integer, read_fields, refuse, text
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant")

# ------------------------------------------------------------------ in


def read_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """As the template takes them: `role` and `content` as a string. `developer` means `system`."""
    if not isinstance(value, list):
        raise refuse(name, value, "an array of messages")
    if not value:
        raise InvalidRequest(f"{name} is empty; send at least one message", name)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"{name} has {len(value)} messages; at most {MAX_MESSAGES} are taken", name)
    return [_read_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _read_message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(name, value, 'an object with "role" and "content"')
    fields = read_fields(
        value,
        {"role": _read_role, "content": _read_content},
        required=("role", "content"),
        unsupported=_UNSUPPORTED_IN_MESSAGE,
        within=name,
    )
    role = "system" if fields["role"] == "developer" else fields["role"]
    return {"role": role, "content": fields["content"]}


def _read_role(value: Any, name: str) -> str:
    if value in ("tool", "function"):
        raise InvalidRequest(f"{name} is {value!r}, and tools are not supported by this server", name)
    if not isinstance(value, str) or value not in ROLES:
        raise refuse(name, value, "one of " + ", ".join(ROLES))
    return value


def _read_content(value: Any, name: str) -> str:
    """A string, or parts that are text, joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(name, value, 'a string or an array of {"type": "text", "text": ...}')
    pieces = []
    for index, part in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(part, dict):
            raise refuse(where, part, 'an object {"type": "text", "text": ...}')
        if part.get("type") != "text":
            raise InvalidRequest(f"{where}.type is {part.get('type')!r}; this server takes text only", f"{where}.type")
        read = {"type": text(16), "text": text(1 << 30)}
        pieces.append(read_fields(part, read, required=("text",), within=where)["text"])
    return "".join(pieces)


def read_response_format(value: Any, name: str) -> None:
    if not isinstance(value, dict):
        raise refuse(name, value, 'an object {"type": "text"}')
    if value != {"type": "text"}:
        raise InvalidRequest(f'{name} is not supported by this server except as {{"type": "text"}}; leave it out', name)


_UNSUPPORTED_IN_MESSAGE = {
    "name": Unsupported(hint="write the name into the content"),
    "tool_calls": Unsupported([], hint="tools are not available"),
    "tool_call_id": Unsupported(hint="tools are not available"),
    "function_call": Unsupported(hint="tools are not available"),
    "refusal": Unsupported(),
    "annotations": Unsupported([]),
    "audio": Unsupported(hint="this server takes text only"),
}

UNSUPPORTED = {
    "tools": Unsupported([], hint="tools are not available"),
    "tool_choice": Unsupported("none", hint="tools are not available"),
    "parallel_tool_calls": Unsupported(hint="tools are not available"),
    "functions": Unsupported([], hint="tools are not available"),
    "function_call": Unsupported("none", hint="tools are not available"),
    "modalities": Unsupported(["text"], hint="this server writes text only"),
    "audio": Unsupported(hint="this server writes text only"),
    "prediction": Unsupported(),
    "reasoning_effort": Unsupported(),
    "verbosity": Unsupported(),
    "web_search_options": Unsupported(),
    "metadata": Unsupported(),
    "store": Unsupported(False, hint="nothing is stored"),
    "service_tier": Unsupported("auto", "default"),
    "prompt_cache_key": Unsupported(hint="prefixes are cached by their tokens"),
    "prompt_cache_retention": Unsupported(hint="prefixes are cached by their tokens"),
    "safety_identifier": Unsupported(),
}

FIELDS: dict[str, Reader] = {
    **COMMON_FIELDS,
    "messages": read_messages,
    "max_tokens": integer(1, MAX_OUTPUT_TOKENS),
    "max_completion_tokens": integer(1, MAX_OUTPUT_TOKENS),
    "logprobs": flag,
    "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
    "stream_options": read_stream_options,
    "response_format": read_response_format,
    "user": text(512),  # opaque: accepted as OpenAI has it, and without any effect
}


def read(body: dict[str, Any]) -> GenerationRequest:
    """Raises `InvalidRequest`."""
    values = read_fields(body, FIELDS, required=("model", "messages"), unsupported=UNSUPPORTED)
    if "max_tokens" in values and "max_completion_tokens" in values:
        raise InvalidRequest("max_tokens and max_completion_tokens mean the same; give one of them", "max_tokens")
    if "stream_options" in values and not values.get("stream"):
        raise InvalidRequest("stream_options is given and stream is not true; leave it out", "stream_options")
    has_logprobs = values.get("logprobs", False)
    if "top_logprobs" in values and not has_logprobs:
        raise InvalidRequest("top_logprobs is given and logprobs is not true; set logprobs", "top_logprobs")
    arguments = common(values)
    top = values.get("top_logprobs", 0)
    if has_logprobs:
        arguments["sampling"] = with_logprobs(arguments["sampling"], top)
    field = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    ask = GenerationRequest(
        endpoint="chat",
        messages=values["messages"],
        max_tokens=values.get(field),
        max_tokens_field=field,
        include_usage=values.get("stream_options", {}).get("include_usage", False),
        logprobs=has_logprobs,
        top_logprobs=top,
        **arguments,
    )
    return check_together(ask)


def with_logprobs(sampling: Sampling, top: int) -> Sampling:
    return Sampling(**{**{f: getattr(sampling, f) for f in Sampling.__struct_fields__}, "logprobs": top})


# ------------------------------------------------------------------ out


class ChatFormatter:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, request: RequestState, vocabulary: TokenBytes) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._base = {
            "id": f"chatcmpl-{request.hex}",
            "object": "chat.completion.chunk",
            "created": request.created,
            "model": request.model,
            "system_fingerprint": request.fingerprint,
        }
        # With include_usage every chunk but the last has a usage of null.
        self._tail = {"usage": None} if request.ask.include_usage else {}
        self._pieces = [
            split(self._chunk(s.index, {"content": "\0text"}, "\0logprobs"), "\0text", "\0logprobs")
            for s in request.sequences
        ]

    def opening(self) -> list[bytes]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [to_json(self._chunk(s.index, delta)) for s in self._request.sequences]

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
        return to_json(self._chunk(sequence.index, {}, finish=sequence.finish))

    def closing(self) -> list[bytes]:
        if not self._request.ask.include_usage:
            return []
        return [to_json({**self._base, "choices": [], "usage": usage(self._request)})]

    def whole(self) -> bytes:
        request = self._request
        choices = [
            {
                "index": s.index,
                "message": {"role": "assistant", "content": "".join(s.text), "refusal": None},
                "logprobs": self._logprobs(s, 0, s.end) if request.ask.logprobs else None,
                "finish_reason": s.finish,
            }
            for s in request.sequences
        ]
        return to_json({**self._base, "object": "chat.completion", "choices": choices, "usage": usage(request)})

    def _chunk(self, index: int, delta: Any, logprobs: Any = None, finish: str | None = None) -> Any:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._base, "choices": [choice], **self._tail}

    def _logprobs(self, sequence: SequenceState, begin: int, end: int) -> Any:
        content = []
        for token, logprob in zip(sequence.tokens[begin:end], sequence.logprobs[begin:end]):
            entry = self._entry(token, logprob.logprob)
            entry["top_logprobs"] = [self._entry(t, p) for t, p in logprob.top[: self._request.ask.top_logprobs]]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._vocabulary.get(token)
        return {"token": token_text(piece), "logprob": finite(logprob), "bytes": list(piece)}
