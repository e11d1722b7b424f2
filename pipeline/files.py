"""Files that outlive their writer: all of the bytes or an error, and the disk asked for them when it suits."""

from __future__ import annotations

import os


def write_all(fd: int, data: bytes | memoryview, at: int) -> None:
    """`data` at offset `at`; the kernel may take less of it at a time. Raises `OSError`."""
    rest = memoryview(data)
    while rest:
        done = os.pwrite(fd, rest, at)
        at += done
        rest = rest[done:]


def append_all(fd: int, data: bytes, size: int) -> None:
    """`data` at the end of a file of `size` bytes. Raises `OSError`: then the file is as before."""
    try:
        write_all(fd, data, size)
    except OSError:
        os.ftruncate(fd, size)
        raise


class DurableFile:
    """A file of one writer.  What is written is with the kernel and outlives any process; that it outlives the
    machine's power is for somebody else to see to (`unsynced`), who has the time to wait for a disk."""

    def __init__(self, fd: int = -1) -> None:
        self._fd = fd  # -1: closed
        self._is_dirty = False

    def unsynced(self) -> int | None:
        """A descriptor of its own (to be closed) if the disk does not have everything yet; else None."""
        if not self._is_dirty or self._fd < 0:
            return None
        self._is_dirty = False
        return os.dup(self._fd)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
