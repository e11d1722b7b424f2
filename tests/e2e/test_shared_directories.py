"""Two servers never write to the same state directory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.server import wait_gone
from tests.e2e.up_server import Up
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow


def test_a_second_server_with_the_same_state_directory_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    models = [{"name": "tiny", "path": str(path), "kv_cache_mb": 16}]
    homes = [tmp_path / "first", tmp_path / "second"]
    for home in homes:
        home.mkdir()
        share_caches(home)
    state = tmp_path / "state"

    def server(home: Path) -> Up:
        # The first server is killed: its arenas are not to stay in /dev/shm.
        return Up(home, {"models": models, "server": {"state_dir": str(state), "arena_dir": str(home / "arenas")}})

    with server(homes[0]) as first:
        second = server(homes[1]).start()
        try:
            found = second.wait_for(r"server\.state_dir \S+ is in use by another server|Starling is ready")
            assert "Starling is ready" not in found.string
            # The message names the holder, since when, its run directory and what to do.
            assert f"{state} " in found.string
            assert str(homes[0] / "run") in found.string
            assert "pid " in found.string
            assert ", started " in found.string
            assert "starling down" in found.string
            assert second.process is not None
            assert second.process.wait(60) == 78
        finally:
            second.stop(signal.SIGKILL)
        # The restart of a stage keeps the lock, and the first server serves.
        kv = first.pid_of("kv")
        os.kill(kv, signal.SIGKILL)
        assert wait_gone(kv)
        assert first.post("/v1/generate", prompt=[1, 2, 3], max_tokens=3)["choices"]
        second = server(homes[1]).start()
        try:
            second.wait_for(r"server\.state_dir \S+ is in use by another server")
        finally:
            second.stop(signal.SIGKILL)
        # The locks of a killed server are free at once.
        first.kill_all()
        with server(homes[1]) as second:
            assert second.post("/v1/generate", prompt=[1, 2, 3], max_tokens=3)["choices"]
