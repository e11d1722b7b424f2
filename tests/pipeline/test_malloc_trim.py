"""Free memory returns to the system within a minute, and not at every check."""

from __future__ import annotations

import ctypes

from hypothesis import given
from hypothesis import strategies as st

from pipeline.procfs import anonymous_bytes
from pipeline.runtime.malloc_trim import CHECK_S, RETRIM_S, SLACK_BYTES, MallocTrimmer, trim

MB = 1 << 20


def test_free_memory_in_the_middle_of_the_heap_is_returned() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    size, count = 64 << 10, 1600
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    full = anonymous_bytes()
    for block in blocks[:-1]:  # the last one holds the end of the heap
        libc.free(block)
    now = [0.0]
    trimmer = MallocTrimmer(lambda: now[0], used=iter([0, full, 0]).__next__, trim=trim)
    now[0] = CHECK_S
    trimmer.tick()
    assert anonymous_bytes() < full - 80 * MB
    libc.free(blocks[-1])


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30)), max_size=60))
def test_free_memory_is_returned_within_a_minute(bursts: list[tuple[int, int]]) -> None:
    """For any sequence of bursts, only the slack stays for much longer than a minute."""
    now, needed, free = 0.0, 50 * MB, 0

    def give_back() -> None:
        nonlocal free
        free = 0

    trimmer = MallocTrimmer(lambda: now, lambda: needed + free, give_back)
    base = needed
    for more, looks in bursts:
        free += max(0, needed - base)  # the burst before is over
        needed = base + more * MB
        free = max(0, free - more * MB)
        for _ in range(looks):
            now += CHECK_S
            trimmer.tick()
        if looks * CHECK_S > RETRIM_S + CHECK_S:
            assert needed + free <= max(needed, base + SLACK_BYTES)


def test_an_idle_process_rarely_trims() -> None:
    now, trims = 0.0, 0

    def count() -> None:
        nonlocal trims
        trims += 1

    used = [50 * MB]
    trimmer = MallocTrimmer(lambda: now, lambda: used[0], count)
    used[0] = 200 * MB
    for _ in range(60):
        now += CHECK_S
        trimmer.tick()
    assert trims == 60 * CHECK_S / RETRIM_S
