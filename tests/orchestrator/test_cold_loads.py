"""Cold loads: one for each model, bounded waiting, errors for all who wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import resolve
from pipeline.errors import Conflict, ModelUnavailable, Overloaded
from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.fleet.records import AgentRecord
from stages.orchestrator import route_finder
from stages.orchestrator.cold_loads import FAILED_S
from stages.orchestrator.fleet_api import EventLog, FleetApi
from stages.orchestrator.forward import Bounds, Forward, StillLoading, Tries
from stages.orchestrator.registry import Registry
from stages.orchestrator.relay import Relay
from stages.orchestrator.router import Published
from stages.orchestrator.stage import OrchestratorStage
from tests.orchestrator.agents import MODEL, cached, engine, heartbeat, request, router, view
from tests.orchestrator.loader import Full, Loader, lost_stream
from tests.orchestrator.loopback_engine import Clock, WatchedClient


async def test_many_requests_cause_one_load() -> None:
    loader = Loader()
    waiters = [loader.wait("m", f"agent-{number}") for number in range(40)]
    await loader.begun("m")
    assert loader.calls == [("agent-0", "m", "")] and loader.cold.n_waiting == 40
    loader.ends["m"].set_result(None)
    assert await asyncio.gather(*waiters) == ["agent-0"] * 40
    assert loader.cold.n_waiting == 0 and not loader.cold.under_way


async def test_all_who_wait_get_the_error_and_the_next_one_loads_again() -> None:
    loader = Loader()
    waiters = [loader.wait("m") for _ in range(3)]
    await loader.begun("m")
    loader.ends.pop("m").set_exception(ModelUnavailable("no room"))
    found = await asyncio.gather(*waiters, return_exceptions=True)
    assert [str(one) for one in found] == ["no room"] * 3
    again = loader.wait("m")
    await loader.begun("m")
    assert (loader.cold.started, loader.cold.done, loader.cold.failed) == (2, 0, 1)  # one is under way
    loader.ends["m"].set_result(None)
    await again
    assert (loader.cold.started, loader.cold.done, loader.cold.failed) == (2, 1, 1)


async def test_waiting_is_bounded_with_an_estimate() -> None:
    loader = Loader(4)
    waiters = [loader.wait("m"), loader.wait("m")]
    await loader.begun("m")
    with pytest.raises(Overloaded) as refused:
        await loader.cold.wait("m", "a")
    assert refused.value.retry_after_s == 7.0
    assert refused.value.message == (
        "2 requests wait for model 'm', and at most 2 may (for one model, fleet.orchestrator.max_waiting = 4); "
        "try again in 7 s"
    )
    waiters += [loader.wait("n"), loader.wait("n")]
    await loader.begun("n")
    with pytest.raises(Overloaded) as refused:
        await loader.cold.wait("o", "a")
    assert refused.value.message == (
        "4 requests wait for models that are loading, and at most 4 may (for all models, "
        "fleet.orchestrator.max_waiting = 4); try again in 1 s"
    )
    for model in "mn":
        loader.ends[model].set_result(None)
    await asyncio.gather(*waiters)


async def test_the_load_of_a_placement_has_the_estimate_of_those_who_join_it() -> None:
    loader = Loader(2)
    placing = asyncio.ensure_future(loader.cold.place("m", "a", lambda: True))
    await loader.begun("m")
    loader.now = 10.0
    waiter = loader.wait("m")
    while not loader.cold.n_waiting:
        await asyncio.sleep(0)
    loader.now = 12.0
    with pytest.raises(Overloaded, match="try again in 5 s") as refused:
        await loader.wait("m")
    assert refused.value.retry_after_s == 5.0
    loader.ends["m"].set_result(None)
    await asyncio.gather(placing, waiter)


async def test_a_request_that_an_engine_had_waits_beyond_the_bound() -> None:
    loader = Loader(1)
    waiter = loader.wait("m")
    await loader.begun("m")
    admitted = asyncio.ensure_future(loader.cold.wait("m", "b", is_admitted=True))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await loader.cold.wait("m", "b")
    assert loader.cold.n_waiting == 2
    loader.ends["m"].set_result(None)
    assert await asyncio.gather(waiter, admitted) == ["a", "a"]


async def test_a_tenant_leaves_room_for_others() -> None:
    loader = Loader(8)  # of which 4 for one model
    loader.cold.share_of = lambda tenant, most: most - most // 4
    waiters = [loader.wait("m", tenant="one") for _ in range(3)]
    await loader.begun("m")
    own = "3 of your requests wait for model 'm', and at most 3 may \\(for one model, of one tenant, "
    with pytest.raises(Overloaded, match=own):
        await loader.cold.wait("m", "a", tenant="one")
    waiters += [loader.wait("m", tenant="two"), *(loader.wait("n", tenant="one") for _ in range(3))]
    await loader.begun("n")
    own = "6 of your requests wait for models that are loading, and at most 6 may \\(for all models, of one tenant, "
    with pytest.raises(Overloaded, match=own):
        await loader.cold.wait("o", "a", tenant="one")
    waiters.append(loader.wait("o", tenant="two"))
    await loader.begun("o")
    for model in "mno":
        loader.ends[model].set_result(None)
    assert await asyncio.gather(*waiters) == ["a"] * 8
    again = loader.wait("m", tenant="one")
    while len(loader.calls) < 4:
        await asyncio.sleep(0)
    loader.ends["m"].set_result(None)
    assert await again == "a"


@pytest.mark.parametrize(("tenants", "share"), [((), 8), (("a",), 8), (("a", "b"), 6)])
async def test_a_tenant_that_is_alone_may_have_all(tenants: tuple[str, ...], share: int, tmp_path: Path) -> None:
    auth = {"api_keys": [{"key": f"sk-{name}", "tenant": name} for name in tenants]}
    stage = OrchestratorStage(resolve({"auth": auth}, {"STARLING_HOME": str(tmp_path)}))
    try:
        assert stage.cold.share_of("a", 8) == share
    finally:
        await stage.client.close()
        await stage._store.close()
        await stage._blobs.close()
        await stage.responses.close_store()


async def test_a_waiter_that_leaves_ends_no_load() -> None:
    loader = Loader()
    waiter = loader.wait("m")
    await loader.begun("m")
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert loader.cold.find("m") is not None and loader.cold.n_waiting == 0
    other = loader.wait("m")
    loader.ends["m"].set_result(None)
    assert await other == "a" and len(loader.calls) == 1
    await loader.cold.close()


async def test_a_placement_and_requests_share_the_load_at_an_agent() -> None:
    loader = Loader()
    placing = asyncio.ensure_future(loader.cold.place("m", "a", lambda: True))
    await loader.begun("m")
    waiters = [loader.wait("m", "b"), asyncio.ensure_future(loader.cold.place("m", "a", lambda: True))]
    while not loader.cold.n_waiting:
        await asyncio.sleep(0)
    assert (
        loader.calls == [("a", "m", "")] and loader.cold.models_at("a") == {"m"} and loader.cold.models_at("b") == set()
    )
    assert loader.cold.agents_of("m") == {"a"}
    # A second replica is loaded beside it.
    first = loader.ends.pop("m")
    other = asyncio.ensure_future(loader.cold.place("m", "b", lambda: True))
    await loader.begun("m")
    assert loader.calls[1:] == [("b", "m", "")]
    first.set_result(None)
    loader.ends["m"].set_exception(ModelUnavailable("no room"))
    assert await asyncio.gather(placing, *waiters) == [None, "a", None]
    with pytest.raises(ModelUnavailable, match="no room"):
        await other
    assert loader.cold.failed_at("m") == {"b"} and not loader.cold.under_way


async def test_a_load_for_a_placement_ends_with_the_wish_unless_a_request_has_joined_it() -> None:
    loader, is_leading = Loader(), [True]
    placing = asyncio.ensure_future(loader.cold.place("m", "a", lambda: is_leading[0]))
    await loader.begun("m")
    assert loader.cold.is_wanted("m", "a")
    is_leading[0] = False
    assert not loader.cold.is_wanted("m", "a")
    placing.cancel()
    await asyncio.gather(placing, return_exceptions=True)
    assert loader.ends.pop("m").cancelled() and not loader.cold.under_way and not loader.cold.failed_at("m")
    is_leading[0] = True
    placing = asyncio.ensure_future(loader.cold.place("m", "a", lambda: is_leading[0]))
    await loader.begun("m")
    waiter = loader.wait("m", "a")
    while not loader.cold.n_waiting:
        await asyncio.sleep(0)
    is_leading[0] = False
    placing.cancel()
    await asyncio.gather(placing, return_exceptions=True)
    assert loader.cold.is_wanted("m", "a")
    loader.ends["m"].set_result(None)
    assert await waiter == "a"


async def test_loads_at_an_agent_that_is_lost_end_without_its_answer() -> None:
    """Who waited for them may begin another one; they count neither as copies nor as failures."""
    loader = Loader()
    placing = asyncio.ensure_future(loader.cold.place("m", "b", lambda: True))
    waiter = loader.wait("m", "c")
    await loader.begun("m")
    loader.cold.lose_agent("c", "the agent has left")
    assert not waiter.done() and loader.cold.agents_of("m") == {"b"}
    first = loader.ends.pop("m")
    loader.cold.lose_agent("b", "the agent has started anew")
    assert not loader.cold.agents_of("m")
    again = loader.wait("m", "c")
    for lost in (placing, waiter):
        with pytest.raises(ModelUnavailable, match="m was not loaded: the agent has started anew"):
            await lost
    assert first.cancelled() and not loader.cold.failed_at("m")
    await loader.begun("m")
    assert [name for name, _, _ in loader.calls] == ["b", "c"]
    loader.ends["m"].set_result(None)
    assert await again == "c" and not loader.cold.n_waiting


async def test_who_waits_for_a_lost_agent_may_leave_at_that_moment() -> None:
    loader = Loader()
    waiter = loader.wait("m", "b")
    await loader.begun("m")
    loader.cold.lose_agent("b", "the agent has left")
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert waiter.cancelled() and not loader.cold.n_waiting


async def test_a_load_that_fails_at_another_agent_is_no_failure_of_the_one_that_was_chosen() -> None:
    """The agent that loads the model is lost; a request that comes then joins its load until that ends."""

    async def poll(record: object) -> HeartbeatResponse:
        return heartbeat("A")

    loader, clock = Loader(), Clock()
    routing = router(view("A", health="SUSPECT", cached_models=(cached(),)), view("B", cached_models=(cached(),)))
    bounds = Bounds(1.0, 1000.0)
    relay = Relay(WatchedClient(), routing, Registry(poll, clock), loader.cold, bounds, clock, clock.wait)
    first = loader.wait(MODEL, "A")
    await loader.begun(MODEL)
    sent = Forward(routed=request(), path="/v1/generate", body=b"{}", headers={})
    finding = asyncio.ensure_future(relay.routes.find(sent, Tries(clock), None))
    while loader.cold.n_waiting < 2:
        await asyncio.sleep(0)
    loader.ends.pop(MODEL).set_exception(ModelUnavailable("A does not answer"))
    await asyncio.gather(first, return_exceptions=True)
    await loader.begun(MODEL)
    assert loader.calls == [("A", MODEL, ""), ("B", MODEL, "")]
    routing.update_routing_table([view("B", engine())])
    loader.ends[MODEL].set_result(None)
    assert (await finding).agent_id == "B"


async def test_a_request_that_waits_for_a_load_is_cancelled_and_the_load_goes_on() -> None:
    async def poll(record: object) -> HeartbeatResponse:
        return heartbeat("A")

    loader, clock = Loader(), Clock()
    bounds = Bounds(1.0, 1000.0)
    routing = router(view("A", cached_models=(cached(),)))
    relay = Relay(WatchedClient(), routing, Registry(poll, clock), loader.cold, bounds, clock, clock.wait)
    sent = Forward(routed=request(), path="/v1/generate", body=b"{}", headers={})
    readers = [asyncio.ensure_future(relay.routes.find(sent, Tries(clock), None)) for _ in range(2)]
    await loader.begun(MODEL)
    other = loader.wait(MODEL, "A")
    while loader.cold.n_waiting < 3:
        await asyncio.sleep(0)
    assert not relay.routes.cancel("req-2")
    assert relay.routes.cancel(sent.id)
    found = await asyncio.gather(*readers, return_exceptions=True)
    assert [(type(one), str(one)) for one in found] == [(Conflict, "the request was cancelled by its client")] * 2
    assert not relay.routes.cancel(sent.id)
    loader.ends[MODEL].set_result(None)
    assert await other == "A" and loader.cold.n_waiting == 0


@pytest.fixture
def without_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is woken, and does not look for room from time to time."""
    monkeypatch.setattr(route_finder, "COMMENT_S", 1000.0)


