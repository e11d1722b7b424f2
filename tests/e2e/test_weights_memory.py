"""A server with `use_mmap: false` answers with the same bytes, also after the death of its workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipeline.config.schema import DEMO_MODEL
from pipeline.procfs import children
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, wait_gone
from tests.e2e.test_damaged_weights import generate

pytestmark = pytest.mark.slow


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_weights_in_memory_serve_the_same_bytes(tmp_path: Path, demo_server: Server) -> None:
    share_caches(tmp_path, models=True)
    expected = generate(demo_server, DEMO_MODEL)
    assert expected[0] == 200
    config = {"models": [{"name": DEMO_MODEL, "kv_cache_mb": 64}], "performance": {"use_mmap": False}}
    with Server(tmp_path, config) as server:
        assert generate(server, DEMO_MODEL) == expected
        pid = server.pid_of(f"worker-{DEMO_MODEL}")
        ranks = [pid, *children(pid)]
        server.wait_output("weights read into memory")
        assert all(".bin" not in maps_of(rank) for rank in ranks)
        demo_pid = demo_server.pid_of(f"worker-{DEMO_MODEL}")
        assert ".bin" in maps_of(demo_pid)
        os.kill(pid, signal.SIGKILL)
        assert all(wait_gone(rank) for rank in ranks)
        assert generate(server, DEMO_MODEL) == expected
        server.stop()
        assert server.leftovers() == []
