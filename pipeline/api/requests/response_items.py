"""The items of a conversation in OpenAI's Responses API, and the messages of the chat template that they become.

message                 a message; without `type`, anything with a role
reasoning               what the model wrote before its answer, part of the assistant's message after it
function_call           a call, part of the assistant's message
function_call_output    its result
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.api.fields import Reader, Unsupported, invalid_value, object_schema, one_of, read_fields, show, text
from pipeline.api.json_schema import any_of, array_of, described
from pipeline.api.requests.chat import MAX_MESSAGES
from pipeline.api.requests.text_parts import text_parts
from pipeline.api.requests.tool_fields import tool_name
from pipeline.api.requests.tool_history import call_id, ignored, read_arguments, template_call
from pipeline.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant")
_STATUS = one_of("in_progress", "completed", "incomplete")
_ITEM_ID = text(256)


def add_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message. Reasoning, text and calls of an answer, which are items of their own, become one message."""
    before = messages[-1] if messages else {}
    is_bare = not before.get("content") and not before.get("tool_calls")  # it has reasoning alone
    if message.get("tool_calls") and before.get("role") == "assistant":
        messages[-1] = {**before, "tool_calls": [*before.get("tool_calls", []), *message["tool_calls"]]}
    elif before.get("reasoning_content") and is_bare and message["role"] == "assistant":
        messages[-1] = {**before, **message}
    else:
        messages.append(message)


def read_item(value: Any, name: str) -> dict[str, Any]:
    """Read an item into a message, or the part of one that it is. Raises `InvalidRequest`."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object like {"role": "user", "content": ...}')
    kind = value.get("type") or "message"
    if kind == "message":
        return _read_message(value, name)
    if kind == "reasoning":
        return _read_reasoning(value, name)
    if kind == "function_call":
        return _read_call(value, name)
    if kind == "function_call_output":
        return _read_result(value, name)
    raise InvalidRequest(
        f"{name}.type is {show(kind)}; this server accepts message, reasoning, function_call and function_call_output",
        f"{name}.type",
    )


def encoded_item(item: msgspec.Raw) -> dict[str, Any]:
    """Return the fields of a valid item. Only texts and nulls are decoded: clients choose how much the others hold."""
    fields = msgspec.json.decode(item, type=dict[str, msgspec.Raw])
    return {
        name: msgspec.json.decode(value) if bytes(memoryview(value)[:1]) in (b'"', b"n") else value
        for name, value in fields.items()
    }


def joined_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an `encoded_item` for `read_item`: the texts of its parts joined, and without what has no effect."""
    joined = {field: value for field, value in item.items() if field not in ("parsed_arguments", "summary")}
    for field in ("content", "output"):
        if isinstance(value := item.get(field), msgspec.Raw):
            parts = msgspec.json.decode(value, type=list[_Part])
            joined[field] = [{"type": parts[0].type, "text": "".join(part.text for part in parts)}] if parts else []
    return joined


class _Part(msgspec.Struct):
    type: str
    text: str


def _read_message(value: dict[str, Any], name: str) -> dict[str, Any]:
    fields = read_fields(value, _MESSAGE, required=("role", "content"), unsupported=_UNSUPPORTED, within=name)
    role = "system" if fields["role"] == "developer" else fields["role"]
    return {"role": role, "content": fields["content"]}


# An answer's parts come back with what the official client and other servers add to them.
_ADDED: dict[str, Reader] = {"annotations": ignored, "logprobs": ignored, "parsed": ignored}
read_content = text_parts("input_text", "output_text", more=_ADDED)
_read_reasoning_parts = text_parts("reasoning_text", accepts_string=False)


def _read_reasoning(value: dict[str, Any], name: str) -> dict[str, Any]:
    fields = read_fields(value, _REASONING, required=("type",), unsupported=_UNSUPPORTED_REASONING, within=name)
    return {"role": "assistant", "content": "", "reasoning_content": fields.get("content", "")}


def _read_call(value: dict[str, Any], name: str) -> dict[str, Any]:
    fields = read_fields(value, _CALL, required=_CALL_REQUIRED, within=name)
    call = template_call(fields["call_id"], fields["name"], fields["arguments"])
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _read_result(value: dict[str, Any], name: str) -> dict[str, Any]:
    fields = read_fields(value, _RESULT, required=_RESULT_REQUIRED, within=name)
    return {"role": "tool", "tool_call_id": fields["call_id"], "content": fields["output"]}


_MESSAGE: dict[str, Reader] = {
    "type": one_of("message"),
    "role": one_of(*ROLES),
    "content": read_content,
    "id": _ITEM_ID,
    "status": _STATUS,
}
_UNSUPPORTED = {"phase": Unsupported()}
_REASONING: dict[str, Reader] = {
    "type": one_of("reasoning"),
    "id": _ITEM_ID,
    "content": _read_reasoning_parts,
    "status": _STATUS,
}
_UNSUPPORTED_REASONING = {"summary": Unsupported([]), "encrypted_content": Unsupported("")}
_CALL: dict[str, Reader] = {
    "type": one_of("function_call"),
    "call_id": call_id,
    "name": tool_name,
    "arguments": read_arguments,
    "id": _ITEM_ID,
    "status": _STATUS,
    "parsed_arguments": ignored,
}
_CALL_REQUIRED = ("type", "call_id", "name", "arguments")
_RESULT: dict[str, Reader] = {
    "type": one_of("function_call_output"),
    "call_id": call_id,
    "output": read_content,
    "id": _ITEM_ID,
    "status": _STATUS,
}
_RESULT_REQUIRED = ("type", "call_id", "output")
ITEM_SCHEMA = any_of(
    object_schema(_MESSAGE, required=("role", "content"), unsupported=_UNSUPPORTED),
    object_schema(_REASONING, required=("type",), unsupported=_UNSUPPORTED_REASONING),
    object_schema(_CALL, required=_CALL_REQUIRED),
    object_schema(_RESULT, required=_RESULT_REQUIRED),
)


@described(any_of({"type": "string"}, array_of(ITEM_SCHEMA, least=1, most=MAX_MESSAGES)))
def read_input(value: Any, name: str) -> list[dict[str, Any]]:
    """Read a text or items into messages. Whether each call has a result is checked with the messages before them."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid_value(name, value, "a string or an array of items")
    if not value:
        raise InvalidRequest(f"{name} is empty; send at least one item", name)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"{name} has {len(value)} items; at most {MAX_MESSAGES} are allowed", name)
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        add_message(messages, read_item(item, f"{name}[{index}]"))
    return messages
