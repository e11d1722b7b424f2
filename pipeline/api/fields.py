"""Field tables: which names an endpoint accepts, of what type and within which bounds.

A reader is `read(value, name)`: it returns the value in the form that the server uses, or raises an
`InvalidRequest` that names the field, the value, the bound and the remedy.  `read_fields` applies a table to
an object.  A null is the same as a missing field.  A name that is in no table is rejected: no field is ignored.

A `FieldTable` is the table of a whole body.  Its schema is in `/openapi.json`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipeline.api.json_schema import Schema, any_of, array_of, described, nullable, schema_of, string
from pipeline.errors import InvalidRequest

Reader = Callable[[Any, str], Any]

SHOWN_CHARACTERS = 60  # of a value or name in an error message
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
MAX_MATCHED_CHARACTERS = 64  # of an unknown name that is compared with the known ones: the time is quadratic


class Unsupported:
    """A parameter of OpenAI's API that this server does not implement.

    A value in `neutral` means the same as no value and is accepted; any other value is rejected by name.
    """

    def __init__(self, *neutral: Any, hint: str = "leave it out") -> None:
        self.neutral = neutral
        self.hint = hint


def show(value: Any) -> str:
    """Return the value as JSON, shortened for an error message."""
    if isinstance(value, str):
        value = value[:SHOWN_CHARACTERS]  # with its quotes it is still longer than what is shown
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def invalid_value(name: str, value: Any, expected: str) -> InvalidRequest:
    """Return the error for a field whose value is not as `expected`."""
    return InvalidRequest(f"{name} is {show(value)}; it must be {expected}", name)


def read_fields(
    body: Mapping[str, Any],
    table: Mapping[str, Reader],
    *,
    required: tuple[str, ...] = (),
    unsupported: Mapping[str, Unsupported] | None = None,
    within: str = "",
) -> dict[str, Any]:
    """Return the values of the fields that `body` has, by name. Raises `InvalidRequest`.

    within: the dotted name of the object, "" for the body itself.
    """
    values: dict[str, Any] = {}
    prefix = f"{within}." if within else ""
    for name, value in body.items():
        reader = table.get(name)
        if reader is not None:
            if value is not None:
                values[name] = reader(value, prefix + name)
            continue
        known = (unsupported or {}).get(name)
        if known is None:
            raise _unknown_field(name, prefix, table)
        if value is not None and not any(is_same_json(value, neutral) for neutral in known.neutral):
            raise InvalidRequest(f"{prefix}{name} is not supported by this server; {known.hint}", prefix + name)
    for name in required:
        if name not in values:
            raise InvalidRequest(f"{prefix}{name} is missing; it is required", prefix + name)
    return values


class FieldTable(NamedTuple):
    """The fields of a body, which of them are required, and the known ones that are refused."""

    fields: Mapping[str, Reader]
    required: tuple[str, ...] = ()
    unsupported: Mapping[str, Unsupported] = {}

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the fields that `body` has, by name. Raises `InvalidRequest`."""
        return read_fields(body, self.fields, required=self.required, unsupported=self.unsupported)

    def schema(self) -> Schema:
        """Return the JSON Schema of the bodies that `read` accepts."""
        return object_schema(self.fields, required=self.required, unsupported=self.unsupported)


def object_schema(
    table: Mapping[str, Reader],
    *,
    required: tuple[str, ...] = (),
    unsupported: Mapping[str, Unsupported] | None = None,
) -> Schema:
    """Return the JSON Schema of the objects that `read_fields` accepts with the same arguments."""
    properties = {
        name: schema_of(reader) if name in required else nullable(schema_of(reader)) for name, reader in table.items()
    }
    for name, field in (unsupported or {}).items():
        if name not in table:
            properties[name] = {"enum": [*field.neutral, None], "description": f"Not supported; {field.hint}."}
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def is_same_json(value: Any, other: Any) -> bool:
    """Compare as JSON: 0 and false differ, although Python's `==` equates them."""
    return type(value) is type(other) and bool(value == other)


