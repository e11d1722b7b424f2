"""No order of delays, losses and deaths lets two lead, applies an old leader's write, or delivers an event twice."""

from __future__ import annotations

import itertools

import pytest

from stages.orchestrator.idle_models import IdleModels
from stages.orchestrator.router import Route
from tests.fleet.coordination_stores import Clock
from tests.orchestrator.agents import MODEL, engine, request, router, view
from tests.protocol.fleet_model import RULES, Leading, Streaming, search


def test_at_most_one_leads_and_writes_of_earlier_terms_are_refused() -> None:
    seen, way = search(Leading(RULES))
    assert not way, way
    assert seen > 5_000, "too few states are reachable"


def test_every_event_is_delivered_once() -> None:
    seen, way = search(Streaming(RULES))
    assert not way, way
    assert seen > 400, "too few states are reachable"


@pytest.mark.parametrize("rule", sorted(RULES))
def test_without_any_one_rule_an_invariant_breaks(rule: str) -> None:
    kind = Leading if rule in ("sent", "fence") else Streaming
    _, way = search(kind(RULES - {rule}))
    assert way, f"the rule {rule!r} is not needed, or not modelled"


def test_no_model_with_requests_is_chosen_to_leave() -> None:
    """All states of two models of an agent: what it computes, what waits, what was sent to it since it has said so."""
    names = (MODEL, "other")
    for states in itertools.product(itertools.product((0, 1), repeat=3), repeat=2):
        engines = [
            engine(name, running=running, vllm_queue_length=waiting)
            for name, (running, waiting, _) in zip(names, states)
        ]
        seen = view("a", *engines)
        routing = router(seen)
        for name, (_, _, sent) in zip(names, states):
            if sent:
                routing.begin(Route("a", "http://a", None, 0.0, 0, 0, ""), request(model=name))
        busy = {name for name, state in zip(names, states) if any(state)}
        leaving = routing.eviction.idle_model("a", ())
        assert leaving not in busy and bool(leaving) == (len(busy) < 2)
        clock = Clock()
        idle = IdleModels(clock, routing.under_way)
        idle.observe([seen])
        clock.now += 100
        idle.observe([seen])
        assert not busy & {one.model for one in idle.due([seen], 50, lambda agent_id: ())}
