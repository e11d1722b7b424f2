"""What a rank calls from Python: rank 0 leads steps, the others follow until there is a word for them.

Rank 0 plans a step, stores a new even number at STEP and computes; a rank that sees the number change
computes too.  Steps that stand ready follow each other without a word of Python between them.  An odd
number sends the others back to Python, where a message is waiting.  One jitted function for both roles,
because the whole forward pass is compiled into it.
"""

from __future__ import annotations

from numba import njit

from shm import step_ring
from shm.atomics import exchange, futex_wait, futex_wake, load_acquire, monotonic_ns, pause, send_nothing
from stages.worker import activations_arena as act
from stages.worker.kernels import forward
from stages.worker.kernels import parameter_block as c
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.parameter_block import word
from stages.worker.kernels.plan import make_plan
from stages.worker.kernels.simd import JIT, put_i64

SPIN_NS = 60_000
SLICE_NS = 900_000_000  # a futex waits for less than a second; an announcement wakes it, rank 0's death ends it
LOST = -1  # the group was given up
_STEP, _SLEEPS, _ABORT = 8 * act.STEP, 8 * act.SLEEPS, 8 * (act.BARRIER + 8)
_BEGUN, _FINISHED, _SLOTS = 8, 16, step_ring.SLOTS
_HEAD, _DONE, _WAKE_AT = 8 * step_ring.HEAD, 8 * step_ring.DONE, 8 * step_ring.WAKE_AT


@njit(**JIT)
def announce(control, turn, ranks):
    """Rank 0: tell the others. `control`: address of the activations arena's first word."""
    exchange(control + _STEP, turn)
    for rank in range(1, ranks):
        if load_acquire(control + 8 * (act.LINES + 8 * rank) + _SLEEPS) != 0:
            futex_wake(control + _STEP)
            return


@njit(**INNER)
def _await_turn(control, seen, rank, limit_ns):
    """Until STEP differs from `seen`, at most `limit_ns`: spin, then sleep. What stands there."""
    line = control + 8 * (act.LINES + 8 * rank)
    begun = monotonic_ns()
    while True:
        for _ in range(256):
            turn = load_acquire(control + _STEP)
            if turn != seen:
                return turn
            pause()
        waited = monotonic_ns() - begun
        if waited > limit_ns or load_acquire(control + _ABORT) != 0:
            return seen
        if waited > SPIN_NS:
            exchange(line + _SLEEPS, 1)
            if load_acquire(control + _STEP) == seen:
                futex_wait(control + _STEP, seen, min(SLICE_NS, limit_ns))
            exchange(line + _SLEEPS, 0)


@njit(**JIT)
def take_turns(ctx, control, turn, step, timing, limit_ns, ring, bell):
    """Rank 0: run step `step` as turn `turn` (even, larger than the last); its begin and end go to the
    slot's row at `timing` (4 i64 a slot).  With `ring`, the address of the steps arena's first word, the
    step is acknowledged, and those that stand ready behind it are run as the turns after it (two more each),
    until entries are refused, `limit_ns` have passed, or the scheduler is to be woken and that cannot be done by a
    datagram to `bell`, a connected socket (-1: there is none).  Returns how many entries of the last step were
    refused, or LOST; whether the last step is one to wake the scheduler for is the caller's to see.

    Others: run every turn after `turn`, until one is odd or `limit_ns` have passed without any.  Returns
    the last turn seen, or LOST.
    """
    if word(ctx, c.RANK) == 0:
        begun = monotonic_ns()
        now = begun
        while True:
            at = timing + 32 * (step % _SLOTS)
            put_i64(at + _BEGUN, now)
            refused = make_plan(ctx, step)
            announce(control, turn, word(ctx, c.RANKS))
            if not forward.run_step(ctx):
                return LOST
            now = monotonic_ns()
            put_i64(at + _FINISHED, now)
            if ring == 0:
                return max(refused, 0)
            exchange(ring + _DONE, step)  # a full fence: what the scheduler stores from now on counts for later steps
            if refused > 0 or now - begun > limit_ns or load_acquire(ring + _HEAD) <= step:
                return max(refused, 0)
            if 0 < load_acquire(ring + _WAKE_AT) <= step:
                if bell < 0 or send_nothing(bell) < 0:
                    return 0
                now = monotonic_ns()
            step += 1
            turn += 2
    while True:
        seen = turn
        turn = _await_turn(control, seen, word(ctx, c.RANK), limit_ns)
        if turn == seen or turn & 1:
            return LOST if load_acquire(control + _ABORT) else turn
        if not forward.run_step(ctx):
            return LOST


ENTRY_ARGUMENTS = 8
