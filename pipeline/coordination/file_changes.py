"""Wakes the watchers of a SQLite store when a process has written to its file, by inotify.

A commit in WAL mode writes to the log beside the file, and is visible only after that: a watcher that is woken opens a
transaction that writes (`BEGIN IMMEDIATE`), which waits for the end of the one that it was woken by.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pipeline.runtime.file_watch import FileWatch

LOG_SUFFIX = "-wal"


class FileChanges:
    """One per store. `arm` may be called in another thread; everything else in one event loop."""

    def __init__(self, path: Path) -> None:
        self.serial = 0  # grows when the file may have changed, as far as the events have been read
        self._watch = FileWatch(path, (LOG_SUFFIX,))
        self._waiting: set[asyncio.Future[None]] = set()

    def arm(self) -> bool:
        """Whether changes from now on are seen. Examines the disk."""
        return self._watch.arm()

    @property
    def has_descriptor(self) -> bool:
        """False: the kernel has none to give, or it is closed, and `arm` is never true."""
        return self._watch.fd >= 0

    def close(self) -> None:
        """Give the descriptor back. Idempotent. Waiting tasks are not woken any more."""
        if self._waiting and self.has_descriptor:
            asyncio.get_running_loop().remove_reader(self._watch.fd)
        self._watch.close()

    async def wait(self, serial: int, timeout_s: float) -> bool:
        """Wait until the file has changed since `serial`. False: it has not, for so long."""
        loop = asyncio.get_running_loop()
        if self.serial != serial:
            return True
        changed: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.add_reader(self._watch.fd, self._read)  # events that wait already call it, too
        self._waiting.add(changed)
        try:
            async with asyncio.timeout(timeout_s):
                await changed
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(changed)
            if not self._waiting and self.has_descriptor:
                loop.remove_reader(self._watch.fd)
        return True

    def _read(self) -> None:
        if self._watch.has_changed():
            self.serial += 1
            for changed in self._waiting:
                if not changed.done():
                    changed.set_result(None)
