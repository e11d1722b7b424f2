"""A supervisor is killed: its stage dies with it, `starling up` starts both again, and streams keep their bytes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.observe.status import read_all
from starling.cli.down import supervisor_of, top_of
from tests.e2e.conftest import share_caches
from tests.e2e.resumable import comparable, events, wait_answering
from tests.e2e.server import POLL_S, wait_gone
from tests.e2e.up_server import Up
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 1500, "seed": 5, "ignore_eos": True, "stream": True}


def supervisor(server: Up, stage: str) -> int:
    """The pid of the process that honcho started for the stage."""
    deadline = time.monotonic() + 60
    while True:
        for record in read_all(server.home / "run"):
            if record.stage.partition("-")[0] != stage or not (record.alive and record.ready):
                continue
            if (found := top_of(supervisor_of(record))) and not wait_gone(found, 0):
                return found
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


def test_each_supervisor_may_be_killed(tmp_path: Path) -> None:
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    with Up(tmp_path, {"models": [{"name": "tiny", "path": str(path), "kv_cache_mb": 16}]}) as server:
        undisturbed = comparable([data for _, data in events(server, "/v1/generate", REQUEST, {})])
        server.config_path.write_text("models: [")  # the file counts from the next start of the server
        for stage in ("tokenizer", "kv", "scheduler", "worker", "gateway"):
            pid = supervisor(server, stage)
            records = [record for record in read_all(server.home / "run") if record.stage.startswith(stage)]
            below = [record.pid for record in records]
            begun = []
            try:
                for event in events(server, "/v1/generate", REQUEST, {}):
                    begun.append(event)
                    if len(begun) == 3:
                        os.kill(pid, signal.SIGKILL)
                        assert wait_gone(pid)
                        assert all(map(wait_gone, below))
            except (OSError, ValueError):
                assert stage == "gateway"
            if stage == "gateway":
                wait_answering(server)
                last = begun[-1][0]
                begun += events(server, f"/v1/requests/{last.partition(':')[0]}", None, {"Last-Event-ID": last})
            assert comparable([data for _, data in begun]) == undisturbed, stage
            assert supervisor(server, stage) != pid
            after = {record.stage: record.restarts for record in read_all(server.home / "run")}
            assert all(after[record.stage] == record.restarts + 1 for record in records), stage
            assert server.process is not None
            assert server.process.poll() is None
        pids = server.pids()
        assert server.stop(signal.SIGTERM) == 0
        assert all(wait_gone(pid) for pid in pids)
    assert server.leftovers() == []
