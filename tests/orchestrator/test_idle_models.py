"""Which models have been idle for long enough to leave."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from stages.orchestrator.idle_models import IdleModels, Loaded
from stages.orchestrator.memory_pressure import MemoryPressure
from tests.orchestrator.agents import engine, view

IDLE_S = 60.0


class World:
    """Models that are observed, with a clock and the requests of this orchestrator."""

    def __init__(self) -> None:
        self.now = 0.0
        self.under_way: Counter[tuple[str, str]] = Counter()
        self.idle = IdleModels(lambda: self.now, lambda agent, model: self.under_way[agent, model])

    def due(self, now: float, *views: Any, kept: tuple[str, ...] = ()) -> list[Loaded]:
        self.now = now
        self.idle.observe(views)
        return self.idle.due(views, IDLE_S, lambda agent_id: kept)


def test_a_model_is_due_after_the_time_and_not_before() -> None:
    world, agent = World(), view("a", engine("other"))
    assert world.due(0.0, agent) == [] == world.due(59.9, agent)
    assert world.due(60.0, agent) == [Loaded("a", "other")]
    assert world.due(60.0, agent, kept=("other",)) == []
    assert world.due(61.0, view("a", engine("other"), health="SUSPECT")) == []


@pytest.mark.parametrize(
    "used", [{"running": 1}, {"vllm_queue_length": 1}, {"requests": 7}, {"engine_incarnation": "2"}]
)
def test_its_time_begins_again_with_its_last_work(used: dict[str, Any]) -> None:
    world, agent = World(), view("a", engine("other"))
    world.due(0.0, agent)
    world.due(50.0, view("a", engine("other", **used)))
    later = view(
        "a",
        engine("other", **{name: value for name, value in used.items() if name in ("requests", "engine_incarnation")}),
    )
    assert world.due(109.9, later) == []
    assert world.due(111.0 if "running" in used or "vllm_queue_length" in used else 110.0, later) == [
        Loaded("a", "other")
    ]


def test_requests_of_this_orchestrator_count_before_the_agent_reports_them() -> None:
    world, agent = World(), view("a", engine("other"))
    world.due(0.0, agent)
    world.under_way["a", "other"] = 1
    assert world.due(100.0, agent) == []
    world.under_way.clear()
    assert world.due(159.0, agent) == [] and world.due(160.0, agent) == [Loaded("a", "other")]


def test_one_model_leaves_an_agent_at_a_time_the_longest_idle_first() -> None:
    world = World()
    world.due(0.0, view("a", engine("other")))
    agents = view("a", engine("other"), engine("demo")), view("b", engine("demo"))
    world.due(10.0, *agents)
    assert world.due(100.0, *agents) == [Loaded("a", "other"), Loaded("b", "demo")]


def test_models_that_are_not_ready_are_forgotten() -> None:
    world, agent = World(), view("a", engine("other"))
    world.due(0.0, agent)
    assert world.due(100.0, view("a", engine("other", model_state="LOADING_TO_GPU"))) == []
    assert world.due(120.0, agent) == []


class Short(World):
    """An agent whose models have been idle for a minute, and answers with their available memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pressure = MemoryPressure(self.idle)
        self.idle.observe([view("a", engine("other"))])
        self.now = 1.0
        self.idle.observe([view("a", engine("other"), engine("demo"))])
        self.now = IDLE_S

    def answer(self, available: float, *engines: Any, kept: tuple[str, ...] = (), **fields: Any) -> list[str]:
        """The models that leave after an answer."""
        answered = view("a", *(engines or (engine("other"), engine("demo"))), memory_available=available, **fields)
        self.idle.observe([answered])
        found = [one.model for one in self.pressure.due([answered], lambda agent_id: kept)]
        assert self.pressure.due([answered], lambda agent_id: kept) == []  # the same answer
        return found


def test_a_model_leaves_after_two_answers_without_memory_and_one_for_each_answer() -> None:
    short = Short()
    assert [short.answer(part) for part in (0.04, 0.06, 0.04, 0.049)] == [[], [], [], ["other"]]
    # One has left; what it had is not yet enough, but for HIGH.
    assert short.answer(0.07, engine("demo")) == ["demo"]
    assert short.answer(0.08, engine("demo")) == []
    assert short.answer(0.06, engine("demo")) == [] == short.answer(0.04, engine("demo"))
    assert short.answer(0.01, engine("demo")) == ["demo"]


def test_what_is_placed_or_used_does_not_leave_for_memory() -> None:
    short = Short()
    short.answer(0.01)
    assert short.answer(0.01, kept=("other",)) == ["demo"]
    assert short.answer(0.01, kept=("other", "demo")) == []
    short.under_way["a", "other"] = 1
    assert short.answer(0.01, engine("other"), engine("demo", running=1)) == []
    # Nor does one that was used in the last seconds, or of an agent that does not answer.
    short.under_way.clear()
    short.now += 9.0
    assert short.answer(0.01) == [] == short.answer(0.01, health="SUSPECT")
    short.now += 1.0
    assert short.answer(0.01) == ["demo"]


def test_agents_of_older_releases_are_not_short_of_memory() -> None:
    short, old = Short(), view("a", engine("other"))
    short.idle.observe([old])
    assert short.pressure.due([old], lambda agent_id: ()) == [] == short.answer(1.0)
