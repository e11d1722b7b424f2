"""Records of weight copies: whose count, what they leave of the memory, and that a version counts those it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.config.load import resolve
from pipeline.config.schema import Config
from pipeline.errors import ResourceError
from pipeline.models import capacity, weight_copies
from pipeline.supervise import cleanup
from tests.emulated_machine import memory_nodes

RECORD = """
import sys
from pathlib import Path
from pipeline.models import weight_copies
weight_copies.record(Path(sys.argv[1]), "worker-b", 300, is_made=True)
print(flush=True)
sys.stdin.read()
"""


def test_copies_count_while_their_process_lives(tmp_path: Path) -> None:
    weight_copies.record(tmp_path, "worker-a", 200, is_made=False)
    command = [sys.executable, "-c", RECORD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert weight_copies.totals(tmp_path) == (300, 200)
        assert weight_copies.totals(tmp_path, without="worker-b") == (0, 200)
        assert weight_copies.totals(tmp_path, without="worker-a") == (300, 0)
        process.kill()
        process.wait()
    assert weight_copies.of(tmp_path, "worker-b") is None
    assert weight_copies.totals(tmp_path) == (0, 200)
    weight_copies.path_of(tmp_path, "worker-a").write_bytes(b"\xff{")
    assert weight_copies.totals(tmp_path) == (0, 0)
    assert weight_copies.totals(tmp_path / "nowhere") == (0, 0)


def test_an_orderly_stop_removes_the_records(tmp_path: Path) -> None:
    with weight_copies.one_at_a_time(tmp_path):
        weight_copies.record(tmp_path, "worker-a", 200, is_made=True)
    assert cleanup.sweep(tmp_path, tmp_path / "arenas") == ""
    assert os.listdir(tmp_path) == []


def config_of(home: Path, **performance: str) -> Config:
    path = home / "m.gguf"
    path.write_bytes(b"x" * 1000)
    models = [{"name": "m", "path": str(path), "kv_cache_mb": 16, "ranks": 2}]
    server = {"run_dir": str(home / "run"), "state_dir": str(home / "state"), "arena_dir": str(home / "arenas")}
    return resolve({"models": models, "server": server, "performance": performance}, {})


def test_memory_that_is_promised_to_copies_is_not_free(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_dir = paths.run_dir(config)
    run_dir.mkdir()
    weight_copies.record(run_dir, "worker-a", 1 << 60, is_made=True)
    assert capacity.measure(config).memory > 0, "what is taken is not available anyway"
    weight_copies.record(run_dir, "worker-a", 1 << 60, is_made=False)
    assert capacity.measure(config).memory == 0


def test_copies_that_must_be_count_before_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a node needs a CPU")
    nodes = memory_nodes(tmp_path / "nodes", {0: str(cpus[0]), 1: ",".join(map(str, cpus[1:]))})
    monkeypatch.setenv("STARLING_NODES", str(nodes))
    for setting in ("never", "auto"):
        config = config_of(tmp_path, weight_copies=setting)
        assert capacity.plan(config, config.models[0]).copies == 0
    config = config_of(tmp_path, weight_copies="always")
    plan = capacity.plan(config, config.models[0])
    assert (plan.weights, plan.copies) == (1000, 2000)
    enough = plan.arenas + plan.copies
    capacity.check(config, config.models[0], capacity.FreeMemory(1 << 40, enough))
    capacity.check_plan(config, "m", plan, capacity.FreeMemory(1 << 40, enough), 0)
    with pytest.raises(
        ResourceError, match="needs 2,000 bytes for a copy of its weights on each memory node"
    ) as caught:
        capacity.check(config, config.models[0], capacity.FreeMemory(1 << 40, enough - 1))
    assert caught.value.param == "performance.weight_copies"
    with pytest.raises(ResourceError, match="2,000 of weights"):
        capacity.check_plan(config, "m", plan, capacity.FreeMemory(1 << 40, enough - 1), 0)
