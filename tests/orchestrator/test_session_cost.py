"""A session stays with its KV pages unless moving is cheaper: properties of the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.orchestrator.score import Weights
from stages.orchestrator.session_cost import MOVE_S, Place, Size, cheapest, pages_s, terms_of

seconds = st.floats(0.0, 1000.0)
rates = st.floats(0.0, 0.01)
speeds = st.just(0.0) | st.floats(1e3, 1e10)
sizes = st.builds(Size, st.integers(0, 32 << 20), st.integers(0, 1 << 40), st.floats(0.0, 1.0))
gains = st.floats(0.0, 100.0)
weights = st.builds(Weights, st.just(1.0), *[st.floats(0.1, 10.0)] * 3)
homes = st.builds(Place, st.just("home"), seconds, rates, speeds)
others = st.lists(
    st.builds(Place, st.sampled_from("abcdef"), seconds, rates, speeds), max_size=5, unique_by=lambda one: one.agent_id
)


def cost(place: Place, size: Size, of: Weights, *, is_home: bool = False) -> float:
    return terms_of(place, size, is_home=is_home).total(of)


@given(homes, others, sizes, gains, weights, seconds)
def test_a_longer_queue_at_home_never_keeps_a_session_that_would_move(
    home: Place, places: list[Place], size: Size, gain: float, of: Weights, more: float
) -> None:
    chosen = cheapest(home, places, size, gain, of)
    busier = cheapest(home._replace(queue_s=home.queue_s + more), places, size, gain, of)
    assert busier == chosen or chosen == "home"


@given(homes, others, sizes, gains, weights, seconds, st.data())
def test_a_longer_queue_elsewhere_never_draws_a_session(
    home: Place, places: list[Place], size: Size, gain: float, of: Weights, more: float, data: st.DataObject
) -> None:
    if not places:
        assert cheapest(home, places, size, gain, of) == "home"
        return
    chosen = cheapest(home, places, size, gain, of)
    at = data.draw(st.integers(0, len(places) - 1))
    changed = [one._replace(queue_s=one.queue_s + more) if at == n else one for n, one in enumerate(places)]
    after = cheapest(home, changed, size, gain, of)
    assert after == chosen or after != places[at].agent_id


@given(homes, others, sizes, gains, weights)
def test_a_session_moves_for_enough_gain_alone_and_to_the_cheapest(
    home: Place, places: list[Place], size: Size, gain: float, of: Weights
) -> None:
    chosen = cheapest(home, places, size, gain, of)
    costs = {one.agent_id: cost(one, size, of) for one in places}
    at_home = cost(home, size, of, is_home=True)
    if chosen == "home":
        assert all(at_home - one < gain or at_home - one <= 0 for one in costs.values())
    else:
        assert costs[chosen] == min(costs.values())
        assert at_home - costs[chosen] >= gain and at_home > costs[chosen]


@given(homes, others, sizes, gains, weights, st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_agents(
    home: Place, places: list[Place], size: Size, gain: float, of: Weights, draw: object
) -> None:
    chosen = cheapest(home, places, size, gain, of)
    for turned in (places[::-1], sorted(places), places[1:] + places[:1]):
        assert cheapest(home, turned, size, gain, of) == chosen


@given(homes, others, sizes, gains, weights)
def test_the_same_queues_never_move_a_session_back(
    home: Place, places: list[Place], size: Size, gain: float, of: Weights
) -> None:
    chosen = cheapest(home, places, size, gain, of)
    if chosen != "home":
        there = next(one for one in places if one.agent_id == chosen)
        rest = [one for one in places if one.agent_id != chosen]
        assert cheapest(there, [home, *rest], size, gain, of) == chosen


@given(st.builds(Place, st.just("a"), seconds, rates, speeds), sizes)
def test_pages_cost_what_is_faster(place: Place, size: Size) -> None:
    computed = size.text_bytes * place.prefill_s_per_byte
    assert 0 <= pages_s(place, size) <= computed
    if place.bytes_per_s and size.page_bytes:
        # What cannot be sent is computed.
        least = (1 - size.sent_part) * computed
        assert least <= pages_s(place, size) <= size.page_bytes / place.bytes_per_s + least
    else:
        assert pages_s(place, size) == computed


def test_examples() -> None:
    home, idle = Place("home", 3.0, 0.001), Place("idle", 0.0, 0.001)
    # 1000 bytes are 1 s of computing: 3 s of queue cost more, with a gain of 1.95 s.
    assert cheapest(home, [idle], Size(1000), 1.0) == "idle"
    assert cheapest(home, [idle], Size(1000), 2.0) == "home"
    assert cheapest(home, [idle], Size(3000), 0.0) == "home"
    # 100 MB at 1 GB/s are 0.1 s.
    fast = idle._replace(bytes_per_s=1e9)
    assert cheapest(home, [fast], Size(3000, 100_000_000), 1.0) == "idle"
    # A tenth of them can be sent: 0.1 s, and 2.7 s of computing.
    assert pages_s(fast, Size(3000, 100_000_000, 0.1)) == pytest.approx(2.8)
    assert cheapest(home, [fast], Size(3000, 100_000_000, 0.1), 1.0) == "home"
    assert cheapest(home._replace(queue_s=MOVE_S), [idle], Size(0), 0.0) == "home"
