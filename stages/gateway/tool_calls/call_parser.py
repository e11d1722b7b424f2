"""Finds tool calls in a text while it is being generated.

`CallParser` is a function of the text so far: however the text was cut into parts, the same items come out, apart from
where texts and arguments are cut.  Therefore a stream that is resumed, or generated again after a crash, has the same
calls.

A call comes out when it is certain (`call_object.py`), and its arguments as they are generated.  Until then its text is
held back, at most some `MAX_HEAD` characters; if it turns out not to be a call of one of the request's tools, it comes
out as text.  Control characters in strings, such as line breaks, come out escaped.  Where arguments stop being JSON the
call ends, and the rest is text.  White space beside a call is left
out, before it up to `MAX_SPACE` characters; a text without calls is unchanged.  With `is_single` the answer ends with
its first call if that is whole; after a broken one there are no other calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from pipeline.api.json_prefix import JsonValue
from pipeline.api.requests.tool_fields import ToolUse
from pipeline.api.requests.tool_formats import (
    ARGS,
    CALL_ID,
    CLOSERS,
    FUNCTION,
    TOOL_CALL,
    TOOL_CALLS,
    CallFormat,
    format_of,
)
from stages.gateway.tool_calls.call_object import MAX_HEAD, SPACE, CallObject
from stages.gateway.tool_calls.function_body import END_OF_FUNCTION, FunctionBody, overlap

MAX_SPACE = 256  # characters of white space that wait for what follows them
SEPARATORS = (",", ";")  # of the calls of an array, and of others
MAX_NAME = 128  # characters of a tool's name, and between the name and the arguments
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")
_ID = re.compile(r"[A-Za-z0-9_-]*")


class Text(NamedTuple):
    """Text that is not part of a call."""

    text: str


class CallBegin(NamedTuple):
    """A call of a tool."""

    name: str


class Arguments(NamedTuple):
    """More of the arguments of the call, JSON text."""

    text: str


class CallEnd(NamedTuple):
    """The arguments have ended. `closed`: all of them, as a whole JSON object even if they were cut off."""

    is_complete: bool
    closed: str


Item = Text | CallBegin | Arguments | CallEnd


def parser_of(tools: ToolUse) -> CallParser:
    """The parser of an answer of a request with these tools."""
    return CallParser(format_of(tools.format), frozenset(tools.names), tools.is_single, tools.types)


class CallParser:
    """The calls in one text. `names`: of the request's tools; `is_single`: what follows the first call is left out."""

    def __init__(
        self,
        call_format: CallFormat,
        names: Collection[str],
        is_single: bool = False,
        types: Iterable[tuple[str, str, str]] = (),
    ) -> None:
        self.n_calls = 0
        self._format = call_format
        self._names = names
        self._is_single = is_single
        self._items: list[Item] = []
        self._step: Callable[[str, int], int] = self._text
        self._held = ""  # text that no step has taken
        self._raw = ""  # text of a call that is not certain
        self._is_fresh = True  # there was only white space since the beginning, or since the last call
        self._opener = ""  # of the current call
        self._is_array = False  # the call is in an array
        self._call: CallObject | None = None
        self._types = types
        self._function = ""  # the tool of a call in Qwen3-Coder's form
        self._body: FunctionBody | None = None  # of that call
        self._arguments: JsonValue | FunctionBody | None = None  # of a certain call, until they end
        self._fragments: list[str] = []  # of its arguments

    @property
    def is_over(self) -> bool:
        """What follows is left out."""
        return self._step == self._leave_out

    def feed(self, text: str) -> list[Item]:
        """Return what has become certain with more of the text."""
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            before = self._step
            begin, at = at, self._step(text, at)
            if at == begin and self._step == before:
                break  # it needs more text
        self._held = text[at:]
        return self._take_items()

    def finish(self) -> list[Item]:
        """Return what was held back. The text has ended."""
        if self._arguments is not None:
            self._end_call()
        elif self._step != self._after_call:  # of a closing tag that was cut off nothing remains
            rest = self._raw + self._held
            self._add_text(rest[1:].lstrip(SPACE) if self._raw[:1] in SEPARATORS else rest)
        self._raw = self._held = ""
        return self._take_items()

    def _take_items(self) -> list[Item]:
        items, self._items = self._items, []
        return items

    def _add_text(self, text: str) -> None:
        if not text:
            return
        last = self._items[-1] if self._items else None
        if isinstance(last, Text):
            self._items[-1] = Text(last.text + text)
        else:
            self._items.append(Text(text))

    def _go(self, step: Callable[[str, int], int]) -> None:
        self._step = step

    # ---------------------------------------------------------------- outside of calls

    def _text(self, text: str, at: int) -> int:
        openers = self._format.openers
        if self._is_fresh:
            at, is_over = self._begin_fresh(text, at)
            if is_over:
                return at
        found = min(((where, o) for o in openers if (where := text.find(o, at)) >= 0), default=None)
        if found is not None:
            where, self._opener = found
            kept = _without_space(text, at, where)
            self._add_text(text[at:kept])
            self._raw = text[kept:where] + self._opener
            self._is_array = False
            self._go(self._after_opener)
            return where + len(self._opener)
        end = len(text) - overlap(text, at, openers)
        end = _without_space(text, at, end)
        self._add_text(text[at:end])
        return end

    def _begin_fresh(self, text: str, at: int) -> tuple[int, bool]:
        """Take white space after a call; hold it back at the beginning. False: other text follows."""
        begin = at
        while at < len(text) and text[at] in SPACE and (self.n_calls or at - begin < MAX_SPACE):
            at += 1
        if self.n_calls:
            begin = at
        if at == len(text):
            return begin, True
        if self._format.is_bare and text[at] == "{":
            self._raw, self._opener, self._is_array = text[begin:at], "", False
            self._begin_object()
            return at, True
        if self._format.is_bare and text[at] == "[":
            first = at + 1
            while first < len(text) and text[first] in SPACE and first - at < MAX_SPACE:
                first += 1
            if first == len(text):
                return begin, True
            if text[first] == "{":
                self._raw, self._opener, self._is_array = text[begin:first], "", True
                self._begin_object()
                return first, True
        self._is_fresh = False
        return begin, False

    # ---------------------------------------------------------------- before a call is certain

    def _after_opener(self, text: str, at: int) -> int:
        """After an opener, or where the next call of an array or list is to begin."""
        c = text[at]
        if self._opener == FUNCTION:
            self._go(self._function_name)
            return at
        if c in SPACE and len(self._raw) < MAX_HEAD:
            self._raw += c
            return at + 1
        if c == "{":
            self._begin_object()
            return at
        if c == "[" and not self._is_array and self._raw.strip(SPACE) == self._opener:
            self._is_array = True
            self._raw += c
            return at + 1
        if self._opener == TOOL_CALLS and not self._is_array and _NAME.match(c):
            self._go(self._name)
            return at
        if self._opener == TOOL_CALL and c == "<" and FUNCTION in self._format.openers:
            if text.startswith(FUNCTION, at):
                self._raw += FUNCTION
                self._go(self._function_name)
                return at + len(FUNCTION)
            if FUNCTION.startswith(text[at:]):
                return at
        self._fail()
        return at

    def _function_name(self, text: str, at: int) -> int:
        """`NAME>` of Qwen3-Coder's form."""
        end = text.find(">", at, at + MAX_NAME + 1)
        if end < 0 and len(text) - at <= MAX_NAME:
            return at
        name = text[at:end].strip(SPACE) if end >= 0 else ""
        if name not in self._names:
            self._fail()
            return at
        self._raw += text[at : end + 1]
        self._function = name
        self._body = FunctionBody({key: types for tool, key, types in self._types if tool == name})
        self._go(self._function_start)
        return end + 1

    def _function_start(self, text: str, at: int) -> int:
        """After `<function=NAME>`: parameters, or JSON, as other templates have it."""
        c = text[at]
        if c in SPACE:
            if len(self._raw) >= MAX_HEAD:
                self._fail()
                return at
            self._raw += c
            return at + 1
        if c == "{":
            self._begin_call(self._function, JsonValue(escapes_controls=True))
            self._go(self._plain_arguments)
        else:
            self._go(self._function_body)
        return at

    def _name(self, text: str, at: int) -> int:
        """`NAME[ARGS]{...}` or `NAME[CALL_ID]ID[ARGS]{...}`."""
        match = _NAME.match(text, at)
        end = match.end() if match is not None else at
        if end == len(text) and end - at < MAX_NAME:
            return at
        name, brace = text[at:end], text.find("{", end, end + MAX_NAME)
        between = text[end : brace if brace >= 0 else end + MAX_NAME]
        if name not in self._names or not _may_precede_arguments(between, is_whole=brace >= 0):
            self._fail()
            return at
        if brace < 0:
            return at
        self._begin_call(name, JsonValue(escapes_controls=True))
        self._go(self._plain_arguments)
        return brace

    def _fail(self) -> None:
        """It is no call: what was held back is text, and the next character is looked at again."""
        self._add_text(self._raw)
        self._raw, self._call, self._is_fresh = "", None, False
        self._go(self._text)

    def _begin_object(self) -> None:
        self._call = CallObject(self._names, is_strict=not self._opener)
        self._go(self._brace)

    def _brace(self, text: str, at: int) -> int:
        self._raw += "{"
        self._go(self._object)
        return at + 1

    # ---------------------------------------------------------------- calls

    def _object(self, text: str, at: int) -> int:
        call = self._call
        assert call is not None
        was_certain = self._arguments is not None or not self._raw
        end = call.feed(text, at)
        if not was_certain:
            self._raw += text[at:end]
            if call.is_certain and call.arguments is not None:
                self._begin_call(call.name, call.arguments)
            elif call.is_done and call.name and self._opener:
                call.fragment, call.arguments = "{}", _empty()  # a call without arguments
                self._begin_call(call.name, call.arguments)
            elif call.is_bad or call.is_done:
                self._fail()
                return end
            else:
                return end
        self._add_arguments(call.fragment)
        call.fragment = ""
        if call.is_bad or call.is_done:
            is_broken = self._arguments is not None  # otherwise only what follows the arguments is not as it should be
            self._call = None
            self._end_call_at(is_broken)
        return end

    def _plain_arguments(self, text: str, at: int) -> int:
        """Arguments that are not in an object."""
        value = self._arguments
        assert isinstance(value, JsonValue)
        end = value.feed(text, at, len(text))
        self._add_arguments(value.take_output())
        if value.is_complete or value.is_bad:
            self._end_call_at(value.is_bad)
        return end

    def _function_body(self, text: str, at: int) -> int:
        """Parameters of Qwen3-Coder's form. The first one, or the end, shows that it is a call."""
        body = self._body
        assert body is not None
        end = body.feed(text, at)
        fragment = body.take_output()
        if self._arguments is None:
            if not fragment:
                if body.is_bad:
                    self._fail()
                return end
            self._begin_call(self._function, body)
        self._add_arguments(fragment)
        if body.is_bad or body.is_complete:
            self._end_call_at(body.is_bad)
        return end

    def _begin_call(self, name: str, arguments: JsonValue | FunctionBody) -> None:
        self._raw, self._arguments, self._fragments = "", arguments, []
        self.n_calls += 1
        self._items.append(CallBegin(name))

    def _add_arguments(self, fragment: str) -> None:
        value = self._arguments
        if value is None:
            return
        if fragment:
            self._fragments.append(fragment)
            self._items.append(Arguments(fragment))
        if value.is_complete:
            self._end_call()

    def _end_call(self) -> None:
        value = self._arguments
        assert value is not None
        closed = value.closed("".join(self._fragments))
        self._items.append(CallEnd(value.is_complete, closed))
        self._arguments, self._fragments = None, []

    def _end_call_at(self, is_broken: bool) -> None:
        if self._arguments is not None:
            self._end_call()
        self._is_fresh = not is_broken
        if self._is_single:  # an answer whose call is broken goes on: it is no complete one
            self._go(self._rest if is_broken else self._leave_out)
        else:
            self._go(self._text if is_broken else self._after_call)

    def _leave_out(self, text: str, at: int) -> int:
        return len(text)

    def _rest(self, text: str, at: int) -> int:
        """Text that has no more calls."""
        self._add_text(text[at:])
        return len(text)

    def _after_call(self, text: str, at: int) -> int:
        """What belongs to the calls after one of them: white space, a comma, a bracket, a closing tag."""
        c = text[at]
        if c in SPACE:
            return at + 1
        if self._is_array and c in "],":
            if c == "]":
                self._is_array = False
            else:
                self._raw = c
                self._go(self._after_opener)
            return at + 1
        closer = CLOSERS.get(self._opener, "")
        if closer and text.startswith(closer, at):
            self._go(self._text)
            return at + len(closer)
        if closer and closer.startswith(text[at:]):
            return at
        if FUNCTION in self._format.openers:  # after arguments in JSON
            if text.startswith(END_OF_FUNCTION, at):
                return at + len(END_OF_FUNCTION)
            if END_OF_FUNCTION.startswith(text[at:]):
                return at
        if c == ";" and not closer:
            self._raw = c
            self._go(self._after_opener)
            return at + 1
        if c == "{" and not self._is_array:
            self._begin_object()
            return at
        self._go(self._text)
        return at


def _may_precede_arguments(text: str, *, is_whole: bool) -> bool:
    """Whether `text` is what stands between a name and its arguments; unless `is_whole`, the beginning of that."""
    if len(text) >= MAX_NAME:
        return False
    text = text.lstrip(SPACE)
    if text.startswith(CALL_ID):
        match = _ID.match(text, len(CALL_ID))
        text = text[match.end() if match is not None else 0 :].lstrip(SPACE)
    elif not is_whole and CALL_ID.startswith(text):
        return True
    if text.startswith(ARGS):
        text = text[len(ARGS) :].lstrip(SPACE)
    elif not is_whole and ARGS.startswith(text):
        return True
    return not text


def _empty() -> JsonValue:
    value = JsonValue()
    value.feed("{}", 0, 2)
    return value


def _without_space(text: str, begin: int, end: int) -> int:
    """Return the end of `text[begin:end]` without the white space at its end, at most `MAX_SPACE` characters."""
    first = max(begin, end - MAX_SPACE)
    return first + len(text[first:end].rstrip(SPACE))
