"""What keeps other processes alive: supervisor (one stage) and crew (one supervisor per instance) are such.

Wishes come by signal: SIGTERM and SIGINT, or the death of a guardian (kinship.py), ask for an end, a second
signal for an end at once; SIGHUP asks for a restart in order.  Children are forked here, so that none of
them inherits what is its parent's alone.
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

from pipeline.runtime import process

SAME_SIGNAL_S = 0.5  # honcho and a terminal may both send one: not a second wish
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class SupervisorBase:
    """In the main thread; every child of this process belongs to it. `watched_ancestors` are pidfds."""

    def __init__(self, watched_ancestors: list[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.stop_requests = 0
        self.restart_requested = False
        self._clock = clock
        self._last_wish = float("-inf")
        self._guardians = watched_ancestors
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for fd in (self._wake, *watched_ancestors):
            self.register(fd)

    def register(self, fd: int) -> None:
        """`look` ends when there is something to read from it, or when a pidfd's process ends."""
        self._poll.register(fd, select.POLLIN)

    def unregister(self, fd: int) -> None:
        self._poll.unregister(fd)

    def take_signals(self) -> None:
        """From now on they are wishes."""
        for number in SIGNALS:
            signal.signal(number, self.on_signal)

    def look(self, timeout_s: float) -> set[int]:
        """Wait for something to happen; the descriptors where it did. Guardians are looked after here."""
        ready = {fd for fd, _ in self._poll.poll(timeout_s * 1000)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for fd in ready.intersection(self._guardians):
            self.unregister(fd)
            self.stop_requests = max(self.stop_requests, 1)
        return ready

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            now = self._clock()
            if self.stop_requests == 0 or now - self._last_wish >= SAME_SIGNAL_S:
                self.stop_requests += 1
                self._last_wish = now
        elif number == signal.SIGHUP:
            self.restart_requested = True
        os.eventfd_write(self._wake, 1)  # poll() is resumed after a handler (PEP 475): this ends it


def fork(body: Callable[[], int]) -> int:
    """A copy of this process, in a process group of its own, that ends with the exit code of `body`.

    It gets SIGKILL at our death.  Returns its pid, in the parent.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return pid
    code = process.EXIT_FATAL
    try:
        process.die_with_parent(parent)
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
