"""A barrier between the ranks of a group, in shared memory. A group of which a rank has died is killed as a whole.

    word of the barrier   field   writer
    0                     epoch   rank 0: n after all ranks have arrived n times

    word of a rank's line   field      writer: the rank that owns the line
    0                       arrivals   barriers that this rank has reached since the words were zero
    1                       sleeping   non-zero: the rank sleeps in a futex, on a word that it waits for

Words are 8 bytes, a line is 8 words (a cache line).  Rank 0 collects the arrivals and then stores `epoch`, which
releases the others: one cache line in each direction per rank, 0.3 us on one socket.  A waiting rank spins for
`SPIN_NS`, then sleeps in slices of `SLICE_NS`.  `stages/worker/activations_arena.py` says where the words are.

With many ranks, those whose cores share a cache may form a cluster (`wait_in_clusters`).  Its first rank, the leader,
collects the arrivals of its own cluster alone, then arrives for all of them, and passes the release on: between two
clusters one cache line moves in each direction, not one for every rank.

    word of a rank's cluster line   field     writer
    0                               release   a leader: n after all ranks have arrived n times

Behind the `MAX_RANKS` cluster lines is a table with two words for each rank.  Rank 0 writes it before any rank waits,
and no rank writes these lines later, so that each core keeps a copy of them:

    word of a rank in the table     field
    0                               leader    the first rank of its cluster
    1                               end       the rank behind the last of its cluster
"""

from __future__ import annotations

import numba

from shm.atomics import (
    exchange,
    futex_wait,
    futex_wake,
    load_acquire,
    monotonic_ns,
    pause,
    prefetch_line,
    store_release,
)
from shm.step_ring import MAX_RANKS

SPIN_NS = 50_000
SLICE_NS = 20_000_000
EPOCH = 0  # word offsets from the barrier's address
_ARRIVALS, _SLEEPING = 0, 8  # byte offsets in a rank's line
_LINE_BYTES = 64
_LEADERS = _LINE_BYTES * MAX_RANKS  # byte offset of the table from the first cluster line
_ENDS = _LEADERS + 8
_TABLE_BYTES = 16  # of each rank
_CALM_SPINS = 2000  # before the first look at the clock: most waits end here


@numba.njit(nogil=True)
def _wait_until_at_least(address, value, own_line, prefetch, prefetch_end):
    """Wait until the i64 at `address` is at least `value`."""
    for _ in range(_CALM_SPINS):
        if load_acquire(address) >= value:
            return
        if prefetch < prefetch_end:
            prefetch_line(prefetch)
            prefetch += _LINE_BYTES
        else:
            pause()
    begun = monotonic_ns()
    while True:
        for _ in range(64):
            if load_acquire(address) >= value:
                return
            pause()
        if monotonic_ns() - begun < SPIN_NS:
            continue
        # The waker stores the word and then reads `sleeping`; this rank stores `sleeping` and then reads the word.
        # Both are full fences, so at least one of them sees the other's store.
        exchange(own_line + _SLEEPING, 1)
        seen = load_acquire(address)
        if seen < value:
            futex_wait(address, seen, SLICE_NS)
        exchange(own_line + _SLEEPING, 0)


@numba.njit(nogil=True)
def _store_and_wake(address, value, first_line, n_lines):
    """Store `value`, then wake the ranks of the given lines that sleep."""
    exchange(address, value)
    for i in range(n_lines):
        if load_acquire(first_line + _LINE_BYTES * i + _SLEEPING) != 0:
            futex_wake(address)
            return


@numba.njit(nogil=True)
def wait(barrier, lines, rank, n_ranks, prefetch=0, prefetch_end=0):
    """Wait for all ranks: stores before a rank's `wait` are visible after every rank's.

    barrier: address of word 0; lines: address of rank 0's line.  All ranks call it equally often.
    While it waits, the rank prefetches the bytes prefetch .. prefetch_end-1, which it reads next.
    """
    if n_ranks == 1:
        return
    own = lines + _LINE_BYTES * rank
    count = load_acquire(own) + 1
    if rank == 0:
        for other in range(1, n_ranks):
            _wait_until_at_least(lines + _LINE_BYTES * other, count, own, prefetch, prefetch_end)
        store_release(own, count)
        _store_and_wake(barrier + 8 * EPOCH, count, lines + _LINE_BYTES, n_ranks - 1)
        return
    _store_and_wake(own, count, lines, 1)
    _wait_until_at_least(barrier + 8 * EPOCH, count, own, prefetch, prefetch_end)


@numba.njit(nogil=True)
def wait_in_clusters(barrier, lines, clusters, rank, n_ranks, prefetch=0, prefetch_end=0):
    """`wait` of ranks in clusters, whose lines begin at `clusters`. All ranks call this one, or all call `wait`."""
    own = lines + _LINE_BYTES * rank
    count = load_acquire(own) + 1
    leader = load_acquire(clusters + _LEADERS + _TABLE_BYTES * rank)
    if rank != leader:
        _store_and_wake(own, count, lines + _LINE_BYTES * leader, 1)
        _wait_until_at_least(clusters + _LINE_BYTES * leader, count, own, prefetch, prefetch_end)
        return
    end = load_acquire(clusters + _ENDS + _TABLE_BYTES * rank)
    for other in range(rank + 1, end):
        _wait_until_at_least(lines + _LINE_BYTES * other, count, own, prefetch, prefetch_end)
    if rank != 0:
        _store_and_wake(own, count, lines, 1)
        _wait_until_at_least(barrier + 8 * EPOCH, count, own, prefetch, prefetch_end)
    else:
        other = end
        while other < n_ranks:  # the leaders of the other clusters
            _wait_until_at_least(lines + _LINE_BYTES * other, count, own, prefetch, prefetch_end)
            other = load_acquire(clusters + _ENDS + _TABLE_BYTES * other)
        store_release(own, count)
        exchange(barrier + 8 * EPOCH, count)
    _store_and_wake(clusters + _LINE_BYTES * rank, count, own + _LINE_BYTES, end - rank - 1)
    if rank == 0:  # only now, because to wake a leader is a system call
        other = end
        while other < n_ranks:
            if load_acquire(lines + _LINE_BYTES * other + _SLEEPING) != 0:
                futex_wake(barrier + 8 * EPOCH)
                return
            other = load_acquire(clusters + _ENDS + _TABLE_BYTES * other)
