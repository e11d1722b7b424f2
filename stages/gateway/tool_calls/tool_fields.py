"""The fields of a request that concern tools, and `ToolUse`, what is kept of them for the answer.

Tools reach the model through its chat template, or as text (`fallback_prompt.py`).  With `tool_choice: "none"` the
prompt does not have them, and no call is looked for in the answer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from pipeline.api.fields import Reader, flag, invalid_value, read_fields, show, text
from pipeline.errors import InvalidRequest

MAX_TOOLS = 128
MAX_DESCRIPTION = 1 << 20  # characters; the body's and the context's bounds are lower in practice
NAME_FORM = "1 to 128 letters, digits, _, - and ."
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class ToolUse(msgspec.Struct, array_like=True, frozen=True):
    """What of a request's tools determines its answer. The journal stores it: fields are only appended."""

    names: tuple[str, ...]
    is_single: bool = False  # an answer ends with its first call
    format: str = ""  # a name of `formats.FORMATS`; set at admission
    salt: str = ""  # hex, of everything that determines the answer; set at admission

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


def tool_name(value: Any, name: str) -> str:
    """Read the name of a tool."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise invalid_value(name, value, NAME_FORM)
    return value


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


def read_strict(value: Any, name: str) -> bool:
    """Read `strict`: the arguments must match the schema."""
    if flag(value, name):
        raise InvalidRequest(
            f"{name} is true, which is not supported by this server; leave it out, and check the arguments", name
        )
    return False


_FUNCTION: dict[str, Reader] = {
    "name": tool_name,
    "description": text(MAX_DESCRIPTION),
    "parameters": json_object,
    "strict": read_strict,
}


def _read_type(value: Any, name: str) -> str:
    if value != "function":
        raise InvalidRequest(f'{name} is {show(value)}; this server supports "function" only', name)
    return "function"


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
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def read_tools(value: Any, name: str) -> list[dict[str, Any]]:
    """Read OpenAI's `tools` into the form of the chat template."""
    if not isinstance(value, list):
        raise invalid_value(name, value, "an array of tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest(f"{name} has {len(value)} tools; at most {MAX_TOOLS} are allowed", name)
    tools = []
    for index, tool in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(tool, dict):
            raise invalid_value(where, tool, 'an object {"type": "function", "function": {...}}')
        table: dict[str, Reader] = {"type": _read_type, "function": _read_function}
        tools.append(read_fields(tool, table, required=("type", "function"), within=where)["function"])
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


def read_tool_choice(value: Any, name: str) -> str:
    """Read OpenAI's `tool_choice`: "none" or "auto"."""
    if value in ("none", "auto"):
        return str(value)
    if value == "required" or (isinstance(value, dict) and value.get("type") in ("function", "allowed_tools")):
        shown = value if isinstance(value, str) else value["type"]
        raise InvalidRequest(
            f"{name} is {show(shown)}, which is not supported by this server: it does not force calls; "
            f'send "auto" or "none"',
            name,
        )
    raise invalid_value(name, value, '"none" or "auto"')


def read_tool_fields(values: dict[str, Any]) -> Tools | None:
    """Return the tools among the values of a request's fields; None if there are none to call."""
    definitions = values.get("tools")
    if not definitions or values.get("tool_choice") == "none":
        return None
    names = tuple(tool["function"]["name"] for tool in definitions)
    return Tools(ToolUse(names, is_single=not values.get("parallel_tool_calls", True)), definitions)
