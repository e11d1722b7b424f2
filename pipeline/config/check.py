"""Compares values with the schema and collects every problem, in words.

A `Findings` records which environment variable set which key, so that a message can name the source of a
value.  Values of secrets are never shown.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from pipeline.config.schema import Config, Section

SHOWN_CHARACTERS = 80
PROBLEMS_MAX = 100  # in a report
MATCHED_CHARACTERS = 64  # of a word that is compared with the known ones: the time is quadratic

_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "keys",
    "null": "nothing",
}

Key = tuple[str, ...]  # ("models", "0", "path")


class Problem(NamedTuple):
    """One line of the report."""

    key: str  # dotted
    text: str  # after the key: value, where it was set, reason

    def __str__(self) -> str:
        return self.key + self.text


class Findings:
    """The problems found so far. `origins`: the environment variable that set a key."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.origins: dict[Key, str] = {}

    def add(self, key: Key, reason: str, shown: str = "") -> None:
        """Add a problem with `key`; `shown` is its printable value, "" for none."""
        if not self.has_room:
            return
        value = f" = {shown}" if shown else ""
        self.problems.append(Problem(".".join(key), f"{value}{self._origin(key)}: {reason}"))

    @property
    def has_room(self) -> bool:
        """Whether another problem would be reported."""
        return len(self.problems) < PROBLEMS_MAX

    def refuse(self, key: Key, value: Any, reason: str) -> None:
        """Add a problem with a value, shortened and masked where necessary."""
        if not self.has_room:
            return
        shown = "***" if key[:2] == ("auth", "api_keys") else repr(value)
        if len(shown) > SHOWN_CHARACTERS:
            shown = shown[: SHOWN_CHARACTERS - 3] + "..."
        self.add(key, reason, shown)

    def _origin(self, key: Key) -> str:
        """The variable that set the key, a part of it, or the list or section that contains it."""
        for length in range(len(key), 0, -1):
            for other, variable in self.origins.items():
                if other == key[:length] or (length == len(key) and other[:length] == key):
                    return f" ({variable})"
        return ""


def check(kind: Any, value: Any, key: Key, findings: Findings) -> None:
    """Add unknown and missing keys, wrong types and values out of bounds. `kind`: a type of the schema."""
    if is_section(kind):
        if isinstance(value, dict):
            _check_section(kind, value, key, findings)
        else:
            findings.refuse(key, value, f"expected keys ({', '.join(fields_of(kind))}), got {kind_of(value)}")
    elif get_origin(kind) is tuple and isinstance(value, list):
        for index, item in enumerate(value):
            check(get_args(kind)[0], item, (*key, str(index)), findings)
    elif get_origin(kind) is dict and isinstance(value, dict):
        for name, item in value.items():
            if isinstance(name, str):
                check(get_args(kind)[1], item, (*key, name), findings)
            else:
                findings.refuse((*key, str(name)), item, "the key must be text; put it in quotes")
    else:
        try:
            converted = msgspec.convert(value, kind)
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError:
            findings.refuse(key, value, "expected valid Unicode text")
            return
        except msgspec.ValidationError as error:
            findings.refuse(key, value, _reason(str(error), kind, value))
            return
        if converted != converted:  # NaN, which passes every bound
            findings.refuse(key, value, "expected a number")


def _check_section(kind: type[Section], value: dict[Any, Any], key: Key, findings: Findings) -> None:
    fields = fields_of(kind)
    for name, item in value.items():
        if name in fields:
            check(fields[name], item, (*key, name), findings)
        elif findings.has_room:
            findings.add((*key, str(name)), "no such key" + _hint(str(name), fields))
    for name in _required(kind):
        if name not in value:
            findings.add((*key, name), "missing; give it a value")


def _reason(message: str, kind: Any, value: Any) -> str:
    """Translates a message of msgspec."""
    if get_origin(kind) is Literal:
        allowed = [str(choice) for choice in get_args(kind)]
        return f"expected one of {', '.join(allowed)}" + did_you_mean(str(value), allowed)
    text = message.split(" - at ")[0].replace("Expected", "expected")
    text = text.replace(" >= ", " of at least ").replace(" <= ", " of at most ")
    return re.sub("`([^`]+)`", lambda quoted: _TYPE_WORDS.get(quoted[1], quoted[1]), text)


def _hint(name: str, fields: Mapping[str, Any]) -> str:
    """Suggests a similar key, or the section that has this key."""
    near = did_you_mean(name, fields)
    if near:
        return near
    homes = [section for section, kind in fields_of(Config).items() if name in fields_of(_element(kind))]
    if homes:
        return f"; it belongs to {' or '.join(homes)}"
    return f"; there are {', '.join(fields)}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" when a known word is similar, else ""."""
    if len(word) > MATCHED_CHARACTERS:
        return ""
    import difflib  # only for a mistake: every process of a server has read its configuration

    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.7)
    return f"; did you mean {names[near[0]]}?" if near else ""


def fields_of(kind: Any) -> dict[str, Any]:
    """Name to type of a section's keys, in order; empty for other types."""
    return _fields(kind) if is_section(kind) else {}


@functools.cache  # 20 ms for the whole schema, which every process of a server checks
def _fields(kind: type[Section]) -> dict[str, Any]:
    return {f.name: f.type for f in msgspec.structs.fields(kind)}


@functools.cache
def _required(kind: type[Section]) -> tuple[str, ...]:
    return tuple(f.name for f in msgspec.structs.fields(kind) if f.required)


def is_section(kind: Any) -> bool:
    """Whether `kind` is a section of the schema."""
    return isinstance(kind, type) and issubclass(kind, Section)


def printable(text: str) -> str:
    """The text with escapes for what UTF-8 cannot encode: bytes of a variable, lone surrogates of a file."""
    return text.encode("utf-8", "backslashreplace").decode()


def kind_of(value: Any) -> str:
    """The kind of a value, in words."""
    if value is None:
        return "nothing"
    names = {dict: "keys", list: "a list", str: "text", bool: "true or false", int: "a whole number"}
    return names.get(type(value), "a number" if isinstance(value, float) else type(value).__name__)


def _element(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is tuple else kind
