"""Forced calls: the grammar of an answer that consists of calls, in the format of the model.

`tool_choice` of `required` or of a function makes such a constraint; arguments then match the tool's schema.  What the
grammar accepts, `call_parser.py` reads as calls of the request's tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from pipeline.protocol.messages import Constraint
from stages.gateway.tool_calls.tool_fields import ANY_TOOL, ToolUse

MAX_FORCED_CALLS = 16  # in an answer: a small model may repeat calls without end
# Between the tokens of JSON: at most a space, so that no output is filled with white space.
_JSON_OPTIONS = {"whitespace_pattern": "[ ]?", "lenient": False}


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
    "mistral": _Form("[TOOL_CALLS] [", "]", ", ", "arguments", is_list=True),
}


def call_constraint(use: ToolUse, definitions: Iterable[dict[str, Any]], field: str) -> Constraint:
    """Return the constraint of a request that forces calls. `definitions`: its tools in the form of the template."""
    form = _FORMS.get(use.format, _HERMES)
    tools = [tool["function"] for tool in definitions if use.forced in (ANY_TOOL, tool["function"]["name"])]
    rules = [_call_rule(index, tool, form) for index, tool in enumerate(tools)]
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    n_more = 0 if use.is_single or use.forced != ANY_TOOL else MAX_FORCED_CALLS - 1
    one = "call" if form.is_list else " ".join(filter(None, [_literal(form.opener), "call", _literal(form.closer)]))
    start = one + (f" ({_literal(form.separator)} {one}){{0,{n_more}}}" if n_more else "")
    if form.is_list:
        start = f"{_literal(form.opener)} {start} {_literal(form.closer)}"
    return Constraint("lark", "\n".join([f"start: {start}", f"call: {names}", *rules]), field)


def _call_rule(index: int, tool: dict[str, Any], form: _Form) -> str:
    head = f'{{"name": {json.dumps(tool["name"])}, {json.dumps(form.arguments)}: '
    schema = {**tool["parameters"], "type": "object", "x-guidance": _JSON_OPTIONS}
    text = json.dumps(schema, ensure_ascii=False)
    return f"call_{index}: {_literal(head)} arguments_{index} {_literal('}')}\narguments_{index}: %json {text}"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