@pytest.mark.usefixtures("without_looks")
async def test_who_waits_for_a_further_copy_takes_room_that_comes_earlier_in_order() -> None:
    made = Full("B", "C")
    waiters = [made.find(f"req-{number}") for number in range(3)]
    await made.waiting(3)
    assert made.loader.calls == [("B", MODEL, None)]  # one load for all, and nothing may leave for it
    made.end()
    assert await waiters[0] == "A"
    await made.waiting(2)
    assert not (waiters[1].done() or waiters[2].done())  # A is full again
    made.loaded("B")
    assert await waiters[1] == "B"
    # B is full, too, and no agent is idle any more.
    with pytest.raises(Overloaded, match="all 2 agents"):
        await waiters[2]
    assert len(made.loader.calls) == 1


@pytest.mark.usefixtures("without_looks")
async def test_a_new_request_takes_room_at_once_and_who_was_woken_keeps_the_place() -> None:
    made = Full("B")
    waiters = [made.find("req-0"), made.find("req-1")]
    await made.waiting(2)
    made.end()
    quick = made.routing.choose(request("quick"), may_copy=True)
    made.routing.begin(quick, request("quick"))
    assert quick.agent_id == "A"
    for _ in range(10):
        await asyncio.sleep(0)
    assert made.cold.n_waiting == 2
    made.routing.end(quick, request("quick"))
    assert await waiters[0] == "A" and not waiters[1].done()
    made.loaded("B")
    assert await waiters[1] == "B"


