"""The registry: agents come, answer, fall silent, return as another incarnation, and leave."""

from __future__ import annotations

import asyncio

from pipeline.errors import StorageUnavailable
from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.fleet.records import AgentRecord
from stages.orchestrator import registry as registry_module
from stages.orchestrator.registry import Cordon, Registry
from tests.orchestrator.agents import engine, heartbeat


class Fleet:
    """Agents that answer polls, or do not."""

    def __init__(self) -> None:
        self.answers: dict[str, HeartbeatResponse] = {}
        self.now = 0.0
        self.registry = Registry(self.poll, lambda: self.now)

    async def poll(self, record: AgentRecord) -> HeartbeatResponse:
        if record.agent_id not in self.answers:
            raise StorageUnavailable(f"{record.url} does not answer")
        return self.answers[record.agent_id]

    async def add(self, agent_id: str, incarnation: str = "1") -> None:
        await self.registry.register_node(
            AgentRecord(agent_id=agent_id, url=f"http://{agent_id}", incarnation=incarnation)
        )


async def test_an_agent_counts_once_it_has_answered() -> None:
    fleet = Fleet()
    await fleet.add("a")
    assert [node.agent_id for node in await fleet.registry.discover_nodes()] == ["a"]
    assert fleet.registry.table() == []
    (found,) = await fleet.registry.health_check_nodes()
    assert found.health == "UNKNOWN" and "does not answer" in found.reason
    fleet.answers["a"] = heartbeat("a", engine())
    (found,) = await fleet.registry.health_check_nodes()
    assert found.health == "READY" and found.age_s == 0
    assert fleet.registry.table()[0].details is fleet.answers["a"]


async def test_a_silent_agent_is_suspect_with_its_last_answer() -> None:
    fleet = Fleet()
    await fleet.add("a")
    fleet.answers["a"] = heartbeat("a", engine())
    await fleet.registry.health_check_nodes()
    answer = fleet.answers.pop("a")
    fleet.now = 3.0
    (found,) = await fleet.registry.health_check_nodes()
    assert (found.health, found.age_s) == ("SUSPECT", 3.0)
    (seen,) = fleet.registry.table()
    assert (seen.health, seen.silent_s) == ("SUSPECT", 3.0) and seen.details is answer
    fleet.answers["a"] = answer
    await fleet.registry.check_node("a")
    (seen,) = fleet.registry.table()
    assert (seen.health, seen.silent_s) == ("READY", 0.0)
    fleet.registry.suspect("a", "a stream broke")
    assert fleet.registry.table()[0].health == "SUSPECT"


async def test_an_answer_that_another_has_overtaken_changes_nothing() -> None:
    """Else a model that has been unloaded would be seen again, and unloaded again."""
    may_answer, asked = asyncio.Event(), asyncio.Event()
    before, after = heartbeat("a", engine()), heartbeat("a")

    async def poll(record: AgentRecord) -> HeartbeatResponse:
        if asked.is_set():
            return after
        asked.set()
        await may_answer.wait()
        return before

    registry = Registry(poll, lambda: 0.0)
    await registry.register_node(AgentRecord(agent_id="a", url="http://a", incarnation="1"))
    slow = asyncio.ensure_future(registry.check_node("a"))
    await asked.wait()
    await registry.check_node("a")
    may_answer.set()
    await slow
    assert registry.table()[0].details is after


async def test_an_agent_of_another_version_gets_no_requests_and_is_named() -> None:
    fleet = Fleet()
    for name, version in (("new", 2), ("same", 1)):
        await fleet.add(name)
        fleet.answers[name] = heartbeat(name, engine(), version=version)
    new, same = await fleet.registry.health_check_nodes()
    assert (new.health, same.health) == ("UNKNOWN", "READY")
    assert all(part in new.reason for part in ("http://new", "version 2", "version 1", "same release"))
    assert [one.agent_id for one in fleet.registry.table()] == ["same"]


async def test_a_new_incarnation_starts_without_details() -> None:
    fleet = Fleet()
    await fleet.add("a")
    fleet.answers["a"] = heartbeat("a", engine())
    await fleet.registry.health_check_nodes()
    await fleet.add("a", "2")
    (found,) = await fleet.registry.health_check_nodes()
    assert found.health == "UNKNOWN" and "incarnation 1" in found.reason
    assert fleet.registry.table() == []
    fleet.answers["a"] = heartbeat("a", incarnation="2")
    await fleet.registry.health_check_nodes()
    assert fleet.registry.table()[0].details.loaded_models == ()
    assert fleet.registry.remove_node("a") and not fleet.registry.remove_node("a")
    assert fleet.registry.table() == []


