"""Asks engines about requests: which of them has one, its end, and a response that is being generated.

An engine may be frozen, so the first positive answer counts and the other look-ups end.  An agent that is lost
(relay.py) counts as one whose engine has nothing, as it does for the requests that it serves: they go on elsewhere.
One that is suspect has `silent_s` for its answer, after which it would be lost.  An agent that has left is asked while
it is followed (leaving_agents.py), except for where a request is to be sent.  Without sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

from pipeline.api.output_tokens import RELAY
from pipeline.fleet.bodies import LoadedModel
from stages.orchestrator.forward import Forward
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.opening import Abortable, Opening
from stages.orchestrator.router import ScoreRouter
from stages.orchestrator.score import loaded
from stages.orchestrator.upstream import Answer, Client, Unreachable, read_whole

LOCATE_S = 10.0  # for engines to say whether they have a request

T = TypeVar("T")
A = TypeVar("A", bound=Abortable)


class Engine(NamedTuple):
    """An engine that may have a request."""

    agent_id: str
    model: LoadedModel
    bound_s: float  # for its answer


class Found(NamedTuple):
    """A request at an engine."""

    agent_id: str
    model_id: str
    content_type: str  # of its answer


class RequestLocator:
    """One per orchestrator. `relay`: the header of that name, with the tenant whose request it is."""

    def __init__(self, router: ScoreRouter, client: Client, silent_s: float) -> None:
        self._router = router
        self._client = client
        self._silent_s = silent_s
        self.leaving: Callable[[], Iterable[NodeView]] = tuple  # agents that have left and may still have requests
        self._asked: dict[str, set[Abortable]] = {}  # look-ups under way, by agent
        self._ending: set[asyncio.Task[bool | None]] = set()  # cancellations, which nothing waits for any longer

    async def locate(self, request_id: str, model: str, relay: str, *, is_certain: bool) -> str:
        """The agent whose engine has the request; "" if none has. `is_certain`: also the only one is asked."""
        engines = self._ready(model)
        if len(engines) < 2 and not is_certain:
            return engines[0].agent_id if engines else ""
        return await self._agent_of(request_id, engines, relay)

    async def locate_other(self, forward: Forward, besides: Collection[str]) -> str:
        """An agent not in `besides` whose engine has a request, from an earlier attempt; "" if none has."""
        engines = [one for one in self._ready(forward.routed.model) if one.agent_id not in besides]
        return await self._agent_of(forward.id, engines, forward.headers.get(RELAY, ""))

    async def find(self, request_id: str, relay: str) -> Found | None:
        """The request at an engine of any model; None if none has it."""
        return await _first(partial(self._head, request_id, one, relay) for one in self._engines())

    async def response(self, path: str, relay: str) -> bytes | None:
        """The body of the answer to a GET of the engine that has a response; None if none has."""
        engines = [*self._engines(), *self._leaving()]
        return await _first(partial(self._get, path, one, relay) for one in engines)

    async def end(self, request_id: str, relay: str) -> bool:
        """Cancel a request at all engines; whether one has ended it. The others may still be asked afterwards."""
        engines = [*self._engines(), *self._leaving()]
        tasks = [asyncio.get_running_loop().create_task(self._delete(request_id, one, relay)) for one in engines]
        for task in tasks:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        has_ended: bool | None = await _first_of(tasks)
        return bool(has_ended)

    def lose_agent(self, agent_id: str, reason: str) -> None:
        """The agent is gone or silent: nothing waits for its engines' answers."""
        for exchange in list(self._asked.get(agent_id, ())):
            exchange.abort(reason)

    async def close(self) -> None:
        """Ask no more."""
        tasks = list(self._ending)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------- engines

    def _engines(self) -> list[Engine]:
        """Those of agents that have answered; one whose model was withdrawn still has its requests."""
        return self._engines_of(self._router.table)

    def _leaving(self) -> list[Engine]:
        return self._engines_of(self.leaving())

    def _engines_of(self, views: Iterable[NodeView]) -> list[Engine]:
        return [
            Engine(view.agent_id, one, self._bound_s(view))
            for view in views
            for one in view.details.loaded_models
            if one.engine_url
        ]

    def _ready(self, model: str) -> list[Engine]:
        """The engines of a model, by agents that answer."""
        return [
            Engine(view.agent_id, one, self._bound_s(view))
            for view in self._router.table
            if (one := loaded(view.details, model)) is not None and one.engine_url and view.health == "READY"
        ]

    def _bound_s(self, view: NodeView) -> float:
        return LOCATE_S if view.health == "READY" else min(LOCATE_S, self._silent_s)

    # ---------------------------------------------------------------- questions

    async def _agent_of(self, request_id: str, engines: list[Engine], relay: str) -> str:
        found = await _first(partial(self._head, request_id, one, relay) for one in engines)
        return found.agent_id if found is not None else ""

    async def _head(self, request_id: str, one: Engine, relay: str) -> Found | None:
        answer = await self._ask("HEAD", request_id, one, relay)
        if answer is None or answer.status != 200:
            return None
        return Found(one.agent_id, one.model.model_id, answer.headers.get("Content-Type", ""))

    async def _delete(self, request_id: str, one: Engine, relay: str) -> bool | None:
        answer = await self._ask("DELETE", request_id, one, relay)
        return True if answer is not None and answer.status == 200 else None

    async def _ask(self, method: str, request_id: str, one: Engine, relay: str) -> Answer | None:
        """The head of an engine's answer about a request; None if it does not answer."""
        try:
            async with asyncio.timeout(one.bound_s):
                answer = await self._open(method, f"/v1/requests/{request_id}", one, relay)
        except (Unreachable, TimeoutError):
            return None
        answer.close()
        return answer

    async def _get(self, path: str, one: Engine, relay: str) -> bytes | None:
        """The body of an engine's answer; None if it does not answer, or with an error."""
        try:
            async with asyncio.timeout(one.bound_s):
                answer = await self._open("GET", path, one, relay)
                asked = self._add(one.agent_id, answer)
                try:
                    body = await read_whole(answer)
                finally:
                    self._remove(one.agent_id, asked)
                    answer.close()
        except (Unreachable, TimeoutError):
            return None
        return body if answer.status == 200 else None

    async def _open(self, method: str, path: str, one: Engine, relay: str) -> Answer:
        """The head of an answer. Raises `Unreachable`."""
        opening = self._add(one.agent_id, Opening())
        try:
            opened = self._client.open(
                method, one.model.engine_url + path, _headers(one.model, relay), b"", agent_id=one.agent_id
            )
            return await opening.answer(opened)
        finally:
            self._remove(one.agent_id, opening)

    def _add(self, agent_id: str, exchange: A) -> A:
        self._asked.setdefault(agent_id, set()).add(exchange)
        return exchange

    def _remove(self, agent_id: str, exchange: Abortable) -> None:
        self._asked[agent_id].discard(exchange)
        if not self._asked[agent_id]:
            del self._asked[agent_id]


async def _first(asks: Iterable[Callable[[], Awaitable[T | None]]]) -> T | None:
    """The first answer that is not None; the others are not waited for, and end."""
    tasks = [asyncio.ensure_future(ask()) for ask in asks]
    try:
        return await _first_of(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_of(tasks: Collection[asyncio.Future[T | None]]) -> T | None:
    """The first result that is not None; of several at once that of the first task. The others go on."""
    left = set(tasks)
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done and (result := task.result()) is not None:
                return result
    return None


def _headers(one: LoadedModel, relay: str) -> dict[str, str]:
    return {RELAY: relay, **({"Authorization": f"Bearer {one.engine_key}"} if one.engine_key else {})}
