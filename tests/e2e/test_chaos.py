"""`starling chaos` injects the faults of its scenarios into a running server, and every stream keeps its bytes."""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load as config_module
from pipeline.faults import points
from starling.chaos.client import Client
from starling.chaos.requests import ChaosRequest
from starling.chaos.scenario import actions, targets
from starling.chaos.traffic import Traffic
from tests.e2e import small_disk
from tests.e2e.arenas import arenas_of
from tests.e2e.command import starling
from tests.e2e.conftest import share_caches
from tests.e2e.server import ROOT, Server, poll_until
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an arena so small that pages are spilled and read back."""
    home = tmp_path_factory.mktemp("chaos")
    share_caches(home)
    path = write_model(home / "tiny.gguf", SHAPES["small"])
    model = {"name": "tiny", "path": str(path), "kv_cache_mb": 1, "ranks": 2, "spill_path": str(home / "spill")}
    with Server(home, {"models": [model], "metrics": {"enabled": False}}) as server:
        yield server
        server.stop()
        assert server.leftovers() == []


def wait_all_ready(server: Server) -> None:
    """For the command, which needs a server that is ready: a stage may be silent for a moment."""
    poll_until(lambda: server.request("GET", "/ready")[0] == 200, lambda: server.request("GET", "/ready")[1])


def chaos(server: Server, scenario: str, seconds: int) -> dict[str, Any]:
    wait_all_ready(server)
    report: dict[str, Any] = json.loads(
        starling(
            server,
            "chaos",
            "--scenario",
            scenario,
            "--duration",
            f"{seconds}s",
            "--streams",
            "4",
            "--tokens",
            "60",
            "--requests",
            "16",
            "--json",
        )
    )
    assert report["scenario"] == scenario
    total = report["rows"][-1]
    assert total["streams"] == total["identical"] > 0
    assert total["lost"] == total["different"] == 0
    return report


def longer_each_time(
    server: Server, scenario: str, seconds: int, fault: str, is_enough: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Run a scenario, each time for twice as long, until `is_enough` of a fault's row: a slow machine does little."""
    for attempt in range(4):
        report = chaos(server, scenario, seconds << attempt)
        rows = [row for row in report["rows"] if row["fault"] == fault]
        if any(map(is_enough, rows)):
            return report
    pytest.fail(f"no run of {scenario} was long enough: {rows}")


@pytest.mark.parametrize("scenario", ["disk-full", "slow-disk"])
def test_a_full_or_slow_disk_changes_no_byte(server: Server, scenario: str) -> None:

    def is_enough(row: dict[str, Any]) -> bool:
        return row["faults"] >= 1 and row["streams"] > 0

    report = longer_each_time(server, scenario, 5, scenario, is_enough)
    if scenario == "disk-full":
        server.wait_output("File too large")
    # The fault plan is removed.
    assert not (server.home / "run" / points.FILE).exists()
    assert server.post("/v1/generate", prompt=[1, 2], max_tokens=1, session_id="")["session_id"]
    names = {use["name"] for use in report["use"]}
    assert {"gateway", "kv", "kv, parent", "workers", "shared memory", "state"} <= names
    for use in report["use"]:
        assert use["descriptors_end"] <= use["descriptors_most"]


def test_clients_outlive_the_gateway(server: Server) -> None:
    """The gateway comes first in the order of names, before the first request; its second round has streams."""

    def is_enough(row: dict[str, Any]) -> bool:
        assert row["streams"] == row["identical"]
        return row["faults"] >= 1 and row["streams"] > 0 and row["resumed"] > 0

    longer_each_time(server, "kill-each", 20, "kill gateway", is_enough)


def test_a_full_disk_ends_when_the_chaos_command_is_killed(server: Server) -> None:
    """SIGKILL leaves the command no chance to lift the limits itself."""

    def is_full() -> bool:
        with contextlib.suppress(ProcessLookupError):
            return resource.prlimit(server.pid_of("kv"), resource.RLIMIT_FSIZE)[0] == 0
        return False

    wait_all_ready(server)
    command = [sys.executable, "-m", "starling", "chaos", "--scenario", "disk-full", "--requests", "4"]
    with subprocess.Popen(command, cwd=ROOT, env=server.environment, stdout=subprocess.DEVNULL) as running:
        poll_until(is_full)
        running.kill()
    poll_until(lambda: not is_full())
    assert server.request("GET", "/health")[0] == 200
    assert server.post("/v1/generate", prompt=[1, 2], max_tokens=1, session_id="")["session_id"]


