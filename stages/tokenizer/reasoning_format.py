"""How a model writes its reasoning, by its chat template: the marks around it, and the variables that switch it.

Templates of models that think name the end mark where they remove the reasoning of earlier turns, or in the prompt
itself.
"""

from __future__ import annotations

from jinja2 import nodes

# Before and after the reasoning; the first pair whose end is in the template counts.
MARKS = (
    ("<think>", "</think>"),  # Qwen3, QwQ, DeepSeek, GLM, SmolLM3, Hermes
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("Here is my thought process:", "Here is my response:"),  # Granite
)
# Variables with true and false, and one with a level.
SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")


def reasoning_marks(source: str) -> tuple[str, ...]:
    """Return the marks before and after the reasoning; (): the model has none."""
    return next((pair for pair in MARKS if pair[1] in source), ())


def thinking_switches(tree: nodes.Template) -> tuple[str, ...]:
    """Return those of `SWITCHES` that a parsed template reads and does not only set itself."""
    names = list(tree.find_all(nodes.Name))
    read = {name.name for name in names if name.ctx == "load"} - {name.name for name in names if name.ctx == "store"}
    # A variable with a default: {% if thinking is not defined %}{% set thinking = false %}{% endif %}
    tests = (test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined"))
    read |= {test.node.name for test in tests if isinstance(test.node, nodes.Name)}
    return tuple(name for name in SWITCHES if name in read)
