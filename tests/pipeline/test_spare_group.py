"""The spare worker group becomes the group of the next version, is replaced, and does not outlive the pool."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline import procfs
from pipeline.config import paths
from pipeline.errors import ConfigError
from pipeline.models.versions import ModelVersion
from pipeline.runtime import process
from pipeline.supervise import base
from pipeline.supervise.spare_group import fork_spare, run_version
from tests.e2e.server import wait_gone
from tests.pipeline.pool_world import WAIT_S, World, make

Group = tuple[int, int]  # pid of the supervisor, and of the process that waits for a version


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    if world.pool is not None and world.pool.poll() is None:
        world.pool.kill()
        world.pool.wait()


def start(world: World) -> Group:
    """Start the pool with one member, and wait for the spare."""
    world.write(make("stay", 1))
    world.start(STARLING_TEST_SPARE_AFTER_S="0")
    world.wait_begun("m@1")
    return spare(world)


def spare(world: World, *earlier: int, is_prepared: bool = True) -> Group:
    """The spare that has a process that waits, and a supervisor that is none of `earlier`."""
    found: list[Group] = []

    def is_there() -> bool:
        assert world.pool is not None
        members = [pid for name in ("m@1", "m@2", "m@3") for pid, _ in world.lives(name)]
        for child in procfs.children(world.pool.pid):
            below = procfs.children(child)
            if child not in (*members, *earlier) and len(below) == 1 and below[0] not in members:
                found[:] = [(child, below[0])]
                held = pipes(child) | pipes(below[0]) if is_prepared else set()
                return not held & pipes(world.pool.pid)
        return False

    world.wait(is_there)
    return found[0]


def pipes(pid: int) -> set[str]:
    """The pipes of a process, but for its input and output."""
    found = set()
    with contextlib.suppress(FileNotFoundError):  # it ends
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # it has just been closed
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}") if int(fd) > 2 else "")
    return {link for link in found if link.startswith("pipe:")}


def stop(world: World) -> None:
    assert world.pool is not None
    world.pool.terminate()
    assert world.pool.wait(WAIT_S) == 0


def test_the_process_that_waits_becomes_the_group_of_the_next_version(world: World) -> None:
    supervisor, waiting = start(world)
    world.write(make("stay", 1), make("parent", 2, "loading"))
    assert world.wait_begun("m@2")[0] == waiting
    below = world.lives("m@2")[0][1]
    other, _ = spare(world, supervisor)  # another one follows
    # Its supervisor is one as any other: it restarts what is killed, after what was below it has ended.
    os.kill(waiting, signal.SIGKILL)
    again, _ = world.wait_begun("m@2", lives=2)
    assert wait_gone(below, 0)
    assert procfs.read_stat(again).parent == supervisor  # type: ignore[union-attr]
    world.write(make("stay", 1))
    assert wait_gone(supervisor)
    assert wait_gone(again)
    stop(world)
    assert wait_gone(other)


def test_the_supervisor_of_a_spare_keeps_to_the_control_plane_and_its_group_does_not(tmp_path: Path) -> None:
    """Nor does a successor of the group."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("ranks and control plane need a core each")
    world = World(tmp_path, performance={"control_cores": 1})
    try:
        supervisor, waiting = start(world)
        world.wait(lambda: os.sched_getaffinity(supervisor) == {min(allowed)})
        assert os.sched_getaffinity(waiting) == allowed
        world.write(make("stay", 1), make("stay", 2, "loading"))
        assert world.wait_begun("m@2")[0] == waiting
        os.kill(waiting, signal.SIGKILL)
        again, _ = world.wait_begun("m@2", lives=2)
        assert os.sched_getaffinity(again) == allowed
        assert os.sched_getaffinity(supervisor) == {min(allowed)}
        stop(world)
    finally:
        if world.pool is not None and world.pool.poll() is None:
            world.pool.kill()
            world.pool.wait()


