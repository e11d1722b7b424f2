"""An engine that sends the head of an error and falls silent: its request ends with its agent, as a stream does."""

from __future__ import annotations

import asyncio

import pytest

from stages.orchestrator.forward import Refusal
from tests.orchestrator.loopback_engine import WAIT_S, LoopbackEngine, head, keyed, relaying, response
from tests.orchestrator.test_text_relay import Received

CASES = [
    ("a whole answer is read again", 409, {"was_sent": True}),
    ("a stream is read again", 409, {"was_sent": True, "is_stream": True}),
    ("a stream goes on after an event", 404, {"is_stream": True, "last_id": "req-1:7"}),
    ("a new request", 404, {}),
    ("a new stream", 500, {"is_stream": True}),
]


@pytest.mark.parametrize(("status", "fields"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_a_request_at_a_silent_engine_goes_on_when_its_agent_is_lost(
    status: int, fields: dict[str, object]
) -> None:
    silent, other = LoopbackEngine(head(status)), LoopbackEngine(response(400))
    async with relaying(silent, other) as world:
        relay, forward = world.relay, keyed(**fields)
        asked = relay.stream(forward, Received()) if forward.is_stream else relay.whole(forward)
        task = asyncio.ensure_future(asked)
        async with asyncio.timeout(WAIT_S):
            while not world.client.n_answers:
                await asyncio.sleep(0)
            for _ in range(10):  # until the request waits for the body
                await asyncio.sleep(0)
            assert relay.lose_agent("a", "the agent has not answered for 3.0 s") == 1
            with pytest.raises(Refusal, match="400"):  # the answer of the other one
                await task
        assert len(silent.requests) == len(other.requests) == 1
