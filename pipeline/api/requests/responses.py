"""POST /v1/responses: reads the parameters of OpenAI's Responses API.

The conversation before the input is stored (`requests/stored_responses.py`); admission puts it before the messages.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pipeline.api.constraint_fields import read_response_format, read_schema
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
    show,
    text,
)
from pipeline.api.generation_fields import (
    COMMON_UNSUPPORTED,
    HINT_FIELDS,
    MAX_MODEL_CHARACTERS,
    MAX_OUTPUT_TOKENS,
    SAMPLER_FIELDS,
    read_keep_alive,
    read_salt,
    read_seed,
    sampling_of,
)
from pipeline.api.json_body import to_json
from pipeline.api.json_schema import any_of, array_of, described
from pipeline.api.requests.conversations import read_conversation, text_item
from pipeline.api.requests.generation_request import (
    GenerationRequest,
    ResponseFields,
    TemplateArguments,
    check_combination,
)
from pipeline.api.requests.reasoning_fields import read_reasoning
from pipeline.api.requests.response_items import read_input
from pipeline.api.requests.tool_fields import (
    ANY_TOOL,
    MAX_DESCRIPTION,
    MAX_TOOLS,
    each_tool,
    json_object,
    make_tools,
    template_form,
    tool_name,
    unique_tools,
)
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Constraint

MAX_RESPONSE_ID = 256
_JSON_FORMAT: dict[str, Reader] = {
    "type": one_of("json_schema"),
    "name": text(64),
    "description": text(1 << 16),
    "strict": flag,
    "schema": read_schema,
}
_FORMAT_SCHEMA = any_of(
    object_schema({"type": one_of("text")}, required=("type",)),
    object_schema({"type": one_of("json_object")}, required=("type",)),
    object_schema(_JSON_FORMAT, required=("type", "schema")),
)


@described(_FORMAT_SCHEMA)
def _read_format(value: Any, name: str) -> Constraint | None:
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return read_response_format(value, name)
    schema: Constraint = read_fields(value, _JSON_FORMAT, required=("type", "schema"), within=name)["schema"]
    return schema


_TEXT: dict[str, Reader] = {"format": _read_format}
_UNSUPPORTED_IN_TEXT = {
    "verbosity": Unsupported("medium", hint="say in the prompt how long the answer should be"),
}


@described(object_schema(_TEXT, unsupported=_UNSUPPORTED_IN_TEXT))
def read_text(value: Any, name: str) -> Constraint | None:
    """Read the form of the output: `{"format": {...}}`."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object like {"format": {"type": "text"}}')
    fields = read_fields(value, _TEXT, unsupported=_UNSUPPORTED_IN_TEXT, within=name)
    constraint: Constraint | None = fields.get("format")
    return constraint


_TOOL: dict[str, Reader] = {
    "type": one_of("function"),
    "name": tool_name,
    "description": text(MAX_DESCRIPTION),
    "parameters": json_object,
    "strict": flag,
}


@described(array_of(object_schema(_TOOL, required=("type", "name")), most=MAX_TOOLS))
def read_tools(value: Any, name: str) -> list[dict[str, Any]]:
    """Read functions into the form of the chat template."""
    tools = []
    for where, tool in each_tool(value, name, 'an object {"type": "function", "name": ...}'):
        if tool.get("type") != "function":
            raise InvalidRequest(
                f'{where}.type is {show(tool.get("type"))}; this server supports "function" only', f"{where}.type"
            )
        fields = read_fields(tool, _TOOL, required=("type", "name"), within=where)
        form = (fields["name"], fields.get("description", ""), fields.get("parameters"), fields.get("strict", False))
        tools.append(template_form(*form))
    return unique_tools(tools, name)


_CHOICE: dict[str, Reader] = {"type": one_of("function"), "name": tool_name}


@described(any_of({"enum": ["none", "auto", "required"]}, object_schema(_CHOICE, required=("type", "name"))))
def read_tool_choice(value: Any, name: str) -> str:
    """Read `tool_choice`: "none", "auto", `ANY_TOOL` for "required", or the name of a function."""
    if value in ("none", "auto"):
        return str(value)
    if value == "required":
        return ANY_TOOL
    if not isinstance(value, dict) or value.get("type") != "function":
        raise invalid_value(name, value, '"none", "auto", "required" or {"type": "function", "name": ...}')
    return str(read_fields(value, _CHOICE, required=("type", "name"), within=name)["name"])