def test_a_spare_that_is_killed_is_replaced(world: World) -> None:
    supervisor, waiting = start(world)
    os.kill(supervisor, signal.SIGKILL)
    second, waiting_second = spare(world, supervisor)
    assert wait_gone(waiting)
    os.kill(waiting_second, signal.SIGKILL)
    third, waiting_third = spare(world, supervisor, second)
    assert wait_gone(second)
    world.write(make("stay", 1), make("stay", 2, "loading"))
    assert world.wait_begun("m@2")[0] == waiting_third
    assert len(world.lives("m@1")) == 1  # none of it concerned the member
    stop(world)
    assert wait_gone(third)


@pytest.mark.parametrize("which", [0, 1])
def test_a_spare_that_is_stopped_is_replaced_before_a_version_needs_it(world: World, which: int) -> None:
    """Its supervisor, or the process that waits: a version would wait for that, or start without a spare."""
    group = start(world)
    os.kill(group[which], signal.SIGSTOP)
    second = spare(world, group[0])
    assert all(wait_gone(pid) for pid in group)
    world.write(make("stay", 1), make("stay", 2, "loading"))
    assert world.wait_begun("m@2")[0] == second[1]
    stop(world)


def test_a_version_waits_for_no_spare(world: World) -> None:
    """One that is stopped is killed, and the version starts without it; so does the next, which finds none."""
    supervisor, waiting = start(world)
    assert world.pool is not None
    world.pool.send_signal(signal.SIGSTOP)  # it sees both at once
    os.kill(supervisor, signal.SIGSTOP)
    world.wait(lambda: procfs.is_stopped(supervisor))
    world.write(make("stay", 1), make("stay", 2, "loading"), make("stay", 3, "loading"))
    world.pool.send_signal(signal.SIGCONT)
    members = {world.wait_begun(name)[0] for name in ("m@2", "m@3")}
    assert waiting not in members
    assert wait_gone(supervisor)
    assert wait_gone(waiting)
    spare(world, supervisor)
    stop(world)


def test_a_version_waits_for_no_spare_that_still_prepares(world: World, tmp_path: Path) -> None:
    """Its processes may wait for a disk. The spare stays, for a later version."""
    disk = tmp_path / "disk"
    os.mkfifo(disk)
    world.write(make("stay", 1))
    world.start(STARLING_TEST_SPARE_AFTER_S="0", STARLING_TEST_PREPARE=str(disk))
    world.wait_begun("m@1")
    supervisor, waiting = spare(world, is_prepared=False)
    world.write(make("stay", 1), make("stay", 2, "loading"))
    assert world.wait_begun("m@2")[0] != waiting
    os.close(os.open(disk, os.O_WRONLY))
    assert spare(world) == (supervisor, waiting)
    world.write(make("stay", 1), make("stay", 2, "loading"), make("stay", 3, "loading"))
    assert world.wait_begun("m@3")[0] == waiting
    stop(world)


