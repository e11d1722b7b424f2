"""Writing files: complete writes, atomic replacement, and files that are synchronized to the disk later."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write `data` beside `path` and rename it over `path`: a reader sees the old contents or the new, never a part.

    `durable` writes the bytes to the disk before the rename.  Raises `OSError`; the old file then stands and
    the new one is removed.  One writer at a time: the temporary name is derived from `path`.
    """
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def temporary_path(path: Path) -> Path:
    """Where `replace_file` writes before it renames: `.NAME.new` beside `path`."""
    return path.with_name(f".{path.name}.new")


def write_all(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` at offset `at`; the kernel may accept less at a time. Raises `OSError`."""
    rest = memoryview(data)
    while rest:
        done = os.pwrite(fd, rest, at)
        at += done
        rest = rest[done:]


def append_all(fd: int, data: bytes, size: int) -> None:
    """Append `data` to a file of `size` bytes. Raises `OSError`; the file is then as before."""
    try:
        write_all(fd, data, size)
    except OSError:
        os.ftruncate(fd, size)
        raise


class DurableFile:
    """A file with one writer.

    Written bytes are in the kernel's page cache and survive the death of any process.  To survive a power
    loss they must be synchronized, which may take long: `unsynced` gives another thread a descriptor to do it with.
    """

    def __init__(self, fd: int = -1) -> None:
        self._fd = fd  # -1: closed
        self._is_dirty = False

    def unsynced(self) -> int | None:
        """A duplicate descriptor (the caller closes it) if the disk lacks some of the bytes; else None."""
        if not self._is_dirty or self._fd < 0:
            return None
        self._is_dirty = False
        return os.dup(self._fd)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
