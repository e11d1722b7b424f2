"""The pages of a mapped checkpoint: whether they are in memory, and mapping them before the first step reads them.

A page that is in memory costs each rank a minor fault at its first access; all at once they cost a third of that.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

SAMPLE_BYTES = 1 << 20  # between two pages that `are_in_memory` asks for

_libc = ctypes.CDLL(None)
_MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14; an older kernel refuses it


def are_in_memory(weights: np.ndarray) -> bool:
    """Whether `weights`, a map of a file or memory, are in memory, as far as one page of each MiB says. Reads nothing.

    Asking for all pages would take as long as mapping them.
    """
    if weights.ctypes.data % mmap.PAGESIZE:
        return True  # not a map of a file
    answer = ctypes.create_string_buffer(1)  # its lowest bit is set for a page in memory
    for offset in range(0, weights.nbytes, SAMPLE_BYTES):
        place = ctypes.c_void_p(weights.ctypes.data + offset), ctypes.c_size_t(1)
        if _libc.mincore(*place, answer) or not answer.raw[0] & 1:
            return False
    return True


def map_weights(weights: np.ndarray) -> None:
    """Map all pages into this process, and read those that are not in memory.

    An error of the disk is left to the step that reads the page.
    """
    _libc.madvise(ctypes.c_void_p(weights.ctypes.data), ctypes.c_size_t(weights.nbytes), _MADV_POPULATE_READ)
