"""A barrier between the ranks of a group, in shared words; no rank can be blocked for ever by a dead one.

Each rank owns a line of words (`steps.RANK_LINES`) and writes only there:

    line + 0   arrivals   how many barriers this rank has reached, since the group came together
    line + 1   sleeping   non-zero: it waits in a futex on `epoch` (rank 0's line)

Rank 0 collects: when all ranks have arrived n times, it stores `epoch = n` (a word of its own,
`steps.BARRIER`), and the others leave.  One cache line goes each way per rank: 0.3 us on one socket.
A rank that waits spins for `SPIN_NS`, then sleeps in slices of `SLICE_NS`, and looks at the
`abort` word (BARRIER + 1): the leader stores there when a rank has died, and everybody leaves with False.
`reset` is for the leader alone, before the other ranks exist.
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

SPIN_NS = 50_000
SLICE_NS = 20_000_000
EPOCH = 0  # word offsets from the barrier's address
ABORT = 8


@numba.njit(nogil=True)
def reset(barrier, lines, n_ranks):
    """Nobody waits, nobody has arrived."""
    for rank in range(n_ranks):
        store_release(lines + 64 * rank, 0)
        store_release(lines + 64 * rank + 8, 0)
    store_release(barrier + 8 * EPOCH, 0)
    store_release(barrier + 8 * ABORT, 0)


@numba.njit(nogil=True)
def _await_word(address, value, barrier, own_line, ask, ask_end):
    """Until the i64 at `address` is at least `value`; False when the group is given up."""
    for _ in range(2000):
        if load_acquire(address) >= value:
            return True
        if ask < ask_end:
            prefetch_line(ask)
            ask += 64
        else:
            pause()
    begun = monotonic_ns()
    while True:
        for _ in range(64):
            if load_acquire(address) >= value:
                return True
            pause()
        if load_acquire(barrier + 8 * ABORT) != 0:
            return False
        if monotonic_ns() - begun < SPIN_NS:
            continue
        # A waker looks at `sleeping` after its store, we look at the word after ours: one sees the other.
        exchange(own_line + 8, 1)
        seen = load_acquire(address)
        if seen < value:
            futex_wait(address, seen, SLICE_NS)
        exchange(own_line + 8, 0)


@numba.njit(nogil=True)
def _store_and_wake(address, value, first_line, n_lines):
    """Store, then wake those of the given lines' ranks that sleep."""
    exchange(address, value)
    for i in range(n_lines):
        if load_acquire(first_line + 64 * i + 8) != 0:
            futex_wake(address)
            return


@numba.njit(nogil=True)
def meet(barrier, lines, rank, n_ranks, ask=0, ask_end=0):
    """All ranks' stores before their `meet` are visible to all after it. False: the group is given up.

    barrier  address of the epoch word, lines  address of rank 0's line; all ranks call it equally often.
    Bytes ask .. ask_end-1 are what this rank reads next: it asks for their cache lines while it waits.
    """
    if n_ranks == 1:
        return True
    own = lines + 64 * rank
    count = load_acquire(own) + 1
    if rank == 0:
        for other in range(1, n_ranks):
            if not _await_word(lines + 64 * other, count, barrier, own, ask, ask_end):
                return False
        store_release(own, count)
        _store_and_wake(barrier + 8 * EPOCH, count, lines + 64, n_ranks - 1)
        return True
    _store_and_wake(own, count, lines, 1)
    return _await_word(barrier + 8 * EPOCH, count, barrier, own, ask, ask_end)


@numba.njit(nogil=True)
def give_up(barrier, lines, n_ranks):
    """Everybody leaves the barrier with False, now and from now on. For the leader."""
    exchange(barrier + 8 * ABORT, 1)
    futex_wake(barrier + 8 * EPOCH)
    for rank in range(n_ranks):
        futex_wake(lines + 64 * rank)
