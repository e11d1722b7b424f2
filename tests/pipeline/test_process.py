"""Parent death, keepalives, descendants and watches, with real processes."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import procfs
from pipeline.runtime import process
from pipeline.supervise import ancestors

LONG_S = 60.0

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""

CHILD = """
import signal
from pipeline.runtime import process
process.die_with_parent()
print(flush=True)
signal.pause()
"""


def test_a_child_dies_with_its_killed_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        parent.kill()
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(LONG_S * 1000)
    os.close(pidfd)


def test_a_parent_that_died_before_the_call_is_detected() -> None:
    code = "from pipeline.runtime import process; process.die_with_parent(); print('alive')"
    env = {**os.environ, process.PARENT_VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (process.EXIT_ORPHANED, b"")


def test_the_death_of_the_parent_can_be_watched() -> None:
    fd = process.watch_parent()
    assert not select.select([fd], [], [], 0)[0]
    os.close(fd)


def test_keepalives_are_read_whole_and_the_last_one_counts() -> None:
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    assert process.read_keepalives(read_end) is None
    for allowance_ms in range(3000):
        process.send_keepalive(write_end, process.KeepAlive(allowance_ms, allowance_ms == 2999))
    assert process.read_keepalives(read_end) == (2999, True)
    process.send_keepalive(write_end, process.KeepAlive(1 << 40, False))
    assert process.read_keepalives(read_end) == (0xFFFFFFFF, False)
    os.close(write_end)
    assert process.read_keepalives(read_end) is None
    os.close(read_end)


def test_a_full_or_broken_pipe_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    for _ in range(20_000):
        process.send_keepalive(write_end, process.KeepAlive(5, False))
    assert process.read_keepalives(read_end) == (5, False)
    os.close(read_end)
    process.send_keepalive(write_end, process.KeepAlive(5, False))
    os.close(write_end)


def test_the_pipe_is_claimed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    monkeypatch.setenv(process.KEEPALIVE_FD_VARIABLE, str(write_end))
    assert process.claim_keepalive_fd() == write_end
    assert process.claim_keepalive_fd() == -1
    os.close(read_end)
    os.close(write_end)
    for nonsense in ("", "x", "99999"):
        monkeypatch.setenv(process.KEEPALIVE_FD_VARIABLE, nonsense)
        assert process.claim_keepalive_fd() == -1


def test_without_systemd_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not process.sd_notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "absent"))
    assert not process.sd_notify("READY=1")
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    assert process.watchdog_interval_s() == 0.5
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert process.watchdog_interval_s() == 0.0


# ------------------------------------------------------------------ descendants and ancestors

TREE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; print(flush=True); signal.pause()"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


def test_a_stopped_grandchild_is_found() -> None:
    with subprocess.Popen([sys.executable, "-c", TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        grandchild = int(child.stdout.readline())
        assert child.pid in procfs.children(os.getpid())
        assert procfs.children(child.pid) == [grandchild]
        assert procfs.descendants(child.pid) == (True, 0)
        assert procfs.descendants(grandchild) == (False, 0)
        os.kill(grandchild, signal.SIGSTOP)
        # A signal is taken at the next return to user space: read the state until it has changed.
        while (seen := procfs.read_stat(grandchild)) is not None and seen.state != "T":
            pass
        assert procfs.descendants(child.pid).stopped == grandchild
        assert procfs.descendants(os.getpid()).stopped == grandchild
        child.stdin.close()
    assert procfs.read_stat(grandchild) is None
    assert procfs.children(child.pid) == []


def test_the_watched_ancestor_of_a_child_is_its_parent() -> None:
    code = "from pipeline.supervise import ancestors; import os; print(*ancestors.watched_ancestors(os.getpid()))"
    mine = [sys.executable, "-c", code]
    plain = subprocess.run(mine, stdout=subprocess.PIPE, check=True)
    assert plain.stdout.split() == [str(os.getpid()).encode()]


def test_a_shell_that_only_runs_the_command_is_watched_with_its_parent() -> None:
    code = "from pipeline.supervise import ancestors; import os; print(*ancestors.watched_ancestors(os.getpid()))"
    found = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -c '{code}'; echo $$"], stdout=subprocess.PIPE, check=True
    )
    watched_ancestors, shell = found.stdout.splitlines()
    assert watched_ancestors.split() == [shell, str(os.getpid()).encode()]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/usr/bin/honcho", "start"], True),
        (["/usr/bin/python3", "/venv/bin/honcho", "start"], True),
        (["python", "-m", "honcho", "start"], True),
        (["python", "-m", "starling.cli.honcho_patch", "start"], True),
        (["vim", "-R", "x", "honcho"], False),
        (["/opt/honcho/bin/python", "app.py"], False),
        ([], False),
    ],
)
def test_honcho_is_recognised_by_its_command(command: list[str], expected: bool) -> None:
    assert ancestors._is_honcho(command) == expected


def test_a_short_time_slice_keeps_policy_and_priority() -> None:
    import ctypes
    import struct
    import threading

    found: list[tuple[bool, bytes]] = []

    def look() -> None:
        done = process.use_short_time_slice(200_000)
        attributes = ctypes.create_string_buffer(56)
        assert ctypes.CDLL(None).syscall(315, 0, attributes, 56, 0) == 0  # sched_getattr
        found.append((done, attributes.raw))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    ((done, raw),) = found
    _, policy, _, nice, _, runtime, *_ = struct.unpack("=IIQiIQQQII", raw)
    assert (policy, nice) == (os.SCHED_OTHER, os.nice(0))
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 12):
        assert done and runtime == 200_000


def test_a_time_slice_replaces_no_policy_of_an_operator() -> None:
    import threading

    found: list[tuple[bool, int]] = []

    def look() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread, as by `chrt --batch`
        found.append((process.use_short_time_slice(), os.sched_getscheduler(0)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(False, os.SCHED_BATCH)]


def test_renames_into_a_directory_are_signalled(tmp_path: Path) -> None:
    fd = process.open_rename_watch(tmp_path)
    (tmp_path / "new").write_text("written, not moved")
    assert not select.select([fd], [], [], 0)[0]
    (tmp_path / "new").rename(tmp_path / "record")
    assert select.select([fd], [], [], LONG_S)[0]
    assert os.read(fd, 65536)
    assert not select.select([fd], [], [], 0)[0]
    os.close(fd)
    with pytest.raises(FileNotFoundError):
        process.open_rename_watch(tmp_path / "nowhere")


def test_touches_of_one_file_are_signalled(tmp_path: Path) -> None:
    """The other files of its directory are not: a stage would wake at every record that another one replaces."""
    path = tmp_path / "bell"
    fd = process.open_touch_watch(path)
    os.utime(path)
    assert select.select([fd], [], [], LONG_S)[0]
    assert os.read(fd, 65536)
    (tmp_path / "new").write_text("record")
    (tmp_path / "new").rename(tmp_path / "record")
    os.utime(tmp_path / "record")
    os.close(process.open_touch_watch(path))
    assert path.read_bytes() == b""
    assert not select.select([fd], [], [], 0)[0]
    os.close(fd)
    with pytest.raises(FileNotFoundError):
        process.open_touch_watch(tmp_path / "nowhere" / "bell")


CHILDREN = """
import os, select, signal, subprocess, sys
from pipeline.runtime import process
fd = process.open_child_signal_fd()
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
for number, flag in ((signal.SIGSTOP, os.WSTOPPED), (signal.SIGCONT, os.WCONTINUED), (signal.SIGKILL, os.WEXITED)):
    assert not select.select([fd], [], [], 0)[0]
    child.send_signal(number)
    assert select.select([fd], [], [], 20)[0]
    os.read(fd, 4096)
    assert os.waitid(os.P_PID, child.pid, flag | os.WNOHANG | os.WNOWAIT) is not None, number
