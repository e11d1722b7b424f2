"""Which sequence is preempted when pages run out: one order of all, in which each keeps its place."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from stages.scheduler.core.page_supply import victim
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.policy.tenant import Tenant

from .peers import submission

TENANTS = {name: Tenant(name, 1.0) for name in "tuv"}
SEQUENCES = st.lists(
    st.tuples(st.sampled_from("tuv"), st.integers(0, 60), st.sampled_from([-100, 0, 1, 100])), min_size=2, max_size=7
)


def sequences(*submitted: tuple[str, float, int]) -> list[SequenceState]:
    """`submitted`: tenant, time in s and priority of each."""
    return [
        SequenceState(submission(str(i), [1], 4, tenant=name, priority=priority), b"", TENANTS[name], when, i)
        for i, (name, when, priority) in enumerate(sorted(submitted, key=lambda one: one[1]))
    ]


def test_a_late_sequence_with_a_priority_takes_the_place_of_its_tenants_first_one() -> None:
    a, b, c = live = sequences(("t", 0, 0), ("u", 10, 0), ("t", 20, 100))
    assert [victim(pair, live) for pair in ([a, b], [b, c], [a, c])] == [a, b, a]


@given(SEQUENCES)
def test_whichever_hold_pages_their_order_is_the_same(submitted: list[tuple[str, float, int]]) -> None:
    live = sequences(*submitted)
    left, order = list(live), []
    while left:
        order.append(victim(left, live))
        left.remove(order[-1])
    for later, earlier in combinations(order, 2):
        assert victim([earlier, later], live) is later
        if later.tenant is earlier.tenant:
            assert later.key > earlier.key


@given(SEQUENCES)
def test_priorities_are_no_matter_between_tenants(submitted: list[tuple[str, float, int]]) -> None:
    """The tenants of the victims, one after the other, are as if all priorities were equal."""

    def tenants(live: list[SequenceState]) -> list[str]:
        left, found = list(live), []
        while left:
            left.remove(one := victim(left, live))
            found.append(one.tenant.name)
        return found

    live = sequences(*submitted)
    plain = sequences(*((one.tenant.name, one.arrived, 0) for one in live))
    assert tenants(live) == tenants(plain)
