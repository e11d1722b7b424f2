"""POST /v1/messages and /v1/messages/count_tokens: reads the parameters of Anthropic's API.

Content blocks become the messages of the chat template: text, calls (`tool_use`) and results (`tool_result`).
Consecutive messages of one role become one, and a last message of the assistant is continued.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pipeline.api.constraint_fields import only_one, read_schema
from pipeline.api.fields import (
    FieldTable,
    Reader,
    Unsupported,
    flag,
    integer,
    invalid_value,
    number,
    object_schema,
    one_of,
    read_fields,
    show,
    text,
)
from pipeline.api.generation_fields import (
    MAX_MODEL_CHARACTERS,
    MAX_OUTPUT_TOKENS,
    read_keep_alive,
    read_seed,
    sampling_of,
)
from pipeline.api.json_schema import Schema, any_of, array_of, described, schema_of
from pipeline.api.requests.chat import MAX_MESSAGES
from pipeline.api.requests.context_edits import read_context_management, without_old_thinking
from pipeline.api.requests.generation_request import GenerationRequest, TemplateArguments, check_combination
from pipeline.api.requests.reasoning_fields import Thinking, check_budget, read_thinking
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
from pipeline.api.requests.tool_history import call_id, check_results, template_call
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Constraint

MAX_STOP_SEQUENCES = 16
MAX_STOP_CHARACTERS = 256
ERROR_PREFIX = "Error: "  # before the content of a result with `is_error`

# ------------------------------------------------------------------ content blocks


_CACHE_CONTROL: dict[str, Reader] = {"type": one_of("ephemeral"), "ttl": one_of("5m", "1h"), "scope": text(64)}


@described(object_schema(_CACHE_CONTROL, required=("type",)))
def read_cache_control(value: Any, name: str) -> None:
    """Read a hint: prefixes are cached without it."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object {"type": "ephemeral"}')
    read_fields(value, _CACHE_CONTROL, required=("type",), within=name)


@described(schema_of(json_object))
def read_input(value: Any, name: str) -> dict[str, Any] | str:
    """Read the input of a `tool_use` block: an object, or the text of one with numbers of more than 64 bits.

    A model may have written such a number, and the client sends the input back.
    """
    try:
        return json_object(value, name)
    except InvalidRequest:
        if not isinstance(value, dict):
            raise
        return json.dumps(value, ensure_ascii=False)


@described(any_of({"type": "string"}, array_of({"type": "object", "required": ["type", "text"]})))
def _read_result_content(value: Any, name: str) -> str:
    return "\n".join(block["text"] for block in read_blocks(value, name, ("text",), may_be_empty=True))


_TEXT: dict[str, Reader] = {"text": text(1 << 30, empty=False)}
_THINKING: dict[str, Reader] = {"thinking": text(1 << 30), "signature": text(1 << 16)}
_BLOCKS: dict[str, tuple[dict[str, Reader], tuple[str, ...]]] = {  # by type: fields, and which are required
    "text": (_TEXT, ("text",)),
    "thinking": (_THINKING, ("thinking",)),
    "tool_use": ({"id": call_id, "name": tool_name, "input": read_input}, ("id", "name", "input")),
    "tool_result": (
        {"tool_use_id": call_id, "content": _read_result_content, "is_error": flag},
        ("tool_use_id",),
    ),
}
_UNSUPPORTED_IN_BLOCK = {
    "citations": Unsupported([], {"enabled": False}),
    "caller": Unsupported({"type": "direct"}),
    "toolset_name": Unsupported(),
}


def read_blocks(value: Any, name: str, types: tuple[str, ...], *, may_be_empty: bool = False) -> list[dict[str, Any]]:
    """Read a string, or an array of content blocks of these types, into blocks."""
    if isinstance(value, str):
        if not value and not may_be_empty:
            raise InvalidRequest(f"{name} is empty; send some text", name)
        return [{"type": "text", "text": value}] if value else []
    if not isinstance(value, list):
        raise invalid_value(name, value, "a string or an array of content blocks")
    if not value and not may_be_empty:
        raise InvalidRequest(f"{name} is empty; send at least one content block", name)
    return [_read_block(block, f"{name}[{index}]", types) for index, block in enumerate(value)]


