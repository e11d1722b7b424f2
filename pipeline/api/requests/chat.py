"""POST /v1/chat/completions: reads OpenAI's parameters."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import msgspec

from pipeline.api.fields import (
    FieldTable,
    Reader,
    Unsupported,
    flag,
    integer,
    invalid_value,
    object_schema,
    one_of,
    read_fields,
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
from pipeline.api.json_schema import Schema, any_of, array_of, described
from pipeline.api.other_servers import OTHER_SERVERS
from pipeline.api.requests.generation_request import (
    GenerationRequest,
    check_combination,
    common_arguments,
    with_logprobs,
)
from pipeline.api.requests.reasoning_fields import REASONING_FIELDS, thinking_of
from pipeline.api.requests.template_fields import TEMPLATE_FIELDS, template_arguments
from pipeline.api.requests.text_parts import text_parts
from pipeline.api.requests.tool_fields import read_tool_choice, read_tool_fields, read_tools, tool_name
from pipeline.api.requests.tool_history import call_id, check_results, ignored, read_tool_calls
from pipeline.errors import InvalidRequest
from shm.step_ring import MAX_TOP

MAX_MESSAGES = 4096
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:T[0-9]{2}:[0-9]{2}:[0-9]{2})?")
ROLES = ("system", "developer", "user", "assistant", "tool")


@described({"enum": list(ROLES)})
def _read_role(value: Any, name: str) -> str:
    if value == "function":
        raise InvalidRequest(f'{name} is "function", an older form of "tool"; send the result of a tool call', name)
    if not isinstance(value, str) or value not in ROLES:
        raise invalid_value(name, value, "one of " + ", ".join(ROLES))
    return value


_read_content = text_parts("text")

_UNSUPPORTED_IN_MESSAGE = {
    "name": Unsupported(hint="write the name into the content"),
    "function_call": Unsupported(hint="use tool_calls"),
    "refusal": Unsupported(),
    "annotations": Unsupported([]),
    "audio": Unsupported(hint="this server accepts text only"),
}

# What the official client and litellm add to answers that they send back.
CLIENTS_OWN = ("parsed", "provider_specific_fields")
_UNSUPPORTED_CALLS = {
    "tool_calls": Unsupported([], hint="an assistant's message has tool calls"),
    "tool_call_id": Unsupported(hint="a message with the role tool has it"),
}

_MESSAGE: dict[str, Reader] = {"role": _read_role, "content": _read_content}
_MESSAGE_FIELDS: dict[str, dict[str, Reader]] = {  # by role; other roles have those of `_MESSAGE` alone
    "assistant": {
        **_MESSAGE,
        "tool_calls": read_tool_calls,
        **dict.fromkeys(CLIENTS_OWN, ignored),
        "reasoning_content": text(1 << 30),
        "reasoning": text(1 << 30),
    },
    "tool": {**_MESSAGE, "tool_call_id": call_id, "name": tool_name},
}


def _message_schema(role: str) -> Schema:
    required: tuple[str, ...] = ("role", "content")
    unsupported = _UNSUPPORTED_IN_MESSAGE
    if role == "assistant":
        required = ("role",)
    elif role == "tool":
        required = ("role", "content", "tool_call_id")
    else:
        unsupported = {**unsupported, **_UNSUPPORTED_CALLS}
    schema = object_schema(_MESSAGE_FIELDS.get(role, _MESSAGE), required=required, unsupported=unsupported)
    return {**schema, "title": role, "properties": {**schema["properties"], "role": {"const": role}}}


@described(array_of(any_of(*map(_message_schema, ROLES)), least=1, most=MAX_MESSAGES))
def read_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Read messages into the form of the chat template: `role`, and `content` as a string."""
    if not isinstance(value, list):
        raise invalid_value(name, value, "an array of messages")
    if not value:
        raise InvalidRequest(f"{name} is empty; send at least one message", name)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"{name} has {len(value)} messages; at most {MAX_MESSAGES} are allowed", name)
    places = [f"{name}[{index}]" for index in range(len(value))]
    messages = [_read_message(message, place) for message, place in zip(value, places)]
    check_results(messages, places)
    return messages


def _read_message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object with "role" and "content"')
    role = _read_role(value["role"], f"{name}.role") if value.get("role") is not None else ""
    table = _MESSAGE_FIELDS.get(role, _MESSAGE)
    unsupported, required = _UNSUPPORTED_IN_MESSAGE, ["role", "content"]
    if role == "assistant":
        if value.get("tool_calls"):
            required.remove("content")
    elif role == "tool":
        required.append("tool_call_id")
    else:
        unsupported = {**unsupported, **_UNSUPPORTED_CALLS}
    fields = read_fields(value, table, required=tuple(required), unsupported=unsupported, within=name)
    fields.setdefault("content", "")
    for key in CLIENTS_OWN:
        fields.pop(key, None)
    # Two names of the same; templates know the first one.
    if reasoning := fields.pop("reasoning", "") or fields.pop("reasoning_content", ""):
        fields["reasoning_content"] = reasoning
    if not fields.get("tool_calls"):
        fields.pop("tool_calls", None)
    # "developer" is OpenAI's newer name of "system".
    return {**fields, "role": "system" if role == "developer" else role}


