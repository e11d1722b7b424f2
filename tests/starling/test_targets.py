"""What `starling drain`, `restart` and `down` act on for each target."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from pipeline.config.load import resolve
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import Conflict, ModelNotFound, StarlingError
from pipeline.ipc import control
from pipeline.models import versions
from pipeline.observe.status import StageStatus
from pipeline.runtime import run_dir as rundir
from pipeline.supervise import ancestors
from starling.cli.down import running, supervisor_of
from starling.cli.drain import ALL, admission, in_flight
from starling.cli.restart import chosen, handed_over, restarted, unfinished

CONFIG = Config(models=(ModelConfig(name="a/b"), ModelConfig(name="c")))


@pytest.mark.parametrize(
    ("target", "name"),
    [("all", ALL), ("kv", ALL), ("gateway", ALL), ("c", "c"), ("a/b", "a/b"), ("worker-a--b", "a/b")],
)
def test_what_a_drain_of_it_refuses(target: str, name: str) -> None:
    assert admission(CONFIG, target) == name


@pytest.mark.parametrize("target", ["worker", "absent", ""])
def test_what_cannot_be_drained(target: str) -> None:
    with pytest.raises(ModelNotFound, match="there are all, gateway, tokenizer.*, a/b, c, worker-a--b, worker-c$"):
        admission(CONFIG, target)


def test_a_worker_of_several_models_is_to_be_named() -> None:
    with pytest.raises(ModelNotFound, match="^'worker' stands for the workers of all models: name one model"):
        admission(CONFIG, "worker")


def record(run_dir: Path, stage: str, parent: int) -> StageStatus:
    stat = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    found = StageStatus(stage, os.getpid(), stat, 1, 1.0, 0, False, True, "", 1.0, 0, parent)
    fields = {name: getattr(found, name) for name in StageStatus.__struct_fields__}
    (run_dir / f"{stage}.status").write_text(json.dumps(fields))
    return found


def test_only_what_is_supervised_is_restarted(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="'absent' is not a stage"):
        chosen(CONFIG, tmp_path, "absent", False)
    with pytest.raises(StarlingError, match="kv is not running"):
        chosen(CONFIG, tmp_path, "kv", False)
    bare = record(tmp_path, "kv", os.getppid())
    assert supervisor_of(bare) == 0
    with pytest.raises(StarlingError, match="systemctl restart starling-kv"):
        chosen(CONFIG, tmp_path, "kv", False)


def test_a_worker_is_named_by_its_model_whatever_version_it_is(tmp_path: Path) -> None:
    config = resolve({"models": [{"name": "a/b", "path": "m.gguf"}], "server": {"run_dir": str(tmp_path)}}, {})
    (old,) = versions.read(config).versions
    new = msgspec.structs.replace(old, serial=3)
    versions.write(config, msgspec.structs.replace(versions.initial(config), versions=(new,), serial=3))
    assert admission(config, "worker-a--b") == "a/b"
    with pytest.raises(StarlingError, match="worker-a--b@3 is not running"):
        chosen(config, tmp_path, "worker-a--b", False)


def test_a_version_that_is_unloaded_meanwhile_need_not_come_back(tmp_path: Path) -> None:
    """As that which a reload has replaced goes at its last stream, also in the middle of `restart all`."""
    config = resolve({"models": [{"name": "m", "path": "m.gguf"}], "server": {"run_dir": str(tmp_path)}}, {})
    for parent in (0, os.getpid()):
        assert restarted(config, tmp_path, record(tmp_path, "worker-m@1", parent), 0.0) == ""
    assert restarted(config, tmp_path, record(tmp_path, "worker-m", 0), 0.0) == "its supervisor is gone"


def test_a_drain_of_what_is_unloaded_meanwhile_is_over() -> None:
    assert in_flight({"in_flight": 3, "models": {"c": 2}}, "c") == 2
    assert in_flight({"in_flight": 3, "models": {"c": 2}}, "a/b") == 0


def test_who_keeps_a_server_alive(tmp_path: Path) -> None:
    assert running(tmp_path) == []
    record(tmp_path, "kv", 1)
    record(tmp_path, "gateway", 1)
    me = os.getpid()
    assert running(tmp_path) == [("gateway", me), ("kv", me)]
    lock = rundir.StageLock(tmp_path, "up")
    assert running(tmp_path)[0] == ("starling up", me)
    lock.release()
    assert len(running(tmp_path)) == 2


def test_no_honcho_above_a_plain_process() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert ancestors.honcho_above(process.pid) == 0


def test_requests_without_a_client_are_in_flight_too() -> None:
    assert in_flight({"in_flight": 0, "models": {"c": 2, "a/b": 0}}, ALL) == 2
    assert in_flight({"in_flight": 3, "models": {"c": 2}}, ALL) == 3
    assert in_flight({"in_flight": 0, "models": {"c": 0}}, ALL) == 0


def test_a_restart_waits_for_what_the_successor_cannot_continue() -> None:
    assert unfinished({"in_flight": 1, "models": {"c": 5}, "unfinished": 2}) == 2
    assert unfinished({"in_flight": 1, "models": {"c": 5}}) == 1  # of a gateway of 0.1.0


@pytest.mark.parametrize("leaves_requests", [True, False])
def test_a_gateway_of_an_earlier_release_is_drained_with_the_fields_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves_requests: bool
) -> None:
    asked: list[dict[str, Any]] = []

    def answer(run_dir: Path, stage: str, request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        if request["op"] == "handover":
            raise Conflict("it has opened its own socket")
        state = {"in_flight": 0, "models": {"c": 5}, "draining": {ALL: {"left_s": 0.0, "ended": 3}}}
        return {**state, "unfinished": 0} if leaves_requests else state

    monkeypatch.setattr(control, "call", answer)
    assert handed_over(tmp_path, 1.0) == 3
    drain = {"op": "drain", "target": ALL, "timeout_s": 1.0, "keep": False}
    assert asked[-1] == ({**drain, "exit": True} if leaves_requests else drain)
