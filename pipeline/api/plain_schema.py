"""A JSON Schema without the keywords that restrict nothing, where the library of grammars refuses them.

Wide bounds of numbers are narrowed as well (`number_bounds`).

The readers of schemas and the grammars of tool calls use it before an object is closed; the scheduler repeats it for
schemas from elsewhere.  It changes nothing the second time, so the bytes of an answer do not depend on who has done it.
"""

from __future__ import annotations

from typing import Any

from pipeline.api.number_bounds import narrow_bounds
from pipeline.api.schema_keywords import ANNOTATIONS, with_subschemas

# The formats that the library enforces.  All others are annotations, as JSON Schema defines them.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_IF, _DEPENDENCIES = ("then", "else"), ("dependencies", "dependentRequired", "dependentSchemas")
# Keywords whose schemas may evaluate properties and elements of the value itself.
_IN_PLACE = {"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", *_IF, *_DEPENDENCIES}
# What has no other keyword than one of these evaluates the same as the second one alone.
_UNEVALUATED = (
    ("unevaluatedProperties", "additionalProperties", _IN_PLACE),
    ("unevaluatedItems", "items", _IN_PLACE | {"contains", "additionalItems"}),
)


def plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of the same values, but for formats and wide numbers, without keywords that restrict nothing.

    A schema that nothing matches, as `{"not": {}}`, becomes `false` where it is inside another.
    """
    made = _plain(schema)
    return made if isinstance(made, dict) else schema


def _plain(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = with_subschemas(schema, _plain)
    if "not" in made and _is_true(made["not"]):
        return False
    if made.get("not") is False:
        del made["not"]
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    if "propertyNames" in made and _takes_every_text(made["propertyNames"]):
        del made["propertyNames"]
    form = made.get("format")
    if isinstance(form, str) and form not in FORMATS:
        del made["format"]
    narrow_bounds(made)
    if "if" not in made:
        for key in _IF:
            made.pop(key, None)
    _without_dependencies(made)
    for key, other, evaluating in _UNEVALUATED:
        if not isinstance(made.get(key), (bool, dict)):
            continue
        if other not in made and made.keys().isdisjoint(evaluating):
            made[other] = made.pop(key)  # also if every value matches: an object that says so is open
        elif _is_true(made[key]) or isinstance(made.get(other), (bool, dict)):
            del made[key]  # nothing is left to it
    # A condition without a consequence still evaluates properties and elements.
    if made.keys().isdisjoint((*_IF, *(key for key, _, _ in _UNEVALUATED))):
        made.pop("if", None)
    return made


def _without_dependencies(made: dict[str, Any]) -> None:
    """Remove dependencies on nothing, or on properties that are present in any case."""
    required = made.get("required")
    present = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    for key in _DEPENDENCIES:
        given = made.get(key)
        if not isinstance(given, dict):
            continue
        left = {name: one for name, one in given.items() if not _is_given(one, name, present)}
        if left:
            made[key] = left
        else:
            del made[key]


def _is_given(dependency: Any, name: str, present: set[str]) -> bool:
    if isinstance(dependency, list):
        return all(isinstance(one, str) and (one == name or one in present) for one in dependency)
    return _is_true(dependency)


def _is_true(schema: Any) -> bool:
    """Whether every value matches."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= ANNOTATIONS)


def _takes_every_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    kind = schema.get("type", "string")
    is_text = kind == "string" or (isinstance(kind, list) and "string" in kind)
    return is_text and schema.get("minLength", 0) == 0 and schema.keys() <= ANNOTATIONS | {"type", "minLength"}
