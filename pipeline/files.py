"""Writing files: complete writes, atomic replacement, files that are synchronized to the disk later, disk errors."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path

_SYNC_FILE_RANGE_WRITE = 2  # of <linux/fs.h>: begin, and do not wait
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of <fcntl.h> and <linux/fs.h>
_libc = ctypes.CDLL(None)
_sync_file_range = getattr(_libc, "sync_file_range", None)
_renameat2 = getattr(_libc, "renameat2", None)


def replace_file(
    path: Path,
    data: bytes,
    *,
    durable: bool = False,
    of_run: bool = False,
    mode: int = 0o666,
    before: Callable[[str], object] = lambda operation: None,
) -> None:
    """Write `data` beside `path` and rename it over `path`: a reader sees the old contents or the new, never a part.

    `durable` writes the bytes to the disk before the rename, and the directory after it; if only the latter fails, the
    new contents stand.  `of_run`: the file belongs to one run of the server, and may be empty after a power cut.  Then
    the two files change places, and the old one is removed: at a rename over a file ext4 begins to write the new one to
    the disk, which takes milliseconds.  Raises `OSError`; the old file then stands and the new one is removed.  One
    writer at a time: the temporary name is derived from `path`.  `before` is called with "open", "sync" and "rename"
    before each.
    """
    temporary = temporary_path(path)
    try:
        before("open")
        if of_run:  # what a killed writer has left there may be the old file, which a reader may have open
            temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            write_all(fd, data, 0)
            if durable:
                before("sync")
                os.fsync(fd)
        finally:
            os.close(fd)
        before("rename")
        if not (of_run and _exchange(temporary, path)):
            os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        with contextlib.suppress(OSError):
            sync_directory(path.parent)


def _exchange(new: Path, path: Path) -> bool:
    """Put `new` in the place of `path` and remove that. False: there is no `path`, or the file system cannot do it."""
    if _renameat2 is None or _renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE):
        return False
    with contextlib.suppress(OSError):
        new.unlink()
    return True


def make_directory(path: Path) -> None:
    """Create a directory for its owner alone, with its parents, each durably, unless it exists. Raises `OSError`."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(OSError):
            sync_directory(directory.parent)


def begin_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Let the kernel begin to write these bytes of a file to the disk, so that a later `fsync` has less to wait for.

    A hint: nothing is promised, and a file system that cannot do it does nothing.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


def sync_directory(directory: Path) -> None:
    """Write a directory to the disk: the files created, renamed and removed in it. Raises `OSError`."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_path(path: Path) -> Path:
    """Where `replace_file` writes before it renames: `.NAME.new` beside `path`."""
    return path.with_name(f".{path.name}.new")


def drop_cached(path: Path) -> None:
    """Make the next read of a file one of the disk, but for pages that a process has mapped. Raises `OSError`."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_all(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` at offset `at`; the kernel may accept less at a time. Raises `OSError`."""
    rest = memoryview(data)
    while rest:
        done = os.pwrite(fd, rest, at)
        at += done
        rest = rest[done:]


def append_all(fd: int, data: bytes, size: int) -> None:
    """Append `data` to a file of `size` bytes. Raises `OSError`; the file is then as before, if the disk allows it."""
    try:
        write_all(fd, data, size)
    except OSError:
        with contextlib.suppress(OSError):  # the part that was written has a wrong checksum
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


class DiskErrors:
    """Errors of one kind of state file: all are counted, the first one is logged, and so is the recovery."""

    def __init__(self, log: logging.Logger, consequence: str) -> None:
        """`consequence`: what the server does without, for the log line."""
        self.count = 0  # since the process started
        self._log = log
        self._consequence = consequence
        self._failed: set[str] = set()  # operations that have failed since they last worked

    def failed(self, operation: str, path: Path, error: OSError) -> None:
        """An operation (`write`, `unlink`, ...) on `path` has failed."""
        self.count += 1
        if operation not in self._failed:
            self._failed.add(operation)
            reason = error.strerror or str(error)
            facts = {"path": str(path), "operation": operation, "error": reason, "consequence": self._consequence}
            self._log.error("a state file failed", extra=facts)

    def worked(self, operation: str) -> None:
        """An operation has succeeded."""
        if operation in self._failed:
            self._failed.discard(operation)
            self._log.warning("state files work again", extra={"operation": operation, "errors": self.count})
