"""The options of the library of grammars that a schema may have, at `x-guidance`, merged with the server's."""

from __future__ import annotations

from typing import Any


def with_options(schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its own options, and those of `options` that it leaves out. It is never lenient.

    With `lenient` the library ignores what it cannot enforce.
    """
    given = schema.get("x-guidance")
    return {**schema, "x-guidance": {**options, **(given if isinstance(given, dict) else {}), "lenient": False}}
