"""Pages of memory that a forked process will write to, given their copies before it has work.

A fork shares its parent's memory; the first write to a page copies it, which takes 4 to 8 us.  What a process writes to
between its start and its first work is nearly the same in all forks of one parent, and at the same addresses.  So one
that waits for work learns from one that has begun which pages to copy meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array
from typing import NamedTuple

MAX_PAGES = 4096  # that are copied: 16 MiB
MAX_MAP_BYTES = 256 << 20  # of one map whose pages are looked at
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; an older kernel refuses it
_PRESENT, _OF_FILE, _EXCLUSIVE = 1 << 63, 1 << 61, 1 << 56  # of /proc/PID/pagemap

_libc = ctypes.CDLL(None)


class Pages(NamedTuple):
    """Pages of one process and of its forks, by address."""

    heap: int  # begin of the heap: differs in processes that are no forks of one parent
    ranges: list[tuple[int, int]]  # begin and end


NO_PAGES = Pages(0, [])


def written_by(pid: int) -> Pages:
    """The pages of private memory that process `pid` shares with no other; none if that cannot be read."""
    try:
        ranges: list[tuple[int, int]] = []
        maps = _private_maps(pid)
        fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for begin, end, _ in maps:
                ranges += _ranges_in(fd, begin, end)
        finally:
            os.close(fd)
        return Pages(_heap(maps), ranges)
    except (OSError, ValueError):
        return NO_PAGES


def copy_pages(pages: Pages) -> None:
    """Make this process the only one that has these pages, as far as its memory has them: the first `MAX_PAGES`."""
    try:
        if not pages.ranges or _heap(_private_maps(os.getpid())) != pages.heap:
            return
    except OSError:
        return
    left = MAX_PAGES * mmap.PAGESIZE
    for begin, end in pages.ranges:
        nbytes = min(end - begin, left)
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)  # refused: not its memory
        left -= nbytes
        if not left:
            return


def _private_maps(pid: int) -> list[tuple[int, int, str]]:
    """Begin, end and name of each map that is private and writeable."""
    found: list[tuple[int, int, str]] = []
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            place, flags, *rest = line.split()
            if flags.startswith("rw") and flags.endswith("p"):
                begin, _, end = place.partition("-")
                found.append((int(begin, 16), int(end, 16), rest[-1] if len(rest) > 3 else ""))
    return found


def _heap(maps: list[tuple[int, int, str]]) -> int:
    return next((begin for begin, _, name in maps if name == "[heap]"), 0)


def _ranges_in(pagemap: int, begin: int, end: int) -> list[tuple[int, int]]:
    """The ranges of a map that are in memory, of no file, and of this process alone."""
    if end - begin > MAX_MAP_BYTES:
        return []
    entries = array("Q")
    first, n = begin // mmap.PAGESIZE, (end - begin) // mmap.PAGESIZE
    entries.frombytes(os.pread(pagemap, entries.itemsize * n, entries.itemsize * first))
    ranges: list[tuple[int, int]] = []
    at = begin
    for entry in entries:
        if entry & (_PRESENT | _OF_FILE | _EXCLUSIVE) == _PRESENT | _EXCLUSIVE:
            if ranges and ranges[-1][1] == at:
                ranges[-1] = ranges[-1][0], at + mmap.PAGESIZE
            else:
                ranges.append((at, at + mmap.PAGESIZE))
        at += mmap.PAGESIZE
    return ranges
