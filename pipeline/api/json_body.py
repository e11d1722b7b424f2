"""JSON bodies: a strict parser for requests and the encoder for responses.

A request body is one object in UTF-8, of one endpoint an array.  RFC 8259 leaves duplicate names, NaN and lone
surrogates to the parser; `parse_object` and `parse_array` reject each of them and name its position.  Depth and number
of values are counted before the body is decoded, so that time and memory are bounded.  Independent of any endpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from json.scanner import make_scanner
from typing import Any, NoReturn

import msgspec

from pipeline.errors import InvalidRequest

to_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode
CONTENT_TYPE = "application/json"

MAX_DIGITS = 256  # characters of one number: few enough to parse quickly, and that a whole one is a finite float

SHOWN_CHARACTERS = 60  # of a name in an error message
MAX_DEPTH = 100  # arrays and objects within each other; no endpoint needs 10
MAX_CONTAINERS = 100_000  # arrays and objects: each takes some 100 bytes of memory, for 2 of the body
SEARCHED = 1 << 20  # characters at most of a body in which the place of such an error is looked for
MAX_VALUES = 1_200_000  # of one body: a prompt of a million token ids, and everything else
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
# A string, which is a name if a colon follows; a bracket; a number, or what Python's json takes for one.
_TOKEN = re.compile(
    r'("[^"\\]*+(?:\\.[^"\\]*+)*+")(\s*:)?|([\[\]{}])|(NaN|-?Infinity|-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)',
    re.DOTALL,
)

# An escape that may be half of a surrogate pair: only a body that has one is searched for lone surrogates.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class _RejectedError(ValueError):
    """Raised in the decoder's hooks, to tell their errors from the json module's syntax errors.

    `number`: what the body has at the place of the error; "": a name that an object has twice.
    """

    def __init__(self, fault: str, remedy: str, number: str = "") -> None:
        super().__init__(fault)
        self.remedy = remedy
        self.number = number


def parse_object(body: bytes, content_type: str = CONTENT_TYPE) -> dict[str, Any]:
    """Return the object in `body`. Raises `InvalidRequest` with the fault and its position."""
    value = _parse(body, content_type)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is {kind_of(value)}; send a JSON object")
    return value


def parse_array(body: bytes, content_type: str = CONTENT_TYPE) -> list[Any]:
    """Return the array in `body`. Raises `InvalidRequest` with the fault and its position."""
    value = _parse(body, content_type)
    if not isinstance(value, list):
        raise InvalidRequest(f"the body is {kind_of(value)}; send a JSON array")
    return value


def _parse(body: bytes, content_type: str) -> Any:
    kind = content_type.partition(";")[0].strip().lower()
    if kind != CONTENT_TYPE:
        shown = repr(kind[:64]) if kind else "missing"
        raise InvalidRequest(f"Content-Type is {shown}; send the body as JSON with Content-Type: application/json")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error.reason} at byte {error.start}; send UTF-8") from None
    if text.startswith("\ufeff"):
        raise InvalidRequest("the body begins with a byte order mark; send JSON without one")
    if not text.strip(" \t\r\n"):
        raise InvalidRequest("the body is empty; send JSON")
    check_size(body)
    try:
        value = _decode(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            f"(character {error.pos})"
        ) from None
    except _RejectedError as error:
        at = -1
        if len(text) <= SEARCHED:
            at = _place_of_number(text, error.number) if error.number else _place_of_second_name(text)
        raise InvalidRequest(f"{error}{_shown_place(text, at)}; {error.remedy}") from None
    if isinstance(value, dict | list) and _SURROGATE_ESCAPE.search(body):
        _reject_lone_surrogates(value)
    return value


def _place_of_number(text: str, number: str) -> int:
    """Where a number stands outside of strings; -1: nowhere."""
    return next((token.start() for token in _TOKEN.finditer(text) if token[4] == number), -1)


def _place_of_second_name(text: str) -> int:
    """Where the first object that ends with a name twice has that name again; -1: there is none."""
    names: list[set[str]] = []  # of the containers that are open
    again: list[int] = []  # where each has a name again; -1: nowhere
    for token in _TOKEN.finditer(text):
        if token[3] in ("{", "["):
            names.append(set())
            again.append(-1)
        elif token[3] and names:
            names.pop()
            if (at := again.pop()) >= 0:
                return at
        elif token[2] and names:
            name = json.loads(token[1])
            if name in names[-1] and again[-1] < 0:
                again[-1] = token.start()
            names[-1].add(name)
    return -1


def _shown_place(text: str, at: int) -> str:
    """A place in the words of the json module's errors."""
    if at < 0:
        return ""
    return f", at line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)} (character {at})"


