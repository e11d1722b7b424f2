"""The barrier orders stores between ranks, with clusters of them and without, on as few cores as there are."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import traceback
from collections.abc import Iterator

import numba
import numpy as np
import pytest

from shm import barrier, words
from shm.atomics import atomic_add, cycles, exchange, futex_wake, load_acquire, monotonic_ns, store_release
from stages.worker.activations_arena import BARRIER, CLUSTERS, CONTROL_WORDS, LINES, has_clusters, reset_barrier

pytestmark = pytest.mark.slow

VALUES = CONTROL_WORDS  # words: 8 for each rank
GATES = VALUES + 8 * 64  # likewise: non-zero lets the rank go on
N_WORDS = GATES + 8 * 64
SLEEPING = 1  # word of a rank's line
EMULATED = [(), (1, 1), (2,), (1, 2), (3, 2), (2, 1, 1, 1), (4, 4), (1, 7), (8,), (4, 4, 4, 4), (1,) * 12, (16, 16)]


@numba.njit(nogil=True)
def wait(base: int, rank: int, ranks: int, in_clusters: bool) -> None:
    if in_clusters:
        barrier.wait_in_clusters(base + 8 * BARRIER, base + 8 * LINES, base + 8 * CLUSTERS, rank, ranks)
    else:
        barrier.wait(base + 8 * BARRIER, base + 8 * LINES, rank, ranks)


@numba.njit(nogil=True)
def walk(base: int, rank: int, ranks: int, rounds: int, in_clusters: bool) -> int:
    """Each round, every rank stores the round's number, waits, and checks the numbers of all ranks.

    Returns 0, or the first round in which a rank left before another one had come.
    """
    values = base + 8 * VALUES
    for i in range(1, rounds + 1):
        store_release(values + 64 * rank, i)
        wait(base, rank, ranks, in_clusters)
        for other in range(ranks):
            if load_acquire(values + 64 * other) != i:
                return i
        wait(base, rank, ranks, in_clusters)
    return 0


@numba.njit(nogil=True)
def step(base: int, rank: int, ranks: int, in_clusters: bool) -> None:
    wait(base, rank, ranks, in_clusters)
    store_release(base + 8 * VALUES + 64 * rank, load_acquire(base + 8 * VALUES + 64 * rank) + 1)


@pytest.fixture
def shared() -> np.ndarray:
    """Words that children of a fork share: (N_WORDS,) i64."""
    found = np.frombuffer(mmap.mmap(-1, 8 * N_WORDS), np.int64)
    reset_barrier(found, 1, (1,))
    at = found.ctypes.data
    # Compiled before a fork.
    for in_clusters in (False, True):
        walk(at, 0, 1, 1, in_clusters)
        step(at, 0, 1, in_clusters)
    found[:] = 0
    return found


@pytest.mark.parametrize("clusters", EMULATED)
def test_stores_before_the_barrier_are_visible_after_it(shared: np.ndarray, clusters: tuple[int, ...]) -> None:
    ranks = sum(clusters) or 5
    base, found = shared.ctypes.data, [1] * ranks
    reset_barrier(shared, ranks, clusters)
    assert has_clusters(shared) == bool(clusters)

    def run(rank: int) -> None:
        found[rank] = walk(base, rank, ranks, 3000 if ranks == 2 else 100, bool(clusters))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_barrier_without_clusters(shared: np.ndarray, ranks: int) -> None:
    test_stores_before_the_barrier_are_visible_after_it(shared, ())


class Group:
    """Processes that pass barriers, each up to a gate: rank r waits at it while its word at GATES is 0."""

    def __init__(self, shared: np.ndarray, clusters: tuple[int, ...], ranks: int) -> None:
        self.shared, self.ranks = shared, ranks
        self.in_clusters = bool(clusters)
        shared[:] = 0
        reset_barrier(shared, ranks, clusters)
        self.pids = [self._start(rank) for rank in range(ranks)]

    def _start(self, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            base = self.shared.ctypes.data
            while True:
                while not words.load(self.shared, GATES + 8 * rank):
                    os.sched_yield()
                step(base, rank, self.ranks, self.in_clusters)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def open(self, rank: int) -> None:
        words.store(self.shared, GATES + 8 * rank, 1)

    def passed(self) -> list[int]:
        """Of each rank, how many barriers it has passed."""
        return self.shared[VALUES : VALUES + 8 * self.ranks : 8].tolist()

    def wait_asleep(self, rank: int) -> None:
        """Until the rank sleeps at the barrier."""
        while not words.load(self.shared, LINES + 8 * rank + SLEEPING):
            os.sched_yield()

    def wait_passed(self, n: int) -> None:
        """Until every rank has passed n barriers."""
        while min(self.passed()) < n:
            os.sched_yield()

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
            self.pids[rank] = 0

    def close(self) -> None:
        self.kill([rank for rank, pid in enumerate(self.pids) if pid])


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """Groups that the test has begun."""
    begun: list[Group] = []
    yield begun
    for group in begun:
        group.close()


@pytest.mark.parametrize(
    ("clusters", "ranks", "victim"),
    [
        ((), 4, 0),
        ((), 4, 2),
        ((2, 3, 1), 6, 0),
        ((2, 3, 1), 6, 1),
        ((2, 3, 1), 6, 2),
        ((2, 3, 1), 6, 4),
        ((2, 3, 1), 6, 5),
    ],
)
@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_rank_that_is_killed_stops_all_and_a_new_group_goes_on(
    shared: np.ndarray, groups: list[Group], clusters: tuple[int, ...], ranks: int, victim: int, has_arrived: bool
) -> None:
    """A root, a leader, a member; before it comes to the barrier, and while it waits for another one there."""
    group = Group(shared, clusters, ranks)
    groups.append(group)
    late = (victim + 1) % ranks  # if the victim arrives, this one does not
    held = late if has_arrived else victim
    others = [rank for rank in range(ranks) if rank != held]
    for rank in others:
        group.open(rank)
    for rank in others:
        group.wait_asleep(rank)
    assert group.passed() == [0] * ranks
    group.kill([victim])
    for rank in others:
        if rank != victim:
            group.wait_asleep(rank)
    assert group.passed() == [0] * ranks, "no rank has left a barrier that not all have come to"
    group.close()  # as the worker's supervisor does
    successor = Group(shared, clusters, ranks)
    groups.append(successor)
    for rank in range(ranks):
        successor.open(rank)
    successor.wait_passed(50)
    # Between the two looks no rank was a barrier ahead of another one, however long each of them took.
    first, second = successor.passed(), successor.passed()
    assert max(first) <= min(second) + 1
    successor.close()


def test_clusters_that_are_not_all_ranks_are_refused(shared: np.ndarray) -> None:
    for clusters in ((2, 2), (3, 3), (5, 0)):
        with pytest.raises(
            ValueError, match=r"clusters have \[\d, \d\] ranks, expected 5 in all and at least 1 in each"
        ):
            reset_barrier(shared, 5, clusters)
    reset_barrier(shared, 5, (4, 1))
    reset_barrier(shared, 5)
    assert not has_clusters(shared)


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