async def test_cordons_keep_new_work_away() -> None:
    fleet = Fleet()
    for name in "abc":
        await fleet.add(name)
        fleet.answers[name] = heartbeat(name)
    await fleet.registry.health_check_nodes()
    fleet.registry.set_cordons({"a": Cordon(), "b": Cordon(is_draining=True)})
    assert [(one.may_start, one.reason) for one in fleet.registry.table()] == [
        (False, "cordoned"),
        (False, "draining"),
        (True, ""),
    ]


async def test_each_drain_of_an_agent_is_told_from_the_one_before() -> None:
    fleet = Fleet()
    await fleet.add("a")
    fleet.answers["a"] = heartbeat("a")
    await fleet.registry.health_check_nodes()
    draining, begun = {"a": Cordon(is_draining=True)}, []
    for cordons in (draining, {**draining, "b": Cordon()}, {}, draining):
        fleet.now += 1.0
        fleet.registry.set_cordons(cordons)
        begun += [one.draining_since for one in fleet.registry.table() if one.is_draining]
    assert begun[0] == begun[1] < begun[2]


async def test_an_agent_that_drains_is_empty_when_it_has_named_no_session_for_some_time() -> None:
    fleet = Fleet()
    await fleet.add("a")
    fleet.registry.set_cordons({"a": Cordon(is_draining=True)})
    answers = [
        heartbeat("a", engine(sessions=1)),
        heartbeat("a", engine(sessions_moving=1)),
        heartbeat("a", engine(model_state="LOADING_TO_GPU")),  # it has not counted them yet
        heartbeat("a", engine()),
    ]
    for answer in answers:
        fleet.answers["a"] = answer
        await fleet.registry.check_node("a")
        fleet.now += registry_module.REPORTED_S
        assert not fleet.registry.is_empty("a")
    await fleet.registry.check_node("a")
    assert fleet.registry.is_empty("a")
    # What it had is elsewhere, also when it has left; a successor is another one.
    fleet.registry.remove_node("a")
    assert fleet.registry.has_emptied("a")
    await fleet.add("a")
    assert not fleet.registry.has_emptied("a")
    fleet.answers["a"] = heartbeat("a", engine(sessions=1))
    await fleet.registry.check_node("a")
    fleet.registry.remove_node("a")
    assert not fleet.registry.has_emptied("a")


async def test_an_agent_that_has_had_requests_lately_is_not_idle() -> None:
    fleet = Fleet()
    await fleet.add("a")
    fleet.registry.set_cordons({"a": Cordon(is_draining=True)})
    for answer in (engine(), engine(running=1), engine(vllm_queue_length=1), engine()):
        fleet.answers["a"] = heartbeat("a", answer)
        await fleet.registry.check_node("a")
        assert not fleet.registry.is_idle("a")
        fleet.now += registry_module.REPORTED_S
    await fleet.registry.check_node("a")
    assert fleet.registry.is_idle("a") and fleet.registry.is_empty("a")


async def test_the_first_answer_of_an_agent_is_awaited_for_some_time() -> None:
    fleet = Fleet()
    assert not fleet.registry.awaits_answers()
    for name in "ab":
        await fleet.add(name)
    fleet.answers["a"] = heartbeat("a", engine())
    await fleet.registry.health_check_nodes()
    fleet.now += registry_module.UNANSWERED_S - 0.1
    assert fleet.registry.awaits_answers()
    fleet.now += 0.2
    assert not fleet.registry.awaits_answers()
    await fleet.add("b", "2")
    assert fleet.registry.awaits_answers()
    fleet.answers["b"] = heartbeat("b", incarnation="2")
    await fleet.registry.health_check_nodes()
    assert not fleet.registry.awaits_answers()


async def test_the_number_of_agents_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(registry_module, "MAX_AGENTS", 2)
    fleet = Fleet()
    for name in "abc":
        await fleet.add(name)
    assert len(await fleet.registry.discover_nodes()) == 2 and fleet.registry.refused == 1
