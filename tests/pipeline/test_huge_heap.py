"""The heap of a process goes into huge pages, with what is in it; reserved memory does not."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest

from pipeline.runtime.huge_heap import HUGE_BYTES, collapse_heap

PAGE_BYTES = mmap.PAGESIZE


def _huge_bytes() -> int:
    """Of the process in huge pages."""
    found = re.search(r"AnonHugePages: +([0-9]+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) << 10


def _map(n_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def test_what_is_in_memory_goes_into_huge_pages_unchanged() -> None:
    used = _map(8 * HUGE_BYTES)
    used[:] = bytes(range(256)) * (len(used) // 256)
    before = _huge_bytes()
    done = collapse_heap()
    if not done:
        pytest.skip("this kernel makes no huge pages on request")
    assert done >= 7 * HUGE_BYTES  # the mapping need not begin at a multiple
    assert _huge_bytes() - before >= 7 * HUGE_BYTES
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
