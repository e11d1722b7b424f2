"""Checks JSON while it is being generated: `JsonValue` takes a text in parts and knows where it stops being JSON.

The grammar is RFC 8259's, with bounds on depth and on the length of a number.  Of a value that was cut off, `closed`
makes a whole one.  Independent of tool calls.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64  # arrays and objects within each other
MAX_NUMBER = 64  # characters

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # characters of a string that stand for themselves
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGINNING = re.compile(r"-|-?(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")

# What may come next.
_VALUE, _VALUE_OR_CLOSE, _KEY, _KEY_OR_CLOSE, _COLON, _COMMA_OR_CLOSE, _STRING, _ESCAPE, _WORD, _END = range(10)


class JsonValue:
    """One JSON value, from its first character to its last one."""

    __slots__ = ("_cut", "_hex", "_is_key", "_length", "_stack", "_state", "_word", "is_bad")

    def __init__(self) -> None:
        self.is_bad = False  # the next character does not continue the value
        self._state = _VALUE
        self._stack: list[str] = []  # the characters that close the open arrays and objects
        self._is_key = False  # the string that is being read is a name
        self._word = ""  # a number or literal so far
        self._hex = 0  # digits that a \u escape still needs
        self._length = 0  # characters taken
        self._cut = (0, "")  # the value can be cut at this length and closed by these characters

    @property
    def is_complete(self) -> bool:
        """Whether the value has ended. A number ends with the character after it."""
        return self._state == _END

    def feed(self, text: str, at: int, end: int) -> int:
        """Take the characters `text[at:end]`. Returns the position after the last one that belongs to the value."""
        begin = at
        while at < end and self._state != _END and not self.is_bad:
            if self._state == _STRING:
                at = self._string(text, at, end, begin)
            elif self._state == _WORD:
                if not self._continue_word(text[at], at - begin):
                    continue  # the character belongs to what follows the word
                at += 1
            elif self._take(text[at], at + 1 - begin):
                at += 1
        self._length += at - begin
        return at

    def closed(self, text: str) -> str:
        """Return `text`, all that was taken, as a whole value: cut after its last whole member, and closed."""
        if self.is_complete:
            return text
        length, closing = self._cut
        return text[:length] + closing

    # ---------------------------------------------------------------- one character; False: it does not belong

    def _take(self, c: str, taken: int) -> bool:
        state = self._state
        if state == _ESCAPE:
            return self._escape(c)
        if c in _SPACE and (self._stack or state != _VALUE):
            return True
        if c == '"' and state in (_VALUE, _VALUE_OR_CLOSE, _KEY, _KEY_OR_CLOSE):
            self._is_key = state in (_KEY, _KEY_OR_CLOSE)
            self._state = _STRING
            return True
        if state in (_VALUE, _VALUE_OR_CLOSE) and self._begin_value(c, taken):
            return True
        if state == _COLON and c == ":":
            self._state = _VALUE
            return True
        if state == _COMMA_OR_CLOSE and c == ",":
            self._state = _KEY if self._stack[-1] == "}" else _VALUE
            return True
        if state in (_VALUE_OR_CLOSE, _KEY_OR_CLOSE, _COMMA_OR_CLOSE) and self._stack and c == self._stack[-1]:
            self._stack.pop()
            self._ended(taken)
            return True
        self.is_bad = True
        return False

    def _begin_value(self, c: str, taken: int) -> bool:
        if c in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return False
            self._stack.append("}" if c == "{" else "]")
            self._state = _KEY_OR_CLOSE if c == "{" else _VALUE_OR_CLOSE
            self._cut = (self._length + taken, "".join(reversed(self._stack)))
            return True
        if c in _LITERALS or c == "-" or c in "0123456789":
            self._word, self._state = c, _WORD
            return True
        return False

    def _ended(self, taken: int) -> None:
        """A value has ended, `taken` characters after the beginning of this part."""
        self._state = _COMMA_OR_CLOSE if self._stack else _END
        self._cut = (self._length + taken, "".join(reversed(self._stack)))

    def _continue_word(self, c: str, taken: int) -> bool:
        word = self._word + c
        literal = _LITERALS.get(word[0])
        if literal is not None:
            if not literal.startswith(word):
                self.is_bad = True
                return False
            self._word = word
            if word == literal:
                self._ended(taken + 1)
            return True
        if len(word) <= MAX_NUMBER and _NUMBER_BEGINNING.fullmatch(word):
            self._word = word
            return True
        if c not in " \t\n\r,]}" or not _NUMBER.fullmatch(self._word):
            self.is_bad = True
            return False
        self._ended(taken)
        return False

    def _string(self, text: str, at: int, end: int, begin: int) -> int:
        plain = _PLAIN.match(text, at, end)
        if plain is not None:
            at = plain.end()
            if at == end:
                return at
        c = text[at]
        if c == '"':
            if self._is_key:
                self._state = _COLON
            else:
                self._ended(at + 1 - begin)
        elif c == "\\":
            self._state = _ESCAPE
        else:
            self.is_bad = True
            return at
        return at + 1

    def _escape(self, c: str) -> bool:
        if self._hex:
            self._hex -= 1
            if c not in _HEX:
                self.is_bad = True
                return False
        elif c == "u":
            self._hex = 4
        elif c not in '"\\/bfnrt':
            self.is_bad = True
            return False
        if not self._hex:
            self._state = _STRING
        return True
