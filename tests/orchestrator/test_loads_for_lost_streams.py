"""Loads for streams that have lost their agents: how many, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.errors import ModelUnavailable, Overloaded, StarlingError
from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.fleet.records import AgentRecord
from stages.orchestrator import route_finder
from stages.orchestrator.forward import Bounds, Forward, NotRefused
from stages.orchestrator.registry import Registry
from stages.orchestrator.relay import Relay
from stages.orchestrator.router import Route
from tests.orchestrator.agents import MODEL, cached, engine, heartbeat, request, router, view
from tests.orchestrator.loader import Full, Loader, lost_stream
from tests.orchestrator.loopback_engine import Clock, WatchedClient

MOVE_S = 60.0  # for an agent to go on with a stream
LOAD_S = 100.0  # that a load takes, which is longer


class Lost:
    """A stream whose agent is gone, and agents that must load its model first."""

    def __init__(self, *names: str, max_per_agent: int = 100) -> None:
        async def poll(record: object) -> HeartbeatResponse:
            return heartbeat("A")

        self.loader, self.clock = Loader(), Clock()
        self.views = {name: view(name, cached_models=(cached(),)) for name in names}
        self.routing = router(*self.views.values(), max_per_agent=max_per_agent)
        self.routing.loading_at, self.routing.failed_at = self.loader.cold.agents_of, self.loader.cold.failed_at
        registry = Registry(poll, self.clock)
        bounds = Bounds(1.0, MOVE_S)
        cold = self.loader.cold
        self.relay = Relay(WatchedClient(), self.routing, registry, cold, bounds, self.clock, self.clock.wait)
        self.tries = lost_stream(self.clock)

    def find(self) -> None:
        """It looks for an agent."""
        sent = Forward(routed=request(), path="/v1/generate", body=b"{}", headers={})
        self.finding = asyncio.ensure_future(self.relay.routes.find(sent, self.tries, None))

    async def load(self, took_s: float, error: StarlingError | None = None, version: str = "f32") -> None:
        """The load that is under way ends, or has brought the model with this KV type."""
        while MODEL not in self.loader.ends:
            assert not self.finding.done()
            await asyncio.sleep(0)
        self.clock.now += took_s
        name = self.loader.calls[-1][0]
        end = self.loader.ends.pop(MODEL)
        if error is not None:
            end.set_exception(error)
            return
        self.views[name] = view(name, engine(kv_type=version))
        self.routing.update_routing_table(list(self.views.values()))
        end.set_result(None)

    async def result(self) -> Route:
        """The route; fails if another load begins."""
        n_loads = len(self.loader.calls)
        while not self.finding.done():
            assert len(self.loader.calls) == n_loads
            await asyncio.sleep(0)
        return await self.finding


async def test_a_stream_whose_version_is_nowhere_loads_its_model_once() -> None:
    made = Lost("B", "C", "D")
    made.find()
    await made.load(LOAD_S)
    with pytest.raises(ModelUnavailable, match="stopped answering"):
        await made.result()
    assert LOAD_S + MOVE_S <= made.clock.now <= LOAD_S + MOVE_S + 1.0


async def test_a_load_of_others_elsewhere_is_not_the_one_load_of_a_stream() -> None:
    """It is at an agent that cannot have the stream's version."""
    made = Lost("B", "C")
    made.views["B"] = view("B", engine("other", numerics=2), cached_models=(cached(),))
    made.routing.update_routing_table(list(made.views.values()))
    other = made.loader.wait(MODEL, "B")
    await made.loader.begun(MODEL)
    made.find()
    while made.loader.cold.n_waiting != 2:
        await asyncio.sleep(0)
    await made.load(LOAD_S)
    assert await other == "B"
    await made.load(LOAD_S, version="f16")
    assert (await made.result()).agent_id == "C"


async def test_a_stream_whose_version_was_loaded_and_is_full_may_wait_for_a_further_copy() -> None:
    made = Lost("B", "C", max_per_agent=1)
    made.find()
    await made.load(LOAD_S, version="f16")
    other = made.routing.choose(request("other"))
    made.routing.begin(other, request("other"))
    assert not made.finding.done()
    await made.load(LOAD_S, version="f16")
    assert {other.agent_id, (await made.result()).agent_id} == {"B", "C"}


