"""The gateway is killed in the middle of a stream: its client resumes the stream and misses no byte."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import comparable, events, wait_answering
from tests.e2e.server import Server, wait_gone

pytestmark = pytest.mark.slow

MINE, OTHER = {"Authorization": "Bearer sk-mine"}, {"Authorization": "Bearer sk-other"}
KEYS = [{"key": "sk-mine", "tenant": "mine"}, {"key": "sk-other", "tenant": "other"}]
REQUEST: dict[str, Any] = {
    "prompt": "The old lighthouse keeper climbed the spiral stairs every evening, counting each step. " * 4,
    "max_tokens": 400,
    "seed": 11,
    "temperature": 0.8,
    "ignore_eos": True,
    "n": 2,
    "stream": True,
}


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
        # The whole stream can be read again as well.
        assert comparable([data for _, data in events(server, path, None, MINE)]) == undisturbed
        server.stop()
        assert server.leftovers() == []