def _unknown_field(name: str, prefix: str, table: Mapping[str, Reader]) -> InvalidRequest:
    shown = prefix + (name if len(name) <= SHOWN_CHARACTERS else name[: SHOWN_CHARACTERS - 3] + "...")
    close = difflib.get_close_matches(name, table, n=1) if len(name) <= MAX_MATCHED_CHARACTERS else []
    hint = f"did you mean {prefix}{close[0]}?" if close else f"known parameters: {', '.join(sorted(table))}"
    return InvalidRequest(f"unknown parameter {shown}; {hint}", shown)


# ------------------------------------------------------------------ readers


@described({"type": "boolean"})
def flag(value: Any, name: str) -> bool:
    """Read a boolean."""
    if not isinstance(value, bool):
        raise invalid_value(name, value, "true or false")
    return value


def one_of(*values: str) -> Reader:
    """Return a reader of one of these strings."""
    expected = " or ".join(f'"{value}"' for value in values)

    @described({"enum": list(values)})
    def read(value: Any, name: str) -> str:
        if not isinstance(value, str) or value not in values:
            raise invalid_value(name, value, expected)
        return value

    return read


def integer(low: int, high: int, hint: str = "") -> Reader:
    """Return a reader of whole numbers from `low` to `high`; it accepts 5.0 and rejects true."""
    expected = f"a whole number from {low} to {high}" + (f" ({hint})" if hint else "")
    schema: Schema = {"type": "integer", "minimum": low, "maximum": high}

    @described({**schema, "description": hint} if hint else schema)
    def read(value: Any, name: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid_value(name, value, expected)
        return value

    return read


def number(low: float, high: float, *, above: bool = False, hint: str = "") -> Reader:
    """Return a reader of finite numbers from `low` (with `above`: greater than `low`) to `high`."""
    start = f"greater than {low:g} and at most" if above else f"from {low:g} to"
    expected = f"a number {start} {high:g}" + (f" ({hint})" if hint else "")
    schema: Schema = {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}

    @described({**schema, "description": hint} if hint else schema)
    def read(value: Any, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid_value(name, value, expected)
        if not low <= value <= high or (above and value == low):
            raise invalid_value(name, value, expected)
        return float(value)

    return read


def text(max_characters: int, *, empty: bool = True) -> Reader:
    """Return a reader of strings of at most `max_characters`; `empty`: accepts the empty string."""
    min_characters = 0 if empty else 1

    @described(string(max_characters, least=min_characters))
    def read(value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise invalid_value(name, value, "a string")
        if not min_characters <= len(value) <= max_characters:
            raise InvalidRequest(
                f"{name} has {len(value)} characters; it must have {min_characters} to {max_characters}", name
            )
        return value

    return read


def strings(max_count: int, max_characters: int, *, name_each: str = "string") -> Reader:
    """Return a reader of one string or an array of up to `max_count`, none of them empty; it drops duplicates."""
    each = text(max_characters, empty=False)

    @described(any_of(schema_of(each), array_of(schema_of(each), most=max_count)))
    def read(value: Any, name: str) -> tuple[str, ...]:
        if isinstance(value, str):
            return (each(value, name),)
        if not isinstance(value, list):
            raise invalid_value(name, value, f"a string or an array of up to {max_count} strings")
        if len(value) > max_count:
            raise InvalidRequest(f"{name} has {len(value)} {name_each}s; at most {max_count} are allowed", name)
        return tuple(dict.fromkeys(each(item, f"{name}[{index}]") for index, item in enumerate(value)))

    return read


def token_ids(max_count: int) -> Reader:
    """Return a reader of arrays of token ids. Their upper bound, the vocabulary, is checked at admission."""

    @described(array_of(TOKEN_ID, most=max_count))
    def read(value: Any, name: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise invalid_value(name, value, "an array of token ids")
        if len(value) > max_count:
            raise InvalidRequest(f"{name} has {len(value)} token ids; at most {max_count} are allowed", name)
        # One pass over the ids of a long prompt; the second one, for the index, only to report an error.
        if not all(type(item) is int and 0 <= item < 2**31 for item in value):
            index = next(i for i, v in enumerate(value) if type(v) is not int or not 0 <= v < 2**31)
            raise invalid_value(f"{name}[{index}]", value[index], "a token id, a whole number of at least 0")
        return tuple(value)

    return read
