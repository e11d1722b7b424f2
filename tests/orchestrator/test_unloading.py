"""Models leave agents: after a time without requests, and when another one needs their memory. Never with requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.fleet import token
from tests.orchestrator.fleet import POLL_S, Fleet, TestAgent

ENGINE: Any = SimpleNamespace(port=1)  # no request is sent to it


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """An orchestrator that unloads what is idle at once, and an agent without models."""
    running = Fleet(tmp_path / "fleet", unload_idle_ms=1)
    yield running
    assert running.close() == 0, "".join(running.lines)


def add_agent(fleet: Fleet, *models: str) -> TestAgent:
    agent = fleet.agents["one"] = TestAgent("one", fleet.secret)
    agent.engines = dict.fromkeys(models, ENGINE)
    agent.may_load.set()
    return agent


def place(fleet: Fleet, model: str) -> None:
    answer = fleet.post("/v1/fleet/place", {"model": model, "replicas": 1}, token.authorization(fleet.secret))
    assert answer.status == 200, answer.body


def unloaded(fleet: Fleet) -> list[dict[str, Any]]:
    return [event for event in fleet.fleet_events() if event["kind"] == "unload"]


def test_idle_models_leave_and_others_stay(fleet: Fleet) -> None:
    agent = add_agent(fleet, "busy", "placed", "idle")
    agent.running["busy"] = 1
    fleet.write("placements/placed", b'{"model":"placed","replicas":1}')
    fleet.register(agent)
    fleet.wait(lambda state: [len(one["loaded_models"]) for one in state["agents"]] == [2])
    assert agent.unloads == ["idle"]
    assert [one["text"] for one in unloaded(fleet)] == ["it had no requests for fleet.orchestrator.unload_idle_ms"]
    # Its last request ends.
    agent.running.clear()
    fleet.wait(lambda state: [len(one["loaded_models"]) for one in state["agents"]] == [1])
    assert agent.unloads == ["idle", "busy"] and agent.loads == []


def test_models_of_an_agent_that_drains_stay_until_its_sessions_have_moved(fleet: Fleet) -> None:
    draining, moving, other = (TestAgent(name, fleet.secret) for name in ("draining", "moving", "other"))
    fleet.agents |= {one.name: one for one in (draining, moving, other)}
    for agent in fleet.agents.values():
        agent.engines = {"idle": ENGINE}
    moving.moving = 1
    fleet.write("cordons/draining", b'{"is_draining":true}')
    for agent in fleet.agents.values():
        fleet.register(agent)
    fleet.wait(lambda state: not state["agents"][-1]["loaded_models"])
    assert [agent.unloads for agent in (draining, moving, other)] == [[], [], ["idle"]]
    moving.moving = 0
    fleet.write("cordons/draining", None)
    fleet.wait(lambda state: not any(one["loaded_models"] for one in state["agents"]))


def test_idle_models_leave_for_one_that_needs_memory(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "fleet")
    agent = add_agent(fleet, "busy", "idle")
    agent.running["busy"] = 1
    agent.cold["cold"] = ENGINE
    agent.memory = 2
    fleet.register(agent)
    place(fleet, "cold")
    fleet.wait(
        lambda state: (
            [sorted(m["model_id"] for m in one["loaded_models"]) for one in state["agents"]] == [["busy", "cold"]]
        )
    )
    assert agent.loads == ["cold", "cold"] and agent.unloads == ["idle"]
    assert [one["text"] for one in unloaded(fleet)] == ["makes room for cold"]
    # Nothing idle is left: the load fails with the agent's reason.
    agent.running["cold"] = 1
    agent.cold["colder"] = ENGINE
    fleet.wait(
        lambda state: (
            any(one["id"] == "colder" for one in state["models"])
            and all(m["running"] for one in state["agents"] for m in one["loaded_models"])
        )
    )
    place(fleet, "colder")
    while not (failed := [one for one in fleet.fleet_events() if one["kind"] == "load-failed"]):
        time.sleep(POLL_S)
    assert "more memory" in failed[0]["text"] and agent.unloads == ["idle"]
    assert fleet.close() == 0, "".join(fleet.lines)


def test_an_idle_model_leaves_an_agent_that_is_short_of_memory(tmp_path: Path) -> None:
    """A model that is unloaded gives a half of the memory back; the busy one stays, though memory is short again."""
    fleet = Fleet(tmp_path / "fleet")
    agent = add_agent(fleet, "busy", "idle")
    agent.running["busy"] = 1
    agent.available = lambda: 0.5 if len(agent.engines) < 2 else 0.03
    fleet.register(agent)
    fleet.wait(lambda state: [len(one["loaded_models"]) for one in state["agents"]] == [1])
    assert agent.unloads == ["idle"] and [one["text"] for one in unloaded(fleet)] == ["its agent is short of memory"]
    agent.available = lambda: 0.01
    seen = agent.polls
    while agent.polls < seen + 40:
        assert agent.unloads == ["idle"]
        time.sleep(POLL_S)
    assert fleet.close() == 0, "".join(fleet.lines)


def loaded(state: dict[str, Any]) -> list[list[str]]:
    """The models of each agent."""
    return [sorted(one["model_id"] for one in agent["loaded_models"]) for agent in state["agents"]]


def kinds(fleet: Fleet) -> set[str]:
    """Of events."""
    return {event["kind"] for event in fleet.fleet_events()}


def test_of_two_placements_without_room_for_both_one_stays(tmp_path: Path) -> None:
    """No engine is stopped for the other one, which is started each time in vain."""
    fleet = Fleet(tmp_path / "fleet")
    agent = add_agent(fleet)
    agent.cold = {"one": ENGINE, "two": ENGINE}
    agent.memory = 1
    for model in agent.cold:
        fleet.write(f"placements/{model}", f'{{"model":"{model}","replicas":1}}'.encode())
    fleet.register(agent)
    # The second one is refused; else the first one leaves for it, and is loaded again.
    fleet.wait(lambda state: len(agent.loads) >= 2 and (agent.unloads or "load-failed" in kinds(fleet)))
    seen = agent.polls
    fleet.wait(lambda state: agent.polls >= seen + 40)
    assert agent.loads[:2] == ["one", "two"] and agent.unloads == [] and list(agent.engines) == ["one"]
    assert fleet.close() == 0, "".join(fleet.lines)


def test_an_idle_model_leaves_for_a_placed_one_and_a_placed_one_for_none(tmp_path: Path) -> None:
    """Of an agent that has as many models as it may have."""
    fleet = Fleet(tmp_path / "fleet")
    agent = add_agent(fleet, "idle")
    agent.cold = {"cold": ENGINE, "colder": ENGINE}
    agent.max_models = 1
    fleet.write("placements/cold", b'{"model":"cold","replicas":1}')
    fleet.register(agent)
    fleet.wait(lambda state: loaded(state) == [["cold"]] or agent.polls >= 200)
    assert agent.unloads == ["idle"] and list(agent.engines) == ["cold"]
    place(fleet, "colder")
    fleet.wait(lambda state: "placement-unmet" in kinds(fleet) or len(agent.unloads) > 1)
    assert agent.unloads == ["idle"] and list(agent.engines) == ["cold"]
    assert fleet.close() == 0, "".join(fleet.lines)


def test_a_placement_that_an_agent_refuses_hinders_nothing_else_there(fleet: Fleet) -> None:
    agent = add_agent(fleet, "idle")
    agent.cold["small"] = ENGINE
    agent.refused.add("big")
    fleet.write("placements/big", b'{"model":"big","replicas":1}')
    fleet.write("placements/small", b'{"model":"small","replicas":1}')
    fleet.register(agent)
    fleet.wait(lambda state: loaded(state) == [["small"]] or agent.polls >= 200)
    assert list(agent.engines) == ["small"]


def test_a_placement_that_an_agent_refuses_is_tried_at_another(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "fleet")
    small = add_agent(fleet)
    large = fleet.agents["two"] = TestAgent("two", fleet.secret)
    large.engines, large.cold = {"other": ENGINE}, {"big": ENGINE}
    large.may_load.set()
    small.cold["big"] = ENGINE  # the first choice: it has the file, too, and runs nothing
    small.refused.add("big")
    for agent in (small, large):
        fleet.register(agent)
    fleet.write("placements/big", b'{"model":"big","replicas":1}')
    fleet.wait(lambda state: loaded(state) == [[], ["big", "other"]] or small.polls >= 200)
    assert set(small.loads) == {"big"} and large.loads == ["big"]
    assert fleet.close() == 0, "".join(fleet.lines)
