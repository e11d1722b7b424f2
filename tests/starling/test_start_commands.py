"""The cores of a server that is started without `starling up`: by honcho, or by systemd's units."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from pipeline import procfs
from pipeline.config import server_cores
from pipeline.config.load import resolve
from pipeline.observe.status import read_all
from tests.e2e.server import ROOT, poll_until
from tools.ports import free_port

pytestmark = pytest.mark.slow

PROGRAMS = Path(sys.executable).parent
WAIT_S = 120.0
Begin = Callable[[str, list[int]], subprocess.Popen[bytes]]  # a stage, on some cores


def command_of(how: str, stage: str) -> list[str]:
    """The command line of a unit, or that which the deployment guide gives for the Procfile."""
    if how == "honcho":
        return [str(PROGRAMS / "honcho"), "start", "-f", str(ROOT / "Procfile"), stage]
    unit = (ROOT / "configs" / "systemd" / f"starling-{stage}.service").read_text()
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    program, *arguments = line.removeprefix("ExecStart=").split()
    assert program == "@PREFIX@/.venv/bin/starling"
    return [str(PROGRAMS / "starling"), *arguments]


def kill(*started: subprocess.Popen[bytes]) -> None:
    """Kill processes with all that they have started, at once."""
    pids = [pid for process in started if process.poll() is None for pid in procfs.process_tree(process.pid)]
    fds: list[int] = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended since, as what a stage starts for a moment does
            fds.append(os.pidfd_open(pid))
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for fd in fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
    for fd in fds:
        assert select.select([fd], [], [], WAIT_S)[0]
        os.close(fd)
    for process in started:
        process.wait(WAIT_S)


@pytest.fixture(params=["honcho", "systemd"])
def begin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Begin]:
    settings = {
        "models": [{"name": "m", "path": str(tmp_path / "m.gguf")}],
        "server": {"port": free_port(), "arena_dir": str(tmp_path)},  # killed stages leave arenas
        "performance": {"worker_groups": "auto"},
    }
    (tmp_path / "starling.yaml").write_text(yaml.safe_dump(settings))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STARLING_")}
    environment |= {"STARLING_HOME": str(tmp_path), "STARLING_CONFIG": str(tmp_path / "starling.yaml")}
    environment |= {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    if request.param == "systemd":
        environment["NOTIFY_SOCKET"] = str(tmp_path / "notify.sock")
    begun: list[subprocess.Popen[bytes]] = []

    def start(stage: str, cores: list[int]) -> subprocess.Popen[bytes]:
        command = ["taskset", "-c", ",".join(map(str, cores)), *command_of(request.param, stage)]
        output = (tmp_path / f"output-{len(begun)}").open("wb")
        with output:
            begun.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
        return begun[-1]

    yield start
    kill(*begun)


def test_a_start_without_up_has_its_own_cores(begin: Begin, tmp_path: Path) -> None:
    """Not those that a killed server has stored, which had others; its later stages have those of the first one."""
    cpus = sorted(os.sched_getaffinity(0))
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    stored = run_dir / server_cores.FILE
    stored.write_text(json.dumps(list(range(64))))
    models = [{"name": "m", "path": str(tmp_path / "m.gguf")}]
    config = resolve({"models": models, "server": {"run_dir": str(run_dir)}}, {})

    def output() -> str:
        return "\n".join(path.read_text() for path in sorted(tmp_path.glob("output-*")))

    def has_stored(cores: list[int]) -> bool:
        return server_cores.of(config) == cores and stored.read_bytes() == msgspec.json.encode(cores)

    def runs(stage: str) -> bool:
        return any(record.alive and record.stage == stage for record in read_all(run_dir))

    first = begin("scheduler", cpus[:1])
    poll_until(lambda: has_stored(cpus[:1]), output, WAIT_S)
    second = begin("kv", cpus)
    poll_until(lambda: runs("kv"), output, WAIT_S)
    assert has_stored(cpus[:1])
    kill(first, second)
    assert server_cores.of(config) == cpus
    assert json.loads(stored.read_bytes()) == cpus[:1], "the server was killed"

    third = begin("scheduler", cpus)
    poll_until(lambda: has_stored(cpus), output, WAIT_S)
    poll_until(lambda: runs("scheduler"), output, WAIT_S)
    third.send_signal(signal.SIGTERM)
    third.wait(WAIT_S)
    assert not stored.exists()
