"""The pages of a mapped checkpoint: whether they are in memory, and mapping them before the first step reads them.

A page that is in memory costs each rank a minor fault at its first access; all at once they cost a third of that.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

SAMPLE_BYTES = 1 << 20  # between two pages that `are_in_memory` asks for
SLICE_BYTES = 4 << 20  # mapped by one call, which keeps other threads from mapping anything: a millisecond in memory
MAX_MAPPED_BYTES = 16 << 30  # by all ranks together, before they read it: page tables of 32 MiB

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


def can_ask(path: Path, owner: int) -> bool:
    """Whether the kernel tells this process which pages of the file at `path` are in memory.

    To others than the owner and who may write the file it says that all are, since Linux 5.2.
    """
    return owner == os.geteuid() or os.access(path, os.W_OK)


def map_weights(weights: np.ndarray, goes_on: Callable[[], bool] = lambda: True) -> None:
    """Map all pages into this process, and read those that are not in memory; no more as soon as not `goes_on()`.

    An error of the disk is left to the step that reads the page.
    """
    for offset in range(0, weights.nbytes, SLICE_BYTES):
        if not goes_on():
            return
        nbytes = min(SLICE_BYTES, weights.nbytes - offset)
        _libc.madvise(ctypes.c_void_p(weights.ctypes.data + offset), ctypes.c_size_t(nbytes), _MADV_POPULATE_READ)


def map_memory(memory: np.ndarray) -> None:
    """Map the pages of some memory of a file into this process, as `map_weights`, at once."""
    begin = memory.ctypes.data & -mmap.PAGESIZE
    nbytes = memory.ctypes.data + memory.nbytes - begin
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), _MADV_POPULATE_READ)
