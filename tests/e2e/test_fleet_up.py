"""`starling fleet up`: real agents and engines; a stream outlives the agent that serves it, killed with its engine."""

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
from tests.e2e.server import free_port
from tests.e2e.up_server import Up

pytestmark = pytest.mark.slow

STREAM: dict[str, Any] = {
    "model": DEMO_MODEL,
    "prompt": "The old lighthouse keeper climbed the spiral stairs.",
    "max_tokens": 120,
    "seed": 11,
    "temperature": 0.8,
    "ignore_eos": True,
    "stream": True,
}


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


def test_a_stream_outlives_its_agent(tmp_path: Path, demo_gguf: Path) -> None:
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
        connection = fleet.connect()
        connection.request("POST", "/v1/completions", json.dumps(STREAM).encode(), {"Content-Type": "application/json"})
        undisturbed = connection.getresponse().read()
        connection.close()
        assert undisturbed.count(b"data: ") > 50
        connection = fleet.connect()
        connection.request("POST", "/v1/completions", json.dumps(STREAM).encode(), {"Content-Type": "application/json"})
        response: http.client.HTTPResponse = connection.getresponse()
        request_id = response.headers["X-Starling-Request"]
        received = response.read1(200)
        _, why, _ = fleet.request("GET", f"/v1/fleet/why/{request_id}", headers=operator)
        agent = why["choices"][-1]["agent_id"]
        pids = [pid for pid, command in fleet.pids().items() if f"agent --id {agent}" in command]
        assert pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has died with its parent
                os.kill(pid, signal.SIGKILL)
        received += response.read()
        connection.close()
        assert content(received) == content(undisturbed)
        # `fleet up` starts the agent again, and it loads its model again.
        while {one["agent_id"]: len(one.get("loaded_models", ())) for one in state()["agents"]} != {
            "agent-1": 1,
            "agent-2": 1,
        }:
            pass
        assert fleet.stop() == 0
        assert fleet.pids() == {}
