"""Tells engines that no one reads a request any longer, so that they need not wait for another reader. Bounded."""

from __future__ import annotations

import asyncio

from pipeline.api.output_tokens import RELAY
from stages.orchestrator.forward import Forward
from stages.orchestrator.router import Route
from stages.orchestrator.upstream import Client, Unreachable

RELEASE_S = 5.0  # for an engine to end a request that no client reads
MAX_RELEASES = 1000  # at once; engines end further ones when no one has read them for a minute


class Releases:
    """One per orchestrator."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, route: Route, forward: Forward) -> None:
        """Tell the engine, if it lives. Engines of others end a request when its connection closes."""
        if RELAY not in forward.headers or route.engine is None or len(self._tasks) >= MAX_RELEASES:
            return
        if route.engine.continues_text:
            return
        key = route.engine.engine_key
        headers = {RELAY: forward.headers[RELAY], **({"Authorization": f"Bearer {key}"} if key else {})}
        url = f"{route.engine.engine_url}/v1/requests/{forward.id}?unread=true"

        async def release() -> None:
            try:
                answer = await self._client.open("DELETE", url, headers, b"", RELEASE_S, agent_id=route.agent_id)
            except Unreachable:
                return
            answer.close()

        task = asyncio.get_running_loop().create_task(release())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what is still being sent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
