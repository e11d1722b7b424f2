"""Tables of fields: which names an endpoint takes, of what type, within which bounds.

A reader is `read(value, name)`: it returns the value as the server uses it or raises `InvalidRequest`
that names field, value, bound and what to do.  `read_fields` applies a table to an object; null means
the same as leaving the field out.  A name that is in no table is refused: nothing is ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.errors import InvalidRequest

Reader = Callable[[Any, str], Any]

SHOWN_CHARACTERS = 60


class Unsupported:
    """A parameter of OpenAI's API that this server does not have.

    `neutral` are values that mean the same as leaving it out; any other is refused by name.
    """

    def __init__(self, *neutral: Any, hint: str = "leave it out") -> None:
        self.neutral = neutral
        self.hint = hint


def show(value: Any) -> str:
    """A value as an error message quotes it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def refuse(name: str, value: Any, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {show(value)}; it must be {expected}", name)


def read_fields(
    body: Mapping[str, Any],
    table: Mapping[str, Reader],
    *,
    required: tuple[str, ...] = (),
    unsupported: Mapping[str, Unsupported] | None = None,
    within: str = "",
) -> dict[str, Any]:
    """Values by name, of the fields that are there. `within` is the dotted name of the object."""
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
            raise _unknown(name, prefix, table)
        if value is not None and not any(same(value, neutral) for neutral in known.neutral):
            raise InvalidRequest(f"{prefix}{name} is not supported by this server; {known.hint}", prefix + name)
    for name in required:
        if name not in values:
            raise InvalidRequest(f"{prefix}{name} is missing; it is required", prefix + name)
    return values


def same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: 0 is not false."""
    return type(value) is type(neutral) and bool(value == neutral)


def _unknown(name: str, prefix: str, table: Mapping[str, Reader]) -> InvalidRequest:
    shown = prefix + (name if len(name) <= SHOWN_CHARACTERS else name[: SHOWN_CHARACTERS - 3] + "...")
    close = difflib.get_close_matches(name, table, n=1, cutoff=0.6)
    hint = f"did you mean {prefix}{close[0]}?" if close else f"there are {', '.join(sorted(table))}"
    return InvalidRequest(f"unknown parameter {shown}; {hint}", shown)


# ------------------------------------------------------------------ readers


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def integer(low: int, high: int, hint: str = "") -> Reader:
    """A whole number (5.0 is one, true is not) from `low` to `high`."""
    expected = f"a whole number from {low} to {high}" + (f" ({hint})" if hint else "")

    def read(value: Any, name: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise refuse(name, value, expected)
        return value

    return read


def number(low: float, high: float, *, above: bool = False, hint: str = "") -> Reader:
    """A finite number from `low` (with `above`: greater than it) to `high`."""
    start = f"greater than {low:g} and at most" if above else f"from {low:g} to"
    expected = f"a number {start} {high:g}" + (f" ({hint})" if hint else "")

    def read(value: Any, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refuse(name, value, expected)
        if not low <= value <= high or (above and value == low):
            raise refuse(name, value, expected)
        return float(value)

    return read


def text(max_characters: int, *, empty: bool = True) -> Reader:
    least = 0 if empty else 1

    def read(value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise refuse(name, value, "a string")
        if not least <= len(value) <= max_characters:
            raise InvalidRequest(f"{name} has {len(value)} characters; it must have {least} to {max_characters}", name)
        return value

    return read


def one_of(*choices: str) -> Reader:
    expected = " or ".join(f'"{choice}"' for choice in choices)

    def read(value: Any, name: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise refuse(name, value, expected)
        return value

    return read


def strings(max_count: int, max_characters: int, *, name_each: str = "string") -> Reader:
    """A string, or an array of up to `max_count`, none empty; repeated ones count once."""
    each = text(max_characters, empty=False)

    def read(value: Any, name: str) -> tuple[str, ...]:
        if isinstance(value, str):
            return (each(value, name),)
        if not isinstance(value, list):
            raise refuse(name, value, f"a string or an array of up to {max_count} strings")
        if len(value) > max_count:
            raise InvalidRequest(f"{name} has {len(value)} {name_each}s; at most {max_count} are taken", name)
        return tuple(dict.fromkeys(each(item, f"{name}[{index}]") for index, item in enumerate(value)))

    return read


def token_ids(max_count: int) -> Reader:
    """An array of token ids (their upper bound, the vocabulary, is checked where the model is known)."""

    def read(value: Any, name: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise refuse(name, value, "an array of token ids")
        if len(value) > max_count:
            raise InvalidRequest(f"{name} has {len(value)} token ids; at most {max_count} are taken", name)
        # Of a long prompt each id is looked at once, here.
        if not all(type(item) is int and 0 <= item < 2**31 for item in value):
            index = next(i for i, v in enumerate(value) if type(v) is not int or not 0 <= v < 2**31)
            raise refuse(f"{name}[{index}]", value[index], "a token id, a whole number of at least 0")
        return tuple(value)

    return read
