"""From what a request demands of a model's reasoning to variables of its chat template, and how an answer begins."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.api.requests.reasoning_fields import Reasoning, Thinking
from pipeline.errors import InvalidRequest
from pipeline.protocol import messages as m
from stages.gateway.requests.token_bytes import TokenBytes

OFF = ("none", "minimal")  # levels that mean no reasoning where a template has only on and off
LEVEL = "reasoning_effort"  # the variable that has a level; others are true or false
TAIL_TOKENS = 64  # at the end of a prompt: a mark may have many


def with_switches(variables: dict[str, Any], thinking: Thinking, described: m.Described) -> dict[str, Any]:
    """Return the template's variables with those that switch reasoning. Raises `InvalidRequest`."""
    effort, field, switches = thinking.effort, thinking.field, described.thinking_switches
    if not effort:
        return {LEVEL: thinking.level, **variables} if thinking.level and LEVEL in switches else variables
    if not described.reasoning and not switches:
        if effort == "none":
            return variables  # it never thinks
        raise InvalidRequest(f"{field} asks for reasoning, and the model's chat template has none; leave it out", field)
    if not switches:
        if not thinking.needs_switch:
            return variables  # it always thinks
        raise InvalidRequest(
            f"{field} is {effort}, and the model's chat template has no switch for its reasoning; leave it out", field
        )
    level = effort if effort in OFF else thinking.level or effort
    wanted = {name: level if name == LEVEL else effort not in OFF for name in switches}
    for name, value in wanted.items():
        if variables.get(name, value) != value:
            raise InvalidRequest(
                f"{field} is {effort}, and chat_template_kwargs.{name} says otherwise; leave one of them out", field
            )
    return {**variables, **wanted}


def reasoning_of(
    thinking: Thinking | msgspec.UnsetType,
    described: m.Described,
    prompt: Sequence[int],
    vocabulary: TokenBytes,
    last: str,
    *,
    continues: bool,
) -> Reasoning | msgspec.UnsetType:
    """Return how the reasoning in the answer to a chat is found; UNSET: its text is not divided.

    last: the content of the last message; `continues`: the answer continues it.
    """
    if len(described.reasoning) != 2 or (thinking and not thinking.is_split):
        return msgspec.UNSET
    begin, end = described.reasoning
    if continues:
        is_open = last.rfind(begin) > last.rfind(end)
    else:
        tail, last = _tail(prompt, vocabulary).rstrip(), last.rstrip()[-TAIL_TOKENS:]
        # A template that puts nothing after the last message does not begin reasoning, whatever the message says.
        is_open = tail.endswith(begin) and not (last.endswith(begin) and tail.endswith(last))
    if not thinking:
        return Reasoning(begin, end, is_open)
    return Reasoning(begin, end, is_open, is_shown=thinking.is_shown, budget=thinking.budget, end_ids=thinking.end_ids)


def prefix_of(
    reasoning: Reasoning, thinking: Thinking | msgspec.UnsetType, prompt: Sequence[int], vocabulary: TokenBytes
) -> m.ReasoningPrefix | None:
    """Return the reasoning that may stand before a constrained answer; None: the answer begins at once."""
    if not reasoning.is_open:
        is_off = thinking.effort in OFF if thinking else False
        if is_off or _tail(prompt, vocabulary).rstrip().endswith(reasoning.end):
            return None
    control = {vocabulary.get(token): token for token in vocabulary.control}
    begin, end = (control.get(mark, -1) for mark in reasoning.marks)
    return m.ReasoningPrefix(reasoning.begin, reasoning.end, begin, end, reasoning.is_open)


def _tail(prompt: Sequence[int], vocabulary: TokenBytes) -> str:
    """The end of a prompt as text."""
    return b"".join(map(vocabulary.get, array("i", prompt[-TAIL_TOKENS:]))).decode("utf-8", "replace")
