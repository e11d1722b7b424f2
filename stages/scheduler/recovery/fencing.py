"""Fencing: before a worker group's arenas pass to a successor, all its processes are killed and waited for.

A process is identified by (pid, start_ticks), because the kernel uses a pid again.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time

from shm.arena import process_ticks


def _open(pid: int) -> int:
    """A pidfd; -1 if no process has this pid any more."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        # EINVAL, from Linux 6.16 on ENOENT: only a process group has this number, whose leader was waited for.
        if error.errno not in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            raise
        return -1


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process runs. One that has exited does not, even before its parent has waited for it."""
    if (pidfd := _open(pid)) < 0:
        return False
    try:
        return process_ticks(pid) == ticks and not select.select([pidfd], [], [], 0)[0]
    finally:
        os.close(pidfd)


class Fence:
    """Sends SIGKILL to the processes at once; `is_closed` after all of them have exited."""

    def __init__(self, pids: tuple[tuple[int, int], ...]) -> None:
        self._pidfds: list[int] = []
        for pid, ticks in pids:
            if (pidfd := _open(pid)) < 0:
                continue
            # The descriptor refers to one process: it cannot become another between the check and the signal.
            if process_ticks(pid) != ticks:
                os.close(pidfd)
                continue
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                os.close(pidfd)
                continue
            self._pidfds.append(pidfd)

    @property
    def is_closed(self) -> bool:
        """Whether all processes have exited. Does not wait."""
        if self._pidfds:
            gone = select.select(self._pidfds, [], [], 0)[0]
            for pidfd in gone:
                os.close(pidfd)
            self._pidfds = [pidfd for pidfd in self._pidfds if pidfd not in gone]
        return not self._pidfds

    def wait(self, seconds: float) -> bool:
        """Wait for their exit, at most `seconds`. It takes a millisecond unless a process is in disk I/O."""
        deadline = time.monotonic() + seconds
        while not self.is_closed:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            select.select(self._pidfds, [], [], left)
        return True
