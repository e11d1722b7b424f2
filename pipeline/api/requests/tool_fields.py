"""The fields of a request that concern tools, and `ToolUse`, what is kept of them for the answer.

Tools reach the model through its chat template, or as text.  With `tool_choice: "none"` the
prompt does not have them, and no call is looked for in the answer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from pipeline.api.constraint_fields import MAX_TEXT
from pipeline.api.fields import Reader, flag, invalid_value, object_schema, read_fields, show, text
from pipeline.api.json_body import to_json
from pipeline.api.json_schema import any_of, array_of, described
from pipeline.errors import InvalidRequest

ANY_TOOL = "*"  # no tool has this name
MAX_TOOLS = 128
MAX_DESCRIPTION = 1 << 20  # characters; the body's and the context's bounds are lower in practice
NAME_FORM = "1 to 128 letters, digits, _, - and ."
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class ToolUse(msgspec.Struct, array_like=True, frozen=True):
    """What of a request's tools determines its answer. The journal stores it: fields are only appended."""

    names: tuple[str, ...]
    is_single: bool = False  # an answer ends with its first call
    format: str = ""  # a name of `tool_formats.FORMATS`; set at admission
    salt: str = ""  # hex, of everything that determines the answer; set at admission
    forced: str = (
        ""  # the answer consists of calls, of the tool of this name or of any (`ANY_TOOL`); "": it may have some
    )
    strict: tuple[str, ...] = ()  # the tools whose arguments match their schemas in any case
    strict_field: str = ""  # the first field that says so, for error messages
    # Tool, parameter and JSON types divided by `|`, of parameters that are not strings; set by the gateway's reader of
    # bodies, and kept at admission for formats that write values without quotes.
    types: tuple[tuple[str, str, str], ...] = ()

    def call_id(self, prefix: str, choice: int, index: int) -> str:
        """Return the id of a call: the same for the same request, and another one for each call of a conversation."""
        digest = hashlib.sha256(f"{self.salt}/{choice}/{index}".encode()).hexdigest()
        return f"{prefix}{digest[:24]}"


class Tools(NamedTuple):
    """The tools of a request. `definitions` are in the form of the chat template."""

    use: ToolUse
    definitions: list[dict[str, Any]]


def answer_salt(prompts: Iterable[bytes], seed: int, digest: str) -> str:
    """Return `ToolUse.salt` of a request for the model file `digest`; `seed` is 0 where it has no effect."""
    hashed = hashlib.sha256(f"{digest}/{seed}/".encode())
    for prompt in prompts:
        hashed.update(len(prompt).to_bytes(8, "little") + prompt)
    return hashed.hexdigest()[:32]


# ------------------------------------------------------------------ readers


@described({"type": "string", "pattern": f"^{_NAME.pattern}$"})
def tool_name(value: Any, name: str) -> str:
    """Read the name of a tool."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise invalid_value(name, value, NAME_FORM)
    return value


@described({"type": "object"})
def json_object(value: Any, name: str) -> dict[str, Any]:
    """Read an object that goes to the chat template. Its whole numbers have at most 64 bits."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, "an object")
    values: list[Any] = [value]
    while values:
        item = values.pop()
        if isinstance(item, dict):
            values += item.values()
        elif isinstance(item, list):
            values += item
        elif isinstance(item, int) and not -(1 << 63) <= item < 1 << 64:
            raise InvalidRequest(f"{name} has the number {show(item)}; whole numbers have at most 64 bits", name)
    return value


_FUNCTION: dict[str, Reader] = {
    "name": tool_name,
    "description": text(MAX_DESCRIPTION),
    "parameters": json_object,
    "strict": flag,
}


@described({"const": "function"})
def _read_type(value: Any, name: str) -> str:
    if value != "function":
        raise InvalidRequest(f'{name} is {show(value)}; this server supports "function" only', name)
    return "function"