def count_separators(body: bytes | bytearray) -> int:
    """Return an upper bound of the number of values in `body`, less one: brackets and commas, also in strings."""
    return body.count(b"[") + body.count(b"{") + body.count(b",")


def check_size(body: bytes, what: str = "the body", field: str = "") -> None:
    """Raise `InvalidRequest` for JSON that is nested too deeply or has too many values. `what`, `field`: for errors."""
    n_open = body.count(b"[") + body.count(b"{")
    if n_open <= MAX_DEPTH and n_open + body.count(b",") <= MAX_VALUES:
        return
    outside = _STRING.sub(b"", body)
    depth = n_open = 0
    for bracket in _BRACKET.finditer(outside):
        if bracket[0] in (b"[", b"{"):
            depth += 1
            n_open += 1
            if depth > MAX_DEPTH:
                raise InvalidRequest(
                    f"{what} is nested too deeply; at most {MAX_DEPTH} arrays and objects may lie within each other",
                    field,
                )
            if n_open > MAX_CONTAINERS:
                raise InvalidRequest(
                    f"{what} has more than {MAX_CONTAINERS} arrays and objects; send several requests", field
                )
        else:
            depth -= 1
    if n_open + outside.count(b",") > MAX_VALUES:
        raise InvalidRequest(f"{what} has more than {MAX_VALUES} values; send several requests", field)


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
                raise _RejectedError(f"the body gives {name[:64]!r} twice in one object", "give it once")
            seen.add(name)
    return result


def _constant(name: str) -> NoReturn:
    raise _RejectedError(f"the body contains {name}, which is not a number in JSON", "send a finite number", name)


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        fault = f"the body contains a number of {len(digits)} digits, more than {MAX_DIGITS}"
        raise _RejectedError(fault, "send a smaller one", digits)
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits) if len(digits) <= MAX_DIGITS else math.inf
    if not math.isfinite(value):
        fault = f"the body contains the number {digits[:32]}, which is too large"
        raise _RejectedError(fault, "send a smaller one", digits)
    return value


_decoder = json.JSONDecoder(
    object_pairs_hook=_no_duplicates, parse_constant=_constant, parse_int=_int, parse_float=_float
)


_scan: Callable[[str, int], tuple[Any, int]] = make_scanner(_decoder)  # type: ignore[arg-type]  # as `JSONDecoder` does


def _decode(text: str) -> Any:
    """As `_decoder.decode`, which looks for blanks before and behind what few bodies have them around."""
    try:
        value, end = _scan(text, 0)
        if not text[end:].strip(" \t\r\n"):
            return value
        del value  # the memory of two at once is not within the bounds
    except StopIteration:  # no value begins where one must
        pass
    return _decoder.decode(text)


def _reject_lone_surrogates(body: dict[str, Any] | list[Any]) -> None:
    """Raise `InvalidRequest` for the first lone surrogate. Not recursive: independent of the interpreter's limit."""
    path: list[str | int] = []  # names and indices of the containers that are being read
    levels = [_items(body)]
    while levels:
        for name, item in levels[-1]:
            if isinstance(name, str):
                _check_text(name, [])
            if isinstance(item, str):
                _check_text(item, [*path, name])
            elif isinstance(item, list | dict):
                path.append(name)
                levels.append(_items(item))
                break
        else:
            levels.pop()
            if path:
                path.pop()


def _items(container: dict[str, Any] | list[Any]) -> Iterator[tuple[str | int, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


def _check_text(text: str, path: list[str | int]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN_CHARACTERS]}" for part in path)
        where = "".join(parts).removeprefix(".")
        raise InvalidRequest(
            f"{where or 'a name'} contains a lone surrogate (\\u{ord(text[error.start]):04x}) at "
            f"character {error.start}, which is not a character; send whole code points",
            where,
        ) from None
