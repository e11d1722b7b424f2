"""Base of the processes that keep others alive: the supervisor of one stage, and the worker pool.

Requests come by signal: SIGTERM or SIGINT, or the death of a watched ancestor, request an orderly stop; a second
signal requests an immediate one; SIGHUP requests a restart.  Where STARLING_KILL_ORPHANS is set, the death of an
ancestor requests an immediate stop, too, unless an orderly one is under way.  Children are forked here, so that none of
them inherits what belongs to its parent alone.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

from pipeline.config import server_cores
from pipeline.runtime import process

SAME_SIGNAL_S = 0.5  # signals within this time count once: honcho and a terminal may both send one
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class SupervisorBase:
    """Signals and waiting. Runs in the main thread; every child of this process belongs to it.

    `watched_ancestors` are pidfds.
    """

    def __init__(self, watched_ancestors: list[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.stop_requests = 0  # 1: orderly; 2 or more: immediate
        self.restart_requested = False
        self.on_wake: Callable[[], object] = lambda: None  # called whenever `wait` returns
        self._clock = clock
        self._last_request = float("-inf")
        self._requests_of_orphan = 2 if process.ORPHANS_VARIABLE in os.environ else 1
        self._watched_ancestors = watched_ancestors
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for fd in (self._wake, *watched_ancestors):
            self.register(fd)

    def register(self, fd: int) -> None:
        """`wait` returns when `fd` is readable; a pidfd is when its process has ended."""
        self._poll.register(fd, select.POLLIN)

    def unregister(self, fd: int) -> None:
        """`wait` no longer watches `fd`."""
        self._poll.unregister(fd)

    def install_signal_handlers(self) -> None:
        """From now on signals are requests."""
        for number in SIGNALS:
            signal.signal(number, self.on_signal)

    @staticmethod
    def ignore_restart_requests() -> None:
        """This process ends: SIGHUP would kill an interpreter that finalizes, and its exit code would be lost."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def wait(self, timeout_s: float) -> set[int]:
        """Wait for a descriptor or a signal; the readable descriptors. The death of an ancestor requests a stop."""
        ready = {fd for fd, _ in self._poll.poll(timeout_s * 1000)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for fd in ready.intersection(self._watched_ancestors):
            self.unregister(fd)
            if not self.stop_requests:
                self.stop_requests = self._requests_of_orphan
        self.on_wake()
        return ready

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """The handler of `SIGNALS`."""
        if number in (signal.SIGTERM, signal.SIGINT):
            now = self._clock()
            if self.stop_requests == 0 or now - self._last_request >= SAME_SIGNAL_S:
                self.stop_requests += 1
                self._last_request = now
        elif number == signal.SIGHUP:
            self.restart_requested = True
        os.eventfd_write(self._wake, 1)  # poll() is resumed after a handler (PEP 475): this ends it


def fork(body: Callable[[], int]) -> int:
    """Fork a copy of this process, in its own process group, that exits with the code `body` returns.

    It may run on all cores that this process had before it kept to some of them, and receives SIGKILL when this process
    dies.  Returns its pid, in the parent.  Raises `OSError`: there are too many processes, or too little memory.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:  # in the parent, also if the fork failed
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if pid:
        return pid
    code = process.EXIT_FATAL
    try:
        process.die_with_parent(parent)
        server_cores.leave()
        os.setpgid(0, 0)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = body()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def open_pidfd(pid: int) -> int:
    """The pidfd of a child. Raises `OSError` if there are too many descriptors; then the child has been killed."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
