"""The launcher of this machine: its agents are real processes, `starling agent` without a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.errors import ConfigError, NotFound
from starling.cli.fleet import fleet
from starling.cli.fleet_launchers import _shown, logs
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


def line_of(agent: str, day: int, event: str = "loaded") -> str:
    return json.dumps({"ts": f"2026-01-0{day}T00:00:00Z", "level": "info", "stage": agent, "event": event}) + "\n"


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
