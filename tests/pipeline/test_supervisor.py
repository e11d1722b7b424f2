"""Supervision with real processes and real signals (the stage: supervised_stage.py).

Every wait is for a report on a pipe or for a pidfd, with a bound that only a failure reaches.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import procfs
from pipeline.runtime.process import EXIT_CONFIG, EXIT_FATAL, ORPHANS_VARIABLE
from pipeline.supervise.base import SAME_SIGNAL_S
from pipeline.supervise.restart_policy import RestartPolicy
from pipeline.supervise.supervisor import Supervisor, start_program

LONG_S = 60.0
LIVES = 4  # of a stage that never becomes ready, by the limits of supervised_stage.py

pytestmark = pytest.mark.slow


def has_ended(pidfd: int, within_s: float = LONG_S) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


class Life:
    """One life of the stage, as it reported itself, held by pidfds."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report
        self.pid: int = report["pid"]
        self.stage = os.pidfd_open(self.pid)
        self.helper = os.pidfd_open(report["helper"])

    def kill(self, number: int) -> None:
        signal.pidfd_send_signal(self.stage, number)


class Theatre:
    """Starts supervisors, reads the reports of their stages, and leaves no process behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fifo = directory / "report"
        os.mkfifo(self.fifo)
        self._reader = os.open(self.fifo, os.O_RDWR | os.O_NONBLOCK)
        self._lines = b""
        self._lives: list[Life] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def command(self, behaviour: str, how: str = "fork") -> list[str]:
        return [
            sys.executable,
            "-m",
            "tests.pipeline.supervised_stage",
            str(self.fifo),
            behaviour,
            how,
            str(self.directory / "run"),
        ]

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        env = {**os.environ, "STARLING_HOME": str(self.directory)}
        with open(self.directory / "stderr", "ab") as stderr:
            process = subprocess.Popen(command, env=env, stdout=stderr, stderr=stderr, start_new_session=True)
        self._started.append(process)
        return process

    def supervise(self, behaviour: str, how: str = "fork") -> subprocess.Popen[bytes]:
        return self.start(self.command(behaviour, how))

    def next_life(self) -> Life:
        while b"\n" not in self._lines:
            poll = select.poll()
            poll.register(self._reader, select.POLLIN)
            assert poll.poll(LONG_S * 1000), "no life: " + (self.directory / "stderr").read_text()
            self._lines += os.read(self._reader, 65536)
        line, _, self._lines = self._lines.partition(b"\n")
        life = Life(json.loads(line))
        self._lives.append(life)
        return life

    def count_lives(self) -> int:
        """Number of unread reports."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while poll.poll(0):
            self._lines += os.read(self._reader, 65536)
        return self._lines.count(b"\n")

    def log(self) -> str:
        return (self.directory / "stderr").read_text()

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(LONG_S)
        for life in self._lives:
            for fd in (life.stage, life.helper):
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                assert has_ended(fd)
                os.close(fd)
        os.close(self._reader)


@pytest.fixture
def theatre(tmp_path: Path) -> Iterator[Theatre]:
    theatre = Theatre(tmp_path)
    yield theatre
    theatre.close()


def kill(life: Life) -> None:
    life.kill(signal.SIGKILL)


def stop(life: Life) -> None:
    life.kill(signal.SIGSTOP)


def stop_helper(life: Life) -> None:
    signal.pidfd_send_signal(life.helper, signal.SIGSTOP)


def crash(life: Life) -> None:
    life.kill(signal.SIGSEGV)


@pytest.mark.parametrize("how", ["fork", "program"])
@pytest.mark.parametrize("harm", [kill, stop, stop_helper, crash])
def test_a_harmed_stage_is_replaced_after_all_its_processes_have_ended(
    theatre: Theatre, harm: Callable[[Life], None], how: str
) -> None:
    supervisor = theatre.supervise("wait", how)
    first = theatre.next_life()
    harm(first)
    second = theatre.next_life()
    # The successor has spoken: stage and grandchild of before are not only doomed but gone.
    assert has_ended(first.stage, 0)
    assert has_ended(first.helper, 0)
    assert second.report["restarts"] == 1
    assert second.report["parent"] == supervisor.pid
    assert second.report["imported"] == (how == "fork")