_PREDICTION: dict[str, Reader] = {"type": one_of("content"), "content": _read_content}


@described(object_schema(_PREDICTION, required=("type", "content")))
def read_prediction(value: Any, name: str) -> str:
    """Read a predicted text, which only makes the answer faster: draft tokens never change it."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object {"type": "content", "content": ...}')
    predicted: str = read_fields(value, _PREDICTION, required=("type", "content"), within=name)["content"]
    return predicted


@described({"type": "string", "pattern": f"^{_DATE.pattern}$"})
def read_template_date(value: Any, name: str) -> str:
    """Read a date, or a date and a time, into ISO 8601 without a zone."""
    expected = "a date or a time without a zone, like 2026-03-01 or 2026-03-01T12:30:00"
    if not isinstance(value, str) or not _DATE.fullmatch(value):
        raise invalid_value(name, value, expected)
    try:
        return datetime.fromisoformat(value).isoformat()
    except ValueError:
        raise invalid_value(name, value, expected) from None


UNSUPPORTED = {
    **COMMON_UNSUPPORTED,
    **{name: one for name, one in OTHER_SERVERS.items() if name not in REASONING_FIELDS},
    "echo": Unsupported(False, hint="use continue_final_message"),
    "add_special_tokens": Unsupported(False, hint="the chat template has what the model expects"),
    "functions": Unsupported([], hint="use tools"),
    "function_call": Unsupported("none", hint="use tool_choice"),
    "modalities": Unsupported(["text"], hint="this server generates text only"),
    "audio": Unsupported(hint="this server generates text only"),
    "verbosity": Unsupported("medium", hint="say in the prompt how long the answer should be"),
    "moderation": Unsupported(),
    "web_search_options": Unsupported(),
    "store": Unsupported(False, hint="nothing is stored"),
}

FIELDS: dict[str, Reader] = {
    **COMMON_FIELDS,
    "messages": read_messages,
    "max_tokens": integer(1, MAX_OUTPUT_TOKENS),
    "max_completion_tokens": integer(1, MAX_OUTPUT_TOKENS),
    "logprobs": flag,
    "top_logprobs": integer(0, MAX_TOP),
    "stream_options": read_stream_options,
    "prompt_logprobs": read_prompt_logprobs,
    "template_date": read_template_date,
    "tools": read_tools,
    "tool_choice": read_tool_choice,
    "parallel_tool_calls": flag,
    **TEMPLATE_FIELDS,
    **REASONING_FIELDS,
    **HINT_FIELDS,
    "prediction": read_prediction,
}


BODY = FieldTable(FIELDS, ("model", "messages"), UNSUPPORTED)


def read(body: dict[str, Any]) -> GenerationRequest:
    """Read the body of a chat request. Raises `InvalidRequest`."""
    values = BODY.read(body)
    most = values.get("max_completion_tokens")
    if most is not None and values.get("max_tokens", most) != most:
        raise InvalidRequest(
            f"max_tokens is {values['max_tokens']} and max_completion_tokens is {most}; they mean the same: give one",
            "max_tokens",
        )
    if "stream_options" in values and not values.get("stream"):
        raise InvalidRequest("stream_options is given and stream is not true; leave it out", "stream_options")
    if "prompt_logprobs" in values and values.get("stream"):
        raise InvalidRequest("prompt_logprobs is given and stream is true; leave one out", "prompt_logprobs")
    has_logprobs = values.get("logprobs", False)
    if "top_logprobs" in values and not has_logprobs:
        raise InvalidRequest("top_logprobs is given and logprobs is not true; set logprobs", "top_logprobs")
    arguments = common_arguments(values)
    top = values.get("top_logprobs", 0)
    if has_logprobs:
        arguments["sampling"] = with_logprobs(arguments["sampling"], top)
    tools = read_tool_fields(values)
    field = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    request = GenerationRequest(
        endpoint="chat",
        messages=values["messages"],
        max_tokens=values.get(field),
        max_tokens_field=field,
        include_usage=values.get("stream_options", {}).get("include_usage", False),
        logprobs=has_logprobs,
        top_logprobs=top,
        prompt_logprobs=values.get("prompt_logprobs", msgspec.UNSET),
        template_date=values.get("template_date", msgspec.UNSET),
        template=template_arguments(values, tools.definitions if tools else None),
        tools=tools.use if tools else msgspec.UNSET,
        thinking=thinking_of(values),
        prediction=values.get("prediction", msgspec.UNSET),
        **arguments,
    )
    return check_combination(request)
