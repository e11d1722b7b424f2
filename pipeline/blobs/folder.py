"""Blobs as files below a directory, which may be on a network file system.

    ROOT/KEY                a blob
    ROOT/.incoming/RANDOM   a blob being written; its writer holds flock(2) on it

A blob is written to `.incoming`, synchronized to the disk and linked to its key: a reader never sees a part of it, and
of two writers one gets `Conflict`.  New directories are synchronized, too.  What a killed writer leaves in `.incoming`
is removed by a later one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.blobs.interface import MAX_LISTED, BlobInfo, BlobStore, Data, check_key, check_range, wrong_length
from pipeline.errors import ConfigError, Conflict, NotFound, ResourceError, StarlingError, StorageUnavailable
from pipeline.files import sync_directory, write_all
from pipeline.threads import Threads

INCOMING = ".incoming"
THREADS = 32  # for calls at once, which wait for a disk or a network
ABANDONED_S = 3600.0  # age of a file in `.incoming` without a writer after which it is removed

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE)


class FolderStore(BlobStore):
    """The store below `root`, which is created by the first `put`."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time, *, is_private: bool = False) -> None:
        """`clock`: s since 1970, as file times. `is_private`: for this user alone."""
        self._modes = (0o700, 0o600) if is_private else (0o777, 0o666)  # of directories and files
        self.address = str(root)
        self._root = root
        self._clock = clock
        self._has_swept = False
        self._making = threading.Lock()
        self._threads = Threads("folder", THREADS)  # a directory that does not answer holds up this store alone

    def path(self, key: str) -> Path:
        """The file of a blob."""
        return self._root / check_key(key)

    async def size(self, key: str) -> int:
        """Bytes of a blob."""
        path = self.path(key)
        with self._errors(path):
            return (await self._threads.run(path.stat)).st_size

    async def get(self, key: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`."""
        check_range(offset, nbytes)
        path = self.path(key)
        with self._errors(path):
            data = await self._threads.run(_read, path, offset, nbytes)
        if len(data) != nbytes:
            raise wrong_length(str(path), offset, nbytes, len(data))
        return data

    async def put(self, key: str, data: Data, *, replace: bool = False) -> None:
        """Place a blob, durably."""
        path = self.path(key)
        with self._errors(path):
            await self._threads.uninterrupted(self._put, path, data, replace)

    async def scan(self, folder: str) -> list[BlobInfo]:
        """All blobs below `folder`, sorted by key."""
        path = self.path(folder)
        with self._errors(path):
            return await self._threads.run(lambda: sorted(self._below(path)))

    async def delete(self, key: str) -> None:
        """Remove a blob. Idempotent."""
        path = self.path(key)
        with self._errors(path):
            await self._threads.run(path.unlink, True)

    async def close(self) -> None:
        """Let the threads end."""
        self._threads.close()

    def _put(self, path: Path, data: Data, replace: bool) -> None:
        incoming = self._root / INCOMING
        with self._making:  # else another `put` could use a directory that is not durable yet
            for directory in (path.parent, incoming):
                self._make(directory)
        self._sweep(incoming)
        temporary = incoming / secrets.token_hex(16)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._modes[1])
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            write_all(fd, data, 0)
            os.fsync(fd)
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)
            sync_directory(path.parent)
        except FileExistsError:
            raise Conflict(f"{path} exists already") from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            os.close(fd)

    def _make(self, path: Path) -> None:
        """Create a directory of the store with its parents, each durably, unless it exists."""
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            directory.mkdir(self._modes[0] if directory.is_relative_to(self._root) else 0o777, exist_ok=True)
            sync_directory(directory.parent)

    def _sweep(self, incoming: Path) -> None:
        """Once in the store's life, remove what killed writers have left."""
        if self._has_swept:
            return
        self._has_swept = True
        for entry in os.scandir(incoming):
            with contextlib.suppress(OSError):
                if self._clock() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_S:
                    fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
                        os.unlink(entry.path)
                    finally:
                        os.close(fd)

    def _below(self, path: Path) -> Iterator[BlobInfo]:
        count = 0
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                file = Path(folder) / name
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if name.startswith(".") or not file.is_file():
                        continue
                    count += 1
                    if count > MAX_LISTED:
                        raise ResourceError(f"{path} has more than {MAX_LISTED:,} files; remove some")
                    found = file.stat()
                    yield BlobInfo(file.relative_to(self._root).as_posix(), found.st_size, found.st_mtime)

    @contextlib.contextmanager
    def _errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._translated(path, error) from None

    def _translated(self, path: Path, error: OSError) -> StarlingError:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            return NotFound(f"{path} does not exist")
        if error.errno in _FULL:
            return ResourceError(f"{path} cannot be written: {reason}; free space there, or set fleet.blobs elsewhere")
        if error.errno in _TRANSIENT:
            return StorageUnavailable(f"{path}: {reason}")
        return ConfigError(f"{path}: {reason}; check fleet.blobs and its permissions", "fleet.blobs")


def _read(path: Path, offset: int, nbytes: int) -> bytes:
    """Up to `nbytes`; fewer if the file ends before."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = max(0, min(nbytes, os.fstat(fd).st_size - offset))  # the memory that is reserved
        parts = []
        while nbytes and (part := os.pread(fd, nbytes, offset)):
            parts.append(part)
            offset += len(part)
            nbytes -= len(part)
    finally:
        os.close(fd)
    return parts[0] if len(parts) == 1 else b"".join(parts)
