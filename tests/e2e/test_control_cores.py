"""The stages of the control plane run on their core, and ranks on the other one."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, poll_until
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

CONTROL = ("gateway", "tokenizer", "scheduler", "kv")


def cores_of(pid: int) -> set[int]:
    """The cores that threads of a process may run on."""
    found: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found |= os.sched_getaffinity(int(thread))
    return found


@pytest.mark.skipif("len(os.sched_getaffinity(0)) < 2", reason="ranks and control plane need a core each")
def test_no_stage_of_the_control_plane_runs_on_a_core_that_computes(tmp_path: Path) -> None:
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"], seed=1)
    first, *others = sorted(os.sched_getaffinity(0))
    model = {"name": "tiny", "path": str(path), "kv_cache_mb": 8}
    with Server(tmp_path, {"models": [model], "performance": {"control_cores": 1}}) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 20, "seed": 1, "ignore_eos": True}
        text = server.post("/v1/generate", **body)["choices"][0]["text"]
        assert text
        for stage in ("scheduler", "gateway"):
            assert {name: cores_of(server.pid_of(name)) for name in CONTROL} == {name: {first} for name in CONTROL}
            assert os.sched_getaffinity(server.pid_of("worker-tiny")) <= set(others)  # rank 0 is the main thread
            killed = server.pid_of(stage)
            os.kill(killed, signal.SIGKILL)
            poll_until(lambda stage=stage, killed=killed: server.pid_of(stage) != killed)
        assert server.post("/v1/generate", **body)["choices"][0]["text"] == text
        server.stop()
