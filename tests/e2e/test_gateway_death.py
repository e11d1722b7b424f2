"""The gateway is killed in the middle of a stream: its client takes the stream up, and misses nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, wait_gone

pytestmark = pytest.mark.slow

MINE, OTHER = {"Authorization": "Bearer sk-mine"}, {"Authorization": "Bearer sk-other"}
KEYS = [{"key": "sk-mine", "tenant": "mine"}, {"key": "sk-other", "tenant": "other"}]
REQUEST: dict[str, Any] = {
    "prompt": "The old lighthouse keeper climbed the spiral stairs every evening, counting each step. " * 4,
    "max_tokens": 120,
    "seed": 11,
    "temperature": 0.8,
    "ignore_eos": True,
    "n": 2,
    "stream": True,
}


def events(server: Server, path: str, body: Any, headers: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """(id, data) until the end of the stream, or of the connection."""
    connection = server.connect()
    try:
        method = "GET" if body is None else "POST"
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        assert response.status == 200, (response.status, response.read())
        where = ""
        while line := response.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                where = value
            elif name == "data":
                if value == "[DONE]":
                    return
                yield where, json.loads(value)
    finally:
        connection.close()


def comparable(data: list[dict[str, Any]]) -> str:
    choices: dict[int, dict[str, Any]] = {}
    usage: list[int] = []
    for event in data:
        assert "error" not in event, event
        if "usage" in event:
            usage.append(event["usage"]["completion_tokens"])
            continue
        choice = choices.setdefault(event["index"], {"text": "", "tokens": [], "finish": []})
        if "tokens" in event:
            assert event["start"] == len(choice["tokens"])
            choice["text"] += event["text"]
            choice["tokens"] += event["tokens"]
        if "finish_reason" in event:
            choice["finish"].append(event["finish_reason"])
    return json.dumps([choices, usage], sort_keys=True)


def wait_answering(server: Server) -> None:
    """Until the successor listens: a connection is what tells."""
    deadline = time.monotonic() + 60
    while True:
        try:
            server.request("GET", "/health")
            return
        except OSError:
            assert time.monotonic() < deadline


def test_a_stream_outlives_the_gateway(tmp_path: Path, demo_gguf: Path) -> None:
    share_caches(tmp_path, models=True)
    config = {"models": [{"name": DEMO_MODEL, "kv_cache_mb": 64}], "auth": {"api_keys": KEYS}}
    with Server(tmp_path, config) as server:
        undisturbed = comparable([data for _, data in events(server, "/v1/generate", REQUEST, MINE)])
        begun = []
        try:
            for event in events(server, "/v1/generate", REQUEST, MINE):
                begun.append(event)
                if len(begun) == 30:
                    pid = server.pid_of("gateway")
                    os.kill(pid, signal.SIGKILL)
                    assert wait_gone(pid)
        except (OSError, ValueError):
            pass  # the connection ends with the gateway
        wait_answering(server)
        last = begun[-1][0]
        path = f"/v1/requests/{last.partition(':')[0]}"
        assert server.request("GET", path, headers=OTHER)[0] == 404
        rest = list(events(server, path, None, {**MINE, "Last-Event-ID": last}))
        assert rest
        assert comparable([data for _, data in begun + rest]) == undisturbed
        # And from the beginning, for whoever has lost it all.
        assert comparable([data for _, data in events(server, path, None, MINE)]) == undisturbed
        server.stop()
        assert server.leftovers() == []
