"""What the answer to a request with a JSON Schema says, judged by the library `jsonschema`."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema  # type: ignore[import-untyped]


class Kind(enum.Enum):
    """Outcome of one request."""

    VALID = "valid"
    CUT = "cut off by max_tokens"
    REFUSED = "refused by name"  # 400 that names a keyword of the schema, or one of its values
    TOO_LARGE = "refused by size"  # 400 that names a bound which the schema exceeds
    UNCHECKED = "not checkable here"  # jsonschema cannot use the schema itself
    INVALID = "INVALID"
    UNNAMED = "REFUSED WITHOUT A NAME"
    FAILED = "FAILED"

    @property
    def is_fault(self) -> bool:
        """Of the server."""
        return self in (Kind.INVALID, Kind.UNNAMED, Kind.FAILED)


class Judgement(NamedTuple):
    """Outcome, and why."""

    kind: Kind
    reason: str = ""


# What a refusal says of a bound: of bytes, depth, CPU time, memory, or the library's own limits.
_BOUND = re.compile(
    r"at most [0-9]|nested too deeply|recursion limit|takes longer than|takes too much memory|"
    r"too (?:many|big|large|complex)|; max is [0-9]|limit (?:exceeded|of [0-9])"
)
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")


def judge(schema: dict[str, Any], status: int, answer: Any) -> Judgement:
    """Judge the answer to a chat: its status, and its body as decoded JSON."""
    if status == 400:
        message = str(answer["error"]["message"])
        if not str(answer["error"]["param"]).startswith("response_format"):
            return Judgement(Kind.UNNAMED, message)
        if _BOUND.search(message):
            return Judgement(Kind.TOO_LARGE, message)
        is_named = any(_names(message, word) for word in words(schema))
        return Judgement(Kind.REFUSED if is_named else Kind.UNNAMED, message)
    if status != 200:
        return Judgement(Kind.FAILED, f"{status}: {str(answer)[:300]}")
    choice = answer["choices"][0]
    text = choice["message"]["content"] or ""
    if choice["finish_reason"] == "length":
        return Judgement(Kind.CUT)
    try:
        value = json.loads(text)
    except ValueError as error:
        return Judgement(Kind.INVALID, f"no JSON ({error}): {text[:200]!r}")
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        fault = next(iter(validator(schema, format_checker=validator.FORMAT_CHECKER).iter_errors(value)), None)
    except Exception as error:  # a reference that is not there, a pattern that Python's `re` does not know, ...
        return Judgement(Kind.UNCHECKED, f"{type(error).__name__}: {error}"[:200])
    if fault is not None:
        where = "/".join(map(str, fault.absolute_schema_path))
        return Judgement(Kind.INVALID, f"{where}: {fault.message[:200]} in {text[:200]}")
    return Judgement(Kind.VALID)


def words(schema: Any, is_map: bool = False) -> Iterator[str]:
    """The keywords of a schema, and its references, patterns and formats. `is_map`: it has schemas by name."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if not is_map:
                yield str(key)
            if isinstance(value, str) and key in ("$ref", "$dynamicRef", "pattern", "format", "type"):
                yield value
            yield from words(value, not is_map and key in _BY_NAME)
    elif isinstance(schema, list):
        for one in schema:
            yield from words(one)


def _names(message: str, word: str) -> bool:
    return bool(word) and re.search(rf"(?<![A-Za-z$]){re.escape(word)}(?![A-Za-z])", message) is not None
