"""The launcher of this machine: its agents are real processes, `starling agent` without a model."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.errors import ConfigError, NotFound
from pipeline.runtime import run_dir
from starling.cli.fleet import fleet
from starling.cli.fleet_launchers import _shown, logs
from starling.launchers import local
from starling.launchers.child import Child
from starling.launchers.local import LocalLauncher, log_file


class Programs:
    """Children that run a Python program instead of an agent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
        def command(child: Child, *arguments: object) -> None:
            original(child, *arguments)  # type: ignore[arg-type]
            child._command = [sys.executable, "-c", program]

        original = Child.__init__
        monkeypatch.setattr(Child, "__init__", command)


SLEEPS = "import signal; signal.pause()"
LIMIT_S = 300  # that only a failure reaches


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "STARLING_HOME": str(tmp_path)}


def test_agents_are_started_again_listed_and_ended(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    Programs(monkeypatch, SLEEPS)
    launcher, other = LocalLauncher(env), LocalLauncher(env)
    assert other.list() == ()
    launcher.start(2)
    try:
        assert [(one.agent_id, one.state, one.restarts) for one in other.list()] == [
            ("agent-1", "running", 0),
            ("agent-2", "running", 0),
        ]
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} runs a fleet in .* already"):
            other.start(1)
        pids = [child.pid for child in launcher._agents]
        os.kill(pids[0], signal.SIGKILL)
        launcher._agents[0]._process.wait()  # type: ignore[union-attr]
        now = 1000.0
        assert launcher.tick(now) is None  # it has ended, and is started again after the backoff
        assert other.list()[0].state == "starting"
        assert launcher.tick(now + 3600) is None
        assert [(one.agent_id, one.restarts) for one in other.list()] == [("agent-1", 1), ("agent-2", 0)]
        launcher.start(1)
        assert [one.agent_id for one in other.list()] == ["agent-1"]
        with pytest.raises(ProcessLookupError):
            os.kill(pids[1], 0)
        left = launcher._agents[0].pid
    finally:
        launcher.stop()
    assert launcher.list() == other.list() == ()
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


def test_an_agent_that_cannot_start_ends_the_fleet(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    Programs(monkeypatch, "raise SystemExit(78)")
    launcher = LocalLauncher(env)
    launcher.start(1)
    try:
        launcher._agents[0]._process.wait()  # type: ignore[union-attr]
        assert launcher.tick(0.0) == 78
    finally:
        launcher.stop()


HOLDER = """
import signal, sys, threading
from starling.launchers.child import Child
from starling.launchers.local import LocalLauncher
launcher = LocalLauncher()
make = Child.__init__
def child(self, name, arguments, env):
    make(self, name, arguments, env)
    self._command = [sys.executable, "-c", "import signal; signal.pause()"]
Child.__init__ = child
ending = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ending.set())
launcher.start(3)
print("started", flush=True)
ending.wait()
launcher.stop()
"""


def test_another_process_ends_the_fleet(env: dict[str, str]) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], env=env, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"started\n"
            launcher = LocalLauncher(env)
            assert len(launcher.list()) == 3
            launcher.stop()
            assert holder.wait() == 0
            assert launcher.list() == ()
            launcher.stop()  # nothing runs
        finally:
            holder.kill()


