"""Cold loads: one for each model, bounded waiting, errors for all who wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.config.load import resolve
from pipeline.errors import Conflict, ModelUnavailable, Overloaded
from pipeline.fleet.bodies import HeartbeatResponse
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.forward import Bounds, Forward, Tries
from stages.orchestrator.registry import Registry
from stages.orchestrator.relay import Relay
from stages.orchestrator.stage import OrchestratorStage
from tests.orchestrator.agents import MODEL, cached, engine, heartbeat, request, router, view
from tests.orchestrator.loopback_engine import Clock, WatchedClient


class Loader:
    """Loads that end when the test says so."""

    def __init__(self, max_waiting: int = 100) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.ends: dict[str, asyncio.Future[None]] = {}
        self.cold = ColdLoads(self.load, max_waiting, lambda: 0.0)

    async def load(self, agent_id: str, model: str, evict: str) -> None:
        self.calls.append((agent_id, model, evict))
        self.ends[model] = asyncio.get_running_loop().create_future()
        await self.ends[model]

    def wait(self, model: str, agent: str = "a", tenant: str = "") -> asyncio.Task[str]:
        return asyncio.ensure_future(self.cold.wait(model, agent, predicted_s=7.0, tenant=tenant))

    async def begun(self, model: str) -> None:
        while model not in self.ends:
            await asyncio.sleep(0)


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
    with pytest.raises(Overloaded, match="max_waiting") as refused:
        await loader.cold.wait("m", "a")
    assert refused.value.retry_after_s == 7.0
    waiters += [loader.wait("n"), loader.wait("n")]
    await loader.begun("n")
    with pytest.raises(Overloaded):
        await loader.cold.wait("o", "a")
    for model in "mn":
        loader.ends[model].set_result(None)
    await asyncio.gather(*waiters)


async def test_a_tenant_leaves_room_for_others() -> None:
    loader = Loader(8)  # of which 4 for one model
    loader.cold.share_of = lambda tenant, most: most - most // 4
    waiters = [loader.wait("m", tenant="one") for _ in range(3)]
    await loader.begun("m")
    with pytest.raises(Overloaded, match="3 of them yours"):
        await loader.cold.wait("m", "a", tenant="one")
    waiters += [loader.wait("m", tenant="two"), *(loader.wait("n", tenant="one") for _ in range(3))]
    await loader.begun("n")
    with pytest.raises(Overloaded, match="6 of them yours"):
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
