"""What the elected orchestrator does with agents, and that it ends with its term."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pipeline.coordination.election import Term
from pipeline.errors import ModelUnavailable
from stages.orchestrator.cold_loads import FAILED_S, ColdLoads
from stages.orchestrator.fleet_api import EventLog
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.leader import Leader
from tests.orchestrator.agents import MODEL, engine, router, view


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0)


async def settle() -> None:
    """Let every task do what it can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Elections:
    """One term after the other, each until the test ends it."""

    def __init__(self, log: list[str]) -> None:
        self.now = 0.0
        self.ends = asyncio.Event()
        self.may_lead = asyncio.Event()
        self.terms: list[Term] = []
        self._log = log

    async def campaign(self) -> Term:
        self._log.append("campaign")
        await self.may_lead.wait()
        self.may_lead.clear()
        self.terms.append(Term("leader", "lease", len(self.terms) + 1, 1000.0, self.now, lambda: self.now))
        return self.terms[-1]

    async def hold(self, term: Term) -> None:
        try:
            await self.ends.wait()
        finally:
            self.ends.clear()
            term.end()
            self._log.append("resigned")


class Bench:
    """A leader whose loads end when the test says so."""

    def __init__(self, *views: NodeView, **replicas: int) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.elections = Elections(self.log)
        self.events = EventLog(lambda: 0.0)
        self.loads: list[tuple[str, str]] = []
        self.ends: dict[str, asyncio.Future[None]] = {}
        self.awaits_answers = False
        self.cold = ColdLoads(self._load, 100, lambda: self.now)
        self.router = router(*views)
        self.wanted = replicas
        self.router.eviction.placements = self.wanted.items
        fleet = SimpleNamespace(is_leader=False, is_store_up=True, wanted=lambda: list(self.wanted.items()))
        unused: Any = None
        self.leader = Leader(
            self.elections,  # type: ignore[arg-type]
            "one",
            fleet,  # type: ignore[arg-type]
            SimpleNamespace(awaits_answers=lambda: self.awaits_answers),  # type: ignore[arg-type]
            self.router,
            self.cold,
            SimpleNamespace(unload_idle=unused),  # type: ignore[arg-type]
            lambda agent_id, model: True,
            self.events,
            0.0,
            lambda: self.now,
        )
        self.task = asyncio.ensure_future(self.leader.lead(self._ready))
        self.elections.may_lead.set()

    async def _ready(self) -> None:
        return

    async def _load(self, agent_id: str, model: str, evict: str | None) -> None:
        self.loads.append((agent_id, model))
        self.ends[agent_id] = asyncio.get_running_loop().create_future()
        try:
            await self.ends[agent_id]
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    async def look(self) -> None:
        """Let the leader look again, as it does after a while."""
        n_looks = len(self.log)
        self.leader.rounds = (lambda: self.log.append("look"),)
        self.elections.ends.set()
        await until(lambda: self.log[n_looks:].count("campaign"))
        self.elections.may_lead.set()
        await until(lambda: self.log[n_looks:].count("look"))
        await settle()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.cold.close()


async def test_a_load_for_a_placement_ends_with_the_term() -> None:
    bench = Bench(view("a"), demo=1)
    await until(lambda: bench.loads)
    assert bench.log == ["campaign"] and bench.loads == [("a", MODEL)]
    bench.elections.ends.set()  # the store has given the lead to another one
    await until(lambda: bench.log.count("campaign") == 2)
    assert bench.log == ["campaign", "resigned", "cancelled", "campaign"]
    assert not bench.cold.under_way and not bench.cold.failed_at(MODEL)
    await bench.close()


async def test_a_load_goes_on_after_the_term_if_a_request_waits_for_it() -> None:
    bench = Bench(view("a"), demo=1)
    await until(lambda: bench.loads)
    waiter = asyncio.ensure_future(bench.cold.wait(MODEL, "b"))
    await until(lambda: bench.cold.n_waiting)
    bench.elections.ends.set()
    await until(lambda: bench.log.count("campaign") == 2)
    bench.ends["a"].set_result(None)
    assert await waiter == "a" and "cancelled" not in bench.log
    await bench.close()


