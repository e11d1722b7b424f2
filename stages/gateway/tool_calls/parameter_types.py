"""The JSON types of the parameters of tools, for formats in which models write values without quotes.

A parameter that may be anything counts as a string.  `ToolUse.types` has those that may be something else.

This runs where a body is parsed (parser_pool.py), because the schemas of a large one take half a second.  Each schema
is read once, however many references lead to it, so the work grows with the size of the tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.api.json_body import MAX_DEPTH

_NONE: frozenset[str] = frozenset()
_TYPES = {name: frozenset({name}) for name in ("number", "string", "boolean", "object", "array", "null")}
_TYPES["integer"] = _TYPES["number"]


def parameter_types(tools: Iterable[dict[str, Any]]) -> tuple[tuple[str, str, str], ...]:
    """Return tool, parameter and its types, divided by `|`, of each parameter that is not only a string.

    tools: in the form of the template.
    """
    found = []
    for tool in tools:
        function = tool["function"]
        properties = function["parameters"].get("properties")
        if not isinstance(properties, dict):
            continue
        types_by_schema = _types_by_schema(list(properties.values()), function["parameters"])
        for name, schema in properties.items():
            types = types_by_schema[id(schema)]
            if types - {"string"}:
                found.append((function["name"], name, "|".join(sorted(types))))
    return tuple(found)


def _types_by_schema(schemas: list[Any], root: dict[str, Any]) -> dict[int, frozenset[str]]:
    """By identity, the types that each schema allows, and each that it leads to; none: any."""
    types: dict[int, frozenset[str]] = {}
    users: dict[int, list[int]] = {}  # by schema: those that allow what it allows
    waiting = [*schemas]
    while waiting:
        schema = waiting.pop()
        if id(schema) in types:
            continue
        types[id(schema)], others = _read(schema, root)
        for other in others:
            users.setdefault(id(other), []).append(id(schema))
        waiting += others
    changed = [schema for schema in users if types[schema]]
    while changed:  # a schema is here at most once for each type, and once before
        schema = changed.pop()
        for user in users.get(schema, ()):
            if not types[schema] <= types[user]:
                types[user] |= types[schema]
                changed.append(user)
    return types


def _read(schema: Any, root: dict[str, Any]) -> tuple[frozenset[str], Sequence[Any]]:
    """The types that a schema names, and the schemas that may allow others."""
    if not isinstance(schema, dict):
        return _NONE, ()
    given = schema.get("type")
    if isinstance(given, list):
        types = _NONE.union(*(_TYPES[name] for name in given if isinstance(name, str) and name in _TYPES))
    else:
        types = _TYPES.get(given, _NONE) if isinstance(given, str) else _NONE
    if types:
        return types, ()
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [schema["const"]] if not values and "const" in schema else values
    types = frozenset(map(_type_of, values))
    others: list[Any] = []
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            others += schema[key]
    if isinstance(reference := schema.get("$ref"), str):
        others.append(_target(reference, root))
    return types, others


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def _target(reference: str, root: dict[str, Any]) -> Any:
    """What a reference within the schema names; None: nothing."""
    if not reference.startswith("#"):
        return None
    target: Any = root
    for part in reference.split("/", MAX_DEPTH)[1:]:  # no schema lies deeper
        if not isinstance(target, dict):
            return None
        target = target.get(part.replace("~1", "/").replace("~0", "~"))
    return target
