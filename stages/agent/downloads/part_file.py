"""The unfinished `.bin` of a download, with its size reserved on the disk.

It needs no record of what has arrived: a piece is present if its bytes have its checksum.  After a crash, also of the
machine, the file is read once, without its holes, and the download continues with what is not right.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Self

from pipeline.errors import DiskFailed, ResourceError, StarlingError, StorageUnavailable
from pipeline.files import begin_writeback, sync_directory, write_all
from shm.checkpoint import PIECE_BYTES, piece_checksum

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)  # of the process or the machine


class PartFile:
    """`path`, of `nbytes`. A context manager, which closes it and leaves the file. One writer at a time."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Raises `ResourceError` when the disk is too small, `DiskFailed`."""
        self.path = path
        self.nbytes = nbytes
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.fstat(self._fd).st_size > nbytes:
                    os.ftruncate(self._fd, 0)
                os.posix_fallocate(self._fd, 0, nbytes)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise self._failure(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    def piece_range(self, piece: int) -> tuple[int, int]:
        """Offset and length."""
        return piece * PIECE_BYTES, min(PIECE_BYTES, self.nbytes - piece * PIECE_BYTES)

    def next_present(self, at: int, checksums: list[int]) -> tuple[int, int]:
        """Look at the first piece from offset `at` that has been written: its number, and the offset after it.

        The number is -1 if the piece is not right.  Holes are skipped; the offset after the last piece is `nbytes`.
        """
        try:
            at = os.lseek(self._fd, at, os.SEEK_DATA)
        except OSError:  # no data after `at`
            return -1, self.nbytes
        piece = at // PIECE_BYTES
        offset, nbytes = self.piece_range(piece)
        try:
            data = os.pread(self._fd, nbytes, offset)
        except OSError:  # an unreadable sector: the piece is fetched again
            data = b""
        is_right = len(data) == nbytes and piece_checksum(data) == checksums[piece]
        return piece if is_right else -1, offset + nbytes

    def write(self, piece: int, data: bytes) -> None:
        """Write a verified piece. Raises `ResourceError`, `DiskFailed`."""
        try:
            write_all(self._fd, data, piece * PIECE_BYTES)
        except OSError as error:
            raise self._failure(error) from None
        begin_writeback(self._fd, piece * PIECE_BYTES, len(data))  # while others arrive: `place` has less to wait for

    def place(self, path: Path) -> None:
        """Synchronize the file to the disk and rename it to `path`, read-only. Raises as `write`."""
        try:
            os.fsync(self._fd)
            os.fchmod(self._fd, 0o444)
            os.rename(self.path, path)
            sync_directory(path.parent)
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> StarlingError:
        return disk_error(error, self.path, self.nbytes)


def disk_error(error: OSError, path: Path, nbytes: int) -> StarlingError:
    """What it means that `path`, of `nbytes`, cannot be written.

    `ResourceError`: no room; `StorageUnavailable`: a limit of the process; else `DiskFailed`.
    """
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return ResourceError(
            f"{path}: {reason} ({nbytes:,} bytes needed); free space there, lower fleet.cache_mb or move "
            f"STARLING_HOME; what has arrived is kept"
        )
    if error.errno in _LIMITS:
        return StorageUnavailable(f"{path}: {reason}; what has arrived is kept")
    return DiskFailed(f"{path}: {reason}; check the disk")