def watches(pid: int) -> int:
    """How many watches of files a process has."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return sum("inotify" in link for link in links)


def test_the_supervisor_watches_for_the_spare_and_a_version_closes_no_watch(world: World, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    (tmp_path / "file").touch()
    inherited = watches(os.getpid())

    def run(version: ModelVersion) -> Callable[[], int]:
        def body() -> int:
            os.write(writer, str(int(watches(os.getpid()) > inherited)).encode())
            signal.pause()
            return 0

        return body

    def prepare(in_child: Callable[[], object], finish: Callable[[], object]) -> list[int]:
        return [process.open_removal_watch(tmp_path / "file")]

    group = fork_spare("worker", world.config, run, 0.0, prepare)
    deadline = time.monotonic() + WAIT_S
    while not (group.is_prepared and watches(group.pid) > inherited):
        assert time.monotonic() < deadline
    (waiting,) = procfs.children(group.pid)
    assert watches(waiting) == inherited  # its last close would wait, and the version for that
    assert group.give(make("stay", 2, "loading"))
    assert os.read(reader, 1) == b"0"
    while watches(group.pid) > inherited:  # of which there are few for each user
        assert time.monotonic() < deadline
    os.kill(group.pid, signal.SIGKILL)
    os.waitpid(group.pid, 0)
    for fd in (reader, writer, group.pidfd):
        os.close(fd)


def test_a_version_that_takes_the_spare_and_is_removed_at_once_leaves_nothing(world: World) -> None:
    supervisor, waiting = start(world)
    for serial in (2, 3):
        world.write(make("stay", 1), make("stay", serial, "loading"))
        world.write(make("stay", 1))  # before the pool has looked, or while it starts the version
        world.write(make("stay", 1), make("stay", serial, "loading"))
        life, _ = world.wait_begun(f"m@{serial}")
        world.write(make("stay", 1))
        assert wait_gone(life)
        world.wait(lambda: not list(world.run_dir.glob(f"worker-m@{serial}.*")))  # noqa: B023
    assert wait_gone(supervisor)
    assert wait_gone(waiting)
    last, waiting = spare(world, supervisor)
    stop(world)
    assert wait_gone(last)
    assert wait_gone(waiting)


def fork_and_kill(world: World, monkeypatch: pytest.MonkeyPatch, version: ModelVersion | None) -> tuple[int, int]:
    """Fork a spare here, give it `version` while its waiting process has been killed, and let its supervisor go on.

    The pids of the supervisor and of the process that waited.
    """
    # As if the pool had looked before the supervisor was stopped, which only makes the order certain.
    monkeypatch.setattr(procfs, "is_stopped", lambda pid: False)

    def run(version: ModelVersion) -> Callable[[], int]:
        def body() -> int:
            with (world.run_dir / "report").open("a") as lines:
                lines.write(f"{version.id} {os.getpid()} 0\n")
            return 0 if signal.sigwait({signal.SIGTERM}) else 1

        return body

    group = fork_spare("worker", world.config, run, 0.0)
    deadline = time.monotonic() + WAIT_S
    while not (below := procfs.children(group.pid)):
        assert time.monotonic() < deadline
    (waiting,) = below
    os.kill(group.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, group.pid, os.WSTOPPED)
    os.kill(waiting, signal.SIGKILL)
    while (stat := procfs.read_stat(waiting)) is not None and stat.state != "Z":
        assert time.monotonic() < deadline
    if version is not None:
        assert group.give(version)
    os.kill(group.pid, signal.SIGCONT)
    os.close(group.pidfd)
    if version is None:
        group.channel.close()
        os.close(group.preparing)
    return group.pid, waiting


def test_a_version_that_is_given_to_a_dying_spare_is_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, waiting = fork_and_kill(world, monkeypatch, make("stay", 2, "loading"))
    deadline = time.monotonic() + WAIT_S
    while not (lives := world.lives("m@2")):
        assert os.waitid(os.P_PID, supervisor, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "it has ended"
        assert time.monotonic() < deadline
    assert lives[0][0] != waiting
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    assert wait_gone(lives[0][0])


def test_the_supervisor_of_a_spare_that_gets_no_version_is_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version given at that moment is lost: the pool starts a member again that was killed, not one that exits."""
    supervisor, _ = fork_and_kill(world, monkeypatch, None)
    assert os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]) == -signal.SIGKILL


