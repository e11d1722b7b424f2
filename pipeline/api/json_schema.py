"""The JSON Schema of a reader: what `/openapi.json` says of the values that it accepts.

A reader states its schema where its bounds are, with `described`, so that the description and the check cannot differ.
Bounds that JSON Schema cannot express (a combination of fields, a model's context) are in the reader's errors only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Schema = dict[str, Any]
ANYTHING: Schema = {}  # of a reader that states none

_Read = TypeVar("_Read", bound=Callable[..., Any])


def described(schema: Schema) -> Callable[[_Read], _Read]:
    """Attach to a reader the schema of what it accepts."""

    def attach(reader: _Read) -> _Read:
        reader.json_schema = schema  # type: ignore[attr-defined]
        return reader

    return attach


def schema_of(reader: Callable[..., Any]) -> Schema:
    """Return the schema of a reader, `ANYTHING` if it states none."""
    schema: Schema = getattr(reader, "json_schema", ANYTHING)
    return schema


def nullable(schema: Schema) -> Schema:
    """Return `schema` with null as a further value: for a field, null means the same as no field."""
    if not schema:
        return schema
    if set(schema) == {"anyOf"}:
        return any_of(*schema["anyOf"], {"type": "null"})
    kind = schema.get("type")
    if kind is None or "enum" in schema or "const" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return {**schema, "type": [*kind, "null"] if isinstance(kind, list) else [kind, "null"]}


def string(most: int, *, least: int = 0) -> Schema:
    """Return the schema of a string, with its bounds in characters."""
    schema: Schema = {"type": "string", "maxLength": most}
    return {**schema, "minLength": least} if least else schema


def array_of(item: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of an array."""
    schema: Schema = {"type": "array", "items": item}
    if least:
        schema["minItems"] = least
    return schema if most is None else {**schema, "maxItems": most}


def any_of(*schemas: Schema) -> Schema:
    """Return the schema of the values that match at least one of `schemas`."""
    flat: list[Schema] = []
    for schema in schemas:
        flat += schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    return {"anyOf": flat}
