"""What an orchestrator does with bodies that are too large, and with records of other releases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.fleet import token
from pipeline.fleet.records import VERSION, agent_key
from tests.gateway import large_bodies
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet
from tests.orchestrator.streams import BODY, MINE


@pytest.fixture(scope="module")
def small_fleet(homes: Callable[[], Path], engines: list[Server]) -> Iterator[Fleet]:
    """An orchestrator that takes bodies of 1 MiB."""
    keys = [{"key": "sk-mine", "tenant": "mine"}]
    running = Fleet(homes(), {"auth": {"api_keys": keys}, "server": {"max_body_mb": 1}}, silent_ms=600_000)
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
