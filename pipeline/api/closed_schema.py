"""Objects of a JSON Schema that take no other properties than the ones they list.

A schema that lists properties and says nothing of others allows any others as well, and a model can fill its whole
output with them.  Schemas made from classes (Pydantic, zod) are of this kind, although no others are meant.  So the
server reads such an object as closed: what it generates still matches the client's schema, and
`additionalProperties: true` opens it.

Objects of which the schema says something else too (a combination, a condition) stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.api.schema_keywords import ANNOTATIONS, BY_NAME, LISTS, SINGLE

# What an object that is closed may say beside that, and an array whose elements are.
_OF_OBJECTS = ANNOTATIONS | {"type", "properties", "required", "minProperties", "maxProperties"}
_OF_ARRAYS = ANNOTATIONS | {"type", "items", "prefixItems", "minItems", "maxItems"}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its objects closed, wherever every text of the result matches the schema as it was."""
    if not all(_references(schema, True)):
        return schema  # what they refer to is a part of something
    made: dict[str, Any] = _closed(schema)
    return made


def closed_arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, closed; also if its properties are `{}`: the tool takes no arguments.

    Elsewhere `"properties": {}` may stand for any object.
    """
    made = closed(parameters)
    if made.get("properties") != {} or not _allows_no_others(made):
        return made
    return {**made, "additionalProperties": False}


def _whole_keywords(schema: dict[str, Any]) -> set[str]:
    """The keywords whose members alone describe a value, if `schema` alone describes the value that it is of."""
    keywords = set(schema)
    found = {"$defs", "definitions"}
    if keywords <= _OF_ARRAYS:
        found |= {"items", "prefixItems"}
    if keywords <= _OF_OBJECTS | {"additionalProperties"}:
        found |= {"properties", "additionalProperties"}
    for key in ("anyOf", "allOf"):
        members = schema.get(key)
        if keywords <= ANNOTATIONS | {key} and isinstance(members, list) and (key == "anyOf" or len(members) == 1):
            found.add(key)
    return found


def _references(schema: Any, is_whole: bool) -> Iterator[bool]:
    """Of each reference: whether its target alone describes a value."""
    if not isinstance(schema, dict):
        return
    if "$dynamicRef" in schema or "$recursiveRef" in schema:
        yield False
    if "$ref" in schema:
        yield is_whole and set(schema) <= ANNOTATIONS | {"$ref"}
    whole = _whole_keywords(schema) if is_whole else ()
    for key in dict.fromkeys((*BY_NAME, *LISTS, *SINGLE)):
        value = schema.get(key)
        if key in BY_NAME and isinstance(value, dict):
            members = list(value.values())
        elif isinstance(value, list):
            members = value
        else:
            members = [value]
        for member in members:
            yield from _references(member, key in whole)


def _closed(schema: Any) -> Any:
    """The schema of a value that nothing else describes, closed."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in _whole_keywords(schema) & set(schema):
        value = schema[key]
        if key in BY_NAME and isinstance(value, dict):
            made[key] = {name: _closed(member) for name, member in value.items()}
        elif isinstance(value, list):
            made[key] = [_closed(member) for member in value]
        else:
            made[key] = _closed(value)
    if _can_close(schema):
        made["additionalProperties"] = False
    return made


def _can_close(schema: dict[str, Any]) -> bool:
    """Whether the schema lists properties and says nothing of others, and an object without them can match."""
    return bool(schema.get("properties")) and _allows_no_others(schema)


def _allows_no_others(schema: dict[str, Any]) -> bool:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not set(schema) <= _OF_OBJECTS:
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    if not isinstance(required, list) or not isinstance(least, int):
        return False
    return least <= len(properties) and all(isinstance(name, str) and name in properties for name in required)
