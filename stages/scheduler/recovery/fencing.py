"""Fencing is death: a worker group whose arenas pass to a successor is killed and waited for, whole.

A process is named by (pid, start_ticks): a pid that has been used again is somebody else's.
"""

from __future__ import annotations

import os
import select
import signal
import time

from shm.arena import process_ticks


class Fence:
    """Kills the processes at once; `is_closed` once all of them are gone."""

    def __init__(self, pids: tuple[tuple[int, int], ...]) -> None:
        self._pidfds: list[int] = []
        for pid, ticks in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            # The descriptor holds on to the process: what it names cannot change between look and kill.
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
        """All gone? Does not wait."""
        if self._pidfds:
            gone = select.select(self._pidfds, [], [], 0)[0]
            for pidfd in gone:
                os.close(pidfd)
            self._pidfds = [pidfd for pidfd in self._pidfds if pidfd not in gone]
        return not self._pidfds

    def wait(self, seconds: float) -> bool:
        """Wait for them, at most so long. SIGKILL takes a millisecond, unless a process is in the disk."""
        end = time.monotonic() + seconds
        while not self.is_closed:
            left = end - time.monotonic()
            if left <= 0:
                return False
            select.select(self._pidfds, [], [], left)
        return True
