"""The worker pool follows the table of versions, and nothing survives its end. Real processes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.models import versions
from pipeline.runtime.run_dir import StageLock
from pipeline.supervise.worker_pool import WorkerPool
from tests.e2e.server import wait_gone
from tests.pipeline.pool_world import WAIT_S, World, make

ROOT = Path(__file__).parents[2]
PTRACE_SEIZE, WAIT_ALL = 0x4206, 0x40000000  # of <sys/ptrace.h> and <sys/wait.h>


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    if world.pool is not None and world.pool.poll() is None:
        world.pool.kill()
        world.pool.wait()


def test_the_pool_follows_the_table(world: World) -> None:
    pool = world.start()
    first, _ = world.wait_begun("m")
    world.write(make("stay", 0), make("stay", 1, "loading"))
    second, _ = world.wait_begun("m@1")
    for name in ("worker-m.lock", "worker-m.status", "worker-m.failed"):
        (world.run_dir / name).write_bytes(b"")
    for name in ("m.act", ".m.act.123", "worker-m.metrics"):
        (world.arenas / name).write_bytes(b"")
    world.write(make("stay", 1))
    assert wait_gone(first)
    # Its files are removed, and those of the other version are untouched.
    world.wait(lambda: not list(world.run_dir.glob("worker-m.*")) and not list(world.arenas.iterdir()))
    assert world.lives("m@1") == [(second, 0)]
    pool.terminate()
    assert pool.wait(WAIT_S) == 0
    assert wait_gone(second)


def test_a_killed_member_is_fenced_and_restarted(world: World) -> None:
    world.write(make("parent", 1))
    pool = world.start()
    member, below = world.wait_begun("m@1")
    os.kill(member, signal.SIGKILL)
    _, other = world.wait_begun("m@1", lives=2)
    assert wait_gone(below, 0)  # before its successor started
    assert other != below
    pool.terminate()
    assert pool.wait(WAIT_S) == 0
    assert wait_gone(other)


def test_an_orphan_that_is_slow_to_end_holds_up_its_own_member_alone(world: World) -> None:
    """A busy machine takes seconds to end a process; a tracer holds it back here, until it has been waited for."""
    world.write(make("parent", 1))
    pool = world.start()
    member, below = world.wait_begun("m@1")
    if ctypes.CDLL(None).ptrace(PTRACE_SEIZE, below, None, None):
        pytest.skip("processes may not be traced here")
    os.kill(member, signal.SIGKILL)
    assert wait_gone(member)
    world.write(make("parent", 1), make("stay", 2, "loading"))
    other, _ = world.wait_begun("m@2")
    world.write(make("parent", 1))
    world.wait(lambda: not list(world.run_dir.glob("worker-m@2.*")) and wait_gone(other, 0))
    assert len(world.lives("m@1")) == 1
    os.waitpid(below, WAIT_ALL)
    world.wait_begun("m@1", lives=2)
    pool.terminate()
    assert pool.wait(WAIT_S) == 0


def test_a_member_that_ends_with_another_one_waits_for_its_own_orphan(world: World) -> None:
    """The pool finds both ended: what the first one finds below itself may be the other's."""
    world.write(make("parent", 1), make("parent", 2, "loading"))
    pool = world.start()
    members = [world.wait_begun(name) for name in ("m@1", "m@2")]
    below = members[1][1]
    if ctypes.CDLL(None).ptrace(PTRACE_SEIZE, below, None, None):
        pytest.skip("processes may not be traced here")
    pool.send_signal(signal.SIGSTOP)
    for member, _ in members:
        ended = os.pidfd_open(member)
        os.kill(member, signal.SIGKILL)
        assert select.select([ended], [], [], WAIT_S)[0]
        os.close(ended)
    pool.send_signal(signal.SIGCONT)
    world.write(make("parent", 1), make("parent", 2, "loading"), make("stay", 3, "loading"))
    world.wait_begun("m@3")
    assert len(world.lives("m@2")) == 1
    os.waitpid(below, WAIT_ALL)
    for name in ("m@1", "m@2"):
        world.wait_begun(name, lives=2)
    pool.terminate()
    assert pool.wait(WAIT_S) == 0


