"""`starling stage` as a unit of systemd: its starts are counted, since no supervisor of the server counts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.observe.status import read_all
from pipeline.runtime import run_dir
from pipeline.runtime.process import EXIT_CONFIG, EXIT_FATAL
from pipeline.runtime.run_dir import StageLock
from pipeline.supervise.restart_count import RestartCount, path_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0


def started(home: Path, **variables: str) -> tuple[subprocess.Popen[bytes], int]:
    """A stage that has written its record, and the restarts in it."""
    environment = {**os.environ, "STARLING_HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
    process = subprocess.Popen([sys.executable, "-m", "starling", "stage", "kv"], env=environment, cwd=home)
    deadline = time.monotonic() + LIMIT_S
    while not (found := [one for one in read_all(home / "run") if one.pid == process.pid]):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process, found[0].restarts


def test_starts_by_systemd_are_counted(tmp_path: Path) -> None:
    config = {"server": {"arena_dir": str(tmp_path / "arenas")}}
    (tmp_path / "starling.yaml").write_text(json.dumps(config))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.setblocking(False)
        variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "STARLING_CONFIG": str(tmp_path / "starling.yaml")}
        first, restarts = started(tmp_path, **variables)
        assert restarts == 0
        lock = StageLock(tmp_path / "run", "gateway")  # another stage runs: the server has not stopped
        first.kill()
        first.wait()
        second, restarts = started(tmp_path, **variables)
        assert restarts == 1
        second.send_signal(signal.SIGTERM)  # systemctl restart
        assert second.wait(LIMIT_S) == 0
        third, restarts = started(tmp_path, **variables)
        assert restarts == 1
        lock.release()
        third.send_signal(signal.SIGTERM)
        assert third.wait(LIMIT_S) == 0
        assert not list((tmp_path / "run").glob("*.restarts"))


def test_a_start_that_fails_is_final_only_if_the_stage_has_not_died(tmp_path: Path) -> None:
    """A unit does not start a stage again after code 78; the address of a stage that has run may come back."""
    config = {"server": {"host": "192.0.2.7", "arena_dir": str(tmp_path / "arenas")}}  # RFC 5737: no machine has it
    (tmp_path / "starling.yaml").write_text(json.dumps(config))
    environment = {**os.environ, "STARLING_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment |= {"NOTIFY_SOCKET": str(tmp_path / "notify"), "STARLING_CONFIG": str(tmp_path / "starling.yaml")}
    run_dir.prepare(tmp_path / "run")
    lock = StageLock(tmp_path / "run", "kv")  # another stage runs: the server has not stopped

    def code() -> int:
        command = [sys.executable, "-m", "starling", "stage", "gateway"]
        return subprocess.run(command, env=environment, cwd=tmp_path, timeout=LIMIT_S).returncode

    try:
        assert [code(), code()] == [EXIT_CONFIG, EXIT_CONFIG]
        count = RestartCount(path_of(tmp_path / "run", "gateway"))
        count.started()  # and dies
        assert [code(), code()] == [EXIT_FATAL, EXIT_FATAL]
        path_of(tmp_path / "run", "gateway").write_text("5 another-boot")
        assert code() == EXIT_CONFIG, "the machine has been started again"
    finally:
        lock.release()


def test_a_file_that_cannot_be_used_is_final_only_if_no_other_stage_runs(tmp_path: Path) -> None:
    """It may be half saved while a stage that has died is started again."""
    file = tmp_path / "starling.yaml"
    file.write_text(json.dumps({"server": {"arena_dir": str(tmp_path / "arenas")}}))
    variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "STARLING_CONFIG": str(file)}
    environment = {**os.environ, "STARLING_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **variables}

    def code(*arguments: str) -> int:
        command = [sys.executable, "-m", "starling", *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, timeout=LIMIT_S).returncode

    kv, _ = started(tmp_path, **variables)
    try:
        file.write_text("models: [")
        assert [code("stage", "tokenizer"), code("supervise", "worker")] == [EXIT_FATAL, EXIT_FATAL]
        kv.send_signal(signal.SIGTERM)
        assert kv.wait(LIMIT_S) == 0
        assert [code("stage", "tokenizer"), code("supervise", "worker")] == [EXIT_CONFIG, EXIT_CONFIG]
    finally:
        kv.kill()
        kv.wait()
