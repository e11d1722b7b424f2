"""The fields of a request that concern reasoning, and `Reasoning`, what is kept of them for the answer."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.api.fields import Reader, Unsupported, flag, integer, invalid_value, object_schema, one_of, read_fields
from pipeline.api.generation_fields import MAX_OUTPUT_TOKENS
from pipeline.api.json_schema import Schema, any_of, described
from pipeline.errors import InvalidRequest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MIN_BUDGET = 1024  # tokens; as in Anthropic's API
BUDGET_FIELDS = ("thinking_token_budget", "reasoning_budget_tokens")  # of a chat: vLLM's and llama-server's


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request demands, until its prompt is rendered."""

    effort: str = ""  # one of `EFFORTS`; "": as the chat template does by default
    level: str = ""  # of a template that has levels, if it thinks; others do without; "": that of `effort`
    field: str = "reasoning_effort"  # for error messages
    needs_switch: bool = True  # a model that always thinks is not enough
    is_split: bool = True  # False: reasoning is part of the text
    is_shown: bool = True  # False: the answer leaves it out
    budget: int = 0  # tokens after which reasoning is ended; 0: it may take all
    end_ids: tuple[int, ...] = ()  # set at admission: the tokens that end it


class Reasoning(msgspec.Struct, array_like=True, frozen=True):
    """How the answer's reasoning is found. The journal stores it: fields are only appended."""

    begin: str  # mark before the reasoning
    end: str  # and after it
    is_open: bool = False  # the prompt ends with the first mark
    keeps_space: bool = False  # after the second mark: a constraint says what the answer is
    is_shown: bool = True
    budget: int = 0  # output tokens after which it is ended; 0: it may take all
    end_ids: tuple[int, ...] = ()  # the tokens of the second mark, which end it then

    @property
    def marks(self) -> tuple[bytes, bytes]:
        """The marks, which may be control tokens."""
        return self.begin.encode(), self.end.encode()


read_effort = one_of(*EFFORTS)

_ANY_BUDGET = integer(-1, MAX_OUTPUT_TOKENS, hint="-1: none")


@described({"type": "integer", "minimum": -1, "maximum": MAX_OUTPUT_TOKENS, "not": {"const": 0}})
def read_budget(value: Any, name: str) -> int:
    """Read a budget of a chat's reasoning; 0: none, which is -1 in the body."""
    budget: int = _ANY_BUDGET(value, name)
    if budget == 0:
        raise InvalidRequest(f'{name} is 0; reasoning_effort "none" switches reasoning off', name)
    return max(0, budget)


REASONING_FIELDS: dict[str, Reader] = {
    "reasoning_effort": read_effort,
    "include_reasoning": flag,  # vLLM's
    "reasoning_format": one_of("auto", "deepseek", "none"),  # llama-server's
    **dict.fromkeys(BUDGET_FIELDS, read_budget),
}


def thinking_of(values: dict[str, Any]) -> Thinking | msgspec.UnsetType:
    """Return what the values of `REASONING_FIELDS` demand; UNSET: nothing."""
    if not any(name in values for name in REASONING_FIELDS):
        return msgspec.UNSET
    given = [name for name in BUDGET_FIELDS if values.get(name)]
    budgets = {values[name] for name in given}
    if len(budgets) > 1:
        raise InvalidRequest(f"{' and '.join(given)} differ, and mean the same; give one", given[0])
    if given and values.get("reasoning_format") == "none":
        raise InvalidRequest(
            f"{given[0]} is given and reasoning_format is none, with which reasoning is not told from the answer; "
            f"leave one of them out",
            given[0],
        )
    return Thinking(
        effort=values.get("reasoning_effort", ""),
        is_split=values.get("reasoning_format") != "none",
        is_shown=values.get("include_reasoning", True),
        budget=max(budgets, default=0),
    )


# ------------------------------------------------------------------ Anthropic's API


_BUDGET = integer(MIN_BUDGET, MAX_OUTPUT_TOKENS)
_DISPLAY = one_of("summarized", "omitted")  # the first: as the model writes it
_THINKING: dict[str, Reader] = {
    "type": one_of("enabled", "disabled", "adaptive"),
    "budget_tokens": _BUDGET,
    "display": _DISPLAY,
}


def _thinking_schema(kind: str, *required: str) -> Schema:
    fields: dict[str, Reader] = {"type": one_of(kind), **({"budget_tokens": _BUDGET} if required else {})}
    return object_schema({**fields, "display": _DISPLAY}, required=("type", *required))


@described(any_of(_thinking_schema("enabled", "budget_tokens"), *map(_thinking_schema, ("disabled", "adaptive"))))
def read_thinking(value: Any, name: str) -> Thinking:
    """Read Anthropic's `thinking`."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object like {"type": "enabled", "budget_tokens": 4096}')
    required = ("type", "budget_tokens") if value.get("type") == "enabled" else ("type",)
    fields = read_fields(value, _THINKING, required=required, within=name)
    kind, is_shown = fields["type"], fields.get("display") != "omitted"
    if "budget_tokens" in fields and kind != "enabled":
        raise InvalidRequest(
            f'{name}.budget_tokens is given and {name}.type is {kind}, not "enabled"; leave it out',
            f"{name}.budget_tokens",
        )
    if kind == "disabled":
        return Thinking(effort="none", field=f"{name}.type")
    if kind == "adaptive":
        return Thinking(is_shown=is_shown)  # as the chat template does by default
    budget = fields["budget_tokens"]
    return Thinking(effort="medium", field=f"{name}.type", needs_switch=False, is_shown=is_shown, budget=budget)


def check_budget(value: Any, max_tokens: int) -> None:
    """Check the budget of a body's `thinking` against its `max_tokens`. Raises `InvalidRequest`."""
    budget = value.get("budget_tokens") if isinstance(value, dict) else None
    if isinstance(budget, int) and budget >= max_tokens:
        raise InvalidRequest(
            f"thinking.budget_tokens is {budget} and max_tokens is {max_tokens}, which counts the reasoning, too; "
            f"give a lower budget",
            "thinking.budget_tokens",
        )


# ------------------------------------------------------------------ OpenAI's Responses API


_REASONING: dict[str, Reader] = {"effort": read_effort}
_UNSUPPORTED_IN_REASONING = {
    name: Unsupported("auto", "detailed", hint="the reasoning itself is in the answer")
    for name in ("summary", "generate_summary")
}


@described(object_schema(_REASONING, unsupported=_UNSUPPORTED_IN_REASONING))
def read_reasoning(value: Any, name: str) -> Thinking:
    """Read `reasoning` of a request for a response."""
    if not isinstance(value, dict):
        raise invalid_value(name, value, 'an object like {"effort": "low"}')
    fields = read_fields(value, _REASONING, unsupported=_UNSUPPORTED_IN_REASONING, within=name)
    return Thinking(effort=fields.get("effort", ""), field=f"{name}.effort")
