"""Which server a command uses: one that runs here, also while its gateway does not."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from pipeline import procfs
from pipeline.config.load import resolve
from pipeline.errors import ModelUnavailable
from pipeline.observe.status import StageStatus
from pipeline.runtime import run_dir as rundir
from shm.arena import process_ticks
from starling.cli import server_use
from starling.cli.server_use import ServerUse, is_running
from starling.cli.users_lock import USERS, open_lock
from tests.e2e.server import poll_until

# A server with one more lock, which it does not give to the child that waits for its users.
SERVER = """
import os, signal, sys
from pathlib import Path
from pipeline.runtime.run_dir import StageLock
from starling.cli.forked_program import can_fork
from starling.cli.users_lock import LastUser
run_dir = Path(sys.argv[1])
lock = StageLock(run_dir, "up")
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked to end\\n"))  # it may interrupt a `print`
user = LastUser(run_dir)
print(can_fork(["starling"]), flush=True)
while sys.stdin.readline() == "goes on?\\n":
    print(user.goes_on(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def record(run_dir: Path, stage: str, *, is_alive: bool) -> None:
    """Of this process, or of one that has ended."""
    ticks = process_ticks(os.getpid()) if is_alive else 1
    found = StageStatus(stage, os.getpid(), ticks, 1, 1.0, 0, False, True, "", 1.0)
    (run_dir / f"{stage}.status").write_bytes(msgspec.json.encode(found))


def use_of(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ServerUse:
    """Of a server that a command must not start."""
    use = ServerUse(resolve({"server": {"run_dir": str(run_dir)}}, {}), "m")
    monkeypatch.setattr(use, "_start", lambda: pytest.fail("a second server was started"))
    monkeypatch.setattr(server_use, "POLL_S", 0.001)
    return use


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_server_whose_gateway_starts_again_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Under systemd or honcho, where no `starling up` runs. What ends in order removes its record."""
    run_dir = rundir.prepare(tmp_path / "run")
    record(run_dir, "kv", is_alive=True)
    if is_killed:
        record(run_dir, "gateway", is_alive=False)
    use, asked = use_of(run_dir, monkeypatch), list[bool]()

    def answers() -> bool:
        asked.append(is_running(run_dir))
        return len(asked) == 3

    monkeypatch.setattr(use, "_answers", answers)
    with use:
        assert asked == [True] * 3
    assert not use.started


def test_a_gateway_that_does_not_come_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = rundir.prepare(tmp_path / "run")
    record(run_dir, "kv", is_alive=True)
    monkeypatch.setattr(server_use, "GATEWAY_S", 0.01)
    with pytest.raises(ModelUnavailable, match="and no gateway for 0.01 s"), use_of(run_dir, monkeypatch):
        pass


def test_what_a_crash_left_is_no_server(tmp_path: Path) -> None:
    run_dir = rundir.prepare(tmp_path / "run")
    assert not is_running(run_dir)
    for stage in ("kv", "gateway"):
        record(run_dir, stage, is_alive=False)
    assert not is_running(run_dir)


def open_files(pid: int, directory: Path) -> set[str]:
    """Names of the files of a directory that a process holds open."""
    opened = map(Path, map(os.readlink, Path(f"/proc/{pid}/fd").iterdir()))
    return {path.name for path in opened if path.parent == directory}


@contextmanager
def started(run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that has a child which waits for its users, and the child's pid."""
    command = [sys.executable, "-c", SERVER, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "True\n"
        (child,) = procfs.children(server.pid)
        yield server, child


def test_a_server_ends_with_its_last_user(tmp_path: Path) -> None:
    run_dir = rundir.prepare(tmp_path / "run")
    users = [open_lock(run_dir / USERS) for _ in range(2)]
    for user in users:
        fcntl.flock(user, fcntl.LOCK_SH)
    with started(run_dir) as (server, child):
        poll_until(lambda: open_files(child, run_dir) == {USERS})
        os.kill(child, signal.SIGKILL)
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write("goes on?\n")
        server.stdin.flush()
        assert server.stdout.readline() == "True\n"
        os.close(users.pop())
        late = open_lock(run_dir / USERS)
        with pytest.raises(BlockingIOError):  # the other user stays
            fcntl.flock(late, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(users.pop())
        assert server.stdout.readline() == "asked to end\n"
        with pytest.raises(BlockingIOError):
            fcntl.flock(late, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a new user waits until the server has ended
        server.communicate("go on\n")
        assert server.returncode == -signal.SIGKILL
        fcntl.flock(late, fcntl.LOCK_SH)
        os.close(late)


def test_the_child_that_waits_for_users_dies_with_the_server(tmp_path: Path) -> None:
    run_dir = rundir.prepare(tmp_path / "run")
    user = open_lock(run_dir / USERS)
    fcntl.flock(user, fcntl.LOCK_SH)
    with started(run_dir) as (server, child):
        fd = os.pidfd_open(child)
        server.communicate("end\n")
    assert select.select([fd], [], [], 60)[0]
    os.close(fd)
    os.close(user)
