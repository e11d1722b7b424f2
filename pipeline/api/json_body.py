"""JSON bodies: a strict parser for requests and the encoder for responses.

A request body is one object in UTF-8.  RFC 8259 leaves duplicate names, NaN and lone surrogates to the parser;
`parse_object` rejects each of them and names its position.  Independent of any endpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from pipeline.errors import InvalidRequest

to_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode
CONTENT_TYPE = "application/json"

MAX_DIGITS = 64  # in one number: more than any bound needs, and few enough to parse quickly

# An escape that may be half of a surrogate pair: only a body that has one is searched for lone surrogates.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class _RejectedError(ValueError):
    """Raised in the decoder's hooks, to tell their errors from the json module's syntax errors."""


def parse_object(body: bytes, content_type: str = CONTENT_TYPE) -> dict[str, Any]:
    """Return the object in `body`. Raises `InvalidRequest` with the fault and its position."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != CONTENT_TYPE:
        raise InvalidRequest(
            f"Content-Type is {kind or 'missing'}; send the body as JSON with Content-Type: application/json"
        )
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error.reason} at byte {error.start}; send UTF-8") from None
    if text.startswith("\ufeff"):
        raise InvalidRequest("the body begins with a byte order mark; send JSON without one")
    if not text.strip(" \t\r\n"):
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            f"(character {error.pos})"
        ) from None
    except _RejectedError as error:
        raise InvalidRequest(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the body is not acceptable JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is {kind_of(value)}; send a JSON object")
    if _SURROGATE_ESCAPE.search(body):
        _reject_lone_surrogates(value, "")
    return value


def kind_of(value: Any) -> str:
    """Return the JSON name of the value's type, with an article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _RejectedError(f"the body gives {name[:64]!r} twice in one object; give it once")
            seen.add(name)
    return result


def _constant(name: str) -> NoReturn:
    raise _RejectedError(f"the body contains {name}, which is not a number in JSON; send a finite number")


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _RejectedError(f"the body contains a number of {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits) if len(digits) <= 4 * MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise _RejectedError(f"the body contains the number {digits[:32]}, which is too large")
    return value


_decoder = json.JSONDecoder(
    object_pairs_hook=_no_duplicates, parse_constant=_constant, parse_int=_int, parse_float=_float
)


def _reject_lone_surrogates(value: Any, path: str) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{path or 'a name'} contains a lone surrogate (\\u{ord(value[error.start]):04x}) at "
                f"character {error.start}, which is not a character; send whole code points",
                path,
            ) from None
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _reject_lone_surrogates(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            _reject_lone_surrogates(name, "")
            _reject_lone_surrogates(item, f"{path}.{name}" if path else name)
