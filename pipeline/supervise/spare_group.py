"""A spare worker group: a supervisor and its stage's process, both forked before it is known which version they run.

    worker pool --version--> supervisor of the spare --version, keepalive pipe--> process of the stage

Until then both wait in a read, and so do the processes that the latter has forked (`prepare`).  They have imported and
loaded what a fork of the pool has, hold no lock or port, and end with the pool.  A version gets none whose processes
still prepare, which may wait for a disk: each holds a pipe's end until it has.  When one of them ends or is stopped,
all end, and the pool forks another spare.  With the version the supervisor becomes that of the version
(supervisor.py), whose first run is the waiting process; later runs are forks, as of any supervisor.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from pipeline import procfs
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.models import control_cores
from pipeline.models.versions import ModelVersion
from pipeline.runtime import process
from pipeline.supervise import base
from pipeline.supervise.restart_count import open_count
from pipeline.supervise.supervisor import (
    Start,
    guarded,
    prepare_supervisor,
    run_supervisor,
    set_environment,
    setup_logs,
    start_fork,
    start_run,
)

MESSAGE_BYTES = 64 << 10  # most of a version as a message
MAX_WATCHED = 16  # descriptors that `Prepare` returns
_PREPARED = b"prepared"  # from the waiting process to its supervisor, with those descriptors
_ENDED_OR_STOPPED = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT

RunVersion = Callable[[ModelVersion], Callable[[], int]]  # a version -> the body of its stage's process
# Called in the stage's process before it waits.  It may fork processes, in which it calls its first argument, which
# closes what is not theirs, and the second one when they have prepared what they can.  Returns up to `MAX_WATCHED`
# descriptors, which the supervisor gets: when one of them is readable before a version comes, what has been prepared is
# of no use any more, as when one of the processes has ended or is stopped: then all of them end.
Prepare = Callable[[Callable[[], object], Callable[[], object]], Sequence[int]]


class _Begin(msgspec.Struct, frozen=True):
    """What the supervisor sends to the waiting process, with its end of the keepalive pipe."""

    restarts: int
    version: ModelVersion


@dataclass
class SpareGroup:
    """The pool's handle of a spare; `give` makes it the group of a version."""

    pid: int  # of its supervisor; 0: it has ended
    pidfd: int
    channel: socket.socket
    started: float  # s, by the pool's clock
    preparing: int = -1  # of a pipe that is closed elsewhere when all its processes have prepared; -1: they have
    orphans: set[int] = field(default_factory=set)  # its processes that have not ended

    def give(self, version: ModelVersion) -> bool:
        """Let it become the group of `version`. False: it has ended or is stopped, and is killed."""
        message = msgspec.msgpack.encode(version)
        try:
            if len(message) <= MESSAGE_BYTES and not procfs.is_stopped(self.pid):
                self.channel.send(message, socket.MSG_DONTWAIT)
                self.channel.close()
                self._close_preparing()
                return True
        except OSError:  # its supervisor has ended
            pass
        self.kill()
        return False

    @property
    def is_prepared(self) -> bool:
        """Whether its processes have prepared what they can, or have ended."""
        if self.preparing >= 0:
            poll = select.poll()
            poll.register(self.preparing, select.POLLIN)
            if poll.poll(0):
                self._close_preparing()
        return self.preparing < 0

    @property
    def is_stopped(self) -> bool:
        """Whether its supervisor is stopped: it waits for no version then."""
        found = os.waitid(os.P_PIDFD, self.pidfd, _ENDED_OR_STOPPED) if self.pid else None
        return found is not None and found.si_code == os.CLD_STOPPED  # a traced process (a debugger) runs

    def kill(self) -> None:
        """Kill its supervisor, with which its other process dies. Idempotent."""
        self.channel.close()
        self._close_preparing()
        if self.pid:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def _close_preparing(self) -> None:
        if self.preparing >= 0:
            os.close(self.preparing)
            self.preparing = -1


