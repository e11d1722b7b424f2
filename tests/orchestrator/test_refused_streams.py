"""Streams that are refused when their clients have got comments: the error is an event, in the form of each API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def fleet(homes: Callable[[], Path], engines: list[Server]) -> Iterator[Fleet]:
    """An orchestrator whose clients get a byte every second."""
    running = Fleet(homes(), {"server": {"sse_ping_interval_s": 1}}, wait_ms=1000, silent_ms=600_000)
    running.add_agent("one", engines[0])
    yield running
    assert running.close() == 0, "".join(running.lines)


@pytest.fixture(autouse=True)
def in_queue(engines: list[Server]) -> Iterator[None]:
    """Requests stay in the engine's queue."""
    peers = engines[0].peers
    with peers.held():
        peers.do(lambda: setattr(peers.generator, "is_starting", False))
        yield
        peers.do(lambda: setattr(peers.generator, "is_starting", True))


def cancel(fleet: Fleet, name: str) -> None:
    assert fleet.request("DELETE", f"/v1/requests/{name}").status == 200


def test_anthropics_client_gets_an_error(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{fleet.port}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        stream = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=20, stream=True)
        cancel(fleet, stream.response.headers["X-Starling-Request"])
        with pytest.raises(anthropic.APIStatusError, match="cancelled") as raised:
            list(stream)
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["error"]["type"] == "invalid_request_error"
    assert raised.value.body["request_id"] == stream.response.headers["X-Request-Id"]


def test_openais_client_gets_a_failed_response(fleet: Fleet) -> None:
    url, unstored = f"http://127.0.0.1:{fleet.port}/v1", {"store": False}
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        client.responses.stream(model=MODEL, input="Hi", temperature=0.5, extra_body=unstored) as stream,
    ):
        name = stream._response.headers["X-Starling-Request"]
        cancel(fleet, name)
        events: list[Any] = list(stream)
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event.sequence_number for event in events] == [0, 1, 2]
    begun, failed = events[0].response, events[-1].response
    assert (begun.status, begun.error, begun.model, begun.temperature) == ("in_progress", None, MODEL, 0.5)
    assert begun.id == failed.id == name.replace("req-", "resp_")
    assert (failed.status, failed.output) == ("failed", []) and "cancelled" in failed.error.message


def test_all_choices_end_with_the_error(fleet: Fleet) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "n": 2}
    stream = fleet.stream("/v1/chat/completions", body)
    cancel(fleet, stream.response.headers["X-Starling-Request"])
    received: bytes = stream.response.read()
    stream.close()
    assert received.startswith(b":\n") and received.endswith(b"data: [DONE]\n\n")
    shown = json.loads(received[received.index(b"{") :].split(b"\n")[0])
    assert shown["error"]["code"] == "CONFLICT"
    assert shown["choices"] == [{"index": index, "finish_reason": "error"} for index in range(2)]