def test_a_failure_while_loading_is_recorded(world: World) -> None:
    world.write(make("stay", 0), make("exit:1", 1, "loading"), make("exit:78", 2, "loading"))
    pool = world.start()
    for name in ("worker-m@1", "worker-m@2"):
        world.wait(lambda: versions.read_failure(world.run_dir, name))  # noqa: B023
    failure = versions.read_failure(world.run_dir, "worker-m@1")
    assert failure is not None
    assert (failure.code, "code 1" in failure.message) == ("MODEL_UNAVAILABLE", True)
    assert len(world.lives("m@1")) == 1
    assert pool.poll() is None
    world.write(make("stay", 0))
    world.wait(lambda: not list(world.run_dir.glob("worker-m@*")))
    pool.terminate()
    assert pool.wait(WAIT_S) == 0


def test_a_failure_while_serving_stops_the_pool(world: World) -> None:
    world.write(make("stay", 0), make("stay", 1, "retiring"))
    pool = world.start()
    other, _ = world.wait_begun("m@1")
    world.write(make("exit:78", 2), make("stay", 1, "retiring"))
    assert pool.wait(WAIT_S) == 78
    assert wait_gone(other)


@pytest.mark.parametrize("code", [1, 78])
def test_one_model_that_fails_leaves_the_others_running(world: World, code: int) -> None:
    world.write(make("stay", 0), make(f"exit:{code}", 1))
    pool = world.start()
    other, _ = world.wait_begun("m")
    world.wait(lambda: versions.read_failure(world.run_dir, "worker-m@1"))
    with pytest.raises(subprocess.TimeoutExpired):
        pool.wait(1.0)
    assert not wait_gone(other, 0)
    failure = versions.read_failure(world.run_dir, "worker-m@1")
    assert failure is not None
    assert f"code {code}" in failure.message
    # A restart that an operator requests starts the failed one as well.
    assert len(world.lives("m@1")) == 1
    pool.send_signal(signal.SIGHUP)
    world.wait_begun("m@1", lives=2)
    # When no other model is left, the pool ends with the reason.
    world.write(make(f"exit:{code}", 1))
    assert wait_gone(other)
    pool.send_signal(signal.SIGHUP)
    assert pool.wait(WAIT_S) == code


def test_only_the_failed_model_is_started_on_request(world: World) -> None:
    world.write(make("stay", 0), make("exit:1", 1))
    pool = world.start()
    world.wait_begun("m")
    for lives in (2, 3):
        world.wait(lambda: versions.read_failure(world.run_dir, "worker-m@1"))
        versions.request_start(world.run_dir, "worker-m@1")
        world.wait_begun("m@1", lives)
    assert len(world.lives("m")) == 1
    assert not list(world.run_dir.glob("*.start"))
    assert pool.poll() is None


def test_a_failed_model_is_started_again_later(world: World) -> None:
    world.write(make("stay", 0), make("exit:1", 1))
    pool = world.start(STARLING_TEST_RETRY_S="0.3")
    world.wait_begun("m@1", lives=3)
    assert pool.poll() is None


def test_files_of_another_pool_are_kept(world: World) -> None:
    """A second server that is started beside a running one gives up and removes nothing."""
    lock = StageLock(world.run_dir, "worker-m")
    theirs = [world.run_dir / "worker-m.lock", world.run_dir / "worker-m.status", world.arenas / "m.act"]
    for path in theirs[1:]:
        path.write_bytes(b"")
    world.write(make("exit:78", 0))
    assert world.start().wait(WAIT_S) == 78
    assert all(path.exists() for path in theirs)
    lock.release()
    world.write(make("exit:78", 0))
    assert world.start().wait(WAIT_S) == 78
    assert not any(path.exists() for path in theirs)


def test_a_stop_that_arrives_during_a_round_leaves_no_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All members wait for their next start, so that the pool could end at once."""
    lock = world.run_dir / "worker-m@1.lock"
    lock.touch()
    world.write(make("stay", 1))
    pool = WorkerPool(world.config, lambda version: pytest.fail("nothing starts"), [])
    pool._add(make("stay", 1)).not_before = float("inf")
    real = pool._reconcile

    def reconcile() -> None:
        real()
        pool.stop_requests = 1

    monkeypatch.setattr(pool, "_reconcile", reconcile)
    for name in ("install_signal_handlers", "ignore_restart_requests"):
        monkeypatch.setattr(pool, name, lambda: None)
    assert pool.run() == 0
    assert not lock.exists()


# One supervisor ends at once, another stays. A restart is requested after the first one's end, before it is collected.
REQUESTED = """
import os, signal, sys, time
from pathlib import Path
from pipeline.config.load import load
from pipeline.supervise.worker_pool import WorkerPool

started = []

