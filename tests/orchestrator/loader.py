"""Cold loads that end when a test says so."""

from __future__ import annotations

import asyncio

from stages.orchestrator.cold_loads import ColdLoads


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
