"""The JSON types of the parameters of tools, for formats in which models write values without quotes.

A parameter that may be anything counts as a string.  `ToolUse.types` has those that may be something else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MAX_DEPTH = 8  # references and combinations within each other
_MAX_READ = 4096  # schemas that are read for the tools of a request, in the event loop; of later ones nothing is known
_TYPES = {"integer": "number", "number": "number"} | {
    name: name for name in ("string", "boolean", "object", "array", "null")
}


def parameter_types(tools: Iterable[dict[str, Any]]) -> tuple[tuple[str, str, str], ...]:
    """Return tool, parameter and its types, divided by `|`, of each parameter that is not only a string.

    tools: in the form of the template.
    """
    found = []
    reader = _Reader()
    for tool in tools:
        function = tool["function"]
        properties = function["parameters"].get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            types = reader.types(schema, function["parameters"], _MAX_DEPTH)
            if types - {"string"}:
                found.append((function["name"], name, "|".join(sorted(types))))
    return tuple(found)


class _Reader:
    """Reads schemas, as many as it may."""

    def __init__(self) -> None:
        self._n_left = _MAX_READ

    def types(self, schema: Any, root: dict[str, Any], depth: int) -> set[str]:
        """The types that a schema allows; none: any."""
        self._n_left -= 1
        if not isinstance(schema, dict) or not depth or self._n_left < 0:
            return set()
        given = schema.get("type")
        names = given if isinstance(given, list) else [given]
        types = {_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES}
        if types:
            return types
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = [schema["const"]] if not values and "const" in schema else values
        types = {_type_of(value) for value in values}
        for key in ("anyOf", "oneOf", "allOf"):
            for part in schema[key] if isinstance(schema.get(key), list) else ():
                types |= self.types(part, root, depth - 1)
        if isinstance(reference := schema.get("$ref"), str):
            types |= self.types(_target(reference, root), root, depth - 1)
        return types


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
    target: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target if reference.startswith("#") else None
