"""The requests of `starling chaos` fit every model, and long ones are sent only under memory pressure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from starling.chaos.client import Answer, Outcome
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
