"""Files in pages of 2 MiB, which the processor finds with fewer reads of its page tables than 512 of 4 KB.

On tmpfs, Linux 6.1 and later put a range of a file into a huge page when a process asks for it (`MADV_COLLAPSE`),
whatever /sys/kernel/mm/transparent_hugepage/enabled says; `deny` in shmem_enabled forbids it.  On disks, a file system
with large folios reads into huge pages for a map that asks for them (`map_to_read`), and writes into them
(shm/chunked_file.py).  A process that maps the file then has one entry for the 2 MiB, if it had none for a part of them
and if its map is aligned (`map_file`).  What the kernel refuses stays in ordinary pages, and no byte differs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

HUGE_BYTES = 2 << 20
MADV_COLLAPSE, _MADV_HUGEPAGE = 25, 14  # asm-generic/mman-common.h
_PROT_NONE, _MAP_FIXED, _MAP_FAILED = 0, 0x10, ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_up(n: int) -> int:
    """The smallest multiple of HUGE_BYTES that is at least `n`."""
    return -(-n // HUGE_BYTES) * HUGE_BYTES


def map_file(fd: int, nbytes: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> memoryview:
    """Map the first `nbytes` of a file, shared and by default writeable, at a multiple of HUGE_BYTES.

    The map goes with the last view of it.  Raises `OSError`.
    """
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = size + HUGE_BYTES
    begin = _map(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    at = round_up(begin)
    try:
        _map(at, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(begin, room)
        raise
    if at > begin:
        _libc.munmap(begin, at - begin)
    _libc.munmap(at + size, begin + room - at - size)
    array = (ctypes.c_ubyte * nbytes).from_address(at)
    weakref.finalize(array, _libc.munmap, at, size).atexit = False  # threads may use it until the process has ended
    view = memoryview(array).cast("B")
    return view if protection & mmap.PROT_WRITE else view.toreadonly()


def map_to_read(fd: int, nbytes: int) -> memoryview:
    """Map the first `nbytes` of a file on a disk to be read, with huge pages for what is not in memory yet.

    As `map_file`, read-only.  Raises `OSError`.
    """
    view = map_file(fd, nbytes, mmap.PROT_READ)
    _libc.madvise(np.frombuffer(view, np.uint8).ctypes.data, nbytes, _MADV_HUGEPAGE)
    return view


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


def is_mapped_from(directory: Path) -> bool:
    """Whether a file on the disk of `directory` is mapped in huge pages. Tries it with one that is removed."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(bytes(HUGE_BYTES))
            data = np.frombuffer(map_to_read(file.fileno(), HUGE_BYTES), np.uint8)
            return not data[0] and mapped_in_huge_pages(data) == HUGE_BYTES  # the access maps it
    except OSError:
        return False


def mapped_in_huge_pages(data: np.ndarray) -> int:
    """The bytes of a map of a file that this process has mapped in huge pages, of which `data` is the beginning."""
    begin, is_there = f"{data.ctypes.data:x}-", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(begin):
            is_there = True
        elif is_there and line.startswith(("FilePmdMapped:", "ShmemPmdMapped:")):
            if nbytes := 1024 * int(line.split()[1]):
                return nbytes
        elif line.startswith("VmFlags:"):
            is_there = False
    return 0
