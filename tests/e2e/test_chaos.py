"""`starling chaos` on a live server: it does what it says, and finds every byte in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline import faultpoints, paths
from tests.e2e.server import Server
from tests.e2e.test_ops import starling
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An arena so small that pages go to the disk and come back."""
    home = tmp_path_factory.mktemp("chaos")
    paths.cache_dir().mkdir(parents=True, exist_ok=True)
    (home / "cache").symlink_to(paths.cache_dir())
    path = write_model(home / "tiny.gguf", SHAPES["small"])
    model = {"name": "tiny", "path": str(path), "kv_cache_mb": 1, "ranks": 2, "spill_path": str(home / "spill")}
    with Server(home, {"models": [model], "metrics": {"enabled": False}}) as server:
        yield server
        server.stop()
        assert server.leftovers() == []


def chaos(server: Server, scenario: str, seconds: int) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(starling(
        server, "chaos", "--scenario", scenario, "--duration", f"{seconds}s", "--streams", "4", "--tokens", "60",
        "--requests", "16", "--json",
    ))  # fmt: skip
    assert report["scenario"] == scenario
    total = report["rows"][-1]
    assert total["streams"] == total["identical"] > 0
    assert total["lost"] == total["different"] == 0
    return report


@pytest.mark.parametrize("scenario", ["disk-full", "slow-disk"])
def test_a_bad_disk_changes_nothing(server: Server, scenario: str) -> None:
    report = chaos(server, scenario, 5)
    row = next(row for row in report["rows"] if row["fault"] == scenario)
    assert row["faults"] >= 1
    assert row["streams"] > 0
    if scenario == "disk-full":
        assert any("File too large" in line for line in server.output)
    # Nothing of it stays behind.
    assert not (server.home / "run" / faultpoints.FILE).exists()
    assert server.post("/v1/generate", prompt=[1, 2], max_tokens=1, session_id="")["session_id"]
    names = {use["name"] for use in report["use"]}
    assert {"gateway", "kv", "kv, parent", "workers", "shared memory", "state"} <= names
    for use in report["use"]:
        assert use["descriptors_end"] <= use["descriptors_most"]


def test_no_server_is_said(tmp_path_factory: pytest.TempPathFactory, server: Server) -> None:
    home = tmp_path_factory.mktemp("nobody")
    nobody = Server(home, {"models": [{"name": "tiny", "path": str(server.home / "tiny.gguf")}]})
    starling(nobody, "chaos", "--duration", "1s", code=1)
