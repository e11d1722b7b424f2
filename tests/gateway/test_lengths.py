"""Length checks: each error names its bound, and the output budget is what the context leaves."""

from __future__ import annotations

import pytest

from pipeline.errors import InvalidRequest
from stages.gateway.admission.lengths import Bounds, longest_prompt, output_budget, too_long

OPEN = Bounds(100, 0, 0)


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "bounds", "budget"),
    [
        (10, None, OPEN, 90),
        (99, None, OPEN, 1),
        (10, None, Bounds(100, 0, 20), 20),
        (95, None, Bounds(100, 0, 20), 5),
        (10, None, Bounds(100, 0, 0, 33), 23),
        (10, None, Bounds(100, 0, 20, 33), 20),
        (33, None, Bounds(100, 0, 0, 33), 1),
        (10, 60, Bounds(100, 0, 0, 33), 60),
        (10, 90, OPEN, 90),
        (10, 20, Bounds(100, 10, 20), 20),
    ],
)
def test_output_budget(n_prompt: int, max_tokens: int | None, bounds: Bounds, budget: int) -> None:
    assert output_budget(n_prompt, max_tokens, bounds, "prompt", "max_tokens") == budget


def test_an_answer_may_end_with_the_context() -> None:
    def budget(n_prompt: int, max_tokens: int, bounds: Bounds = OPEN) -> int:
        return output_budget(n_prompt, max_tokens, bounds, "messages", "max_tokens", ends_at_context=True)

    assert (budget(10, 32_000), budget(99, 2), budget(10, 20)) == (90, 1, 20)
    in_arena = Bounds(100, 0, 0, 33)
    assert (budget(10, 32_000, in_arena), budget(40, 2, in_arena), budget(10, 20, in_arena)) == (23, 1, 20)
    with pytest.raises(InvalidRequest, match="at most 99"):
        budget(100, 1)
    with pytest.raises(InvalidRequest, match=r"scheduler\.max_output_tokens"):
        budget(10, 32_000, Bounds(100, 0, 20))


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "bounds", "param", "code", "message"),
    [
        (0, None, OPEN, "prompt", "INVALID_REQUEST", "at least one"),
        (100, None, OPEN, "prompt", "CONTEXT_LENGTH_EXCEEDED", "at most 99"),
        (11, None, Bounds(100, 10, 0), "prompt", "CONTEXT_LENGTH_EXCEEDED", "scheduler.max_prompt_tokens"),
        (10, 91, OPEN, "max_tokens", "CONTEXT_LENGTH_EXCEEDED", "together 101"),
        (10, 21, Bounds(100, 0, 20), "max_tokens", "INVALID_REQUEST", "scheduler.max_output_tokens"),
    ],
)
def test_lengths_over_a_bound_are_rejected(
    n_prompt: int, max_tokens: int | None, bounds: Bounds, param: str, code: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as rejected:
        output_budget(n_prompt, max_tokens, bounds, "prompt", "max_tokens")
    assert (rejected.value.param, rejected.value.code) == (param, code)


@pytest.mark.parametrize(
    "bounds", [OPEN, Bounds(100, 10, 0), Bounds(100, 99, 0), Bounds(100, 1000, 0), Bounds(2, 0, 0)]
)
def test_longest_prompt_is_the_enforced_bound(bounds: Bounds) -> None:
    longest = longest_prompt(bounds)
    assert output_budget(longest, None, bounds, "prompt", "max_tokens") > 0
    with pytest.raises(InvalidRequest) as exact:
        output_budget(longest + 1, None, bounds, "prompt", "max_tokens")
    assert str(exact.value) == str(too_long(longest + 1, bounds, "prompt"))
    at_least = too_long(longest + 7, bounds, "messages", is_exact=False)
    assert at_least.message.startswith(f"messages has at least {longest + 7} tokens; at most {longest} are allowed")
    assert (at_least.code, at_least.param) == ("CONTEXT_LENGTH_EXCEEDED", "messages")
    anthropic = too_long(longest + 7, bounds, "messages", is_exact=False, is_anthropic=True)
    assert anthropic.message.startswith(f"prompt is too long: {longest + 7} tokens > {longest} maximum (")
    assert f"messages has at least {longest + 7} tokens" in anthropic.message
