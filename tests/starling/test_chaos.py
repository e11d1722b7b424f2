"""The requests of `starling chaos` fit every model, and long ones are sent only under memory pressure."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from starling.chaos import client as client_module
from starling.chaos.client import Answer, Client, Outcome
from starling.chaos.requests import ChaosRequest, ServedModel, plan
from starling.chaos.traffic import Traffic


def longest(requests: list[ChaosRequest]) -> int:
    """Tokens of the longest context, if every byte were one."""

    def of(turn: dict[str, Any]) -> int:
        return len(turn.get("prompt") or "".join(one["content"] for one in turn["messages"])) + turn["max_tokens"]

    return max(sum(map(of, request.turns)) for request in requests)


@pytest.mark.parametrize("context", [512, 2048, 8192])
@pytest.mark.parametrize("long_prompts", [False, True])
def test_every_request_fits_the_context(context: int, long_prompts: bool) -> None:
    requests = plan(48, 1, 120, [ServedModel("a", True, context)], long_prompts)
    assert longest(requests) <= context
    assert len({str(request.turns) for request in requests}) == 48
    assert {request.path for request in requests} == {"/v1/generate", "/v1/chat/completions"}


def test_prompts_keep_the_limit_of_the_server() -> None:
    requests = plan(48, 1, 20, [ServedModel("a", False, 8192)], True, max_prompt=100)
    assert max(len(request.turns[0]["prompt"]) for request in requests) == 100


def test_the_error_names_a_model_whose_context_is_too_small() -> None:
    with pytest.raises(RuntimeError, match=r"'a' has a context of 256 tokens.*lower --tokens"):
        plan(4, 1, 120, [ServedModel("a", False, 256)])


class InstantClient:
    """A client that answers at once and records the requests."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.traffic: Traffic | None = None

    async def send(self, index: int, request: ChaosRequest) -> Outcome:
        assert self.traffic is not None
        self.sent.append(index)
        if len(self.sent) == 50:
            assert self.traffic.press()
        if len(self.sent) == 100:
            self.traffic.release()
        if len(self.sent) == 150:
            self.traffic._stop.set()
        return Outcome(index, 0.0, 0.0, (Answer((), (), (), "", ""),))


async def test_heavy_requests_are_sent_only_under_memory_pressure() -> None:
    client = InstantClient()
    light, heavy = (
        plan(6, 1, 20, [ServedModel("a", False, 4096)]),
        plan(3, 2, 20, [ServedModel("a", False, 4096)], True),
    )
    client.traffic = traffic = Traffic(client, light, 1, 1, heavy)  # type: ignore[arg-type]
    traffic.start()
    await asyncio.gather(*traffic._tasks)
    assert max(client.sent[:50] + client.sent[100:]) < 6 <= min(client.sent[50:100])
    assert traffic.can_press
    assert not Traffic(client, light, 1, 1).can_press  # type: ignore[arg-type]


async def test_it_begins_when_a_server_that_is_silent_for_a_moment_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no model is ready by the time of the list."""
    monkeypatch.setattr(client_module, "READY_S", 600.0)
    ready = iter((503, 200, 503, 200))
    listed = iter((False, True))
    model = {"id": "a", "chat": True, "context_length": 512}

    async def answer_ready(request: web.Request) -> web.Response:
        return web.Response(status=next(ready))

    async def answer_models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{**model, "ready": next(listed)}]})

    app = web.Application()
    app.router.add_get("/ready", answer_ready)
    app.router.add_get("/v1/models", answer_models)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        client = Client(str(server.make_url("")), session)
        assert await client.models_when_ready() == [ServedModel("a", True, 512)]
    assert not [*ready, *listed]


async def test_it_does_not_wait_for_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "READY_S", 600.0)
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        assert await Client(f"http://127.0.0.1:{unused_port()}", session).models_when_ready() == []