@pytest.mark.usefixtures("without_looks")
async def test_who_is_woken_and_has_left_wakes_the_next_one() -> None:
    made = Full("B")
    waiters = [made.find("req-0"), made.find("req-1")]
    await made.waiting(2)
    made.end()
    waiters[0].cancel()
    assert await waiters[1] == "A"
    await asyncio.gather(waiters[0], return_exceptions=True)
    assert waiters[0].cancelled()
    await made.cold.close()


async def test_who_waits_for_loads_makes_an_orchestrator_unready_only_without_a_ready_model() -> None:
    made = Full(max_waiting=10)
    record = AgentRecord(agent_id="A", url="http://A", incarnation="1")
    await made.registry.register_node(record)
    await made.registry.check_node("A")
    unused: Any = None
    api = FleetApi("x", made.registry, made.routing, made.relay, made.cold, unused, EventLog(lambda: 0.0))
    api.published = {"other": Published("e" * 64, 1)}

    def found() -> tuple[bool, bool]:
        report = api.readiness()
        return report["ready"], report["waiting_full"]

    made.cold.n_waiting = 10
    assert found() == (True, True)
    made.routing.update_routing_table([view("A")])
    assert found() == (False, True)
    assert "10 requests wait for one, of at most 10" in api.readiness()["reason"]
    made.cold.n_waiting = 9
    assert found() == (True, False)
    await made.cold.close()


