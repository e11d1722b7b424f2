"""What an orchestrator does with bodies that are too large, unknown expectations, and records of other releases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.fleet import token
from pipeline.fleet.records import VERSION, agent_key
from tests.e2e.server import poll_until
from tests.gateway import large_bodies
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet
from tests.orchestrator.streams import BODY, MINE, OTHER, hold, step


@pytest.fixture(scope="module")
def small_fleet(homes: Callable[[], Path], engines: list[Server]) -> Iterator[Fleet]:
    """An orchestrator that takes bodies of 1 MiB, and two of them at once."""
    keys = [{"key": "sk-mine", "tenant": "mine"}, {"key": "sk-other", "tenant": "other"}]
    server = {"max_body_mb": 1, "body_buffer_mb": 2}
    running = Fleet(homes(), {"auth": {"api_keys": keys}, "server": server}, silent_ms=600_000)
    running.add_agent("one", engines[0])
    yield running
    assert running.close() == 0, "".join(running.lines)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/fleet/place"])
def test_a_body_of_100_mib_is_refused_in_bounded_memory(small_fleet: Fleet, path: str, is_chunked: bool) -> None:
    authorization = MINE if path == "/v1/completions" else token.authorization(small_fleet.secret)
    before = large_bodies.peak_bytes(small_fleet.process.pid)
    answer = large_bodies.send(small_fleet.port, path, authorization["Authorization"], is_chunked=is_chunked)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"server.max_body_mb" in answer, answer
    assert large_bodies.peak_bytes(small_fleet.process.pid) < before + (16 << 20)
    assert small_fleet.post("/v1/completions", BODY, MINE).status == 200


def padded(body: dict[str, Any], n: int) -> bytes:
    """A body with `n` bytes more."""
    return json.dumps(body).encode() + b" " * n


TEXT = {"model": MODEL, "text": "x"}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", padded(BODY, 200_000)), ("/v1/tokenize", padded(TEXT, 400_000))],
    ids=["plain", "by aiohttp"],
)
def test_bodies_of_requests_in_flight_are_bounded_for_each_tenant(
    small_fleet: Fleet, engines: list[Server], path: str, body: bytes
) -> None:
    connection = small_fleet.connect()
    hold(engines[0])
    try:
        headers = {"Content-Type": "application/json", **MINE}
        connection.request("POST", "/v1/completions", padded({**BODY, "stream": True}, 900_000), headers)
        step(engines[0], 1)
        response = connection.getresponse()
        refused = small_fleet.post(path, body, MINE)
        assert (refused.status, refused.error["code"]) == (429, "OVERLOADED")
        assert "(server.body_buffer_mb): at most 1 MiB for one client, 2 MiB in all" in refused.error["message"]
        assert small_fleet.post("/v1/tokenize", TEXT, MINE).status == 200
        assert small_fleet.post("/v1/tokenize", padded(TEXT, 400_000), OTHER).status == 200
        hold(engines[0], False)
        assert response.read().endswith(b"data: [DONE]\n\n")
        poll_until(lambda: small_fleet.post(path, body, MINE).status == 200)
    finally:
        hold(engines[0], False)
        connection.close()


def test_bodies_in_the_background_are_bounded_for_each_tenant(small_fleet: Fleet, engines: list[Server]) -> None:
    """A stream is refused, and others wait in the store. They count apart from the bodies of requests in flight."""
    path, asked = "/v1/responses", {"model": MODEL, "input": "x", "max_output_tokens": 4, "background": True}
    made: list[tuple[str, dict[str, str]]] = []
    hold(engines[0])
    try:
        for tenant in (MINE, MINE, OTHER):
            made.append((small_fleet.post(path, padded(asked, 700_000), tenant).json["id"], tenant))
        for tenant in (MINE, OTHER):
            refused = small_fleet.post(path, padded({**asked, "stream": True}, 700_000), tenant)
            assert (refused.status, refused.error["code"]) == (429, "OVERLOADED")
            assert "in the background are held (server.body_buffer_mb): at most 1 MiB" in refused.error["message"]
            assert small_fleet.post("/v1/tokenize", padded(TEXT, 400_000), tenant).status == 200
    finally:
        hold(engines[0], False)
    for name, tenant in made:
        poll_until(lambda: small_fleet.get(f"{path}/{name}", tenant).json["status"] == "incomplete")  # noqa: B023


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/fleet/place"])
def test_an_unknown_expectation_is_refused_as_others(small_fleet: Fleet, path: str) -> None:
    refused = small_fleet.post(path, BODY, {**MINE, "Expect": "foo"})
    assert (refused.status, refused.error["code"]) == (417, "INVALID_REQUEST")
    assert refused.error["message"].startswith("the header Expect is 'foo', expected '100-continue'; ")
    assert small_fleet.post("/v1/completions", BODY, MINE).status == 200


def test_an_unknown_expectation_is_refused_in_the_form_of_anthropic(small_fleet: Fleet) -> None:
    refused = small_fleet.post("/v1/messages", BODY, {**MINE, "Expect": "foo"})
    assert (refused.status, refused.json["type"]) == (417, "error")
    assert refused.json["request_id"] == refused.headers["request-id"]
    assert set(error := refused.json["error"]) == {"type", "message"}
    assert error["type"] == "invalid_request_error"


def test_records_of_a_newer_release_are_skipped_and_named(small_fleet: Fleet) -> None:
    url = small_fleet.agents["one"].url
    newer = {"agent_id": "two", "url": url, "incarnation": "9", "version": VERSION + 1, "what": {"is": "new"}}
    records = {
        agent_key("two"): newer,
        agent_key("three"): [1, 2, 3],
        "placements/later": {"model": {"name": "later"}, "replicas": "many"},
        "cordons/four": {"is_draining": {"until": 5}},
        "unknown/key": {"x": 1},
    }
    for key, value in records.items():
        small_fleet.write(key, json.dumps(value).encode())
    small_fleet.add_agent("five", small_fleet.agents["one"].engines[MODEL])  # what comes after them is applied
    state = small_fleet.state()
    assert [one["agent_id"] for one in state["agents"]] == ["five", "one"]
    assert small_fleet.post("/v1/completions", BODY, MINE).status == 200
    said = [line for line in small_fleet.lines if "a value of the store is not used" in line]
    for key in list(records)[:-1]:
        assert any(key in line for line in said), key
    assert any(f"version {VERSION + 1}, expected {VERSION}" in line for line in said)
