"""How models write tool calls. The tokenizer names a model's format by its chat template (`Described.tool_format`).

hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>         Hermes, Qwen
qwen3_coder  <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, or JSON as hermes
llama3       {"name": ..., "parameters": {...}}, alone or after <|python_tag|>, several divided by `;`
granite      [{"name": ..., "arguments": {...}}, ...], alone or after <|tool_call|> or <tool_call>       Granite 3
mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]NAME[ARGS]{...}
generic      any of them: for templates of another kind, and for those that have no place for tools, as that of Phi-4
             mini, which writes <|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>
"""

from __future__ import annotations

from typing import NamedTuple

TOOL_CALL, PYTHON_TAG, TOOL_CALLS = "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]"
BAR_CALL, FUNCTION = "<|tool_call|>", "<function="
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
CLOSERS = {
    TOOL_CALL: "</tool_call>",
    FUNCTION: "</tool_call>",  # some models leave out the opening tag
    BAR_CALL: "<|/tool_call|>",
    PYTHON_TAG: "",
    TOOL_CALLS: "",
}


class CallFormat(NamedTuple):
    """What may begin a call in a model's text."""

    openers: tuple[str, ...]
    # Calls may also be JSON objects at the beginning of the text or after another call, or an array of them there.
    is_bare: bool = False


FORMATS = {
    "hermes": CallFormat((TOOL_CALL,)),
    "qwen3_coder": CallFormat((TOOL_CALL, FUNCTION)),
    "llama3": CallFormat((PYTHON_TAG,), is_bare=True),
    "mistral": CallFormat((TOOL_CALLS,)),
    "granite": CallFormat((BAR_CALL, TOOL_CALL), is_bare=True),
    "generic": CallFormat((TOOL_CALL, BAR_CALL, PYTHON_TAG, TOOL_CALLS), is_bare=True),
}
GENERIC = "generic"

# Control tokens that are part of a call: they are text in the answers of requests with tools.
MARKERS = frozenset(marker.encode() for marker in (*CLOSERS, *CLOSERS.values(), CALL_ID, ARGS) if marker)


def format_of(name: str) -> CallFormat:
    """Return the format of that name; `generic` for one that this release does not have."""
    return FORMATS.get(name, FORMATS[GENERIC])