child.wait()
"""


def test_stops_of_children_are_signalled() -> None:
    subprocess.run([sys.executable, "-c", CHILDREN], check=True, timeout=4 * LONG_S)


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        process.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        assert process.file_limit() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# A map of a file keeps a descriptor of it. The child lets go of its parent's files, opens others, and drops the map.
FORK = """
import mmap, os, resource, sys, traceback
from pipeline.runtime import process
with open(sys.argv[1], "rb") as file:
    map_ = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
reader, writer = os.pipe()
other = os.open(sys.argv[1], os.O_RDONLY)
free = os.dup(other)
os.close(free)
before = resource.getrlimit(resource.RLIMIT_NOFILE)
pid = os.fork()
if pid == 0:
    try:
        if sys.argv[2] == "full":
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        process.close_files(keep=reader)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        opened = [os.open(sys.argv[1], os.O_RDONLY) for _ in range(64)]
        assert bytes(map_) == b"content"
        del map_
        for fd in opened:
            os.fstat(fd)
        links = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if int(fd) > 2 and int(fd) not in opened and os.path.exists(f"/proc/self/fd/{fd}")}
        assert links.pop(reader).startswith("pipe:")
        assert {writer, other} <= links.keys()
        assert set(links.values()) == {os.readlink("/proc/self/fd/2") if sys.argv[2] == "full" else "/dev/null"}, links
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(4)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("table", ["with room", "full"])
def test_what_a_fork_keeps_of_its_parent_closes_no_file_of_its_own(tmp_path: Path, table: str) -> None:
    """Also if it can open no file at first."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    command = [sys.executable, "-c", FORK, str(path), table]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
