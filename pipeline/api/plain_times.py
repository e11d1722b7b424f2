"""Times and dates of a JSON Schema without those that many readers refuse: the second 60, and the year 0.

Both are allowed by the formats as the library of grammars has them.  The schemas of answers and of tools' arguments go
through here before they become grammars.  Schemas below unknown keywords are rewritten as well, because a reference may
lead there: `#/components/schemas/NAME`.
"""

from __future__ import annotations

from typing import Any

from pipeline.api.schema_keywords import BY_NAME

_SECONDS, _YEARS = "^[^:]*:[^:]*:[0-5]", "^(000[1-9]|00[1-9]|0[1-9]|[1-9])"
_PLAIN = {"time": (_SECONDS,), "date": (_YEARS,), "date-time": (_SECONDS, _YEARS)}
_VALUES = ("const", "enum", "default", "examples", "example")  # keywords whose values are no schemas


def plain_times(schema: Any) -> Any:
    """The schema, in which times have no second 60 and dates no year 0, which the library allows anywhere.

    RFC 3339 has that second only where a leap second was inserted, and many calendars begin with the year 1.
    """
    if isinstance(schema, list):
        return [plain_times(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            made[key] = {name: plain_times(one) for name, one in value.items()}
        else:
            made[key] = value if key in _VALUES else plain_times(value)
    form = made.get("format")
    patterns = _PLAIN.get(form, ()) if isinstance(form, str) else ()
    if patterns:
        given = made.get("allOf", [])
        made["allOf"] = [*(given if isinstance(given, list) else []), *({"pattern": one} for one in patterns)]
    return made