async def test_a_load_is_not_wanted_once_the_term_is_over_by_the_clock() -> None:
    """Before the leader has noticed: its process was stopped."""
    bench = Bench(view("a"), demo=1)
    await until(lambda: bench.loads)
    assert bench.cold.is_wanted(MODEL, "a")
    bench.elections.now = 1000.0
    assert not bench.cold.is_wanted(MODEL, "a") and bench.cold.is_wanted("other", "a")
    await bench.close()


async def test_a_load_ends_with_its_placement_unless_a_request_waits_for_it() -> None:
    bench = Bench(view("a"), view("b"), demo=1, other=1)
    await until(lambda: len(bench.loads) == 2)
    places = {model: agent_id for agent_id, model in bench.loads}
    waiter = asyncio.ensure_future(bench.cold.wait("other", places["other"]))
    await until(lambda: bench.cold.n_waiting)
    assert bench.cold.is_wanted(MODEL, places[MODEL])
    bench.wanted.clear()
    assert not bench.cold.is_wanted(MODEL, places[MODEL]) and bench.cold.is_wanted("other", places["other"])
    bench.leader._look(bench.elections.terms[-1])
    await until(lambda: "cancelled" in bench.log)
    assert [one.model for one in bench.cold.under_way] == ["other"] and not bench.cold.failed_at(MODEL)
    bench.ends[places["other"]].set_result(None)
    assert await waiter == places["other"]
    await bench.close()


async def test_an_agent_that_has_refused_a_model_is_free_for_others_and_is_asked_again_later() -> None:
    bench = Bench(view("a"), demo=1, other=1)
    await until(lambda: bench.loads)
    bench.ends["a"].set_exception(ModelUnavailable("it is too large"))
    await until(lambda: not bench.cold.under_way)
    await bench.look()
    await until(lambda: len(bench.loads) == 2)
    assert bench.loads == [("a", MODEL), ("a", "other")]
    bench.router.update_routing_table([view("a", engine("other"))])
    bench.ends["a"].set_result(None)
    await until(lambda: not bench.cold.under_way)
    bench.now = FAILED_S
    await bench.look()
    await until(lambda: len(bench.loads) == 3)
    assert bench.loads[-1] == ("a", MODEL)
    await bench.close()


async def test_a_load_that_a_request_has_begun_counts_for_a_placement() -> None:
    bench = Bench(view("a"), view("b"))
    await until(lambda: bench.log)
    waiter = asyncio.ensure_future(bench.cold.wait(MODEL, "b"))
    await until(lambda: bench.loads)
    bench.wanted[MODEL] = 1
    await bench.look()
    assert bench.loads == [("b", MODEL)]
    bench.ends["b"].set_result(None)
    await waiter
    await bench.close()


async def test_nothing_is_placed_while_agents_have_yet_to_answer() -> None:
    bench = Bench(view("a"), demo=1)
    bench.awaits_answers = True
    await bench.look()
    assert not bench.loads
    bench.awaits_answers = False
    await bench.look()
    await until(lambda: bench.loads)
    await bench.close()


async def test_a_placement_that_cannot_be_carried_out_is_reported_once() -> None:
    bench = Bench(view("a", engine("other"), max_models=1), other=1, demo=1)
    await bench.look()
    await bench.look()
    found = [(one.model, one.text) for one in bench.events.after(0) if one.kind == "placement-unmet"]
    assert [model for model, _ in found] == [MODEL] and found[0][1].startswith("0 of 1 replicas: ")
    assert not bench.loads
    await bench.close()


async def test_a_placement_that_waits_for_another_one_at_its_agent_is_not_reported() -> None:
    bench = Bench(view("a"), demo=1, other=1)
    await until(lambda: bench.loads)
    await bench.look()
    assert {*bench.loads} == {("a", MODEL)}
    assert not [one for one in bench.events.after(0) if one.kind == "placement-unmet"]
    await bench.close()
