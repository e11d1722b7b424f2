"""Where the schemas stand inside a JSON Schema, and which keywords restrict no value.

The modules that rewrite schemas before they become grammars use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

ANNOTATIONS = frozenset(
    ("$defs", "definitions", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
).union(("$schema", "$id", "$comment", "x-guidance", "discriminator"))
# Keywords that hold schemas: by name, in a list, or one.
BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies")
LISTS = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
_IN_PLACE = ("not", "if", "then", "else")
_OF_MEMBERS = ("items", "additionalItems", "contains", "unevaluatedItems", "contentSchema")
SINGLE = (*_IN_PLACE, *_OF_MEMBERS, "additionalProperties", "unevaluatedProperties", "propertyNames")


def with_subschemas(
    schema: dict[str, Any], change: Callable[[Any], Any], without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the schema with `change` applied to each schema directly inside it, but for the keywords of `without`.

    Values of `const`, `enum`, `default` and `examples`, names of properties and unknown keywords stay as they are.
    """
    made = dict(schema)
    for key, value in schema.items():
        if key in without:
            continue
        if key in BY_NAME and isinstance(value, dict):
            made[key] = {name: change(member) for name, member in value.items()}
        elif key in LISTS and isinstance(value, list):
            made[key] = [change(member) for member in value]
        elif key in SINGLE:
            made[key] = change(value)
    return made
