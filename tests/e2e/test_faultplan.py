"""Each fault of the documented plan occurs in a real server at its place, and no byte differs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, wait_gone
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

PLAN = "worker:exit@step=17, kv:stop@page=3, wire:drop@gateway>scheduler:5, disk:enospc@spill"
SHAPE = SHAPES["small"]._replace(context_length=2048)


def prompt(n: int, count: int) -> list[int]:
    return [(n * 131 + i * 7) % 290 + 1 for i in range(count)]


def ask(server: Server, n: int, count: int = 200) -> Any:
    answer = server.post(
        "/v1/generate", prompt=prompt(n, count), max_tokens=12, ignore_eos=True, temperature=0.9, seed=n, logprobs=1
    )
    answer["usage"].pop("prompt_tokens_details")
    return json.dumps([answer["choices"], answer["usage"]], sort_keys=True)


def test_the_documented_plan_fires(tmp_path: Path) -> None:
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPE)
    model = {
        "name": "tiny",
        "path": str(path),
        "kv_cache_mb": 1,
        "ranks": 2,
        "spill_path": str(tmp_path / "spill"),
        "spill_mb": 8,
    }
    config = {"models": [model], "server": {"request_timeout_ms": 120_000}}
    with Server(tmp_path, config, {"STARLING_FAULTS": PLAN}) as server:
        disturbed = [ask(server, n) for n in range(30)]
        for said in (
            "ended with code 1",
            "was stopped (SIGSTOP) and has been killed",
            "frames from it were lost",
        ):
            server.wait_output(said)
        # Evicted pages do not fit on the disk and are computed again.
        assert [ask(server, n) for n in range(30)] == disturbed
        server.wait_metrics("starling_kv_cache_evictions_total", lambda found: sum(found.values()) > 0)
        assert server.metrics("starling_kv_cache_bytes")['state="spilled"'] == 0
        server.wait_output("No space left on device")


def test_a_log_disk_that_stands_still_stops_no_stage(tmp_path: Path) -> None:
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPE)
    config = {"models": [{"name": "tiny", "path": str(path), "kv_cache_mb": 1, "ranks": 2}]}
    with Server(tmp_path, config, {"STARLING_FAULTS": "disk:slow@logs=1000000"}) as server:  # ms: no end in sight
        first = ask(server, 1)
        # The worker attaches to the arenas of the scheduler's successor, and logs it.
        pid = server.pid_of("scheduler")
        os.kill(pid, signal.SIGKILL)
        assert wait_gone(pid)
        server.pid_of("scheduler")  # requests wait 10 s for a stage that is restarted
        assert ask(server, 1) == first
        assert not any("has been killed" in line for line in server.output), "a stage hung"
