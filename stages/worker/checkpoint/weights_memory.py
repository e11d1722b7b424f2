"""Weights in memory of their own instead of a map of the file: `performance.use_mmap: false`.

    file --O_DIRECT, several pieces at once--> one private mapping of huge pages, then read-only --fork--> all ranks

The mapping is made before the other ranks are forked, so all ranks of a group share its pages, and the kernel frees
them with the last rank, however it ends: nothing is left to adopt or to remove.  The page cache holds no second copy,
and no page of the weights can be dropped and read again under memory pressure, as pages of a mapped file can.

Where the machine has no huge pages, ordinary ones are used; where the file system has no O_DIRECT, reads go through the
page cache.  Both are logged and change no byte.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline import procfs
from pipeline.errors import ResourceError
from shm.arena import align
from shm.checkpoint import PIECE_BYTES, CheckpointError, Index

log = logging.getLogger("starling.checkpoint")

Progress = Callable[[str, int, int], None]  # phase, done, total (bytes)
PHASE = "read weights"
HUGE_BYTES = 2 << 20  # of a huge page
READS = 4  # at once, whatever the number of cores: a disk needs several to be fast
THP_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_libc = ctypes.CDLL(None, use_errno=True)
_MAP_HUGETLB = 0x40000
_MADV_HUGEPAGE = 14


class Memory(NamedTuple):
    """An anonymous mapping, aligned to huge pages."""

    data: np.ndarray  # uint8, writeable
    pages: str  # "reserved huge pages", "transparent huge pages" or "ordinary pages"


def read_weights(fd: int, index: Index, progress: Progress) -> np.ndarray:
    """Read the opened `.bin` into memory; read-only uint8.

    Raises `ResourceError` when the machine has too little memory, `CheckpointError` when the file cannot be read.
    """
    available = procfs.available_memory()
    if index.bin_bytes > available:
        raise ResourceError(
            f"the weights of {index.name} need {index.bin_bytes:,} bytes of memory, and the machine has {available:,} "
            f"available: free some, use a smaller model, or set performance.use_mmap: true",
            param="performance.use_mmap",
        )
    begun = time.monotonic()
    memory = allocate(index.bin_bytes)
    is_direct = _read_all(fd, memory.data, index, progress)
    protect(memory.data)
    facts = {
        "bytes": index.bin_bytes,
        "pages": memory.pages,
        "direct": is_direct,
        "seconds": round(time.monotonic() - begun, 3),
    }
    log.info("weights read into memory", extra=facts)
    return memory.data


def allocate(nbytes: int) -> Memory:
    """An empty mapping of at least `nbytes`, of the largest pages that the machine has."""
    size = align(nbytes, HUGE_BYTES)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with contextlib.suppress(OSError):  # none are reserved, or too few: the usual case
        reserved = mmap.mmap(-1, size, flags | _MAP_HUGETLB, mmap.PROT_READ | mmap.PROT_WRITE)
        return Memory(np.frombuffer(reserved, np.uint8, nbytes), "reserved huge pages")
    map_ = mmap.mmap(-1, size + HUGE_BYTES, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    whole = np.frombuffer(map_, np.uint8)
    offset = -whole.ctypes.data % HUGE_BYTES
    address, length = ctypes.c_void_p(whole.ctypes.data + offset), ctypes.c_size_t(size)
    is_huge = _libc.madvise(address, length, _MADV_HUGEPAGE) == 0 and _has_transparent_pages()
    if not is_huge:
        log.warning("weights are in ordinary pages: transparent huge pages are off", extra={"see": str(THP_FILE)})
    return Memory(whole[offset : offset + nbytes], "transparent huge pages" if is_huge else "ordinary pages")


def _has_transparent_pages() -> bool:
    try:
        return "[never]" not in THP_FILE.read_text()
    except OSError:
        return False


def _read_all(fd: int, data: np.ndarray, index: Index, progress: Progress) -> bool:
    """Fill `data` from the file; whether by O_DIRECT. Raises `CheckpointError`."""
    target, is_direct = data.data, True
    try:
        # Through the descriptor, so that it is the opened file whatever its path names by now.
        source = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        log.warning("weights are read through the page cache", extra={"digest": index.digest, "reason": error.strerror})
        source, is_direct = os.dup(fd), False

    def read(begin: int) -> int:
        end = at = min(begin + PIECE_BYTES, len(target))
        at = begin
        while at < end:
            done = os.preadv(source, [target[at:end]], at)
            if not done:
                raise OSError(errno.EIO, "the file has ended")
            at += done
        return end - begin

    done = 0
    progress(PHASE, 0, len(target))
    try:
        with ThreadPoolExecutor(READS, "read") as pool:
            futures = {pool.submit(read, at): at for at in range(0, len(target), PIECE_BYTES)}
            try:
                for future in as_completed(futures):
                    done += future.result()
                    progress(PHASE, done, len(target))
            except OSError as error:
                pool.shutdown(cancel_futures=True)
                piece = futures[future] // PIECE_BYTES
                names = ", ".join(t.name for t in index.tensors_in(piece)) or "padding"
                raise CheckpointError(
                    f"the weights of {index.name} ({index.digest}.bin): piece {piece} (of {names}) cannot be read: "
                    f"{error.strerror}; check the disk"
                ) from None
        if not is_direct:
            os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(source)
    return is_direct


def protect(data: np.ndarray) -> None:
    """A write to the weights is a fault from now on, in every rank."""
    data.flags.writeable = False
    begin = data.ctypes.data & -mmap.PAGESIZE
    length = align(data.ctypes.data + data.nbytes - begin, HUGE_BYTES)
    _libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.PROT_READ)