@described(object_schema(_FUNCTION, required=("name",)))
def _read_function(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object with "name", "description" and "parameters"')
    return template_form(**read_fields(value, _FUNCTION, required=("name",), within=name))


def template_form(
    name: str, description: str = "", parameters: dict[str, Any] | None = None, strict: bool = False
) -> dict[str, Any]:
    """Return a tool in the form that chat templates expect."""
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    return {**tool, "strict": True} if strict else tool  # the key goes in `make_tools`


def each_tool(value: Any, name: str, expected: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a `tools` field, each with its place; `expected`: their form. Raises `InvalidRequest`."""
    if not isinstance(value, list):
        raise invalid_value(name, value, "an array of tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest(f"{name} has {len(value)} tools; at most {MAX_TOOLS} are allowed", name)
    for index, tool in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(tool, dict):
            raise invalid_value(where, tool, expected)
        yield where, tool


_TOOL: dict[str, Reader] = {"type": _read_type, "function": _read_function}


@described(array_of(object_schema(_TOOL, required=("type", "function")), most=MAX_TOOLS))
def read_tools(value: Any, name: str) -> list[dict[str, Any]]:
    """Read OpenAI's `tools` into the form of the chat template."""
    tools = []
    for where, tool in each_tool(value, name, 'an object {"type": "function", "function": {...}}'):
        tools.append(read_fields(tool, _TOOL, required=("type", "function"), within=where)["function"])
    return unique_tools(tools, name)


def unique_tools(tools: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the tools. Raises `InvalidRequest` if two have the same name."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        tool_of = tool["function"]["name"]
        if tool_of in seen:
            where = f"{name}[{index}]"
            raise InvalidRequest(f"{where} has the name {tool_of!r} of a tool before it; rename one", where)
        seen.add(tool_of)
    return tools


_CHOSEN: dict[str, Reader] = {"name": tool_name}


@described(object_schema(_CHOSEN, required=("name",)))
def _read_chosen(value: Any, name: str) -> str:
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object {"name": ...}')
    return str(read_fields(value, _CHOSEN, required=("name",), within=name)["name"])


_CHOICE: dict[str, Reader] = {"type": _read_type, "function": _read_chosen}


@described(any_of({"enum": ["none", "auto", "required"]}, object_schema(_CHOICE, required=("type", "function"))))
def read_tool_choice(value: Any, name: str) -> str:
    """Read OpenAI's `tool_choice`: "none", "auto", `ANY_TOOL` for "required", or the name of a function."""
    if value in ("none", "auto"):
        return str(value)
    if value == "required":
        return ANY_TOOL
    if not isinstance(value, dict):
        raise invalid_value(
            name, value, '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        )
    return str(read_fields(value, _CHOICE, required=("type", "function"), within=name)["function"])


def read_tool_fields(values: dict[str, Any]) -> Tools | None:
    """Return the tools among the values of a request's fields; None if there are none to call."""
    choice, is_single = values.get("tool_choice", "auto"), not values.get("parallel_tool_calls", True)
    return make_tools(values.get("tools", []), choice, "tools[{}].function.strict", "tool_choice", is_single=is_single)


def make_tools(
    definitions: list[dict[str, Any]], choice: str, strict_field: str, choice_field: str, *, is_single: bool
) -> Tools | None:
    """Return the tools of a request, None if there are none to call. Raises `InvalidRequest`.

    choice: "none", "auto", `ANY_TOOL` or a name. The fields are for error messages; {} stands for a tool's index.
    """
    names = tuple(tool["function"]["name"] for tool in definitions)
    forced = "" if choice in ("none", "auto") else choice
    if forced and not names:
        raise InvalidRequest(f"{choice_field} demands a tool call, and there are no tools; send some", choice_field)
    if forced not in ("", ANY_TOOL, *names):
        raise InvalidRequest(f"{choice_field} names {forced!r}, which is not one of the tools", choice_field)
    if choice == "none" or not names:
        return None
    strict = [index for index, tool in enumerate(definitions) if tool.get("strict")]
    plain = [{key: value for key, value in tool.items() if key != "strict"} for tool in definitions]
    use = ToolUse(
        names,
        is_single=is_single,
        forced=forced,
        strict=tuple(names[index] for index in strict),
        strict_field=strict_field.format(strict[0]) if strict else "",
    )
    _check_schemas([tool["function"] for tool in plain], use, use.strict_field if not forced else choice_field)
    return Tools(use, plain)


def _check_schemas(functions: list[dict[str, Any]], use: ToolUse, field: str) -> None:
    """Raise `InvalidRequest` if the schemas of which a grammar is made are larger than a constraint may be.

    Admission makes it in the gateway's event loop, and checks `scheduler.constraints.max_bytes` only afterwards.
    """
    wanted = use.names if use.forced == ANY_TOOL else (use.forced,) if use.forced else use.strict
    size = sum(len(to_json(one["parameters"])) for one in functions if one["name"] in wanted)
    if size > MAX_TEXT:
        raise InvalidRequest(
            f"{field} with the schemas of the tools has {size} bytes; at most {MAX_TEXT} are allowed: shorten them",
            field,
        )
