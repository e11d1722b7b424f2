"""How much of a file is in the page cache: whether a model would be read from memory or from the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

SAMPLED_BYTES = 64 << 20  # of a larger file, spread over it in windows
WINDOW_BYTES = 4 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def resident_fraction(path: Path) -> float:
    """The fraction of the file's pages that are in memory, estimated for large files; 0.0 if it cannot be found out.

    Touches no page.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        nbytes = os.fstat(fd).st_size
        pages = found = 0
        for offset in _windows(nbytes):
            resident = _resident(fd, offset, min(WINDOW_BYTES, nbytes - offset))
            pages += len(resident)
            found += sum(one & 1 for one in resident)
        return found / pages if pages else 0.0
    except (OSError, ValueError):
        return 0.0
    finally:
        os.close(fd)


def _windows(nbytes: int) -> range:
    """Offsets of the windows that are looked at; multiples of the page size."""
    n_windows = -(-nbytes // WINDOW_BYTES)
    step = max(1, n_windows // (SAMPLED_BYTES // WINDOW_BYTES))
    return range(0, nbytes, step * WINDOW_BYTES)


def _resident(fd: int, offset: int, nbytes: int) -> bytes:
    """One byte for each page, of which bit 0 is set if it is in memory."""
    # A private writable map: ctypes takes the address of writable buffers only. Nothing is written.
    with mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset) as view:
        first = ctypes.c_char.from_buffer(view)
        try:
            vector = (ctypes.c_ubyte * (-(-nbytes // mmap.PAGESIZE)))()
            if _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), vector) != 0:
                raise OSError(ctypes.get_errno(), "mincore")
            return bytes(vector)
        finally:
            del first
