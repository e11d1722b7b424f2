"""Logs on a disk that is full: requests are served, what is stored are whole lines, and the lost ones are counted."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.e2e import small_disk
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

SIZE_KIB = 512
PAGE = 4096  # bytes that a file system has in one piece
WAIT_S = 60.0


def test_a_full_disk_of_the_logs_costs_lines_alone(tmp_path: Path) -> None:
    if reason := small_disk.why_not():
        pytest.skip(f"no file system can be mounted here: {reason}")
    share_caches(tmp_path)
    (tmp_path / "logs").mkdir()
    model = {"name": "tiny", "path": str(write_model(tmp_path / "tiny.gguf", SHAPES["small"])), "kv_cache_mb": 16}
    config = {"models": [model], "logging": {"format": "json", "level": "debug"}}
    launcher = small_disk.mounted(SIZE_KIB, tmp_path / "logs")
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": 5, "seed": 1, "ignore_eos": True}
    with Server(tmp_path, config, launcher=launcher) as server:
        disk = Path(f"/proc/{server.pid_of('gateway')}/root{tmp_path}/logs")
        expected = server.post("/v1/completions", **body)["choices"]
        fill(disk / "filler")
        for i in range(20):  # of each stage more lines than fit into what its file has of its last page
            status, answer, _ = server.request(
                "POST", "/v1/completions", body, {"X-Request-Id": f"full-{i}-" + "x" * 100}
            )
            assert (status, answer["choices"]) == (200, expected)
        for _ in range(100):
            assert server.request("GET", "/v1/models", headers={"X-Request-Id": "y" * 120})[0] == 200
        assert room(disk) < PAGE
        (disk / "filler").unlink()
        lost = wait_reported(server, disk / "gateway.log", body)
        assert lost > 0
        # Of what ends with a line break all is whole; standard error has the requests that the file lacks.
        texts = [path.read_bytes() for path in disk.glob("*.log")]
        assert all(isinstance(json.loads(line), dict) for text in texts for line in text.split(b"\n")[:-1])
        server.wait_output('"full-19-')
        server.stop()
        assert server.leftovers() == []


def fill(path: Path) -> None:
    """Take all room that the file system has left."""
    with path.open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), bytes(PAGE))
        except OSError:
            pass


def room(disk: Path) -> int:
    """Free bytes."""
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def wait_reported(server: Server, path: Path, body: dict[str, object]) -> int:
    """Send requests until the file says how many lines were lost; returns that."""
    deadline = time.monotonic() + WAIT_S
    while True:
        server.post("/v1/completions", **body)
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        found = [line["lines"] for line in lines if line["event"] == "log lines lost"]
        if found:
            return sum(found)
        assert time.monotonic() < deadline, lines[-5:]
