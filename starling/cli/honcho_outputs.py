"""The output and the ends of honcho's processes, read by honcho's own process.

honcho forks a process for each of its processes, only to read its output. Those readers would hold several megabytes
each for the server's whole life; one `poll` replaces them. Callers: honcho_patch.py
and procfile_runner.py.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Any

from honcho import printer

READ_BYTES = 65536
MAX_LINE_BYTES = 65536  # a longer line is printed in parts


class _Running:
    """A started process: its child, and what it has written of a line that has not ended."""

    def __init__(self, process: Any, child: Any) -> None:
        self.process = process
        self.child = child
        self.rest = b""


class Outputs:
    """Events of all processes, in the order in which they are seen."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._reading: dict[int, _Running] = {}  # by descriptor of the output
        self._ending: dict[int, _Running] = {}  # their output has ended; by pidfd
        self._watched: dict[int, Callable[[], object]] = {}
        self._events: deque[Any] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.POLLIN)

    def start(self, process: Any, child: Any) -> None:
        """Follow `child` (subprocess.Popen or `ForkedProgram`) of honcho's `process`. Its start is an event."""
        fd = child.stdout.fileno()
        os.set_blocking(fd, False)
        self._reading[fd] = _Running(process, child)
        self._poll.register(fd, select.POLLIN)
        self._add(process, {"pid": child.pid}, "start")

    def add(self, message: Any) -> None:
        """Deliver another event. Safe in a signal handler."""
        self._events.append(message)
        os.eventfd_write(self._wake, 1)

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call `call` within `get` when `fd` is readable."""
        self._watched[fd] = call
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """No longer watch `fd`."""
        self._poll.unregister(fd)
        del self._watched[fd]

    def get(self, timeout_s: float | None) -> Any:
        """The next event; None at the timeout (s; None: no limit), or early."""
        self._wait(0.0 if self._events else timeout_s)  # also while others add events without end
        return self._events.popleft() if self._events else None

    def _wait(self, timeout_s: float | None) -> None:
        for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            if fd == self._wake:
                os.eventfd_read(fd)
            elif fd in self._reading:
                self._read(fd)
            elif fd in self._watched:
                self._watched[fd]()
            else:
                self._end(fd)

    def _read(self, fd: int) -> None:
        running = self._reading[fd]
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        *lines, running.rest = (running.rest + data).split(b"\n")
        if not data or len(running.rest) >= MAX_LINE_BYTES:
            lines, running.rest = [*lines, running.rest], b""
            lines = lines if lines[-1] else lines[:-1]
        for line in lines:
            if not running.process.quiet:
                self._add(running.process, line + b"\n", "line")
        if not data:
            self._poll.unregister(fd)
            del self._reading[fd]
            running.child.stdout.close()
            pidfd = os.pidfd_open(running.child.pid)
            self._ending[pidfd] = running
            self._poll.register(pidfd, select.POLLIN)

    def _end(self, pidfd: int) -> None:
        running = self._ending.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        self._add(running.process, {"returncode": running.child.wait()}, "stop")

    def _add(self, process: Any, data: Any, kind: str) -> None:
        self._events.append(
            printer.Message(type=kind, data=data, time=datetime.now(), name=process.name, colour=process.colour)
        )
