"""Commands for a running server, without one: tables, log files, targets, measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from pipeline import procfs
from pipeline.config.load import resolve
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ModelNotFound, StarlingError
from pipeline.models import versions
from pipeline.observe.status import StageStatus
from pipeline.runtime import run_dir as rundir
from pipeline.supervise import ancestors
from starling.cli.down import running, supervisor_of
from starling.cli.drain import ALL, admission, in_flight
from starling.cli.logs import Tail, logs
from starling.cli.restart import chosen, restarted
from starling.cli.status import Row, duration, look, size, table

CONFIG = Config(models=(ModelConfig(name="a/b"), ModelConfig(name="c")))


def test_the_table_fits_80_columns_whatever_the_numbers() -> None:
    large = Row(
        "worker-" + "x" * 40,
        "not running",
        "r" * 10,
        4_194_304,
        1,
        1e8,
        99,
        6400.0,
        1 << 39,
        64,
        1000,
        64,
        True,
        1 << 60,
        1e8,
    )
    lines = list(table([large, Row("kv", "draining")]))
    assert max(len(line) for line in lines) <= 80
    assert lines[1].split()[1] == "4194304"
    assert lines[2] == "  " + "r" * 10
    assert lines[3].split() == ["kv", *"-------", "draining"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (86400 * 3, "3d")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(("count", "shown"), [(2048, "2K"), (3 << 20, "3.0M"), (700 << 20, "700M"), (3 << 29, "1.5G")])
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown


def test_a_server_that_is_down_has_rows_but_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    rows = look(resolve({"models": [{"name": "m", "path": "m.gguf"}]}, {}))
    assert [(row.stage, row.state, row.pid) for row in rows] == [
        (name, "not running", None) for name in ("tokenizer", "scheduler", "kv", "gateway", "worker-m")
    ]


def test_cpu_and_memory_of_a_process_and_what_is_below_it() -> None:
    code = (
        "import subprocess, sys; block = bytearray(32 << 20)\n"
        "while sum(range(10000)) and __import__('time').process_time() < 0.2: pass\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE); print('up', flush=True); sys.stdin.read()\n"
        "child.communicate()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert len(procfs.process_tree(process.pid)) == 2
        assert procfs.cpu_s(process.pid) >= 0.15
        assert procfs.memory_bytes(process.pid) > 32 << 20
        process.communicate()
    assert (procfs.cpu_s(process.pid), procfs.memory_bytes(process.pid)) == (0.0, 0)


# ------------------------------------------------------------------ logs


def line(ts: str, event: str) -> bytes:
    return json.dumps({"ts": ts, "event": event}).encode() + b"\n"


def events(tail: Tail, at_most: int | None = None) -> list[str]:
    return [fields["event"] for _, fields, _ in tail.read(at_most)]


def test_a_tail_follows_lines_and_rotation(tmp_path: Path) -> None:
    path = tmp_path / "kv.log"
    tail = Tail(path)
    assert events(tail) == []
    with path.open("wb", buffering=0) as file:
        file.write(line("1", "a") + line("2", "b") + line("3", "c")[:-5])
        assert events(tail, 1) == ["b"]
        file.write(line("3", "c")[-5:] + b"not ours\n[]\n" + line("4", "d"))
        assert events(tail) == ["c", "d"]
        file.write(line("5", "e"))
    path.rename(tmp_path / "kv.log.1")
    assert events(tail) == ["e"]
    path.write_bytes(line("6", "f"))
    assert events(tail) == ["f"]
    tail.close()


@pytest.mark.parametrize("stage", ["worker", None])
def test_what_the_parent_of_all_worker_groups_says_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str | None
) -> None:
    """Of a group that has given up only its parent tells."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    (tmp_path / "logs").mkdir()
    for number, name in enumerate(("worker", "worker-supervisor", "worker-crew", "kv")):
        line = json.dumps({"ts": f"2026-01-01T00:00:0{number}.000Z", "level": "info", "stage": name, "event": name})
        (tmp_path / "logs" / f"{name}.log").write_text(line + "\n")
    shown = CliRunner().invoke(logs, [stage, "--json"] if stage else ["--json"])
    events = [json.loads(line)["event"] for line in shown.output.splitlines()]
    assert events == ["worker", "worker-supervisor", "worker-crew", *([] if stage else ["kv"])]


# ------------------------------------------------------------------ targets


@pytest.mark.parametrize(
    ("target", "name"),
    [("all", ALL), ("kv", ALL), ("gateway", ALL), ("c", "c"), ("a/b", "a/b"), ("worker-a--b", "a/b")],
)
def test_what_a_drain_of_it_refuses(target: str, name: str) -> None:
    assert admission(CONFIG, target) == name


@pytest.mark.parametrize("target", ["worker", "nobody", ""])
def test_what_cannot_be_drained(target: str) -> None:
    with pytest.raises(ModelNotFound, match="there are all, tokenizer.*, a/b, c, worker-a--b, worker-c$"):
        admission(CONFIG, target)


def test_a_worker_of_several_models_is_to_be_named() -> None:
    with pytest.raises(ModelNotFound, match="^'worker' is every model's: name the model, or its worker"):
        admission(CONFIG, "worker")


def record(run_dir: Path, stage: str, parent: int) -> StageStatus:
    stat = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    found = StageStatus(stage, os.getpid(), stat, 1, 1.0, 0, False, True, "", 1.0, 0, parent)
    fields = {name: getattr(found, name) for name in StageStatus.__struct_fields__}
    (run_dir / f"{stage}.status").write_text(json.dumps(fields))
    return found


def test_only_what_is_supervised_is_restarted(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="'nobody' is no stage"):
        chosen(CONFIG, tmp_path, "nobody", False)
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
