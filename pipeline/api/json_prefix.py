"""Checks JSON while it is being generated: `JsonValue` takes a text in parts and knows where it stops being JSON.

The grammar is RFC 8259's, with bounds on depth and on numbers that let a client send the value back.  Models also write
line breaks and tabs inside strings as they are: on demand they are taken, and `take_output` has them escaped.  Of a
value that was cut off, `closed` makes a whole one.  Memory is bounded whatever the text.  Independent of tool calls.
"""

from __future__ import annotations

import json
import math
import re

from pipeline.api import json_body
from pipeline.api.json_body import MAX_DIGITS

MAX_DEPTH = json_body.MAX_DEPTH - 10  # arrays and objects; a message with the value has five around it

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # characters of a string that stand for themselves
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")

# What may come next.
_VALUE, _VALUE_OR_CLOSE, _KEY, _KEY_OR_CLOSE, _COLON, _COMMA_OR_CLOSE, _STRING, _ESCAPE = range(8)
_WORD, _NUMBER, _END = range(8, 11)

# The part of a number that its last character belongs to.
_MINUS, _ZERO, _WHOLE, _POINT, _FRACTION, _E, _E_SIGN, _EXPONENT = range(8)
_DIGIT = {_MINUS: _WHOLE, _WHOLE: _WHOLE, _POINT: _FRACTION, _FRACTION: _FRACTION} | dict.fromkeys(
    (_E, _E_SIGN, _EXPONENT), _EXPONENT
)  # the part after one more digit
_NUMBER_ENDS = frozenset((_ZERO, _WHOLE, _FRACTION, _EXPONENT))  # the parts that a number may end with


def _next_part(part: int, c: str) -> int | None:
    """The part of a number that `c` belongs to after `part`; None: it does not continue the number."""
    if c in "0123456789":
        return _ZERO if part == _MINUS and c == "0" else _DIGIT.get(part)
    if c == "." and part in (_ZERO, _WHOLE):
        return _POINT
    if c in "eE" and part in (_ZERO, _WHOLE, _FRACTION):
        return _E
    return _E_SIGN if c in "+-" and part == _E else None


class JsonValue:
    """One JSON value, from its first character to its last one."""

    __slots__ = (
        "_cut",
        "_escapes_controls",
        "_hex",
        "_is_key",
        "_length",
        "_most",
        "_output",
        "_part",
        "_stack",
        "_state",
        "_word",
        "_written",
        "is_bad",
    )

    def __init__(self, *, escapes_controls: bool = False, n_around: int = 0) -> None:
        """escapes_controls: control characters in strings are taken; `take_output` returns what is JSON instead.

        n_around: arrays and objects that the value lies in, for the bound on depth.
        """
        self.is_bad = False  # the next character does not continue the value
        self._state = _VALUE
        self._stack: list[str] = []  # the characters that close the open arrays and objects
        self._is_key = False  # the string that is being read is a name
        self._word = ""  # a literal or a number so far
        self._part = _MINUS  # of a number
        self._hex = 0  # digits that a \u escape still needs
        self._length = 0  # characters taken, as they are in the output
        self._cut = (0, "")  # the value can be cut at this length and closed by these characters
        self._escapes_controls = escapes_controls
        self._most = MAX_DEPTH - n_around  # open arrays and objects
        self._output: list[str] = []  # with `escapes_controls`: the text so far, as JSON
        self._written = 0  # the position in the current part up to which the output has it

    @property
    def is_complete(self) -> bool:
        """Whether the value has ended. A number ends with the character after it."""
        return self._state == _END

    def feed(self, text: str, at: int, end: int) -> int:
        """Take the characters `text[at:end]`. Returns the position after the last one that belongs to the value."""
        begin = self._written = at
        while at < end and self._state != _END and not self.is_bad:
            if self._state == _STRING:
                at = self._string(text, at, end, begin)
            elif self._state == _WORD:
                at += self._continue_word(text[at], at + 1 - begin)
            elif self._state == _NUMBER:
                at += self._continue_number(text[at], at - begin)
            elif self._take(text[at], at + 1 - begin):
                at += 1
        self._length += at - begin
        if self._escapes_controls:
            self._output.append(text[self._written : at])
        return at

    def take_output(self) -> str:
        """Return what was taken since the last time, as JSON. Only with `escapes_controls`."""
        output, self._output = "".join(self._output), []
        return output

    def closed(self, text: str) -> str:
        """Return `text`, all of the output, as a whole value: cut after its last whole member, and closed."""
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
            if len(self._stack) >= self._most:
                return False
            self._stack.append("}" if c == "{" else "]")
            self._state = _KEY_OR_CLOSE if c == "{" else _VALUE_OR_CLOSE
            self._cut = (self._length + taken, "".join(reversed(self._stack)))
            return True
        if c in _LITERALS:
            self._word, self._state = c, _WORD
            return True
        part = _MINUS if c == "-" else _next_part(_MINUS, c)
        if part is None:
            return False
        self._word, self._part, self._state = c, part, _NUMBER
        return True

    def _ended(self, taken: int) -> None:
        """A value has ended, `taken` characters after the beginning of this part."""
        self._state = _COMMA_OR_CLOSE if self._stack else _END
        self._cut = (self._length + taken, "".join(reversed(self._stack)))

    def _continue_word(self, c: str, taken: int) -> bool:
        word = self._word + c
        literal = _LITERALS[word[0]]
        if not literal.startswith(word):
            self.is_bad = True
            return False
        self._word = word
        if word == literal:
            self._ended(taken)
        return True

    def _continue_number(self, c: str, taken: int) -> bool:
        """Take a character of the number, or end the number: then the character belongs to what follows it."""
        part = _next_part(self._part, c)
        if part is not None and len(self._word) < MAX_DIGITS:
            self._part = part
            self._word += c
            return True
        is_ended = c in " \t\n\r,]}" and self._part in _NUMBER_ENDS
        if is_ended and math.isfinite(float(self._word)):
            self._ended(taken)
        else:
            self.is_bad = True
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
        elif self._escapes_controls:
            escape = json.dumps(c)[1:-1]
            self._output.append(text[self._written : at] + escape)
            self._written = at + 1
            self._length += len(escape) - 1
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