@pytest.mark.usefixtures("without_looks")
async def test_waiting_for_a_further_copy_is_bounded() -> None:
    made = Full("B", max_waiting=4)  # two for one model
    waiters = [made.find("req-0"), made.find("req-1")]
    await made.waiting(2)
    with pytest.raises(Overloaded, match="max_waiting"):
        await made.find("req-2")
    made.end()
    assert await waiters[0] == "A"
    made.loaded("B")
    assert await waiters[1] == "B"


@pytest.mark.usefixtures("without_looks")
async def test_a_copy_that_is_not_loaded_leaves_the_model_full_and_is_not_tried_again_at_once() -> None:
    made = Full("B", "C")
    waiter = made.find("req-0")
    for name in "BC":  # one after the other
        await made.loader.begun(MODEL)
        assert made.loader.calls[-1] == (name, MODEL, None)
        made.loader.ends.pop(MODEL).set_exception(ModelUnavailable(f"no room at {name}"))
    with pytest.raises(Overloaded, match="all 1 agents that serve"):
        await waiter
    with pytest.raises(Overloaded, match="all 1 agents that serve"):
        await made.find("req-1")
    assert len(made.loader.calls) == 2
    made.loader.now = FAILED_S
    again = made.find("req-2")
    await made.waiting(1)
    made.end()
    assert await again == "A" and len(made.loader.calls) == 3
    await made.cold.close()


@pytest.mark.usefixtures("without_looks")
async def test_who_has_waited_for_a_copy_that_was_late_is_not_failed_by_it_and_waits_for_no_other() -> None:
    made = Full("B", "C")
    waiter = made.find("req-0")
    await made.waiting(1)
    made.loader.ends.pop(MODEL).set_exception(StillLoading("not within 600 s", "model"))
    with pytest.raises(Overloaded, match="all 1 agents that serve"):
        await waiter
    assert [agent for agent, _, _ in made.loader.calls] == ["B"]


@pytest.mark.usefixtures("without_looks")
async def test_a_stream_that_has_lost_its_agent_waits_for_a_further_copy_as_well() -> None:
    """Also beyond the bound on requests that wait. A copy that is refused does not end it."""
    made = Full("B", "C", max_waiting=2)  # one for a model
    new = made.find("req-0")
    await made.waiting(1)
    begun = made.find("req-1", lost_stream(made.clock))
    while made.cold.n_waiting != 2:
        assert not begun.done()
        await asyncio.sleep(0)
    new.cancel()
    for _ in "BC":  # one after the other
        await made.loader.begun(MODEL)
        made.loader.ends.pop(MODEL).set_exception(ModelUnavailable("no room"))
    while made.cold.n_waiting:
        await asyncio.sleep(0)
    assert made.loader.calls == [("B", MODEL, None), ("C", MODEL, None)]
    made.loader.now = FAILED_S
    await made.waiting(1)
    made.loaded("B")
    assert await begun == "B"
    await asyncio.gather(new, return_exceptions=True)


async def test_an_agent_that_gets_the_model_otherwise_is_found_during_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_finder, "COMMENT_S", 0.001)
    made = Full("B")
    waiter = made.find("req-0")
    await made.waiting(1)
    made.routing.update_routing_table([view("A", engine()), *made.idle, view("C", engine())])
    assert await waiter == "C" and MODEL in made.loader.ends
    await made.cold.close()
