"""Tool calls and their results in the messages of a chat, in the form that chat templates expect.

    {"role": "assistant", "content": "...", "tool_calls": [{"id", "type", "function": {"name", "arguments": {...}}}]}
    {"role": "tool", "content": "...", "tool_call_id": "...", "name": "..."}

Each call must have exactly one result, directly after the message with the call.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from pipeline.api.fields import Reader, invalid_value, object_schema, read_fields, show, text
from pipeline.api.json_body import parse_object
from pipeline.api.json_schema import array_of, described
from pipeline.api.requests.tool_fields import json_object, tool_name
from pipeline.errors import InvalidRequest

MAX_CALLS = 128  # in a message
MAX_ID = 256  # characters
_NINE = re.compile(r"[A-Za-z0-9]{9}")

call_id = text(MAX_ID, empty=False)


@described({"type": "string", "contentMediaType": "application/json"})
def read_arguments(value: Any, name: str) -> dict[str, Any] | str:
    """Read the arguments of a call: the text of a JSON object, or any other text as it is.

    A model may stop within the object or write something else, and the client sends back what it wrote.
    """
    if not isinstance(value, str):
        raise invalid_value(name, value, "a string, the text of a JSON object")
    if not value.strip():
        return {}
    try:
        return json_object(parse_object(value.encode()), name)
    except InvalidRequest:
        return value


@described({"const": "function"})
def _read_type(value: Any, name: str) -> str:
    if value != "function":
        raise InvalidRequest(f'{name} is {show(value)}; this server supports "function" only', name)
    return "function"


def ignored(value: Any, name: str) -> None:
    """Accept a value that has no effect."""


# The official client sends an answer of its `stream` or `parse` back with what it made of it.
_FUNCTION: dict[str, Reader] = {"name": tool_name, "arguments": read_arguments, "parsed_arguments": ignored}


@described(object_schema(_FUNCTION, required=("name", "arguments")))
def _read_function(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object with "name" and "arguments"')
    fields = read_fields(value, _FUNCTION, required=("name", "arguments"), within=name)
    return {"name": fields["name"], "arguments": fields["arguments"]}


_CALL: dict[str, Reader] = {
    "id": call_id,
    "type": _read_type,
    "function": _read_function,
    "index": ignored,
    "provider_specific_fields": ignored,
}


@described(array_of(object_schema(_CALL, required=("id", "type", "function")), most=MAX_CALLS))
def read_tool_calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Read `tool_calls` of an assistant's message."""
    if not isinstance(value, list):
        raise invalid_value(name, value, "an array of tool calls")
    if len(value) > MAX_CALLS:
        raise InvalidRequest(f"{name} has {len(value)} calls; at most {MAX_CALLS} are allowed", name)
    calls = []
    for index, call in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(call, dict):
            raise invalid_value(where, call, 'an object with "id", "type" and "function"')
        fields = read_fields(call, _CALL, required=("id", "type", "function"), within=where)
        calls.append(template_call(fields["id"], **fields["function"]))
    return calls


def template_call(id: str, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """Return a call in the form that chat templates expect. `arguments`: text, if it is not that of an object."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def check_results(messages: list[dict[str, Any]], places: list[str], id_field: str = "tool_call_id") -> None:
    """Check that each call has one result; give each result the name of its tool.

    places: what to call each message in an error, and `id_field` the id of a result. Raises `InvalidRequest`.
    """
    waiting: dict[str, str] = {}  # ids of the calls without a result, and the tools' names
    for message, place in zip(messages, places, strict=True):
        if message["role"] == "tool":
            _take_result(message, f"{place}.{id_field}", waiting)
            continue
        if waiting:
            raise InvalidRequest(
                f"{place} comes before the result of the tool call {show(next(iter(waiting)))}; send the results of "
                f"all calls directly after the message that has them",
                place,
            )
        for call in message.get("tool_calls", ()):
            if call["id"] in waiting:
                raise InvalidRequest(f"{place} has two tool calls with the id {show(call['id'])}; change one", place)
            waiting[call["id"]] = call["function"]["name"]
    if waiting:
        last = places[-1]
        raise InvalidRequest(
            f"the tool call {show(next(iter(waiting)))} has no result; send one after {last}, for each call", last
        )


def _take_result(message: dict[str, Any], name: str, waiting: dict[str, str]) -> None:
    tool = waiting.pop(message["tool_call_id"], None)
    if tool is None:
        shown = show(message["tool_call_id"])
        raise InvalidRequest(
            f"{name} is {shown}; it must be the id of a tool call in the assistant's message before it, and each call "
            f"has one result",
            name,
        )
    if message.setdefault("name", tool) != tool:
        raise InvalidRequest(
            f"{name} is the id of a call of {tool!r}, and the result's name is {show(message['name'])}; leave the "
            f"name out",
            name,
        )


def with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ids of nine letters and digits, the only ones that Mistral's templates accept."""
    short = []
    for message in messages:
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": _short_id(message["tool_call_id"])}
        if "tool_calls" in message:
            calls = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        short.append(message)
    return short


def _short_id(name: str) -> str:
    return name if _NINE.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:9]