_ROLES = ("user", "assistant", "system")
_TYPES = {"assistant": ("text", "thinking", "tool_use"), "system": ("text",)}  # of content blocks, by role
_OTHER_TYPES = ("text", "tool_result")


def _blocks_schema(*types: str) -> Schema:
    schemas = []
    for kind in types:
        fields, required = _BLOCKS[kind]
        table = {**fields, "type": one_of(kind), "cache_control": read_cache_control}
        schema = object_schema(table, required=(*required, "type"), unsupported=_UNSUPPORTED_IN_BLOCK)
        schemas.append({**schema, "title": kind})
    return any_of({"type": "string"}, array_of(any_of(*schemas)))


def _read_block(value: Any, name: str, types: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object like {"type": "text", "text": ...}')
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in types:
        raise InvalidRequest(
            f"{name}.type is {show(kind)}; this server accepts {', '.join(types)} here", f"{name}.type"
        )
    fields, required = _BLOCKS[kind]
    table = {**fields, "type": one_of(kind), "cache_control": read_cache_control}
    return read_fields(value, table, required=required, unsupported=_UNSUPPORTED_IN_BLOCK, within=name)


# ------------------------------------------------------------------ messages


def _message_schema(role: str) -> Schema:
    content = _blocks_schema(*_TYPES.get(role, _OTHER_TYPES))
    properties = {"role": {"const": role}, "content": content}
    return {"type": "object", "properties": properties, "required": ["role", "content"], "additionalProperties": False}


@described(array_of(any_of(*map(_message_schema, _ROLES)), least=1, most=MAX_MESSAGES))
def read_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Read messages with content blocks into messages of the chat template."""
    if not isinstance(value, list):
        raise invalid_value(name, value, "an array of messages")
    if not value:
        raise InvalidRequest(f"{name} is empty; send at least one message", name)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"{name} has {len(value)} messages; at most {MAX_MESSAGES} are allowed", name)
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for index, item in enumerate(value):
        place = f"{name}[{index}]"
        for message in _read_message(item, place):
            if messages and _continues(messages[-1], message):
                messages[-1] = _joined(messages[-1], message)
            else:
                messages.append(message)
                places.append(place)
    check_results(messages, places, "tool_use_id")
    if messages[-1]["role"] == "assistant" and messages[-1]["content"][-1:].isspace():
        raise InvalidRequest(
            f"{places[-1]}.content ends with white space, and the answer continues it; leave the white space out",
            f"{places[-1]}.content",
        )
    return messages


def _read_message(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object with "role" and "content"')
    role = value.get("role")
    types = _TYPES.get(str(role), _OTHER_TYPES)

    def read_content(value: Any, name: str) -> list[dict[str, Any]]:
        return read_blocks(value, name, types)

    table: dict[str, Reader] = {"role": one_of(*_ROLES), "content": read_content}
    blocks = read_fields(value, table, required=("role", "content"), within=name)["content"]
    if role == "assistant":
        calls = [template_call(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        message = {"role": role, "content": "".join(b["text"] for b in blocks if b["type"] == "text")}
        if reasoning := "".join(b["thinking"] for b in blocks if b["type"] == "thinking"):
            message["reasoning_content"] = reasoning
        return [{**message, "tool_calls": calls} if calls else message]
    messages: list[dict[str, Any]] = []
    for block in blocks:
        message = _result(block) if block["type"] == "tool_result" else {"role": role, "content": block["text"]}
        if messages and _continues(messages[-1], message):
            message = _joined(messages.pop(), message)
        messages.append(message)
    return messages


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content", "")
    if block.get("is_error"):
        content = ERROR_PREFIX + content
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _continues(before: dict[str, Any], message: dict[str, Any]) -> bool:
    return bool(before["role"] == message["role"] and message["role"] != "tool")


def _joined(before: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    separator = "" if message["role"] == "assistant" else "\n"
    joined = {**before, **message, "content": f"{before['content']}{separator}{message['content']}"}
    if reasoning := before.get("reasoning_content", "") + message.get("reasoning_content", ""):
        joined["reasoning_content"] = reasoning
    if calls := [*before.get("tool_calls", ()), *message.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


# ------------------------------------------------------------------ fields


@described(_blocks_schema("text"))
def read_system(value: Any, name: str) -> str:
    """Read a string or text blocks."""
    return "\n".join(block["text"] for block in read_blocks(value, name, ("text",), may_be_empty=True))


_TOOL: dict[str, Reader] = {
    "name": tool_name,
    "description": text(MAX_DESCRIPTION),
    "input_schema": json_object,
    "strict": flag,
    "type": one_of("custom"),
    "cache_control": read_cache_control,
    "eager_input_streaming": flag,  # input is always streamed as it is generated
}


_UNSUPPORTED_IN_TOOL = {
    "allowed_callers": Unsupported(["direct"]),
    "defer_loading": Unsupported(False),
    "input_examples": Unsupported([], hint="put them into the description"),
}


@described(
    array_of(object_schema(_TOOL, required=("name", "input_schema"), unsupported=_UNSUPPORTED_IN_TOOL), most=MAX_TOOLS)
)
def read_tools(value: Any, name: str) -> list[dict[str, Any]]:
    """Read Anthropic's `tools` into the form of the chat template."""
    tools = []
    for where, tool in each_tool(value, name, 'an object with "name", "description" and "input_schema"'):
        if tool.get("type") not in (None, "custom"):
            raise InvalidRequest(
                f"{where}.type is {show(tool['type'])}, a tool that runs at Anthropic or that its models know; "
                f"describe it with name, description and input_schema",
                f"{where}.type",
            )
        required = ("name", "input_schema")
        fields = read_fields(tool, _TOOL, required=required, unsupported=_UNSUPPORTED_IN_TOOL, within=where)
        form = (fields["name"], fields.get("description", ""), fields["input_schema"], fields.get("strict", False))
        tools.append(template_form(*form))
    return unique_tools(tools, name)


_TOOL_CHOICE: dict[str, Reader] = {
    "type": one_of("auto", "any", "tool", "none"),
    "name": tool_name,
    "disable_parallel_tool_use": flag,
}


@described(object_schema(_TOOL_CHOICE, required=("type",)))
def read_tool_choice(value: Any, name: str) -> dict[str, Any]:
    """Read Anthropic's `tool_choice`."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object like {"type": "auto"}')
    required = ("type", "name") if value.get("type") == "tool" else ("type",)
    fields = read_fields(value, _TOOL_CHOICE, required=required, within=name)
    if "name" in fields and fields["type"] != "tool":
        raise InvalidRequest(f'{name}.name is given and {name}.type is not "tool"; leave it out', f"{name}.name")
    return fields


_STOP = text(MAX_STOP_CHARACTERS, empty=False)


@described(array_of(schema_of(_STOP), most=MAX_STOP_SEQUENCES))
def read_stop_sequences(value: Any, name: str) -> tuple[str, ...]:
    """Read an array of stop strings."""
    if not isinstance(value, list):
        raise invalid_value(name, value, f"an array of up to {MAX_STOP_SEQUENCES} strings")
    if len(value) > MAX_STOP_SEQUENCES:
        raise InvalidRequest(f"{name} has {len(value)} strings; at most {MAX_STOP_SEQUENCES} are allowed", name)
    return tuple(dict.fromkeys(_STOP(item, f"{name}[{index}]") for index, item in enumerate(value)))


_METADATA: dict[str, Reader] = {"user_id": text(512)}


@described(object_schema(_METADATA))
def read_metadata(value: Any, name: str) -> None:
    """Read a hint."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object {"user_id": ...}')
    read_fields(value, _METADATA, within=name)


_FORMAT: dict[str, Reader] = {"type": one_of("json_schema"), "schema": read_schema}
_OUTPUT_UNSUPPORTED = {"task_budget": Unsupported()}


@described(object_schema(_FORMAT, required=("type", "schema")))
def read_output_format(value: Any, name: str) -> Constraint:
    """Read the schema that the answer must match."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object {"type": "json_schema", "schema": {...}}')
    schema: Constraint = read_fields(value, _FORMAT, required=("type", "schema"), within=name)["schema"]
    return schema


_OUTPUT: dict[str, Reader] = {
    "format": read_output_format,
    "effort": one_of("low", "medium", "high", "xhigh", "max"),
}


@described(object_schema(_OUTPUT, unsupported=_OUTPUT_UNSUPPORTED))
def read_output_config(value: Any, name: str) -> dict[str, Any]:
    """Read the settings of the output: its `format`, and the `effort` of reasoning."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object {"format": {...}}')
    return read_fields(value, _OUTPUT, unsupported=_OUTPUT_UNSUPPORTED, within=name)


UNSUPPORTED = {
    "container": Unsupported(),
    "diagnostics": Unsupported(),
    "speed": Unsupported("standard"),
    "inference_geo": Unsupported(),
    "mcp_servers": Unsupported([], hint="call them from the client, with tools"),
}
_PROMPT_FIELDS: dict[str, Reader] = {
    "model": text(MAX_MODEL_CHARACTERS, empty=False),
    "messages": read_messages,
    "system": read_system,
    "tools": read_tools,
    "tool_choice": read_tool_choice,
    "thinking": read_thinking,
    "cache_control": read_cache_control,
    "context_management": read_context_management,
    "output_config": read_output_config,
    "output_format": read_output_format,  # the older name of its `format`
}
FIELDS: dict[str, Reader] = {
    **_PROMPT_FIELDS,
    "max_tokens": integer(1, MAX_OUTPUT_TOKENS),
    "stop_sequences": read_stop_sequences,
    "temperature": number(0, 1, hint="0 is greedy"),
    "top_p": number(0, 1, above=True, hint="1 switches it off"),
    "top_k": integer(0, 1_000_000, hint="0 switches it off"),
    "seed": read_seed,
    "stream": flag,
    "keep_alive": read_keep_alive,
    "metadata": read_metadata,  # these two are accepted for compatibility, without effect
    "service_tier": one_of("auto", "standard_only"),
}


BODY = FieldTable(FIELDS, ("model", "max_tokens", "messages"), UNSUPPORTED)
COUNT_BODY = FieldTable(_PROMPT_FIELDS, ("model", "messages"), UNSUPPORTED)


def read(body: dict[str, Any]) -> GenerationRequest:
    """Read the body of a request for a message. Raises `InvalidRequest`."""
    values = BODY.read(body)
    check_budget(body.get("thinking"), values["max_tokens"])
    request = GenerationRequest(
        endpoint="messages",
        constraint=only_one(values.get("output_config", {}).get("format"), values.get("output_format"))
        or msgspec.UNSET,
        max_tokens=values["max_tokens"],
        seed=values.get("seed"),
        sampling=sampling_of(values),
        stop=values.get("stop_sequences", ()),
        stream=values.get("stream", False),
        keep_alive=values.get("keep_alive", msgspec.UNSET),
        **_prompt_arguments(values),
    )
    return check_combination(request)


def read_count(body: dict[str, Any]) -> GenerationRequest:
    """Read the body of a request to count the tokens of a prompt. Raises `InvalidRequest`."""
    values = COUNT_BODY.read(body)
    return GenerationRequest(endpoint="count_tokens", **_prompt_arguments(values))


def _prompt_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest` that make the prompt."""
    messages, system = values["messages"], values.get("system", "")
    if "context_management" in values:
        messages = without_old_thinking(messages, values["context_management"])
    continues = messages[-1]["role"] == "assistant"
    choice = values.get("tool_choice", {})
    kind = {"any": ANY_TOOL, "tool": choice.get("name", "")}.get(choice.get("type", "auto"), choice.get("type", "auto"))
    is_single = choice.get("disable_parallel_tool_use", False)
    tools = make_tools(values.get("tools", []), kind, "tools[{}].strict", "tool_choice", is_single=is_single)
    arguments: dict[str, Any] = {
        "model": values["model"],
        "messages": [{"role": "system", "content": system}, *messages] if system else messages,
        "template": TemplateArguments(
            tools=tools.definitions if tools is not None else None,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        ),
    }
    if tools is not None:
        arguments["tools"] = tools.use
    thinking = values.get("thinking")
    if effort := values.get("output_config", {}).get("effort"):
        thinking = msgspec.structs.replace(thinking or Thinking(), level=effort)
    if thinking is not None:
        arguments["thinking"] = thinking
    return arguments


def text_characters(generation: GenerationRequest) -> int:
    """Return the number of characters of the messages, their thinking and calls, and the tools, to charge for them."""
    template = generation.template or TemplateArguments()
    count = len(msgspec.json.encode(template.tools)) if template.tools else 0
    for message in generation.messages or []:
        count += len(message["content"]) + len(message.get("reasoning_content", ""))
        if calls := message.get("tool_calls"):
            count += len(msgspec.json.encode(calls))
    return count
