"""How a model writes tool calls, by its chat template: a name of the gateway's call formats.

A template that never reads `tools` has no place for them.  Formats differ in the markers that templates write around
the calls of earlier turns.
"""

from __future__ import annotations

from jinja2 import nodes

HERMES, QWEN3_CODER, LLAMA3, GRANITE = "hermes", "qwen3_coder", "llama3", "granite"
MISTRAL, GENERIC = "mistral", "generic"


def tool_format(tree: nodes.Template, source: str) -> str:
    """Return the format of a parsed template; "": it has no place for tools."""
    if not any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name)):
        return ""
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<|tool_call|>" in source:
        return GRANITE
    if "<function=" in source:
        return QWEN3_CODER
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or ('"parameters"' in source and "ipython" in source):
        return LLAMA3
    return GENERIC
