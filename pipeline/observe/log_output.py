"""Destinations of log lines: a descriptor that never blocks, and a rotating file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from pipeline.faults import points

LostLine = Callable[[int], bytes]  # the line that says how many lines were lost


class Output:
    """A descriptor (stderr) that is written without blocking. `lost`: lines that did not fit."""

    def __init__(self, fd: int, lost_line: LostLine) -> None:
        self.lost = 0
        self._lost_line = lost_line
        self._rest = b""  # of a line that was written in part
        self._socket: socket.socket | None = None
        kind = os.fstat(fd).st_mode
        if stat.S_ISSOCK(kind):  # systemd's journal
            self._fd = os.dup(fd)
            self._socket = socket.socket(fileno=self._fd)
        elif stat.S_ISREG(kind):
            self._fd = os.dup(fd)  # reopened it would have an offset of its own
        else:
            # O_NONBLOCK on the given descriptor would affect every process that shares it.
            try:
                self._fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            except OSError:
                self._fd = os.dup(fd)

    def write(self, line: bytes) -> None:
        """Write the whole line, or count it as lost."""
        if self._rest:
            self._rest = self._rest[self._put(self._rest) :]
            if self._rest:
                self.lost += 1
                return
        if self.lost:
            line = self._lost_line(self.lost) + line
        sent = self._put(line)
        if sent == 0:
            self.lost += 1
            return
        self.lost = 0
        self._rest = line[sent:]

    def _put(self, data: bytes) -> int:
        try:
            if self._socket is not None:
                return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return os.write(self._fd, data)
        except OSError:  # full, or closed by its reader
            return 0

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class RotatingFile:
    """PATH, PATH.1, ...: `files` files of at most `max_bytes` each. Opened at the first line.

    Several processes may write to a path, as worker groups do.  One of them rotates the file, and the others open it
    again before their next line.  Lines of the same moment may exceed the bound, and go to what has become PATH.1.

    A full or failing disk costs lines, which are counted in `lost`; the next line that is written follows one that
    says how many.
    """

    def __init__(self, path: Path, max_bytes: int, files: int, lost_line: LostLine | None = None) -> None:
        self.path = path
        self.lost = 0
        self._reported = 0  # of `lost`
        self._lost_line = lost_line
        self._max_bytes = max_bytes
        self._files = files
        self._fd = -1
        self._points = points.DiskPoints("logs")

    def write(self, line: bytes) -> None:
        """Append one line; rotate first when it does not fit."""
        try:
            if not self._is_current():
                self._reopen()
            size = os.fstat(self._fd).st_size
            if size and size + len(line) > self._max_bytes:
                self._rotate()
            self._points.write.hit()
            lost = self.lost - self._reported
            if lost and self._lost_line is not None:
                line = self._lost_line(lost) + line
            self._append(line)
            self._reported += lost
        except OSError:
            self.lost += 1

    def _append(self, line: bytes) -> None:
        """Write the whole line, or raise `OSError`: half of one would make the next line unreadable, too."""
        written = os.write(self._fd, line)
        if written < len(line):  # the disk is full; another program may have emptied the file since it was opened
            os.ftruncate(self._fd, max(0, os.fstat(self._fd).st_size - written))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _is_current(self) -> bool:
        """Whether the open file is the one at the path: another process may have rotated it."""
        try:
            return self._fd >= 0 and os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _reopen(self) -> None:
        self.close()
        self._points.open.hit()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _rotate(self) -> None:
        """Let the next line begin a file, unless another process does that now."""
        try:
            # Of this process alone: forks, which share the descriptor, would share a lock of flock().  Without waiting,
            # because the process that has it may be stopped.
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # the file system has no locks
            pass
        try:
            if self._is_current():
                self._shift()
        except OSError:
            # The bound holds even if no file can be renamed: the current file starts again.
            self._points.open.hit()
            os.truncate(self.path, 0)
        finally:
            self.close()  # and with it the lock
        self._reopen()

    def _shift(self) -> None:
        names = [self.path, *(Path(f"{self.path}.{i}") for i in range(1, self._files))]
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            if newer.exists():
                self._points.rename.hit()
                os.replace(newer, older)
        if self._files == 1:
            self._points.unlink.hit()
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)
