"""Puts the heap of a process that has started into huge pages, so that what runs seldom finds its memory sooner.

A request that comes alone runs code and reads objects whose pages the processor has dropped from its tables since the
last one, because other processes ran.  With pages of 2 MiB few entries are dropped.  Linux 6.1 or later does it, where
transparent huge pages are not switched off.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # asm-generic/mman-common.h
# An anonymous area of /proc/PID/smaps that can be written, with its size and what of it is in memory, KiB.
_AREA = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 +(?:\[heap\])?\n"
    r"Size: +([0-9]+) kB\n(?:(?!Rss)[^\n]+\n)*Rss: +([0-9]+) kB$",
    re.MULTILINE,
)

_libc = ctypes.CDLL(None, use_errno=True)


def collapse_heap() -> int:
    """Put the heap into huge pages; how many bytes are. What the kernel refuses stays as it was."""
    done = 0
    for begin, end in _areas():
        first = -(-begin // HUGE_BYTES) * HUGE_BYTES
        for at in range(first, end - HUGE_BYTES + 1, HUGE_BYTES):
            if _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE_BYTES), _MADV_COLLAPSE) == 0:
                done += HUGE_BYTES
    return done


def _areas() -> Iterator[tuple[int, int]]:
    """Of which most is in memory: stacks of threads, of which little is, would take 2 MiB each."""
    try:
        text = Path("/proc/self/smaps").read_text()
    except OSError:
        return
    for begin, end, size, resident in _AREA.findall(text):
        if 2 * int(resident) >= int(size):
            yield int(begin, 16), int(end, 16)