def test_a_spare_that_cannot_be_forked_leaves_nothing_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    before = set(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(BlockingIOError):
        fork_spare("worker", world.config, lambda version: lambda: 0, 0.0)
    assert (set(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before


def test_what_its_process_has_prepared_ends_with_it(world: World) -> None:
    """Such as ranks that wait: they are forked before the process waits for a version."""

    def prepare(in_child: Callable[[], object], finish: Callable[[], object]) -> list[int]:
        parent = os.getpid()
        if not os.fork():
            process.die_with_parent(parent)
            signal.pause()
        return []

    group = fork_spare("worker", world.config, lambda version: lambda: 0, 0.0, prepare)
    deadline = time.monotonic() + WAIT_S
    while not (prepared := [below for child in procfs.children(group.pid) for below in procfs.children(child)]):
        assert time.monotonic() < deadline
    (waiting,) = procfs.children(group.pid)
    group.kill()
    os.waitpid(group.pid, 0)
    os.close(group.pidfd)
    assert wait_gone(waiting)
    assert wait_gone(prepared[0])


def sockets() -> set[str]:
    """The sockets of this process, by their inodes."""
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return {Path(link).name for link in links if "socket:" in link}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_it_ends_when_what_its_process_has_prepared_has_ended_or_is_stopped(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The pool then forks another one.  What was forked holds no socket of the spare, and does not write the
    supervisor's log."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    reader, writer = os.pipe()
    inherited = sockets()

    def prepare(in_child: Callable[[], object], finish: Callable[[], object]) -> list[int]:
        parent = os.getpid()
        if not os.fork():
            process.die_with_parent(parent)
            in_child()
            logging.getLogger("starling").error("of a rank")
            os.write(writer, f"{len(sockets() - inherited)}".encode())
            signal.pause()
        return []

    group = fork_spare("worker", world.config, lambda version: lambda: 0, 0.0, prepare)
    assert os.read(reader, 100) == b"0"
    (waiting,) = procfs.children(group.pid)
    (prepared,) = procfs.children(waiting)
    os.kill(prepared, number)
    assert os.waitstatus_to_exitcode(os.waitpid(group.pid, 0)[1]) == -signal.SIGKILL
    assert wait_gone(waiting)
    assert wait_gone(prepared)
    assert not any("of a rank" in path.read_text() for path in paths.logs_dir().glob("worker-supervisor.log*"))
    for fd in (reader, writer, group.pidfd):
        os.close(fd)
    assert group.is_prepared
    group.channel.close()


def test_without_processes_for_it_the_spare_comes_later(world: World) -> None:
    """Neither a spare nor a member that cannot be forked ends the pool."""
    world.write(make("stay", 1))
    world.start(STARLING_TEST_SPARE_AFTER_S="0", STARLING_TEST_RETRY_S="0.2", STARLING_TEST_FAILED_FORKS="2")
    member, _ = world.wait_begun("m@1")
    assert len(world.lives("m@1")) == 1
    _, waiting = spare(world)
    world.write(make("stay", 1), make("stay", 2, "loading"))
    assert world.wait_begun("m@2")[0] == waiting
    assert not wait_gone(member, 0)
    stop(world)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_spare_ends_with_the_pool(world: World, number: signal.Signals) -> None:
    supervisor, waiting = start(world)
    assert world.pool is not None
    world.pool.send_signal(number)
    assert world.pool.wait(WAIT_S) == (0 if number == signal.SIGTERM else -number)
    assert wait_gone(supervisor)
    assert wait_gone(waiting)


def test_a_server_that_loads_nothing_has_no_spare(world: World) -> None:
    """Until a version is loaded while it runs: then more may follow."""
    world.write(make("stay", 1), serial=0)
    pool = world.start(STARLING_TEST_SPARE_AFTER_S="0")
    member, _ = world.wait_begun("m@1")
    world.write(make("stay", 1), make("stay", 2, "loading"), serial=0)
    other, _ = world.wait_begun("m@2")
    assert sorted(procfs.children(pool.pid)) == sorted([member, other])
    world.write(make("stay", 1), serial=2)
    assert spare(world)[0] not in (member, other)
    stop(world)


def test_a_version_that_has_left_the_table_is_not_given_up() -> None:
    """Its process dies as if killed: it may be back by now."""

    def run(version: ModelVersion) -> Callable[[], int]:
        raise ConfigError("no such model is configured")

    pid = base.fork(lambda: run_version(run, make("stay", 2, "loading")))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
