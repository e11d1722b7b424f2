"""One call as a JSON object, `{"name": NAME, "arguments": {...}}`, while it is being generated.

The names may come in any order, and others beside them; `parameters` means the same as `arguments`, and a `function`
that is a string the same as `name`.  A `function` that is an object has all of this in it.  The call is certain as soon
as its name is one of the request's tools and its arguments have begun; until then at most `MAX_HEAD` characters are
taken.  Arguments that are a string are certain at its end, if it is the text of an object; null is an object without
members.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from pipeline.api.json_prefix import JsonValue

MAX_HEAD = 4096  # characters before a call is certain
MAX_TEXT = 1 << 15  # as `MAX_HEAD`, in a string of arguments of a tool that is known
SPACE = " \t\n\r"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "function", "arguments", "parameters", "type", "id"})

_KEY_OR_CLOSE, _KEY, _COLON, _VALUE, _COMMA_OR_CLOSE = range(5)


class CallObject:
    """Takes the text after the opening brace."""

    __slots__ = (
        "_is_inner",
        "_is_key",
        "_is_strict",
        "_key",
        "_lexeme",
        "_names",
        "_state",
        "_taken",
        "_value",
        "arguments",
        "fragment",
        "is_bad",
        "is_done",
        "name",
    )

    def __init__(self, names: Collection[str], *, is_strict: bool = False) -> None:
        """is_strict: a key that no call has shows that the object is not a call."""
        self.name = ""
        self.arguments: JsonValue | None = None
        self.fragment = ""  # of the arguments; the caller takes it
        self.is_bad = False  # the next character does not continue the object
        self.is_done = False
        self._names = names
        self._is_strict = is_strict
        self._is_inner = False  # in the object of a `function`
        self._state = _KEY_OR_CLOSE
        self._taken = 1  # characters, while the call is not certain
        self._value: JsonValue | None = None  # being read: a key, or the value of `_key`
        self._is_key = False
        self._key = ""
        self._lexeme = ""

    @property
    def is_certain(self) -> bool:
        """Whether the text is a call of one of the request's tools."""
        return bool(self.name) and self.arguments is not None

    def feed(self, text: str, at: int) -> int:
        """Take characters from `text[at]` on. Returns the position after the last one that belongs to the object."""
        while at < len(text) and not (self.is_bad or self.is_done):
            end = len(text) if self.is_certain else min(len(text), at + self._most() - self._taken)
            if at >= end:
                self.is_bad = True
                break
            begin, at = at, self._take(text, at, end)
            self._taken += at - begin
        return at

    def _most(self) -> int:
        is_text = self.name and self._value is not None and not self._is_key and self._key in _ARGUMENTS
        return MAX_TEXT if is_text else MAX_HEAD

    def _take(self, text: str, at: int, end: int) -> int:
        if self._value is not None:
            return self._continue_value(self._value, text, at, end)
        c = text[at]
        if c in SPACE:
            return at + 1
        state = self._state
        if c == "}" and state in (_KEY_OR_CLOSE, _COMMA_OR_CLOSE):
            if self._is_inner:
                self._is_inner, self._state = False, _COMMA_OR_CLOSE
            else:
                self.is_done = True
        elif c == '"' and state in (_KEY_OR_CLOSE, _KEY):
            self._begin(c, is_key=True)
            return at  # the string begins here
        elif c == ":" and state == _COLON:
            self._state = _VALUE
        elif c == "," and state == _COMMA_OR_CLOSE:
            self._state = _KEY
        elif state == _VALUE and c == "{" and self._may_descend():
            self._is_inner, self._state = True, _KEY_OR_CLOSE
        elif state == _VALUE and self._may_begin(c):
            self._begin(c, is_key=False)
            return at
        else:
            self.is_bad = True
            return at
        return at + 1

    def _may_descend(self) -> bool:
        return self._key == "function" and not (self._is_inner or self.name or self.arguments)

    def _may_begin(self, c: str) -> bool:
        """Whether the value of `_key` may begin with this character."""
        if self._key in _ARGUMENTS:
            return c in '{"n' and self.arguments is None
        if self._key == "name":
            return c == '"' and not self.name
        return True

    def _begin(self, c: str, *, is_key: bool) -> None:
        self._value, self._is_key, self._lexeme = JsonValue(escapes_controls=True), is_key, ""
        if not is_key and self._key in _ARGUMENTS and c == "{":
            self.arguments = self._value

    def _continue_value(self, value: JsonValue, text: str, at: int, end: int) -> int:
        at = value.feed(text, at, end)
        part = value.take_output()
        if value is self.arguments:
            self.fragment += part
        elif not self.is_certain or self._is_key:
            self._lexeme += part
        if value.is_bad:
            self.is_bad = True
        elif value.is_complete:
            self._value = None
            self._end(value)
        return at

    def _end(self, value: JsonValue) -> None:
        """A key or a value is complete."""
        if self._is_key:
            self._key, self._state = json.loads(self._lexeme), _COLON
            if self._is_strict and not self.is_certain and self._key not in _KEYS:
                self.is_bad = True
            return
        self._state = _COMMA_OR_CLOSE
        if self._key in _ARGUMENTS and value is not self.arguments:
            self._take_text(json.loads(self._lexeme))
            return
        is_name = self._key == "name" or (self._key == "function" and not self.name and self._lexeme[:1] == '"')
        if is_name and value is not self.arguments and not self.name:
            name = json.loads(self._lexeme)
            if name in self._names:
                self.name = name
            else:
                self.is_bad = True

    def _take_text(self, text: str | None) -> None:
        """The arguments are the text of an object, or null."""
        text = (text or "").strip(SPACE) or "{}"
        value = JsonValue(escapes_controls=True)
        end = value.feed(text, 0, len(text))
        is_unicode = not any("\ud800" <= c <= "\udfff" for c in text)
        if text[0] == "{" and end == len(text) and value.is_complete and is_unicode:
            self.arguments, self.fragment = value, value.take_output()
        else:
            self.is_bad = True
