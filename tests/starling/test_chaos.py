"""What `starling chaos` asks: requests that any model can take, and long ones only while the memory is pressed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from starling.chaos.traffic import Answer, Ask, Outcome, Served, Traffic, plan


def longest(requests: list[Ask]) -> int:
    """Tokens of the longest context, if every byte were one."""

    def of(turn: dict[str, Any]) -> int:
        return len(turn.get("prompt") or "".join(one["content"] for one in turn["messages"])) + turn["max_tokens"]

    return max(sum(map(of, ask.turns)) for ask in requests)


@pytest.mark.parametrize("context", [512, 2048, 8192])
@pytest.mark.parametrize("long_prompts", [False, True])
def test_every_request_fits_the_context(context: int, long_prompts: bool) -> None:
    requests = plan(48, 1, 120, [Served("a", True, context)], long_prompts)
    assert longest(requests) <= context
    assert len({str(ask.turns) for ask in requests}) == 48
    assert {ask.path for ask in requests} == {"/v1/generate", "/v1/chat/completions"}


def test_prompts_are_as_short_as_the_server_wants_them() -> None:
    requests = plan(48, 1, 20, [Served("a", False, 8192)], True, max_prompt=100)
    assert max(len(ask.turns[0]["prompt"]) for ask in requests) == 100


def test_a_context_that_is_too_small_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"'a' has a context of 256 tokens.*lower --tokens"):
        plan(4, 1, 120, [Served("a", False, 256)])


class Answering:
    """A client that has every answer at once, and tells what was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.traffic: Traffic | None = None

    async def ask(self, index: int, ask: Ask) -> Outcome:
        assert self.traffic is not None
        self.asked.append(index)
        if len(self.asked) == 50:
            assert self.traffic.press()
        if len(self.asked) == 100:
            self.traffic.relent()
        if len(self.asked) == 150:
            self.traffic._stop.set()
        return Outcome(index, 0.0, 0.0, (Answer((), (), (), "", ""),))


async def test_heavy_requests_are_asked_while_the_memory_is_pressed() -> None:
    client = Answering()
    light, heavy = plan(6, 1, 20, [Served("a", False, 4096)]), plan(3, 2, 20, [Served("a", False, 4096)], True)
    client.traffic = traffic = Traffic(client, light, 1, 1, heavy)  # type: ignore[arg-type]
    traffic.start()
    await asyncio.gather(*traffic._tasks)
    assert max(client.asked[:50] + client.asked[100:]) < 6 <= min(client.asked[50:100])
    assert traffic.can_press
    assert not Traffic(client, light, 1, 1).can_press  # type: ignore[arg-type]
