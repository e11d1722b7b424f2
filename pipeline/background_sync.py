"""Writes files to the disk in a thread, so that a slow disk delays no event loop.

Bytes that a process has written are in the kernel's page cache: they survive its death, and a power failure once they
are synchronized.  A file that waits is synchronized once, however often it was written meanwhile.  While the disk
takes no more, files are left to the kernel, which writes them within about 30 s.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from pipeline.files import DiskErrors

MAX_WAITING = 256  # files: each holds a descriptor


class BackgroundSync:
    """One thread, which starts with the first file. `before` is called before each synchronization."""

    def __init__(self, errors: DiskErrors, before: Callable[[], object]) -> None:
        self.skipped = 0  # files left to the kernel
        self._errors = errors
        self._before = before
        self._lock = threading.Lock()
        self._waiting: dict[Path, int] = {}  # descriptors
        self._is_running = False

    def request(self, path: Path, fd: int) -> None:
        """Synchronize a file or directory soon; `fd` remains the caller's. Never raises or waits for the disk."""
        with self._lock:
            if path in self._waiting:
                os.close(self._waiting.pop(path))  # it may be of a file that was replaced
            elif len(self._waiting) >= MAX_WAITING:
                self.skipped += 1
                return
            try:
                self._waiting[path] = os.dup(fd)
            except OSError as error:
                self._errors.failed("sync", path, error)
                return
            if not self._is_running:
                try:
                    threading.Thread(target=self._run, name="sync", daemon=True).start()
                except RuntimeError as error:  # there are too many: the next file has another attempt
                    self._errors.failed("sync", path, OSError(errno.EAGAIN, str(error)))
                else:
                    self._is_running = True

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            path, fd = taken
            try:
                self._before()
                os.fsync(fd)
            except OSError as error:
                self._errors.failed("sync", path, error)
            else:
                self._errors.worked("sync")
            finally:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _take(self) -> tuple[Path, int] | None:
        """The file that has waited longest. None: there is none, and the thread ends."""
        with self._lock:
            if not self._waiting:
                self._is_running = False
                return None
            path = next(iter(self._waiting))
            return path, self._waiting.pop(path)
