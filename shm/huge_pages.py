"""Files on tmpfs in pages of 2 MiB, which the processor finds with fewer reads of its page tables than 512 of 4 KB.

Linux 6.1 and later put a range of such a file into a huge page when a process asks for it (`MADV_COLLAPSE`), whatever
/sys/kernel/mm/transparent_hugepage/enabled says; `deny` in shmem_enabled forbids it.  A process that maps the file
then has one entry for the 2 MiB, if it had none for a part of them and if its map is aligned (`map_file`).  What the
kernel refuses stays in ordinary pages, and no byte differs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

HUGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # asm-generic/mman-common.h
_PROT_NONE, _MAP_FIXED, _MAP_FAILED = 0, 0x10, ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_up(n: int) -> int:
    """The smallest multiple of HUGE_BYTES that is at least `n`."""
    return -(-n // HUGE_BYTES) * HUGE_BYTES


def map_file(fd: int, nbytes: int) -> memoryview:
    """Map the first `nbytes` of a file, shared and writeable, at an address that is a multiple of HUGE_BYTES.

    The map goes with the last view of it.  Raises `OSError`.
    """
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = size + HUGE_BYTES
    begin = _map(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    at = round_up(begin)
    try:
        _map(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(begin, room)
        raise
    if at > begin:
        _libc.munmap(begin, at - begin)
    _libc.munmap(at + size, begin + room - at - size)
    array = (ctypes.c_ubyte * nbytes).from_address(at)
    weakref.finalize(array, _libc.munmap, at, size).atexit = False  # threads may use it until the process has ended
    return memoryview(array).cast("B")


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(found)


def collapse(fd: int, address: int, begin: int, end: int) -> bool:
    """Put the whole huge pages of bytes `begin` .. `end` - 1 of a file, which are holes, into huge pages.

    address: of a map of the file by `map_file`.  Returns whether the kernel granted all of them, if there are any.
    Raises `OSError` when the file system is full; the caller frees what was taken.
    """
    first, last = round_up(begin), end // HUGE_BYTES * HUGE_BYTES
    if last <= first:
        return True
    for at in range(first, last, HUGE_BYTES):
        os.posix_fallocate(fd, at, mmap.PAGESIZE)  # a huge page without any page of the file is refused
    # One call: each of them waits for all processors once.
    return bool(_libc.madvise(address + first, last - first, MADV_COLLAPSE) == 0)


def is_granted(directory: Path) -> bool:
    """Whether the kernel puts a file in `directory` into a huge page. Tries it with one that is removed."""
    import tempfile  # with random numbers and digests: few processes ask, and all import this module

    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.truncate(2 * HUGE_BYTES)
            data = np.frombuffer(map_file(file.fileno(), 2 * HUGE_BYTES), np.uint8)
            return collapse(file.fileno(), data.ctypes.data, 0, HUGE_BYTES)
    except OSError:
        return False
