"""`context_management` of /v1/messages: which reasoning of earlier answers the prompt is made from."""

from __future__ import annotations

from typing import Any

from pipeline.api.fields import Reader, integer, invalid_value, object_schema, one_of, read_fields, show
from pipeline.api.json_schema import any_of, array_of, described, nullable
from pipeline.errors import InvalidRequest

CLEAR_THINKING = "clear_thinking_20251015"
MAX_TURNS = 100_000
DEFAULT_TURNS = 1  # that keep their reasoning, as in the API

_TURNS: dict[str, Reader] = {"type": one_of("thinking_turns"), "value": integer(1, MAX_TURNS)}
_ALL: dict[str, Reader] = {"type": one_of("all")}
_KEEP = any_of(
    {"const": "all"}, object_schema(_ALL, required=("type",)), object_schema(_TURNS, required=("type", "value"))
)


@described(_KEEP)
def _read_keep(value: Any, name: str) -> int:
    """Read how many turns keep their reasoning."""
    if value == "all":
        return MAX_TURNS
    if not isinstance(value, dict):
        raise invalid_value(name, value, '"all" or {"type": "thinking_turns", "value": ...}')
    if value.get("type") == "all":
        read_fields(value, _ALL, within=name)
        return MAX_TURNS
    return int(read_fields(value, _TURNS, required=("type", "value"), within=name)["value"])


_EDIT: dict[str, Reader] = {"type": one_of(CLEAR_THINKING), "keep": _read_keep}
_EDITS_SCHEMA = array_of(object_schema(_EDIT, required=("type",)), most=1)


@described({"type": "object", "properties": {"edits": nullable(_EDITS_SCHEMA)}, "additionalProperties": False})
def read_context_management(value: Any, name: str) -> int:
    """Read the edits; return how many turns of the assistant keep their reasoning."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object {"edits": [...]}')
    return int(read_fields(value, {"edits": _read_edits}, within=name).get("edits", MAX_TURNS))


def _read_edits(value: Any, name: str) -> int:
    if not isinstance(value, list):
        raise invalid_value(name, value, "an array")
    kept = MAX_TURNS
    for index, edit in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(edit, dict):
            raise invalid_value(where, edit, f'an object {{"type": "{CLEAR_THINKING}"}}')
        if edit.get("type") != CLEAR_THINKING:
            raise InvalidRequest(
                f"{where}.type is {show(edit.get('type'))}; this server supports {CLEAR_THINKING} alone: clear other "
                f"content in the client",
                f"{where}.type",
            )
        if index:
            raise InvalidRequest(f"{where}.type is {CLEAR_THINKING} again; give it once", f"{where}.type")
        kept = read_fields(edit, _EDIT, required=("type",), within=where).get("keep", DEFAULT_TURNS)
    return kept


def without_old_thinking(messages: list[dict[str, Any]], kept: int) -> list[dict[str, Any]]:
    """Return the messages; of those with reasoning the last `kept` have it."""
    thinking = [index for index, message in enumerate(messages) if "reasoning_content" in message]
    cleared = set(thinking[: max(0, len(thinking) - kept)])
    return [
        {key: item for key, item in message.items() if key != "reasoning_content"} if index in cleared else message
        for index, message in enumerate(messages)
    ]
