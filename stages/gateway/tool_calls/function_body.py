"""The parameters of one call in Qwen3-Coder's form, while it is being generated, as the JSON text of the arguments.

    <parameter=KEY>
    VALUE
    </parameter>
    </function>

A value is a string unless the schema of the tool says otherwise (`parameter_types.py`).  Strings come out as they are
generated, other values at their end, since text that is not JSON of the type becomes a string; they are checked as they
are generated.  The line breaks after the first tag and before the last one are not part of the value.
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
_PYTHON_WORDS = {"True": "true", "False": "false", "None": _NULL}
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
        self._value: _Text | _Json | None = None  # that is being read
        self._is_first = False  # a line break here is not part of the value

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
            at = self._tag(text, at) if self._value is None else self._take(text, at, self._value)
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
        allowed = frozenset(self._types.get(key, "string").split("|"))
        self._value = _Text(may_be_null=_NULL in allowed) if "string" in allowed else _Json(allowed)
        self._is_first = True
        return end + 1

    def _take(self, text: str, at: int, value: _Text | _Json) -> int:
        """More of a value."""
        if self._is_first:
            self._is_first = False
            if text[at] == "\n":
                return at + 1
        found = text.find(END_OF_PARAMETER, at)
        if found < 0:
            end = len(text) - overlap(text, at, _ENDS)
            self._add(value.feed(text[at:end]))
            return end
        self._add(value.feed(text[at : found - 1 if found > at and text[found - 1] == "\n" else found]))
        self._add(value.finish())
        self._cut = self._length
        self._value = None
        return found + len(END_OF_PARAMETER)

    def _add(self, output: str) -> None:
        self._output += output
        self._length += len(output)


class _Text:
    """A string, or null."""

    def __init__(self, *, may_be_null: bool) -> None:
        self._may_be_null = may_be_null  # the text so far is the beginning of that
        self._held = ""
        self._is_open = False  # the output has begun

    def feed(self, part: str) -> str:
        """Take more of the text. Returns what follows in the output."""
        self._held += part
        self._may_be_null = self._may_be_null and _NULL.startswith(self._held)
        if self._may_be_null or not self._held:
            return ""
        opening, self._is_open = "" if self._is_open else '"', True
        part, self._held = self._held, ""
        return opening + json.dumps(part, ensure_ascii=False)[1:-1]

    def finish(self) -> str:
        """Return the end of the output."""
        if self._is_open:
            return '"'
        return _NULL if self._may_be_null and self._held == _NULL else json.dumps(self._held)


class _Json:
    """JSON of one of some types, none of them a string; any other text is a string."""

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed
        self._parts: list[str] = []
        self._kind = ""  # of the value, by its first character; "": there was only white space
        self._value = JsonValue(escapes_controls=True, n_around=1)

    def feed(self, part: str) -> str:
        """Take more of the text. Returns "": what it is shows at its end."""
        self._parts.append(part)
        at = 0
        if not self._kind:
            at = len(part) - len(part.lstrip(_SPACE))
            self._kind = _KINDS.get(part[at], "number") if at < len(part) else ""
        if self._kind in self._allowed and not self._value.is_bad:
            end = self._value.feed(part, at, len(part))
            self._value.is_bad |= bool(part[end:].strip(_SPACE))  # of what follows the value
        return ""

    def finish(self) -> str:
        """Return the output."""
        text = "".join(self._parts)
        if word := _PYTHON_WORDS.get(text.strip(_SPACE)):
            return word if _KINDS[word[0]] in self._allowed else json.dumps(text)
        self._value.feed("\n", 0, 1)  # ends a number
        if self._value.is_complete and not self._value.is_bad:
            return self._value.take_output()
        return json.dumps(text, ensure_ascii=False)


def overlap(text: str, begin: int, marks: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text[begin:]` that may become one of the marks."""
    for length in range(min(len(text) - begin, max(map(len, marks), default=1) - 1), 0, -1):
        tail = text[len(text) - length :]
        if any(mark.startswith(tail) and len(mark) > length for mark in marks):
            return length
    return 0