async def test_only_the_time_of_one_load_does_not_count_for_a_stream_that_is_lost() -> None:
    made = Lost("B", "C", "D")
    made.find()
    for _ in "BC":
        await made.load(LOAD_S, ModelUnavailable("damaged"))
    with pytest.raises(ModelUnavailable, match="damaged"):
        await made.result()


async def test_a_stream_that_is_late_begins_no_load_but_joins_one() -> None:
    made = Lost("B")
    other = made.loader.wait(MODEL, "B")
    await made.loader.begun(MODEL)
    made.clock.now += MOVE_S
    made.find()
    while made.loader.cold.n_waiting != 2:
        assert not made.finding.done()
        await asyncio.sleep(0)
    await made.load(LOAD_S, version="f16")
    assert (await made.result()).agent_id == await other == "B"


async def test_time_in_a_load_that_a_stream_leaves_for_room_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that has room refuses it, and the load that it left has failed."""
    monkeypatch.setattr(route_finder, "COMMENT_S", 1000.0)
    made = Full("B")
    tries = lost_stream(made.clock)
    begun = made.find("begun", tries)
    await made.waiting(1)
    made.clock.now += 2000.0  # more than its bound
    made.end()
    assert await begun == "A"
    made.loader.ends.pop(MODEL).set_exception(ModelUnavailable("damaged"))
    while made.cold.under_way:
        await asyncio.sleep(0)
    tries.failed("A", Overloaded("others have come"))
    again = made.find("begun", tries)
    while not made.cold.n_waiting:
        assert not again.done()
        await asyncio.sleep(0)
    await made.waiting(1)
    made.loaded("B")
    assert await again == "B"


async def test_a_stream_waits_for_the_store_without_which_nothing_is_loaded() -> None:
    """That is no agent's failure: as soon as the store answers, an agent is asked."""
    made = Lost("B", "C")
    made.find()
    while made.clock.now < MOVE_S / 2:
        await made.load(0.0, NotRefused("the store does not answer"))
        assert not made.loader.cold.failed_at(MODEL)
    await made.load(LOAD_S, version="f16")
    assert (await made.result()).engine is not None
    assert made.clock.now < MOVE_S / 2 + LOAD_S + 2.0


async def test_room_that_a_stream_cannot_use_goes_to_the_next_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in the line was begun by another version than the one that has room."""
    monkeypatch.setattr(route_finder, "COMMENT_S", 1000.0)
    made = Full("B")
    made.routing.update_routing_table([view("A", engine(numerics=2)), view("A2", engine()), *made.idle])
    other = made.routing.choose(request("other"))
    made.routing.begin(other, request("other"))
    assert other.agent_id == "A2"
    begun = made.find("begun", lost_stream(made.clock))
    await made.waiting(1)
    new = made.find("new")
    await made.waiting(2)
    made.end()
    assert await new == "A" and not begun.done()
    made.routing.end(other, request("other"))
    assert await begun == "A2"
    await made.cold.close()


async def test_a_stream_takes_room_before_it_is_known_whether_its_agent_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """No poll of that agent ends, and no other agent answers anything new."""
    is_waiting = asyncio.Event()

    async def wait(clock: Clock, seconds: float) -> None:
        is_waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Clock, "wait", wait)
    monkeypatch.setattr(route_finder, "COMMENT_S", 1000.0)
    made = Full("B")
    await made.registry.register_node(AgentRecord(agent_id="gone", url="http://gone", incarnation="1"))
    made.registry.suspect("gone", "it stopped answering")
    begun = made.find("begun", lost_stream(made.clock))
    await is_waiting.wait()
    new = made.find("new")
    await made.waiting(1)
    made.end()
    done, _ = await asyncio.wait({begun, new}, return_when=asyncio.FIRST_COMPLETED)
    assert done == {begun} and await begun == "A"
    assert made.registry.is_unsettled("gone")
    new.cancel()
    await asyncio.gather(new, return_exceptions=True)
    await made.cold.close()
