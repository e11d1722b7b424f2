"""In a /dev/shm with room for one set of arenas, killed processes leave room for their successors.

And in a larger one, a model whose arenas turn out too large when it has been converted is refused.

The file system is a tmpfs in a mount namespace of the server's own, and the kernel really reports it as full (ENOSPC).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.models import capacity
from tests.e2e import small_disk
from tests.e2e.arenas import arenas_of
from tests.e2e.conftest import share_caches
from tests.e2e.phases import plan_strike, struck
from tests.e2e.server import ROOT, Server, poll_until
from tests.e2e.up_server import Up
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

SPARE_BYTES = 256 << 10  # for metrics, locks and honcho's semaphores; less than any of the arenas
ESTIMATED_BYTES = (4 << 20) + (capacity.UNPREPARED_MB << 20)  # arenas of a model that is not converted, with its KV
REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 1500, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if reason := small_disk.why_not():
        pytest.skip(f"no file system can be mounted here: {reason}")
    home = tmp_path_factory.mktemp("small")
    share_caches(home)
    path = write_model(home / "tiny.gguf", SHAPES["small"])
    models = [{"name": "tiny", "path": str(path), "kv_cache_mb": 4}]
    config: dict[str, Any] = {"models": models, "server": {"request_timeout_ms": 60_000}}
    sizes = arenas_of(config, path, home)
    assert min(sizes) > SPARE_BYTES
    launcher = small_disk.mounted((sizes.total + SPARE_BYTES) >> 10, Path("/dev/shm"))
    with Server(home, config, launcher=launcher) as server:
        yield server
        server.stop()


def shm(server: Server) -> Path:
    """The server's /dev/shm."""
    return Path(f"/proc/{server.pid_of('kv')}/root/dev/shm")


def ask(server: Server) -> Any:
    return server.post("/v1/generate", **REQUEST)["choices"]


def test_a_killed_process_leaves_room_for_its_successor(server: Server) -> None:
    expected = ask(server)[0]["tokens"]
    for stage in ("worker-tiny", "scheduler", "kv", "scheduler", "worker-tiny"):
        tokens: list[int] = []
        for number, event in enumerate(server.stream("/v1/generate", **REQUEST)):
            if number == 3:
                os.kill(server.pid_of(stage), signal.SIGKILL)
            assert "error" not in event, (stage, event)
            tokens += event.get("tokens", ())
        assert tokens == expected, stage


def test_a_model_that_cannot_attach_is_an_error_within_seconds(server: Server) -> None:
    expected = ask(server)
    (arena,) = shm(server).glob("*/tiny.act")
    kept = arena.with_name("kept")
    os.link(arena, kept)  # its memory stays in use when the file is removed
    plan_strike(server, "decode-20", [server.pid_of("worker-tiny")], [server.pid_of("scheduler")])
    events = list(server.stream("/v1/generate", **REQUEST))
    struck(server, "decode-20")
    error = events[-1]["error"]
    assert error["code"] == "MODEL_UNAVAILABLE"  # the stream's own time is not over
    assert "tiny.act: needs" in error["message"] and "bytes but" in error["message"]
    status, answer, _ = server.request("GET", "/ready")
    assert status == 503
    assert "tiny.act: needs" in answer["models"]["tiny"]["reason"]
    poll_until(lambda: server.request("GET", "/ready")[1]["stages"]["kv"]["ready"])
    status, answer, _ = server.request("POST", "/v1/generate", REQUEST)
    assert status == 503
    assert "tiny.act: needs" in answer["error"]["message"]
    kept.unlink()
    assert ask(server) == expected


def test_a_model_that_proves_too_large_is_refused_with_the_numbers(tmp_path: Path) -> None:
    """Its context is long; before it is converted its arenas are taken for smaller ones, which fit."""
    if reason := small_disk.why_not():
        pytest.skip(f"no file system can be mounted here: {reason}")
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    long = write_model(tmp_path / "long.gguf", SHAPES["small"]._replace(context_length=1 << 18), seed=2)
    models = [{"name": "tiny", "path": str(path), "kv_cache_mb": 4}]
    config: dict[str, Any] = {"models": models, "server": {"request_timeout_ms": 60_000}}
    own = arenas_of(config, path, tmp_path).total
    needed = arenas_of({"models": [{"name": "long", "path": str(long), "kv_cache_mb": 4}]}, long, tmp_path).total
    assert needed > ESTIMATED_BYTES + (2 << 20)
    launcher = small_disk.mounted((own + ESTIMATED_BYTES + (1 << 20)) >> 10, Path("/dev/shm"))
    with Server(tmp_path, config, launcher=launcher) as server:
        expected = ask(server)
        for _ in range(2):  # first by the worker that has converted it, then by the gateway
            command = [sys.executable, "-m", "starling", "load", "long", "--path", str(long), "--kv-cache-mb", "4"]
            done = subprocess.run(
                command, cwd=ROOT, env=server.environment, capture_output=True, text=True, timeout=240
            )
            assert done.returncode == 78, (done.stdout, done.stderr)
            assert f"model 'long' needs {needed:,} bytes for its arenas" in done.stderr
        assert ask(server) == expected
        assert [one.name for one in shm(server).glob("*/long.*")] == []
        server.stop()


def test_arenas_without_room_move_to_the_home_where_other_shells_find_them(tmp_path: Path) -> None:
    """Until the server ends: then they are removed, with what says where they are."""
    if reason := small_disk.why_not():
        pytest.skip(f"no file system can be mounted here: {reason}")
    share_caches(tmp_path)
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    server = Up(tmp_path, {"models": [{"name": "tiny", "path": str(path), "kv_cache_mb": 4}]})
    server.command = (*small_disk.mounted(2048, Path("/dev/shm")), *Up.command)
    with server:
        (moved,) = (tmp_path / "arenas").iterdir()
        assert (moved / "tiny.kv").exists()
        command = [sys.executable, "-m", "starling", "kv", "--json"]
        done = subprocess.run(command, cwd=ROOT, env=server.environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, (done.stdout, done.stderr)
        assert '"tiny"' in done.stdout
        down = [sys.executable, "-m", "starling", "down", "--timeout", "120"]
        done = subprocess.run(down, cwd=ROOT, env=server.environment, capture_output=True, text=True, timeout=240)
        assert (done.returncode, done.stdout) == (0, "ended\n")
    assert not moved.exists()
    assert not (tmp_path / "run" / "arena-parent").exists()