def test_the_reload_scenario_reloads_the_loaded_models(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    starling(server, "unload", "tiny")
    try:
        starling(server, "load", "other", "--path", str(server.home / "tiny.gguf"), "--kv-cache-mb", "1")
        report = longer_each_time(server, "reload", 3, "reload", lambda row: bool(row["faults"] > 0))
        assert report["rows"][0]["fault"] == "reload"
    finally:
        starling(server, "load", "tiny")
        starling(server, "unload", "other")
    monkeypatch.setenv("STARLING_HOME", str(server.home))
    config = config_module.load(server.config_path, server.environment)
    assert not [name for name in targets(config) if "other" in name]  # although its worker may still run


KINDS = {"kill", "stop", "segv", "bit-flip", "disk-full", "slow-disk", "memory", "reload"}


def mixed(
    server: Server, first: set[str], seconds: int, monkeypatch: pytest.MonkeyPatch, is_enough: Callable[[Mixed], bool]
) -> Mixed:
    """Run mixed scenarios whose order begins with the faults `first`, each longer than the last, until `is_enough`.

    The order is drawn over the processes that are there when it begins, which may be others than were there for the
    choice of its seed; and a slow machine gets through few faults in a given time.
    """
    monkeypatch.setenv("STARLING_HOME", str(server.home))
    config = config_module.load(server.config_path, server.environment)
    request = ChaosRequest("/v1/generate", ({},))
    traffic = Traffic(Client("", None), [request], 1, 1, [request])  # type: ignore[arg-type]

    def order(seed: int) -> list[str]:
        return [action.kind.split()[0] for action in actions("mixed", config, traffic, random.Random(seed))]

    assert set(order(0)) == KINDS
    found = Mixed({}, "")
    for attempt in range(4):
        seed = next(seed for seed in range(100_000) if set(order(seed)[: len(first)]) == first)
        wait_all_ready(server)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "starling",
                "chaos",
                "--duration",
                f"{seconds << attempt}s",
                "--streams",
                "4",
                "--tokens",
                "60",
                "--requests",
                "16",
                "--seed",
                str(seed),
                "--json",
            ],
            cwd=ROOT,
            env=server.environment,
            capture_output=True,
            text=True,
            timeout=480,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        for row in json.loads(done.stdout)["rows"]:
            assert row["streams"] == row["identical"]
            found.faults[row["fault"]] = found.faults.get(row["fault"], 0) + row["faults"]
            found.streams += row["streams"]
        found.said += done.stderr
        if is_enough(found):
            return found
    pytest.fail(f"{found.faults}: {found.said}")


@dataclass
class Mixed:
    """Faults by kind, and the output, of one or more runs in which every stream had its bytes."""

    faults: dict[str, int]
    said: str
    streams: int = 0


def test_mixed_reloads_models_and_evicts_pages(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reload it kills the new version's worker."""

    def is_enough(found: Mixed) -> bool:
        return {"memory", "reload"} <= found.faults.keys()

    found = mixed(server, {"memory", "reload"}, 16, monkeypatch, is_enough)
    assert found.streams > 0
    assert "is not running" not in found.said


def test_a_model_that_does_not_fit_twice_is_not_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas on a file system with room for one version of the model."""
    if reason := small_disk.why_not():
        pytest.skip(f"no file system can be mounted here: {reason}")
    share_caches(tmp_path)
    (tmp_path / "arenas").mkdir()
    path = write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    model = {"name": "tiny", "path": str(path), "kv_cache_mb": 16}
    config: dict[str, Any] = {"models": [model], "server": {"arena_dir": str(tmp_path / "arenas")}}
    arenas = arenas_of(config, path, tmp_path)
    launcher = small_disk.mounted(3 * arenas.total // 2 >> 10, tmp_path / "arenas")

    def is_enough(found: Mixed) -> bool:
        return re.search(r"skip reload: .* exits with 78: .*of KV pages", " ".join(found.said.split())) is not None

    with Server(tmp_path, config, launcher=launcher) as server:
        found = mixed(server, {"reload"}, 4, monkeypatch, is_enough)
        assert "reload" not in found.faults
        assert found.streams > 0


def test_chaos_fails_without_a_server(tmp_path_factory: pytest.TempPathFactory, server: Server) -> None:
    home = tmp_path_factory.mktemp("unused")
    absent = Server(home, {"models": [{"name": "tiny", "path": str(server.home / "tiny.gguf")}]})
    starling(absent, "chaos", "--duration", "1s", code=1)
