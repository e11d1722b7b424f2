"""Reads a mapped file from its disk before the map is used: an access to a page that a disk refuses is a SIGBUS."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

_MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14
_READ_BYTES = 1 << 20  # by one call


def read_mapped(fd: int, mapped: mmap.mmap) -> None:
    """Read all pages of the file `fd`, which is mapped from its beginning on, and map those that are in memory.

    Raises `OSError` with the disk's reason, and where the file has become shorter than its map.
    """
    with contextlib.suppress(OSError):  # an older kernel, or a page that is refused: the reads below give the reason
        mapped.madvise(_MADV_POPULATE_READ)
        return
    at, buffer = 0, bytearray(_READ_BYTES)
    while at < len(mapped):
        n_read = os.preadv(fd, [buffer], at)
        if not n_read:
            raise OSError(errno.EIO, f"it ends after {at} of {len(mapped)} bytes")
        at += n_read
