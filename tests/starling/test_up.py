"""`starling up` around stand-ins for the stages: real honcho, real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from honcho import printer

from pipeline.config import server_cores
from pipeline.config.load import resolve
from pipeline.observe.status import StatusFile
from pipeline.protocol.messages import Heartbeat
from pipeline.runtime import run_dir as rundir
from starling.cli import honcho_patch, procfile_runner
from starling.cli.up import Timeline, _Watcher
from tools.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 180.0
POLL = "7"  # the number of the system call, x86-64

# `up` with the Procfile of the test and nothing to prepare.
UP = """
import os
import signal
import sys
from pathlib import Path
from honcho import manager
from starling.cli import honcho_patch, main, procfile_runner, up
up.PROCFILE = Path(sys.argv.pop(1))
up.prepare_all = lambda config: None
procfile_runner.CHECK_S = float(os.environ.get("CHECK_S", procfile_runner.CHECK_S))
honcho_patch.KILL_S = float(os.environ.get("KILL_S", honcho_patch.KILL_S))
procfile_runner.AFTER_DRAIN_S = 0.0
manager.KILL_WAIT = float(os.environ.get("KILL_WAIT", manager.KILL_WAIT))
up.ANSWER_S = 60.0  # where no check in time would ask again

def with_signals(place, name, *numbers):
    "Let a function send this process signals when it ends."
    call = getattr(place, name)
    def wrapper(*arguments, **options):
        result = call(*arguments, **options)
        for number in numbers:
            os.kill(os.getpid(), number)
        return result
    setattr(place, name, wrapper)

def start_without_sigterm(*arguments):
    "Start a process that never receives SIGTERM. When it is the second one, two signals come before its start is seen."
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    children.append(child_of(*arguments))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for number in (signal.SIGTERM, signal.SIGTERM) if len(children) == 2 else ():
        os.kill(os.getpid(), number)
    return children[-1]

match os.environ.get("SIGNAL_AT"):
    case "arenas":
        with_signals(up.arena_dir, "prepare", signal.SIGTERM)
    case "end":
        with_signals(up, "run_procfile", signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    case "restart":
        child_of, children = honcho_patch.forked_supervisor.child_of, []
        honcho_patch.forked_supervisor.child_of = start_without_sigterm
main()
"""

# A gateway that is always ready, and holds what a stage holds: a lock, a socket, an arena.
READY = """
import http.server, os, signal, socket, sys
from pathlib import Path
from pipeline.config import paths
from pipeline.config.load import load
from pipeline.protocol.messages import Heartbeat
from pipeline.runtime.run_dir import StageLock
from pipeline.observe.status import StatusFile
config = load()
lock = StageLock(paths.run_dir(config), "gateway")
StatusFile(paths.run_dir(config), "gateway").write(Heartbeat("gateway", 0, 0, False, True))
socket.socket(socket.AF_UNIX).bind(str(paths.run_dir(config) / "left.sock"))
paths.arena_dir(config).mkdir(parents=True, exist_ok=True)
(paths.arena_dir(config) / "model.kv").write_bytes(bytes(4096))

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
http.server.HTTPServer(("127.0.0.1", config.server.port), Ready).serve_forever()
"""

# It accepts connections before its record says that it is ready.
LISTENS_FIRST = READY.replace(
    'StatusFile(paths.run_dir(config), "gateway").write(Heartbeat("gateway", 0, 0, False, True))\n', ""
).replace(
    'http.server.HTTPServer(("127.0.0.1", config.server.port), Ready).serve_forever()',
    """server = http.server.HTTPServer(("127.0.0.1", config.server.port), Ready)
StatusFile(paths.run_dir(config), "gateway").write(Heartbeat("gateway", 0, 0, False, True))
server.serve_forever()""",
)


class Up:
    """A running `starling up`, its lines as they come."""

    def __init__(self, tmp_path: Path, gateway: str, others: str = "", launcher: tuple[str, ...] = ()) -> None:
        """`others`: more lines of the Procfile; `launcher`: a command that runs it."""
        self.port = free_port()
        (tmp_path / "gateway.py").write_text(gateway)
        procfile = tmp_path / "Procfile"
        procfile.write_text(f"gateway: exec {sys.executable} {tmp_path}/gateway.py\n{others}")
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "STARLING_HOME": str(tmp_path / "home"),
            "STARLING_SERVER__PORT": str(self.port),
            "STARLING_SERVER__ARENA_DIR": str(tmp_path / "shm"),
            "STARLING_CACHE__MAX_SIZE_MB": "1",
        }
        self.process = subprocess.Popen(
            [*launcher, sys.executable, "-c", UP, str(procfile), "up"],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.seen: list[str] = []
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.seen.append(line)
                self.lines.put(line)

    def wait_for(self, pattern: str) -> re.Match[str]:
        while True:
            try:
                line = self.lines.get(timeout=WAIT_S)
            except queue.Empty:
                raise AssertionError(f"no {pattern!r} in:\n" + "".join(self.seen)) from None
            if found := re.search(pattern, line):
                return found

    def stage_pid(self) -> int:
        """The pid of the stage's first process."""
        printed = re.search(r"pid=(\d+)", "".join(self.seen)) or self.wait_for(r"pid=(\d+)")
        return int(printed[1])

    def end(self) -> int:
        code = self.process.wait(WAIT_S)
        self.reader.join()
        return code


Start = Callable[..., Up]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Up] = []

    def begin(gateway: str, others: str = "", launcher: tuple[str, ...] = ()) -> Up:
        running.append(Up(tmp_path, gateway, others, launcher))
        return running[-1]

    yield begin
    for up in running:
        up.process.kill()
        for pid in re.findall(r"pid=(\d+)", "".join(up.seen)):
            # A stage's supervisor sees the end of honcho; these stand-ins have none.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        up.end()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_from_start_to_ctrl_c(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    up = start(READY)
    up.wait_for(rf"ready at http://127\.0\.0\.1:{up.port} \(\d+\.\d s\)")
    pid = up.stage_pid()
    assert list((tmp_path / "shm").rglob("*.kv"))
    up.process.send_signal(number)
    assert up.end() == 0, "".join(up.seen)
    assert not list((tmp_path / "shm").iterdir())
    assert not list((tmp_path / "home" / "run").glob("*.sock"))
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_the_record_of_a_stage_is_seen_without_a_check_in_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECK_S", str(10 * WAIT_S))
    up = start(LISTENS_FIRST)
    up.wait_for("ready at")
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0, "".join(up.seen)