def test_a_stage_without_keepalives_is_replaced(theatre: Theatre) -> None:
    theatre.supervise("silent")
    first = theatre.next_life()
    first.kill(signal.SIGUSR1)  # now that it is held by a pidfd: it is killed a moment later
    theatre.next_life()
    assert has_ended(first.stage, 0)
    assert "sent no keepalive" in theatre.log()


def test_sigterm_lets_the_stage_end_in_order(theatre: Theatre) -> None:
    supervisor = theatre.supervise("wait")
    life = theatre.next_life()
    assert procfs.read_stat(life.pid) is not None
    assert os.getpgid(life.pid) == life.pid
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(LONG_S) == 0
    assert has_ended(life.stage, 0)
    assert has_ended(life.helper, 0)
    assert theatre.count_lives() == 0
    assert not (theatre.directory / "run" / "kv.status").exists()


def test_sigterm_kills_a_stage_that_does_not_end(theatre: Theatre) -> None:
    supervisor = theatre.supervise("stubborn")
    life = theatre.next_life()
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(LONG_S) == EXIT_FATAL
    assert has_ended(life.stage, 0)
    assert theatre.count_lives() == 0


def test_sighup_restarts_in_order(theatre: Theatre) -> None:
    supervisor = theatre.supervise("wait")
    first = theatre.next_life()
    supervisor.send_signal(signal.SIGHUP)
    second = theatre.next_life()
    assert has_ended(first.stage, 0)
    assert second.report["restarts"] == 1
    assert "restarting it" not in theatre.log()


def test_the_stage_dies_with_its_supervisor(theatre: Theatre) -> None:
    supervisor = theatre.supervise("wait")
    life = theatre.next_life()
    supervisor.kill()
    assert has_ended(life.stage)


def test_restarts_are_counted_on_when_the_supervisor_dies(theatre: Theatre) -> None:
    """The counter of restarts never goes back; a stop in order is no restart."""
    for _ in range(2):
        supervisor = theatre.supervise("wait")
        life = theatre.next_life()
        supervisor.kill()
        assert has_ended(life.stage)
    supervisor = theatre.supervise("wait")
    life = theatre.next_life()
    assert life.report["restarts"] == 2
    life.kill(signal.SIGKILL)
    assert theatre.next_life().report["restarts"] == 3
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(LONG_S) == 0
    theatre.supervise("wait")
    assert theatre.next_life().report["restarts"] == 3


@pytest.mark.parametrize(
    ("behaviour", "code", "lives"),
    [("crash", EXIT_FATAL, LIVES), ("leave", EXIT_FATAL, LIVES), ("config", EXIT_CONFIG, 1)],
)
def test_giving_up(theatre: Theatre, behaviour: str, code: int, lives: int) -> None:
    supervisor = theatre.supervise(behaviour)
    assert supervisor.wait(LONG_S) == code
    assert theatre.count_lives() == lives
    for _ in range(lives):
        line, _, theatre._lines = theatre._lines.partition(b"\n")
        assert procfs.read_stat(json.loads(line)["helper"]) is None
    assert "giving up" in theatre.log()


def test_a_stage_that_had_been_ready_is_restarted_however_often_it_is_killed(theatre: Theatre) -> None:
    supervisor = theatre.supervise("wait")
    for _ in range(3 * LIVES):
        life = theatre.next_life()
        life.kill(signal.SIGKILL)
        assert has_ended(life.stage)
    assert supervisor.poll() is None
    assert "giving up" not in theatre.log()


@pytest.mark.parametrize("shell", ["exec ", "", ": && "])
def test_the_stage_dies_with_honcho(theatre: Theatre, shell: str) -> None:
    """The shell and the intermediate process of honcho survive it: the supervisor must watch further ancestors."""
    end = " ; :" if shell == ": && " else ""
    procfile = theatre.directory / "Procfile"
    procfile.write_text(f"kv: {shell}{' '.join(theatre.command('wait'))}{end}\n")
    honcho = theatre.start([sys.executable, "-m", "honcho", "start", "-d", os.getcwd(), "-f", str(procfile)])
    life = theatre.next_life()
    supervisor = os.pidfd_open(life.report["parent"])
    honcho.kill()
    assert has_ended(life.stage)
    assert has_ended(life.helper)
    assert has_ended(supervisor)
    os.close(supervisor)


