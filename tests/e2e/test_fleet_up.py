"""`starling fleet up`: real agents and engines; streams outlive the agent that serves them, killed with its engine.

They go on at the other agent from their tokens: sampled, greedy and constrained ones.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from pipeline.fleet import token
from tests.e2e.conftest import share_caches
from tests.e2e.up_server import Up
from tools.ports import free_port

pytestmark = pytest.mark.slow

SAMPLED: dict[str, Any] = {
    "model": DEMO_MODEL,
    "prompt": "The old lighthouse keeper climbed the spiral stairs.",
    "max_tokens": 240,
    "seed": 11,
    "temperature": 0.8,
    "ignore_eos": True,
    "stream": True,
}
GREEDY = {**SAMPLED, "temperature": 0.0}
CONSTRAINED = {**SAMPLED, "ignore_eos": False, "regex": "[a-z]{3,9}( [a-z]{3,9}){39}\\."}
N_EVENTS = 10
STREAMS = (SAMPLED, GREEDY, CONSTRAINED)


class FleetUp(Up):
    """A fleet of two agents on this machine."""

    command = (*Up.command[:-1], "fleet", "up", "--agents", "2")

    def wait_ready(self) -> FleetUp:
        self.wait_for(rf"The fleet is ready at http://127\.0\.0\.1:{self.port} ")
        return self


def content(raw: bytes) -> bytes:
    """A stream without what differs from request to request."""
    raw = re.sub(rb'("created|"cached_tokens)":\d+', rb'\1":0', raw)
    return re.sub(rb"[0-9a-f]{24}", b"ID", raw)


def begin(fleet: FleetUp, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = fleet.connect()
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def several_events(response: http.client.HTTPResponse) -> bytes:
    """The first `N_EVENTS` events, of which each has a token or more."""
    lines: list[bytes] = []
    while sum(line.startswith(b"data: ") for line in lines) < N_EVENTS:
        lines.append(response.readline())
        assert lines[-1], "the stream has ended"
    return b"".join(lines)


def test_streams_outlive_their_agent(tmp_path: Path, demo_gguf: Path) -> None:
    share_caches(tmp_path, models=True)
    port = free_port()
    config = {
        "models": [{"name": DEMO_MODEL, "kv_cache_mb": 64, "ranks": 1}],
        "fleet": {"orchestrator": {"port": port, "poll_ms": 100}},
    }
    fleet = FleetUp(tmp_path, config)
    fleet.port = port
    with fleet:
        operator = token.authorization(token.load_or_create(tmp_path / "fleet-token"))

        def state() -> dict[str, Any]:
            status, found, _ = fleet.request("GET", "/v1/fleet", headers=operator)
            assert status == 200, found
            return dict(found)

        _, models, _ = fleet.request("GET", "/v1/models")
        assert [(one["id"], one["ready"], len(one["agents"])) for one in models["data"]] == [(DEMO_MODEL, True, 2)]
        undisturbed = []
        for body in STREAMS:
            connection, response = begin(fleet, body)
            undisturbed.append(response.read())
            connection.close()
            assert undisturbed[-1].count(b"data: ") > 40 and b'"error"' not in undisturbed[-1]
        # All three to one agent, of which several events have come when it dies.
        assert fleet.request("POST", "/v1/fleet/cordon", {"agent": "agent-2", "cordoned": True}, operator)[0] == 200
        while not state()["agents"][1]["cordoned"]:
            pass
        pids = [pid for pid, command in fleet.pids().items() if "agent --id agent-1" in command]
        assert pids
        begun = [begin(fleet, body) for body in STREAMS]
        received = [several_events(response) for _, response in begun]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has died with its parent
                os.kill(pid, signal.SIGKILL)
        assert fleet.request("POST", "/v1/fleet/cordon", {"agent": "agent-2", "cordoned": False}, operator)[0] == 200
        for number, (connection, response) in enumerate(begun):
            received[number] += response.read()
            connection.close()
            assert content(received[number]) == content(undisturbed[number])
        assert fleet.metrics("starling_fleet_continued_tokens_total")[""] >= N_EVENTS
        # `fleet up` starts the agent again, and it loads its model again.
        while {one["agent_id"]: len(one.get("loaded_models", ())) for one in state()["agents"]} != {
            "agent-1": 1,
            "agent-2": 1,
        }:
            pass
        assert fleet.stop() == 0
        assert fleet.pids() == {}