@pytest.mark.slow
def test_an_end_before_honcho_knows_its_processes(start: Start) -> None:
    up = start(READY)
    up.wait_for("gateway.1 started")
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize("at", ["arenas", "end"])
def test_a_signal_before_or_after_honcho_runs_leaves_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setenv("SIGNAL_AT", at)
    up = start(READY)
    if at == "end":
        up.wait_for("ready at")
        up.process.send_signal(signal.SIGINT)
    assert up.end() == 0, "".join(up.seen)
    assert not list((tmp_path / "shm").iterdir())
    assert not list((tmp_path / "home" / "run").glob("*.sock"))


@pytest.mark.slow
def test_who_asks_twice_while_a_process_starts_again_does_not_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGNAL_AT", "restart")
    monkeypatch.setenv("KILL_S", "0.2")
    up = start("import signal; signal.pause()")
    os.kill(up.stage_pid(), signal.SIGKILL)
    second = int(up.wait_for(r"gateway\.1 started \(pid=(\d+)\)")[1])
    assert up.end() == 0, "".join(up.seen)
    assert not Path(f"/proc/{second}").exists()


@pytest.mark.slow
def test_who_asks_twice_does_not_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILL_S", str(10 * WAIT_S))
    up = start(READY.replace("lambda *_: os._exit(0)", "signal.SIG_IGN"))
    up.wait_for("ready at")
    pid = up.stage_pid()
    up.process.send_signal(signal.SIGINT)
    up.wait_for("SIGINT received")
    assert Path(f"/proc/{pid}").exists()
    up.process.send_signal(signal.SIGTERM)
    up.wait_for(rf"sending SIGKILL to gateway\.1 \(pid {pid}\)")
    assert up.end() == 0, "".join(up.seen)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("drain_s", [0.2, 10 * WAIT_S])
def test_a_stage_that_does_not_end_is_killed_after_its_time(
    start: Start, monkeypatch: pytest.MonkeyPatch, drain_s: float
) -> None:
    monkeypatch.setenv("KILL_S", "0.2")
    monkeypatch.setenv("STARLING_SERVER__DRAIN_TIMEOUT_MS", str(int(drain_s * 1000)))
    # The second one ends after five times the least time.
    slow = "threading.Timer(1.0, os._exit, [0]).start()" if drain_s > 1 else "None"
    up = start(
        READY.replace("lambda *_: os._exit(0)", f"lambda *_: {slow}").replace("import http", "import threading, http")
    )
    up.wait_for("ready at")
    pid = up.stage_pid()
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0, "".join(up.seen)
    assert any(f"sending SIGKILL to gateway.1 (pid {pid})" in line for line in up.seen) == (drain_s < 1)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_it_outlives_a_terminal_where_that_is_asked_for(start: Start) -> None:
    up = start(READY, launcher=("nohup",))
    up.wait_for("ready at")
    up.process.send_signal(signal.SIGHUP)
    os.kill(up.stage_pid(), signal.SIGKILL)
    up.wait_for(r"gateway\.1 was killed by SIGKILL; starting it again")
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0, "".join(up.seen)
    assert not any("SIGHUP received" in line for line in up.seen)


