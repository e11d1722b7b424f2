"""The grammars of answers whose calls are constrained, in the format of the model.

    forced            calls and nothing else (`tool_choice`: `required`, or a function), with arguments by the schemas
    beside a schema   either JSON that matches `response_format`, or calls
    strict            any text, in which calls of tools with `strict: true` match the tools' schemas

What a grammar accepts, `call_parser.py` reads as calls of the request's tools.  The arguments of tools without `strict`
may be any object, unless they are forced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from pipeline.api.closed_schema import closed_arguments
from pipeline.api.guidance_options import with_options
from pipeline.api.plain_schema import plain_schema
from pipeline.api.plain_times import plain_times
from pipeline.api.requests.tool_fields import ANY_TOOL, ToolUse
from pipeline.api.requests.tool_formats import format_of
from pipeline.api.tagged_unions import tagged_unions
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Constraint

MAX_FORCED_CALLS = 16  # in an answer: a small model may repeat calls without end
# Between the tokens of JSON: at most a space, so that no output is filled with white space.
_JSON_OPTIONS = {"whitespace_pattern": "[ ]?"}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class _Form(NamedTuple):
    """How the calls of an answer are written."""

    opener: str  # before each call, or before all of them if `is_list`
    closer: str
    separator: str
    arguments: str  # the key of the arguments
    is_list: bool


_HERMES = _Form("<tool_call>\n", "\n</tool_call>", "\n", "arguments", is_list=False)
_FORMS = {
    "hermes": _HERMES,
    "generic": _HERMES,
    "llama3": _Form("", "", "; ", "parameters", is_list=False),
    "granite": _Form("<|tool_call|>[", "]", ", ", "arguments", is_list=True),
    "mistral": _Form("[TOOL_CALLS] [", "]", ", ", "arguments", is_list=True),
}


def answer_constraint(use: ToolUse, tools: Iterable[dict[str, Any]], given: Constraint | None) -> Constraint | None:
    """Return the constraint of a request with tools; None: its answer may be any text.

    tools: in the form of the template.  given: the request's own, a JSON schema, which forced calls make pointless.
    Raises `InvalidRequest` where the model's format of calls leaves no choice between them and other text.
    """
    if use.forced:
        return call_constraint(use, tools, "tool_choice")
    field = given.field if given else use.strict_field
    if not field:
        return None
    form = _FORMS.get(use.format, _HERMES)
    if form.is_list:
        raise InvalidRequest(
            f"{field} constrains the answer, which this model supports beside tools only if tool_choice demands a "
            f"call; leave {field} out, or send tool_choice none or required",
            field,
        )
    calls, rules = _calls(use, list(tools), form)
    if given:
        schema = with_options(plain_times(json.loads(given.text)), _JSON_OPTIONS)
        start = [f"start: answer | {calls}", f"answer: %json {json.dumps(schema, ensure_ascii=False)}"]
    elif form.opener:
        start = _text_with_calls(use, form)
    else:  # calls begin the text, or it has none
        start = [f"start: {calls} | plain", f"plain: PLAIN | {_literal('')}", _plain_terminal(use)]
    return Constraint("lark", "\n".join([*start, *rules]), field)


def call_constraint(use: ToolUse, tools: Iterable[dict[str, Any]], field: str) -> Constraint:
    """Return the constraint of a request that forces calls. `tools`: in the form of the template."""
    chosen = [tool for tool in tools if use.forced in (ANY_TOOL, tool["function"]["name"])]
    calls, rules = _calls(use, chosen, _FORMS.get(use.format, _HERMES))
    return Constraint("lark", "\n".join([f"start: {calls}", *rules]), field)


def _calls(use: ToolUse, tools: list[dict[str, Any]], form: _Form) -> tuple[str, list[str]]:
    """The expression of one or more calls, and the rules that it needs."""
    functions = [tool["function"] for tool in tools]
    rules = [_call_rule(index, function, form, use) for index, function in enumerate(functions)]
    names = " | ".join(f"call_{index}" for index in range(len(functions)))
    n_more = 0 if use.is_single or use.forced not in ("", ANY_TOOL) else MAX_FORCED_CALLS - 1
    parts = ["call"] if form.is_list else [_literal(form.opener), "call", _literal(form.closer)]
    one = " ".join(part for part in parts if part != _literal(""))
    calls = one + (f" ({_literal(form.separator)} {one}){{0,{n_more}}}" if n_more else "")
    if form.is_list:
        calls = f"{_literal(form.opener)} {calls} {_literal(form.closer)}"
    return calls, [f"call: {names}", *rules]


def _call_rule(index: int, function: dict[str, Any], form: _Form, use: ToolUse) -> str:
    head = f'{{"name": {json.dumps(function["name"])}, {json.dumps(form.arguments)}: '
    schema = _ANY_OBJECT
    if use.forced or function["name"] in use.strict:
        arguments = closed_arguments(tagged_unions(plain_schema(function["parameters"])))
        schema = {**plain_times(arguments), "type": "object"}
    text = json.dumps(with_options(schema, _JSON_OPTIONS), ensure_ascii=False)
    return f"call_{index}: {_literal(head)} arguments_{index} {_literal('}')}\narguments_{index}: %json {text}"


def _text_with_calls(use: ToolUse, form: _Form) -> list[str]:
    """The rules of text that may have calls after an opener. Nothing else in the text begins a call."""
    opener = form.opener.rstrip("\n")
    one = f'before "\\n"? call {_literal(form.closer)}'
    start = f"start: {one} | plain" if use.is_single else f"start: ({one}){{0,{MAX_FORCED_CALLS}}} plain"
    others = [other for other in format_of(use.format).openers if other != opener]
    before = f"/(.|\\n)*{_escaped(opener)}/" + _without(others) + _bare_exclusion(use)
    return [
        start,
        f"plain: PLAIN | {_literal('')}",
        "before[lazy]: BEFORE",  # ends with the first opener
        f"BEFORE: {before}",
        _plain_terminal(use),
    ]


def _plain_terminal(use: ToolUse) -> str:
    return "PLAIN: /(.|\\n)+/" + _without(format_of(use.format).openers) + _bare_exclusion(use)


def _without(openers: Iterable[str]) -> str:
    found = "|".join(map(_escaped, openers))
    return f" & ~/(.|\\n)*({found})(.|\\n)*/" if found else ""


def _bare_exclusion(use: ToolUse) -> str:
    return " & ~/[ \\t\\r\\n]*(\\[[ \\t\\r\\n]*)?\\{(.|\\n)*/" if format_of(use.format).is_bare else ""


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "|[]{}()/.*+?\\" else c for c in text)


def _literal(text: str) -> str:
    return json.dumps(text)