UNSUPPORTED = {
    **COMMON_UNSUPPORTED,
    "context_management": Unsupported(),
    "include": Unsupported([]),
    "access_programs": Unsupported(),
    "image": Unsupported(hint="this server generates text only"),
    "moderation": Unsupported(),
    "max_tool_calls": Unsupported(),
    "prompt": Unsupported(hint="send instructions and input"),
    "stream_options": Unsupported({}, {"include_obfuscation": False}),
    "top_logprobs": Unsupported(0),
    "truncation": Unsupported("disabled", hint="send less"),
}
FIELDS: dict[str, Reader] = {
    **SAMPLER_FIELDS,
    **HINT_FIELDS,
    "model": text(MAX_MODEL_CHARACTERS, empty=False),
    "input": read_input,
    "instructions": text(1 << 30),
    "previous_response_id": text(MAX_RESPONSE_ID, empty=False),
    "conversation": read_conversation,
    "max_output_tokens": integer(1, MAX_OUTPUT_TOKENS),
    "seed": read_seed,
    "cache_salt": read_salt,
    "keep_alive": read_keep_alive,
    "stream": flag,
    "store": flag,
    "background": flag,
    "text": read_text,
    "reasoning": read_reasoning,
    "tools": read_tools,
    "tool_choice": read_tool_choice,
    "parallel_tool_calls": flag,
}
# What the answer repeats of the request, and its value if the request does not have it.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "user": None,
}


BODY = FieldTable(FIELDS, ("model", "input"), UNSUPPORTED)


def read(body: dict[str, Any]) -> GenerationRequest:
    """Read the body of a request for a response. Raises `InvalidRequest`."""
    values = BODY.read(body)
    is_stored, in_background = values.get("store", True), values.get("background", False)
    if in_background and not is_stored:
        raise InvalidRequest("background is true and store is false; leave one of them out", "background")
    choice, is_single = values.get("tool_choice", "auto"), not values.get("parallel_tool_calls", True)
    tools = make_tools(values.get("tools", []), choice, "tools[{}].strict", "tool_choice", is_single=is_single)
    if "conversation" in values and "previous_response_id" in values:
        raise InvalidRequest(
            "conversation and previous_response_id are both given; leave one of them out", "previous_response_id"
        )
    inputs = [text_item(body["input"])] if isinstance(body["input"], str) else body["input"]
    instructions = [{"role": "system", "content": values["instructions"]}] if values.get("instructions") else []
    repeated = {name: body[name] if body.get(name) is not None else value for name, value in _REPEATED.items()}
    if "format" not in repeated["text"]:
        repeated["text"] = {**repeated["text"], "format": {"type": "text"}}
    request = GenerationRequest(
        endpoint="responses",
        model=values["model"],
        messages=[*instructions, *values["input"]],
        max_tokens=values.get("max_output_tokens"),
        max_tokens_field="max_output_tokens",
        seed=values.get("seed"),
        sampling=sampling_of(values),
        stream=values.get("stream", False),
        cache_salt=values.get("cache_salt", ""),
        keep_alive=values.get("keep_alive", msgspec.UNSET),
        constraint=values.get("text") or msgspec.UNSET,
        template=TemplateArguments(tools=tools.definitions if tools is not None else None),
        tools=tools.use if tools is not None else msgspec.UNSET,
        thinking=values.get("reasoning", msgspec.UNSET),
        response=ResponseFields(
            previous=values.get("previous_response_id", ""),
            is_stored=is_stored,
            in_background=in_background,
            conversation=values["input"],
            n_instructions=len(instructions),
            repeated=json.dumps(repeated, ensure_ascii=False).encode(),
            effort=values["reasoning"].effort if "reasoning" in values else "",
            inputs=to_json(inputs),
            conversation_id=values.get("conversation", ""),
        ),
    )
    return check_combination(request)
