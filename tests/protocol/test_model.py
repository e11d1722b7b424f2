"""No order of deaths makes two processes write one page, and each rule is needed for that."""

import pytest

from tests.protocol.model import RULES, search


def test_no_reachable_state_breaks_an_invariant() -> None:
    seen, way = search()
    assert not way, way
    assert seen > 100_000, "too few states are reachable"


@pytest.mark.parametrize("rule", sorted(RULES))
def test_without_any_one_rule_an_invariant_breaks(rule: str) -> None:
    _, way = search(RULES - {rule})
    assert way, f"the rule {rule!r} is not needed, or not modelled"