def fork(version):
    started.append(version.id)
    pid = os.fork()
    if pid == 0:
        if version.id == "m@1":
            os._exit(78)
        while True:
            signal.pause()
    return pid

pool = WorkerPool(load(Path(sys.argv[1]), {}), fork, [])
pool._follower.poll()
pool._reconcile()
member = pool._members["worker-m@1"]
os.waitid(os.P_PIDFD, member.pidfd, os.WEXITED | os.WNOWAIT)
pool.restart_requested = len(sys.argv) > 2
pool._reconcile()
pool._reap()
pool._reconcile()
print(started.count("m@1"))
pool._signal_all(signal.SIGKILL)
"""


@pytest.mark.parametrize(("arguments", "starts"), [(["requested"], 2), ([], 1)])
def test_a_restart_is_not_lost_that_is_requested_while_a_group_ends(
    world: World, arguments: list[str], starts: int
) -> None:
    world.write(make("stay", 0), make("exit:78", 1))
    command = [sys.executable, "-c", REQUESTED, str(world.file), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STARLING_HOME": str(world.file.parent)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    assert int(done.stdout) == starts


def test_a_concurrent_sweep_does_not_prevent_removal(world: World) -> None:
    """`cleanup.sweep` holds the lock of an ended stage for a moment."""
    with subprocess.Popen(["true"]) as ended:
        pass
    path = world.run_dir / "worker-m.lock"
    path.write_text(f"{ended.pid}\n")
    world.write(make("exit:78", 0))
    with path.open() as swept:
        fcntl.flock(swept, fcntl.LOCK_EX)
        assert world.start().wait(WAIT_S) == 78
    assert not path.exists()


def test_all_members_die_with_the_pool(world: World) -> None:
    world.write(make("stay", 0), make("stay", 1))
    pool = world.start()
    members = [world.wait_begun(name)[0] for name in ("m", "m@1")]
    pool.kill()
    pool.wait()
    assert all(wait_gone(member) for member in members)


def test_systemd_is_notified_when_all_serving_versions_are_ready(world: World, tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        systemd.settimeout(WAIT_S)
        world.write(make("stay", 1), make("stay", 2, "loading"))
        pool = world.start(NOTIFY_SOCKET=address, WATCHDOG_USEC="200000")
        pid, _ = world.wait_begun("m@1")
        received = {systemd.recv(100) for _ in range(3)}
        assert received == {b"WATCHDOG=1"}
        status = {
            "stage": "worker-m@1",
            "pid": pid,
            "ticks": _ticks(pid),
            "epoch": 1,
            "uptime_s": 1.0,
            "progress": 0,
            "busy": False,
            "ready": True,
            "reason": "",
            "written": 0.0,
        }
        (world.run_dir / "worker-m@1.status").write_bytes(msgspec.json.encode(status))
        while systemd.recv(100) != b"READY=1":
            pass
        pool.terminate()
        while not systemd.recv(100).startswith(b"STOPPING=1\nEXTEND_TIMEOUT_USEC="):
            pass
        assert pool.wait(WAIT_S) == 0


def _ticks(pid: int) -> int:
    from shm.arena import process_ticks

    return process_ticks(pid)


def test_each_worker_group_of_a_version_is_a_member(tmp_path: Path) -> None:
    """A killed one is started again alone; all of them end with the version, and leave no file."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a group needs a core")
    world = World(tmp_path, performance={"worker_groups": 2})
    world.write(make("stay", 1))
    pool = world.start()
    try:
        world.wait(lambda: len(world.lives("m@1")) == 2)
        members = [pid for pid, _ in world.lives("m@1")]
        for name in ("worker-m@1~1.lock", "worker-m@1~1.restarts"):
            (world.run_dir / name).write_bytes(b"")
        (world.arenas / "m@1~1.act").write_bytes(b"")
        os.kill(members[1], signal.SIGKILL)
        third, _ = world.wait_begun("m@1", lives=3)
        assert not wait_gone(members[0], 0)
        world.write(make("stay", 2))
        world.wait(lambda: len(world.lives("m@2")) == 2)
        assert wait_gone(members[0]) and wait_gone(third)
        world.wait(lambda: not list(world.run_dir.glob("worker-m@1*")) and not list(world.arenas.iterdir()))
        pool.terminate()
        assert pool.wait(WAIT_S) == 0
        assert all(wait_gone(pid) for pid, _ in world.lives("m@2"))
    finally:
        pool.kill()
        pool.wait()