class Reader:
    """A process that asks who holds the lock, at the very moment of a claim: then it has left again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        def ask(directory: Path, stage: str) -> int:
            found = original(directory, stage)
            os.close(self.fd)
            monkeypatch.setattr(run_dir, "lock_holder", original)
            return found

        original = run_dir.lock_holder
        path.parent.mkdir(mode=0o700)
        self.fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_SH)
        monkeypatch.setattr(run_dir, "lock_holder", ask)


def test_a_reader_of_the_lock_refuses_no_fleet(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    Reader(monkeypatch, Path(env["STARLING_HOME"]) / "fleet" / f"{local.LOCK}.lock")
    launcher, other = LocalLauncher(env), LocalLauncher(env)
    launcher.claim()
    launcher.claim()
    assert run_dir.lock_holder(launcher._dir, local.LOCK) == os.getpid()
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} runs a fleet"):
        other.claim()
    launcher._record.write_text('[{"agent_id": "of-a-killed-fleet"}]')
    assert launcher._lock is not None
    launcher._lock.release()
    other.claim()
    assert LocalLauncher(env).list() == ()


def test_a_part_that_cannot_be_forked_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that holds an agent of a Ray cluster would end with the error, and never start it again."""
    child, popen = Child("agent", [], os.environ), subprocess.Popen
    child._command = [sys.executable, "-c", ""]

    def fail(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr(subprocess, "Popen", fail)
    assert child.tick(0.0) is None and (child.pid, child.starts) == (0, 0)
    monkeypatch.setattr(subprocess, "Popen", popen)
    assert child.tick(0.0) is None and child.pid == 0, "it pauses"
    assert child.tick(100.0) is None
    assert child.pid and child.starts == 1
    child.end(time.monotonic() + 60.0)


def test_a_part_is_started_again_when_nothing_reads_its_output() -> None:
    """`starling fleet up 2>&1 | head -1`: one agent that dies must not end the others."""
    program = """if True:
        import os, sys
        from starling.cli import fleet_up, output
        from starling.launchers.child import Child
        output.install()
        child = Child("agent", [], os.environ)
        child._command = [sys.executable, "-c", "raise SystemExit(3)"]
        child.tick(0.0)
        child._process.wait()
        child.tick(100.0)
        child._command = [sys.executable, "-c", "raise SystemExit(78)"]
        child.tick(1000.0)
        child._process.wait()
        fleet_up._is_loaded = lambda *_: True
        fleet_up._place = lambda *_: True
        fleet_up.FleetClient.is_ready = lambda *_: True
        class Agents:
            looks = 0
            def tick(self, now):
                self.looks += 1
                return None if self.looks < 3 else 5  # after the banner
        class Running:
            def tick(self, now): return None
        from pipeline.config.load import load
        import threading
        fleet_up.LOADED_S = 0.0
        code = fleet_up._run(load(), Running(), Agents(), "m", 1, threading.Event())
        if code == 5:
            code = fleet_up._run(load(), child, Agents(), "m", 1, threading.Event())
        os._exit(code - 78 + 40 + child.starts)
    """
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stdout=writer, stderr=writer, timeout=LIMIT_S, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 42


def line_of(agent: str, day: int, event: str = "loaded") -> str:
    return json.dumps({"ts": f"2026-01-0{day}T00:00:00Z", "level": "info", "stage": agent, "event": event}) + "\n"


def test_a_second_fleet_of_a_home_leaves_the_first_one_alone(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "starling.yaml").write_text("models: [{name: m, path: 'catalog:m'}]")
    with subprocess.Popen([sys.executable, "-c", HOLDER], env=env, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"started\n"
            program = """if True:
                import sys
                from starling.cli import fleet_up, main
                fleet_up.publish_configured = lambda *_: print("publishes into the fleet that runs")
                sys.argv[0] = "starling"
                main()
            """
            command = [sys.executable, "-c", program, "--config", str(tmp_path / "starling.yaml"), "fleet", "up"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            assert (done.returncode, f"process {holder.pid} runs a fleet" in done.stderr) == (78, True), done
            assert done.stdout == ""
            assert holder.poll() is None
            assert len(LocalLauncher(env).list()) == 3
        finally:
            holder.kill()


def test_ctrl_c_ends_the_preparation_of_a_fleet(env: dict[str, str], tmp_path: Path) -> None:
    """The first model is being published, which may take minutes."""
    program = """
import os, signal, sys, time
from starling.cli import fleet_up, main
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests' parent ignores it
def publish(config, model):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
fleet_up.publish_configured = publish
sys.argv = ["starling", "fleet", "up"]
main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "starling: interrupted")
    assert done.stdout == ""


def test_logs_are_the_lines_of_one_agent(env: dict[str, str]) -> None:
    launcher = LocalLauncher(env)
    for name in ("agent-1", "agent-2"):
        path = log_file(name, env)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line_of(name, day) for day in range(1, 6)))
    found = list(launcher.logs("agent-2", 2, follow=False))
    assert len(found) == 2
    assert all("agent-2" in line for line in found)
    with pytest.raises(NotFound, match="no log of an agent 'agent-9'"):
        list(launcher.logs("agent-9", 2, follow=False))
    assert log_file("../../etc/passwd", env).parent == log_file("agent-1", env).parent
    follow = launcher.logs("agent-1", 1, follow=True)
    assert next(follow)
    with log_file("agent-1", env).open("a") as file:
        file.write(line_of("agent-1", 6, "later"))
    assert "later" in next(follow)
    follow.close()  # type: ignore[attr-defined]


def test_the_configured_launcher_is_asked(env: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STARLING_HOME", env["STARLING_HOME"])
        for name, shown in (("launched", ""), ("launched --json", "[]"), ("down", "ended")):
            command = fleet.commands[name.split()[0]]
            done = CliRunner().invoke(command, name.split()[1:], standalone_mode=False)
            assert done.exception is None, done.output
            assert done.output.strip().endswith(shown)


def test_the_command_prints_the_lines_for_people_or_as_json(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log_file("agent-1", env)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line_of("agent-1", day) for day in range(1, 6)))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    command = ["agent-1", "--lines", "2", "--launcher", "local"]
    found = CliRunner().invoke(logs, [*command, "--json"], catch_exceptions=False).output.splitlines()
    assert [json.loads(line)["ts"][:10] for line in found] == ["2026-01-04", "2026-01-05"]
    shown = CliRunner().invoke(logs, command, catch_exceptions=False).output.splitlines()
    assert [line.split() for line in shown] == [["00:00:00Z", "INFO", "agent-1", "loaded"]] * 2


def test_what_is_no_line_of_the_log_is_shown_too() -> None:
    assert _shown("Segmentation fault", False) == "Segmentation fault"
    assert json.loads(_shown("Segmentation fault", True)) == {
        "event": "message of a library",
        "text": "Segmentation fault",
    }