def fork_spare(
    stage: str, config: Config, run: RunVersion, now: float, prepare: Prepare = lambda in_child, finish: ()
) -> SpareGroup:
    """Fork a spare from this process, which has imported the stage. Raises `OSError`: then there is none."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader = writer = -1

    def body() -> int:
        ours.close()
        os.close(reader)
        return _supervise(stage, config, run, theirs, writer, prepare)

    try:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        pid = base.fork(body)
        return SpareGroup(pid, base.open_pidfd(pid), ours, now, reader)
    except BaseException:
        ours.close()
        if reader >= 0:
            os.close(reader)
        raise
    finally:
        theirs.close()
        if writer >= 0:
            os.close(writer)


def run_version(run: RunVersion, version: ModelVersion) -> int:
    """The body of the process of a version; its exit code.

    `run` reads the table of loaded versions. One that has left it dies as if killed: the pool ends it, or it starts
    again if it is back by now. An exit would give it up.
    """
    try:
        body = run(version)
    except ConfigError:
        os.kill(os.getpid(), signal.SIGKILL)
        raise
    return body()


def _supervise(
    stage: str, config: Config, run: RunVersion, channel: socket.socket, preparing: int, prepare: Prepare
) -> int:
    """The supervisor of a spare; the exit code.

    Until it supervises a version it ends by SIGKILL alone.  The pool may have given it a version meanwhile, and gives
    up a version whose supervisor exits, but starts one whose supervisor was killed again.
    """
    try:
        supervise_version = _wait_for_version(stage, config, run, channel, preparing, prepare)
    except Exception:
        traceback.print_exc()
        supervise_version = None
    if supervise_version is None:
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    assert supervise_version is not None
    return supervise_version()


def _wait_for_version(
    stage: str, config: Config, run: RunVersion, channel: socket.socket, preparing: int, prepare: Prepare
) -> Callable[[], int] | None:
    """What supervises the version that the pool gives; None: the waiting process has ended, or the pool.

    preparing: the pipe's end that is closed when all has been prepared.
    """
    os.environ.pop("NOTIFY_SOCKET", None)  # the pool notifies systemd
    watched_ancestors = prepare_supervisor(stage, config)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def wait_and_run() -> int:
        channel.close()
        ours.close()
        setup_logs(stage, config)  # first: what `prepare` forks must not write the supervisor's log
        _give(prepare(theirs.close, partial(os.close, preparing)), theirs)
        os.close(preparing)
        return _wait_and_run(run, theirs)

    pid = base.fork(wait_and_run)
    theirs.close()
    os.close(preparing)
    control_cores.keep_parent(config)
    message, watched = _receive(channel, ours)
    channel.close()
    if not message:
        return None
    version = msgspec.msgpack.decode(message, type=ModelVersion)
    # Before anything else that a supervisor prepares: the version waits for this process alone.
    running = start_run(_start_waiting(pid, ours, version), open_count(config, version.stage))
    for fd in watched:
        os.close(fd)
    start = start_fork(lambda: run_version(run, version), stage, config)
    return lambda: run_supervisor(stage, start, config, watched_ancestors, version.stage, running=running)


def _give(watched: Sequence[int], channel: socket.socket) -> None:
    """Give the supervisor what it watches, in the waiting process.

    The last close of a file's watch waits until the kernel has freed its parts, 6 to 20 ms: a version that begins
    would wait for that, and its supervisor has nothing to do then.  Call this before the pool learns that all is
    prepared: the supervisor must have read the descriptors when a version comes.
    """
    assert len(watched) <= MAX_WATCHED, watched
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the supervisor has ended, and this process does
        socket.send_fds(channel, [_PREPARED], watched)
    for fd in watched:
        os.close(fd)


def _receive(channel: socket.socket, waiting: socket.socket) -> tuple[bytes, list[int]]:
    """The pool's message, even if the waiting process has ended, and what was watched meanwhile.

    b"": the process has ended without one, or the pool has, or what it has prepared is of no use any more.
    """
    watched: list[int] = []
    if waiting.fileno() in _wait_for([channel.fileno(), waiting.fileno()]):
        with contextlib.suppress(OSError):  # the process has ended
            watched = socket.recv_fds(waiting, len(_PREPARED), MAX_WATCHED)[1]
        for fd in watched:
            os.set_inheritable(fd, False)
        _wait_for([channel.fileno(), *watched])
    try:
        return channel.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT), watched
    except BlockingIOError:
        return b"", watched


def _wait_for(descriptors: Sequence[int]) -> set[int]:
    """Wait until one of them is readable, or a child has ended or is stopped; those that are readable."""
    signals = process.open_child_signal_fd()
    try:
        poll = select.poll()
        for fd in (signals, *descriptors):
            poll.register(fd, select.POLLIN)
        while True:
            is_lost = _has_lost_child()
            ready = {fd for fd, _ in poll.poll(0 if is_lost else None)}
            if signals in ready:
                os.read(signals, 4096)
            if is_lost or ready != {signals}:
                return ready - {signals}
    finally:
        os.close(signals)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _has_lost_child() -> bool:
    """Whether a child has ended or is stopped. A traced one (a debugger, a profiler) runs."""
    try:
        found = os.waitid(os.P_ALL, 0, _ENDED_OR_STOPPED)
    except ChildProcessError:  # it has none
        return False
    return found is not None and found.si_code != os.CLD_TRAPPED


def _start_waiting(pid: int, channel: socket.socket, version: ModelVersion) -> Start:
    """The first start is of the waiting process."""

    def start(keepalive_fd: int, restarts: int) -> int:
        """Let the stage begin; its pid."""
        with contextlib.suppress(OSError):  # it has ended: the supervisor sees that as it sees any end
            socket.send_fds(channel, [msgspec.msgpack.encode(_Begin(restarts, version))], [keepalive_fd])
        channel.close()
        return pid

    return start


def _wait_and_run(run: RunVersion, channel: socket.socket) -> int:
    """The process of the stage; the exit code."""
    if channel.fileno() not in _wait_for([channel.fileno()]):
        return process.EXIT_FATAL  # the supervisor ends with this process, and the pool forks another spare
    raw, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES + 1024, 1)
    channel.close()
    if not raw:
        return process.EXIT_ORPHANED
    begin = msgspec.msgpack.decode(raw, type=_Begin)
    set_environment(descriptors[0], begin.restarts)
    return guarded(lambda: run_version(run, begin.version))
