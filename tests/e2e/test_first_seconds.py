"""The first seconds of a server: its estimate of waiting times must not refuse what takes a moment."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, wait_gone
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow


def test_long_outputs_of_a_tiny_model_are_not_refused_after_a_start(tmp_path: Path) -> None:
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPES["wide"])
    model = {"name": "tiny", "path": str(path), "kv_cache_mb": 64, "max_batch_size": 4}
    with Server(tmp_path, {"models": [model], "server": {"request_timeout_ms": 60_000}}) as server:
        for stage in ("scheduler", "worker-tiny"):
            first: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True}
            assert server.request("POST", "/v1/generate", first)[0] == 200
            status, answer, _ = server.request("POST", "/v1/generate", {**first, "n": 8, "max_tokens": 1200})
            assert status == 200, answer
            assert [len(choice["tokens"]) for choice in answer["choices"]] == [1200] * 8
            pid = server.pid_of(stage)
            os.kill(pid, signal.SIGKILL)
            assert wait_gone(pid)
            server.pid_of(stage)  # requests wait 10 s for a stage that is restarted
        server.stop()
