"""The heap of a process goes into huge pages, with what is in it; reserved memory does not."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from pipeline.runtime.huge_heap import HUGE_BYTES, collapse_heap

PAGE_BYTES = mmap.PAGESIZE
SMAPS = Path("/proc/self/smaps")
_MADV_NOHUGEPAGE, _MADV_HUGEPAGE, _MADV_COLLAPSE = 15, 14, 25


def _map(n_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _huge_bytes(mapping: mmap.mmap) -> int:
    """Of a mapping in huge pages."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    found = re.search(rf"^{begin:x}-.*?^AnonHugePages: +([0-9]+) kB$", SMAPS.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return int(found[1]) << 10


def _makes_huge_pages() -> bool:
    """Whether this kernel makes them on request, by a request of the test's own."""
    mapping = _map(4 * HUGE_BYTES)
    mapping[:] = bytes(len(mapping))
    begin = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    at = -(-begin // HUGE_BYTES) * HUGE_BYTES
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE_BYTES), _MADV_COLLAPSE) == 0


def test_what_is_in_memory_goes_into_huge_pages_unchanged() -> None:
    if not _makes_huge_pages():
        pytest.skip("this kernel makes no huge pages on request")
    used = _map(8 * HUGE_BYTES)
    used.madvise(_MADV_NOHUGEPAGE)  # until it is full: some kernels take huge pages at once
    used[:] = bytes(range(256)) * (len(used) // 256)
    used.madvise(_MADV_HUGEPAGE)
    assert _huge_bytes(used) == 0
    assert collapse_heap() >= 7 * HUGE_BYTES  # the mapping need not begin at a multiple
    assert _huge_bytes(used) >= 7 * HUGE_BYTES
    assert used[:] == bytes(range(256)) * (len(used) // 256)


def test_what_is_only_reserved_stays_so() -> None:
    reserved = _map(64 * HUGE_BYTES)
    for at in range(0, len(reserved), 2 * HUGE_BYTES):
        reserved[at] = 1
    resident = _resident()
    collapse_heap()
    assert _resident() - resident < len(reserved) // 4


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
