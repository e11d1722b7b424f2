"""The parameters of one call in Qwen3-Coder's form, while it is being generated, as the JSON text of the arguments.

    <parameter=KEY>
    VALUE
    </parameter>
    </function>

A value is a string unless the schema of the tool says otherwise (`parameter_types.py`).  Strings come out as they are
generated, other values at their end, since text that is not JSON of the type becomes a string.  The line breaks after
the first tag and before the last one are not part of the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pipeline.api.json_prefix import JsonValue

PARAMETER, END_OF_PARAMETER, END_OF_FUNCTION = "<parameter=", "</parameter>", "</function>"
MAX_KEY = 256  # characters of a parameter's name
_SPACE = " \t\n\r"
_NULL = "null"
_KINDS = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": _NULL, '"': "string"}  # by first character
_ENDS = (f"\n{END_OF_PARAMETER}", END_OF_PARAMETER)


class FunctionBody:
    """Takes the text after `<function=NAME>`. There is no output before the first parameter, or the end."""

    def __init__(self, types: Mapping[str, str]) -> None:
        """types: of parameters, JSON types divided by `|`; a string for any other."""
        self.is_bad = False  # the next character does not continue the call
        self.is_complete = False
        self._types = types
        self._output = ""
        self._length = 0  # of all output
        self._cut = 0  # the output up to here is an object that lacks its brace
        self._keys: set[str] = set()
        self._allowed: frozenset[str] | None = None  # types of the value that is being read; None: no value is
        self._is_first = False  # a line break here is not part of the value
        self._is_open = False  # the string has begun in the output
        self._text = ""  # of a value that is not in the output

    def take_output(self) -> str:
        """Return the JSON text since the last time."""
        output, self._output = self._output, ""
        return output

    def closed(self, text: str) -> str:
        """Return `text`, all of the output, as a whole object: cut after its last whole member, and closed."""
        return text if self.is_complete else text[: self._cut] + "}"

    def feed(self, text: str, at: int) -> int:
        """Take characters from `text[at]` on. Returns the position after the last one that was taken."""
        while at < len(text) and not (self.is_bad or self.is_complete):
            begin = at
            at = self._tag(text, at) if self._allowed is None else self._value(text, at, self._allowed)
            if at == begin:
                break  # it needs more text
        return at

    def _tag(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return at + 1
        if text.startswith(END_OF_FUNCTION, at):
            self._add("}" if self._keys else "{}")
            self.is_complete = True
            return at + len(END_OF_FUNCTION)
        if not text.startswith(PARAMETER, at):
            self.is_bad = not (PARAMETER.startswith(text[at:]) or END_OF_FUNCTION.startswith(text[at:]))
            return at
        begin = at + len(PARAMETER)
        end = text.find(">", begin, begin + MAX_KEY + 1)
        key = text[begin:end] if end >= 0 else ""
        if end < 0 and len(text) - begin <= MAX_KEY:
            return at
        if not key or key in self._keys:
            self.is_bad = True
            return at
        if not self._keys:
            self._add("{")
            self._cut = self._length
        self._add(f"{', ' if self._keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys.add(key)
        self._allowed = frozenset(self._types.get(key, "string").split("|"))
        self._is_first, self._is_open, self._text = True, False, ""
        return end + 1

    def _value(self, text: str, at: int, allowed: frozenset[str]) -> int:
        if self._is_first:
            self._is_first = False
            if text[at] == "\n":
                return at + 1
        found = text.find(END_OF_PARAMETER, at)
        if found < 0:
            end = len(text) - overlap(text, at, _ENDS)
            self._take(text[at:end], allowed)
            return end
        self._take(text[at : found - 1 if found > at and text[found - 1] == "\n" else found], allowed)
        self._add('"' if self._is_open else _as_json(self._text, allowed))
        self._cut = self._length
        self._allowed = None
        return found + len(END_OF_PARAMETER)

    def _take(self, part: str, allowed: frozenset[str]) -> None:
        """More of a value."""
        self._text += part
        may_be_null = not self._is_open and _NULL in allowed and _NULL.startswith(self._text)
        if "string" not in allowed or may_be_null:
            return  # the end shows what it is
        if self._text and not self._is_open:
            self._add('"')
            self._is_open = True
        self._add(json.dumps(self._text, ensure_ascii=False)[1:-1])
        self._text = ""

    def _add(self, output: str) -> None:
        self._output += output
        self._length += len(output)


def overlap(text: str, begin: int, marks: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text[begin:]` that may become one of the marks."""
    for length in range(min(len(text) - begin, max(map(len, marks), default=1) - 1), 0, -1):
        tail = text[len(text) - length :]
        if any(mark.startswith(tail) and len(mark) > length for mark in marks):
            return length
    return 0


def _as_json(text: str, allowed: frozenset[str]) -> str:
    """The JSON text of a value: of an allowed type if it is that, otherwise a string."""
    plain = text.strip(_SPACE)
    if plain in ("True", "False", "None"):  # Python's words
        plain = {"True": "true", "False": "false", "None": _NULL}[plain]
    kind = _KINDS.get(plain[:1], "number")
    if kind in allowed and kind != "string":
        value = JsonValue(escapes_controls=True)
        end = value.feed(f"{plain}\n", 0, len(plain) + 1)  # a number ends before the line break
        written = value.take_output()
        inner = JsonValue()
        inner.feed(f"[{written}", 0, len(written) + 1)  # one level more, as in the arguments
        if value.is_complete and end >= len(plain) and not inner.is_bad:
            return written
    return json.dumps(text, ensure_ascii=False)
