"""Chat templates: from messages to a prompt, with the Jinja template of the model file.

A model file is not trusted: its template runs in a sandbox with bounded time and memory (`template_budget.py`), with
the globals that published templates expect (`raise_exception`, `strftime_now`, `bos_token`, `eos_token`, `tools`).  A
template that cannot be compiled fails the model's chat requests only.  Messages are not trusted either: names of
control tokens in them are literal text (`template_marks.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec

from pipeline.errors import InvalidRequest
from stages.tokenizer.chat_messages import (
    RenderedChat,
    cut_at_end,
    fold_system_messages,
    mark_end,
    mark_written_arguments,
)
from stages.tokenizer.reasoning_format import reasoning_marks, thinking_switches
from stages.tokenizer.template_budget import RenderLimit
from stages.tokenizer.template_marks import Marking, TemplateMarks
from stages.tokenizer.template_selection import MarkedEnvironment
from stages.tokenizer.tool_format import tool_format

log = logging.getLogger("starling.tokenizer")

MAX_SOURCE = 256 << 10  # characters; published templates have up to 20 thousand
_SURROGATE = re.compile("[\ud800-\udfff]")
_PROBE_SYSTEM, _PROBE_USER = "probe of the system role", "probe of the user role"
_WIDE_DATE = re.compile(r"%[^A-Za-z%]*[0-9]{3}")


class _Rejected(Exception):
    """The template itself called `raise_exception`."""


def _raise(message: str) -> NoReturn:
    raise _Rejected(message)


class ChatTemplate:
    """A template. One that cannot be compiled raises `InvalidRequest` for each rendering.

    control_names: ids of the control tokens by name; in `source`, `bos_token` and `eos_token` they are marked.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = datetime.now,
        control_names: Mapping[str, int] | None = None,
    ) -> None:
        self._environment = MarkedEnvironment()
        self._environment.globals["raise_exception"] = _raise
        self._now = now
        self._template: jinja2.Template | None = None
        self.failure = ""  # why the template cannot be used
        self.tool_format = ""  # "": it has no place for tools
        self.reasoning: tuple[str, ...] = ()  # marks around the model's reasoning; empty: it has none
        self.thinking_switches: tuple[str, ...] = ()  # variables that turn it on and off
        try:
            if len(source) > MAX_SOURCE:
                raise ValueError(f"it has {len(source)} characters; at most {MAX_SOURCE} are allowed")
            self._marks = self._environment.marks = TemplateMarks(control_names or {})
            tree = Marking(self._marks, self._environment).visit(self._environment.parse_bounded(source))
            self.tool_format = tool_format(tree, source)
            self.reasoning, self.thinking_switches = reasoning_marks(source), thinking_switches(tree)
            code = self._environment.compile(tree)
            self._template = jinja2.Template.from_code(self._environment, code, dict(self._environment.globals))
            self._always = {"bos_token": self._marks.mark(bos_token), "eos_token": self._marks.mark(eos_token)}
        except Exception as error:  # of the parser (nesting), of Python's compiler (nested loops), ...
            self.failure = f"{type(error).__name__}: {error}"[:500]
            log.warning("the chat template cannot be compiled", extra={"reason": self.failure})
        self.lacks_system_role = self._template is not None and self._has_no_system_role()
        if self.lacks_system_role:
            log.info("the chat template has no system role; system messages are put into the user message beside them")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> RenderedChat:
        """Return the prompt. Raises `InvalidRequest` if the template fails or rejects the messages.

        variables: further variables of the template. Those that have a parameter here cannot be replaced.
        now: what `strftime_now` shows; None: the time of the template's clock.
        continue_final_message: the prompt ends where the content of the last message ends.
        """
        _check_all_unicode((messages, tools, variables, documents))
        messages, has_written = mark_written_arguments(messages)
        if self.lacks_system_role:
            messages = fold_system_messages(messages)
        if continue_final_message:
            messages = mark_end(messages)
        try:
            chat = self._render(messages, add_generation_prompt, tools, variables, now, documents)
        except InvalidRequest as error:
            if has_written:
                hint = "; the arguments of a tool call are not the text of a JSON object, which it may need"
                raise InvalidRequest(error.message + hint, error.param) from None
            raise
        if continue_final_message:
            chat = cut_at_end(chat)
        _check_unicode(chat.text)
        return chat

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        now: datetime | None,
        documents: Sequence[Mapping[str, Any]] | None,
    ) -> RenderedChat:
        if self._template is None:
            raise InvalidRequest(
                f"the model's chat template is not valid ({self.failure}); use /v1/completions", param="model"
            )
        values = {
            "strftime_now": lambda form: _format_date(now or self._now(), form),
            **(variables or {}),
            **self._always,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        environment = self._environment
        try:
            environment.start()
            pieces: list[str] = []
            for piece in self._template.root_render_func(self._template.new_context(values)):
                environment.charge(len(piece))
                pieces.append(piece)
            rendered = RenderedChat(*self._marks.remove(pieces))
        except _Rejected as rejection:
            raise InvalidRequest(
                f"the model's chat template rejects the messages: {self._unmarked(rejection)}", param="messages"
            ) from None
        except RenderLimit as limit:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages within its limits: {limit}", param="messages"
            ) from None
        except Exception as error:  # a template is a program and can fail in any way
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {type(error).__name__}: "
                f"{self._unmarked(error)}",
                param="messages",
            ) from None
        finally:
            environment.stop()
        return rendered

    def _has_no_system_role(self) -> bool:
        """Whether the template shows a user message and no system message before it."""
        user, system = {"role": "user", "content": _PROBE_USER}, {"role": "system", "content": _PROBE_SYSTEM}
        try:
            if _PROBE_USER not in self._render([user], True, None, None, None, None).text:
                return False
        except InvalidRequest:
            return False
        try:
            return _PROBE_SYSTEM not in self._render([system, user], True, None, None, None, None).text
        except InvalidRequest:
            return True

    def _unmarked(self, error: Exception) -> str:
        text = self._marks.remove([str(error)[:2000]])[0]
        return _SURROGATE.sub("\ufffd", text)  # a reply must be valid Unicode


def _format_date(now: datetime, form: str) -> str:
    if len(form) > 256 or _WIDE_DATE.search(form):
        raise RenderLimit("it formats a date with a field that is too wide")
    return now.strftime(form)


def _check_all_unicode(values: Any) -> None:
    """As `_check_unicode`, which is slower and names the character."""
    try:
        msgspec.msgpack.encode(values)
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError, RecursionError):
        _check_unicode(values)


def _check_unicode(value: Any) -> None:
    """Raises `InvalidRequest` for lone surrogates, which JSON can encode, UTF-8 cannot, and marks consist of."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"messages is not valid Unicode text: lone surrogate {value[error.start]!r} at "
                f"character {error.start}; send whole characters",
                param="messages",
            ) from None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_unicode(key)
            _check_unicode(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_unicode(item)
