"""The barrier orders stores between ranks."""

from __future__ import annotations

import mmap
import threading

import numba
import numpy as np
import pytest

from shm import barrier
from shm.atomics import atomic_add, cycles, exchange, futex_wake, load_acquire, monotonic_ns, store_release

pytestmark = pytest.mark.slow

BARRIER, LINES = 0, 16 * 8  # bytes


@numba.njit(nogil=True)
def walk(base: int, rank: int, ranks: int, rounds: int) -> int:
    """Each round, every rank stores the round's number, waits, and checks the numbers of all ranks."""
    values = base + 4096
    for i in range(1, rounds + 1):
        store_release(values + 64 * rank, i)
        barrier.wait(base + BARRIER, base + LINES, rank, ranks)
        for other in range(ranks):
            if load_acquire(values + 64 * other) != i:
                return i
        barrier.wait(base + BARRIER, base + LINES, rank, ranks)
    return 0


@pytest.fixture
def shared() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, 8192), np.uint64)


def prepare(shared: np.ndarray) -> int:
    base = shared.ctypes.data
    walk(base, 0, 1, 1)  # compiled before the fork; one rank alone touches no word of the barrier
    return base


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_stores_before_the_barrier_are_visible_after_it(shared: np.ndarray, ranks: int) -> None:
    base, found = prepare(shared), [1] * ranks

    def run(rank: int) -> None:
        found[rank] = walk(base, rank, ranks, 300 if ranks > 2 else 3000)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * ranks


def test_atomics_by_address() -> None:
    @numba.njit
    def use(at: int) -> tuple[int, int, int]:
        before = atomic_add(at, 5)
        store_release(at + 8, 7)
        return before, exchange(at, -1), futex_wake(at)

    values = np.array([37, 0], np.int64)
    assert use(values.ctypes.data) == (37, 42, 0)
    assert values.tolist() == [-1, 7]


def test_clocks_are_monotonic() -> None:
    @numba.njit
    def both() -> tuple[int, int, int, int]:
        return monotonic_ns(), cycles(), monotonic_ns(), cycles()

    a, b, c, d = both()
    assert a <= c
    assert b < d
