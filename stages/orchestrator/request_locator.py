"""Asks engines about requests: which of them has one, its end, and a response that is being generated.

Without sockets.
"""

from __future__ import annotations

import asyncio

from pipeline.api.output_tokens import RELAY
from pipeline.fleet.bodies import LoadedModel
from stages.orchestrator.forward import Forward
from stages.orchestrator.router import ScoreRouter
from stages.orchestrator.score import loaded
from stages.orchestrator.upstream import Answer, Client, Unreachable, read_whole

LOCATE_S = 10.0  # for engines to say whether they have a request


class RequestLocator:
    """One per orchestrator. `relay`: the header of that name, with the tenant whose request it is."""

    def __init__(self, router: ScoreRouter, client: Client) -> None:
        self._router = router
        self._client = client

    def engines(self) -> list[tuple[str, LoadedModel]]:
        """Those that answer, by agent; one whose model was withdrawn still has its requests."""
        return [
            (view.agent_id, one) for view in self._router.table for one in view.details.loaded_models if one.engine_url
        ]

    async def locate(self, request_id: str, model: str, relay: str, *, is_certain: bool) -> str:
        """The agent whose engine has the request; "" if none has. `is_certain`: also the only one is asked."""
        engines = self._ready(model)
        if len(engines) < 2 and not is_certain:
            return engines[0][0] if engines else ""
        return await self._first(request_id, engines, relay)

    async def locate_other(self, forward: Forward, besides: str) -> str:
        """Another agent than `besides` whose engine has a request, from an earlier attempt; "" if none has."""
        engines = [(agent, one) for agent, one in self._ready(forward.routed.model) if agent != besides]
        return await self._first(forward.id, engines, forward.headers.get(RELAY, ""))

    async def head(self, request_id: str, agent_id: str, one: LoadedModel, relay: str) -> str | None:
        """The content type of the engine's answer to a request that it has; None if it has none."""
        answer = await self.ask("HEAD", request_id, agent_id, one, relay)
        return answer.headers.get("Content-Type", "") if answer is not None and answer.status == 200 else None

    async def ask(self, method: str, request_id: str, agent_id: str, one: LoadedModel, relay: str) -> Answer | None:
        """The head of an engine's answer about a request; None if it does not answer."""
        url = f"{one.engine_url}/v1/requests/{request_id}"
        try:
            answer = await self._client.open(method, url, _headers(one, relay), b"", LOCATE_S, agent_id=agent_id)
        except Unreachable:
            return None
        answer.close()
        return answer

    async def get(self, path: str, agent_id: str, one: LoadedModel, relay: str) -> bytes | None:
        """The body of an engine's answer; None if it does not answer, or with an error."""
        try:
            async with asyncio.timeout(LOCATE_S):
                url = one.engine_url + path
                answer = await self._client.open("GET", url, _headers(one, relay), b"", agent_id=agent_id)
                try:
                    body = await read_whole(answer)
                finally:
                    answer.close()
        except (Unreachable, TimeoutError):
            return None
        return body if answer.status == 200 else None

    def _ready(self, model: str) -> list[tuple[str, LoadedModel]]:
        """The engines of a model, by agents that answer."""
        return [
            (view.agent_id, one)
            for view in self._router.table
            if (one := loaded(view.details, model)) is not None and one.engine_url and view.health == "READY"
        ]

    async def _first(self, request_id: str, engines: list[tuple[str, LoadedModel]], relay: str) -> str:
        answers = await asyncio.gather(*(self.head(request_id, agent, one, relay) for agent, one in engines))
        return next((agent for (agent, _), found in zip(engines, answers) if found is not None), "")


def _headers(one: LoadedModel, relay: str) -> dict[str, str]:
    return {RELAY: relay, **({"Authorization": f"Bearer {one.engine_key}"} if one.engine_key else {})}