@pytest.mark.slow
def test_a_stage_has_its_time_after_the_end_of_another(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILL_WAIT", "0.2")
    slow = READY.replace("lambda *_: os._exit(0)", "lambda *_: threading.Timer(1.5, os._exit, [0]).start()")
    up = start(slow.replace("import http", "import threading, http"), "other: exec sleep 1000\n")
    up.wait_for("ready at")
    up.process.send_signal(signal.SIGTERM)
    up.wait_for(r"gateway\.1 stopped \(rc=0\)")
    assert up.end() == 0, "".join(up.seen)
    assert any("other.1 stopped (rc=-15)" in line for line in up.seen)


@pytest.mark.slow
def test_a_stage_that_ends_ends_all_with_an_error(start: Start) -> None:
    up = start("import sys; sys.exit('cannot go on')")
    up.wait_for("cannot go on")
    assert up.end() == 1


@pytest.mark.slow
def test_a_killed_process_is_started_again(start: Start) -> None:
    up = start(READY)
    up.wait_for("ready at")
    first = up.stage_pid()
    os.kill(first, signal.SIGKILL)
    up.wait_for(r"gateway\.1 was killed by SIGKILL; starting it again")
    second = int(up.wait_for(r"gateway\.1 started \(pid=(\d+)\)")[1])
    assert second != first
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0, "".join(up.seen)
    assert not Path(f"/proc/{second}").exists()


@pytest.mark.slow
def test_a_signal_is_obeyed_while_a_killed_process_waits_for_its_restart(start: Start) -> None:
    up = start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    for _ in range(8):  # the next restart waits for 0.8 s or more
        up.wait_for("was killed by SIGKILL; starting it again")
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0, "".join(up.seen)


@pytest.mark.slow
def test_a_plan_of_faults_that_means_nothing_is_refused_before_anything_starts(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARLING_FAULTS", "worker:exit@stepp=1")
    up = start(READY)
    assert up.end() == 78
    assert len(up.seen) == 1
    assert "worker has no point 'stepp'" in up.seen[0]


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 64])
def test_the_cores_of_a_killed_server_decide_no_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    n_cores = len(os.sched_getaffinity(0))
    stored = tmp_path / "home" / "run" / server_cores.FILE
    stored.parent.mkdir(parents=True, mode=0o700)
    stored.write_text("[0]" if groups <= n_cores else str(list(range(64))))
    monkeypatch.setenv("STARLING_PERFORMANCE__WORKER_GROUPS", str(groups))
    up = start(READY)
    if groups > n_cores:
        up.wait_for(rf"worker_groups = {groups}: .* give at most {n_cores}")
        assert up.end() == 78
        return
    up.wait_for("ready at")
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0, "".join(up.seen)
    assert not stored.exists()


@pytest.mark.slow
def test_a_second_one_is_refused(start: Start, tmp_path: Path) -> None:
    up = start(READY)
    up.wait_for("ready at")
    second = start(READY)
    second.wait_for(r"server\.run_dir .*/home/run is in use: stage up already runs there \(.*\d+.*\): stop it first")
    assert second.end() == 78
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0


def test_a_gateway_is_asked_only_once_it_has_recorded_that_it_runs(tmp_path: Path) -> None:
    """Its supervisor listens before it, and a request would wait for its imports."""
    run_dir = rundir.prepare(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = resolve({"server": {"run_dir": str(run_dir), "port": listener.getsockname()[1]}}, {})
        watcher = _Watcher(config, run_dir, Timeline(0.0))
        StatusFile(run_dir, "kv").write(Heartbeat("kv", 0, 0, False, True))
        listener.setblocking(False)
        assert not watcher.check()
        with pytest.raises(BlockingIOError):
            listener.accept()


def raise_beside_poll(number: signal.Signals) -> None:
    """Give this process a signal while its main thread is in `poll`, which does not return.

    As at a signal that comes just before the system call, a handler of Python's waits for the end of the call.
    """
    state = Path(f"/proc/self/task/{threading.main_thread().native_id}/syscall")

    def run() -> None:
        while state.read_text().split()[0] != POLL:
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), number)

    threading.Thread(target=run).start()


def test_a_signal_just_before_a_wait_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honcho_patch, "LOST_SIGNAL_S", 0.1)
    (tmp_path / "Procfile").write_text("one: exec sleep 1000\n")
    late = threading.Timer(WAIT_S, os.kill, [os.getpid(), signal.SIGINT])
    late.start()

    def check() -> bool:
        raise_beside_poll(signal.SIGTERM)
        return True

    before = {number: signal.getsignal(number) for number in honcho_patch.SIGNALS}
    assert procfile_runner.run_procfile(tmp_path / "Procfile", os.environ, tmp_path, check) == 0
    assert late.is_alive()
    late.cancel()
    for number, handler in before.items():  # further signals do not interrupt what is left to do
        assert signal.signal(number, handler) is signal.SIG_IGN


def test_honcho_obeys_a_signal_just_before_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honcho_patch, "LOST_SIGNAL_S", 0.1)
    events = honcho_patch.Manager(honcho_patch.Printer(sys.stdout)).events
    before = signal.signal(signal.SIGTERM, lambda *_: events.add(line("received")))
    late = threading.Timer(WAIT_S, events.add, [line("late")])
    late.start()
    try:
        raise_beside_poll(signal.SIGTERM)
        assert events.get().data == "received"
    finally:
        signal.signal(signal.SIGTERM, before)
        late.cancel()


def line(text: str) -> printer.Message:
    return printer.Message(type="line", data=text, time=datetime.now(), name="system", colour=None)