@pytest.mark.parametrize(("settings", "requests"), [({}, 1), ({ORPHANS_VARIABLE: "1"}, 2)])
def test_an_orphan_drains_or_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], requests: int
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    ancestor = subprocess.Popen(["sleep", "600"])
    pidfd = os.pidfd_open(ancestor.pid)
    supervisors = [
        Supervisor("kv", start_program(["true"]), RestartPolicy(lambda: 0.0), [pidfd], 1.0) for _ in range(2)
    ]
    supervisors[1].on_signal(signal.SIGTERM, None)  # it drains already, and goes on
    ancestor.kill()
    assert [pidfd in one.wait(LONG_S) or pidfd in one.wait(LONG_S) for one in supervisors] == [True, True]
    assert [one.stop_requests for one in supervisors] == [requests, 1]
    ancestor.wait()
    os.close(pidfd)


def test_a_repeated_signal_is_a_second_request_only_after_a_while() -> None:
    now = [100.0]
    supervisor = Supervisor("kv", start_program(["true"]), RestartPolicy(lambda: 0.0), [], 1.0, clock=lambda: now[0])
    for at, wishes in ((0.0, 1), (SAME_SIGNAL_S / 2, 1), (SAME_SIGNAL_S, 2)):
        now[0] = 100.0 + at
        supervisor.on_signal(signal.SIGTERM, None)
        assert supervisor.stop_requests == wishes


PRELOAD = """
import logging, sys, threading
from pathlib import Path
from pipeline.config.schema import Config, ModelConfig
from pipeline.observe import logs
from pipeline.supervise.supervisor import preloaded

logs.setup("kv", Config(models=(ModelConfig(name="m"),)), Path(sys.argv[1]), in_background=True)
logging.getLogger("starling.kv").warning("before")
assert threading.active_count() == 2  # the thread that writes the line
print(preloaded(lambda: None), preloaded(threading.Thread(target=threading.Event().wait, daemon=True).start))
"""


def test_the_thread_that_writes_log_lines_does_not_prevent_a_fork(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PRELOAD, tmp_path], capture_output=True, text=True, timeout=LONG_S, check=True
    )
    assert result.stdout.split() == ["True", "False"]


FAILED_FORKS = """
import errno
from pipeline import procfs
from pipeline.supervise import base
from pipeline.supervise.restart_policy import Limits, RestartPolicy
from pipeline.supervise.supervisor import Supervisor

fds = []

def start(keepalive_fd, restarts):
    fds.append(procfs.open_fds())
    if len(fds) in (1, 3):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return base.fork(lambda: 1)

code = Supervisor("kv", start, RestartPolicy(lambda: 0.0, Limits(immediate=9, most=5)), [], 1.0).run()
print(code, len(fds), len(set(fds)))
"""


def test_a_stage_that_cannot_be_forked_is_started_later() -> None:
    """Such a shortage may be why it has ended, and lasts a moment; without its supervisor the whole server ends."""
    command = [sys.executable, "-c", FAILED_FORKS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True)
    assert result.stdout.split() == [str(EXIT_FATAL), "5", "1"]


REQUEST_DURING_BACKOFF = """
import signal
from pipeline.supervise import base
from pipeline.supervise.restart_policy import RestartPolicy
from pipeline.supervise.supervisor import Supervisor

ROUNDS = 2  # in which the second stage would receive SIGTERM
starts = rounds = 0

class Policy(RestartPolicy):
    def after_death(self, ran_s, was_ready=False):
        signal.raise_signal(signal.SIGHUP)
        return 3600.0

def start(keepalive_fd, restarts):
    global starts
    starts += 1
    return base.fork((lambda: 1) if starts == 1 else signal.pause)

def on_wake():
    global rounds
    rounds += starts > 1
    if rounds >= ROUNDS:
        supervisor.on_signal(signal.SIGTERM, None)

supervisor = Supervisor("kv", start, Policy(lambda: 0.0), [], 1.0)
supervisor.on_wake = on_wake
supervisor.run()
print(starts)
"""


def test_a_request_during_the_backoff_starts_the_stage_once_and_at_once() -> None:
    """The stage that starts is the one that was requested: it receives no SIGTERM for it."""
    command = [sys.executable, "-c", REQUEST_DURING_BACKOFF]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True)
    assert result.stdout.split() == ["2"]
