"""Cold loads that end when a test says so."""

from __future__ import annotations

import asyncio

from pipeline.errors import ModelUnavailable
from pipeline.fleet.bodies import HeartbeatResponse
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.forward import Bounds, Forward, Tries
from stages.orchestrator.registry import Registry
from stages.orchestrator.relay import Relay
from stages.orchestrator.score import version_of
from tests.orchestrator.agents import MODEL, cached, engine, heartbeat, request, router, view
from tests.orchestrator.loopback_engine import Clock, WatchedClient


class Loader:
    """Loads that end when the test says so."""

    def __init__(self, max_waiting: int = 100) -> None:
        self.calls: list[tuple[str, str, str | None]] = []
        self.ends: dict[str, asyncio.Future[None]] = {}
        self.now = 0.0
        self.cold = ColdLoads(self.load, max_waiting, lambda: self.now)

    async def load(self, agent_id: str, model: str, evict: str | None) -> None:
        self.calls.append((agent_id, model, evict))
        self.ends[model] = asyncio.get_running_loop().create_future()
        await self.ends[model]

    def wait(self, model: str, agent: str = "a", tenant: str = "") -> asyncio.Task[str]:
        return asyncio.ensure_future(self.cold.wait(model, agent, predicted_s=7.0, tenant=tenant))

    async def begun(self, model: str) -> None:
        while model not in self.ends:
            await asyncio.sleep(0)


def lost_stream(clock: Clock) -> Tries:
    """Of a stream that the agent "gone" has begun, and that has lost it."""
    tries = Tries(clock)
    tries.version = version_of(engine())
    tries.advanced()
    tries.failed("gone", ModelUnavailable("it stopped answering"))
    tries.was_lost = True
    return tries


class Full:
    """The agent A has the model and as many requests as it may have; the others are idle. Finds routes."""

    def __init__(self, *idle: str, max_waiting: int = 100) -> None:
        async def poll(record: object) -> HeartbeatResponse:
            return heartbeat("A")

        self.loader, self.clock = Loader(max_waiting), Clock()
        self.cold = self.loader.cold
        self.idle = [view(name, cached_models=(cached(),)) for name in idle]
        self.routing = router(view("A", engine()), *self.idle, max_per_agent=1)
        self.routing.loading_at, self.routing.failed_at = self.cold.agents_of, self.cold.failed_at
        bounds = Bounds(1.0, 1000.0)
        self.registry = Registry(poll, self.clock)
        self.relay = Relay(WatchedClient(), self.routing, self.registry, self.cold, bounds, self.clock, self.clock.wait)
        self.first = self.routing.choose(request())
        self.routing.begin(self.first, request())

    def find(self, name: str, tries: Tries | None = None) -> asyncio.Task[str]:
        """Find a route, and use it: the agent."""

        async def found() -> str:
            sent = Forward(routed=request(name), path="/v1/generate", body=b"{}", headers={})
            route = await self.relay.routes.find(sent, tries or Tries(self.clock), None)
            self.routing.begin(route, sent.routed)
            return route.agent_id

        return asyncio.ensure_future(found())

    async def waiting(self, count: int) -> None:
        """So many wait for a load that has begun."""
        await self.loader.begun(MODEL)
        while self.cold.n_waiting != count:
            await asyncio.sleep(0)

    def end(self) -> None:
        """A request of A ends."""
        self.routing.end(self.first, request())

    def loaded(self, name: str) -> None:
        """The load has ended, and the table has it."""
        self.routing.update_routing_table([view("A", engine()), view(name, engine())])
        self.loader.ends[MODEL].set_result(None)
