"""Reads a mapped file from its disk before the map is used: an access to a page that a disk refuses is a SIGBUS."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np

_libc = ctypes.CDLL(None)  # which releases the interpreter lock during a call, unlike `mmap.madvise`
_MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14
_READ_BYTES = 1 << 20  # by one call


def read_mapped(fd: int, mapped: mmap.mmap, nbytes: int) -> None:
    """Read the first `nbytes` of the file `fd`, which is mapped from its beginning on, into memory.

    They are mapped as well where the kernel can do that.  Other threads run meanwhile, however slow the disk is.

    Raises `OSError` with the disk's reason, and where the file has become shorter than that.
    """
    place = ctypes.c_void_p(np.frombuffer(mapped, np.uint8).ctypes.data), ctypes.c_size_t(nbytes)
    if not _libc.madvise(*place, _MADV_POPULATE_READ):
        return
    # An older kernel, or a page that is refused: the reads give the reason.
    at, buffer = 0, memoryview(bytearray(_READ_BYTES))
    while at < nbytes:
        n_read = os.preadv(fd, [buffer[: nbytes - at]], at)
        if not n_read:
            raise OSError(errno.EIO, f"it ends after {at} of {len(mapped)} bytes")
        at += n_read
