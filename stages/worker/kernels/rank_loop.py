"""The loop of a rank in jitted code: rank 0 leads steps, the others follow its announcements.

Rank 0 plans a step, stores a new even number at STEP and computes; a rank that sees the number change computes too.
Published steps follow each other without a return to Python.  An odd number sends the other ranks back to Python, where
a message waits for them.  Both roles are one jitted function, because the whole forward pass is compiled into it.
"""

from __future__ import annotations

from numba import njit

from shm import step_ring
from shm.atomics import exchange, futex_wait, futex_wake, load_acquire, monotonic_ns, pause, send_nothing
from stages.worker import activations_arena as act
from stages.worker.kernels import forward
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.needed_plan import plan_needed
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.plan import plan_part
from stages.worker.kernels.simd import JIT, put_i64

SPIN_NS = 60_000  # until a rank that waits for an announcement sleeps
SLICE_NS = 900_000_000  # of one futex wait, below the 1 s that the call takes; an announcement ends it at once
_STEP, _SLEEPS = 8 * act.STEP, 8 * act.SLEEPS
_BEGUN, _FINISHED, _SLOTS = 8, 16, step_ring.SLOTS
_HEAD, _DONE, _WAKE_AT = 8 * step_ring.HEAD, 8 * step_ring.DONE, 8 * step_ring.WAKE_AT


@njit(**JIT)
def wait_for_head(control, step, limit_ns):
    """1 if step `step` is published within `limit_ns`, else 0. `control`: address of the steps arena's first word."""
    begun = monotonic_ns()
    while True:
        for _ in range(64):
            if load_acquire(control + _HEAD) >= step:
                return 1
            pause()
        if monotonic_ns() - begun > limit_ns:
            return 0


@njit(**JIT)
def announce(control, number, ranks):
    """Rank 0: store `number` at STEP and wake the ranks. `control`: address of the activations arena's first word."""
    exchange(control + _STEP, number)
    for rank in range(1, ranks):
        if load_acquire(control + 8 * (act.LINES + 8 * rank) + _SLEEPS) != 0:
            futex_wake(control + _STEP)
            return


@njit(**INNER)
def _wait_for_announcement(control, seen, rank, limit_ns):
    """Spin, then sleep, until STEP differs from `seen` or `limit_ns` have passed; returns STEP."""
    line = control + 8 * (act.LINES + 8 * rank)
    begun = monotonic_ns()
    while True:
        for _ in range(256):
            number = load_acquire(control + _STEP)
            if number != seen:
                return number
            pause()
        waited = monotonic_ns() - begun
        if waited > limit_ns:
            return seen
        if waited > SPIN_NS:
            exchange(line + _SLEEPS, 1)
            if load_acquire(control + _STEP) == seen:
                futex_wait(control + _STEP, seen, min(SLICE_NS, limit_ns))
            exchange(line + _SLEEPS, 0)


@njit(**JIT)
def run_steps(params, control, number, step, timing, limit_ns, ring, bell):
    """Rank 0: run step `step`, announced as `number` (even, larger than the last).

    params   address of the rank's parameter block
    control  address of the activations arena's first word
    timing   address of 4 i64 a slot: begin and end of the step are stored at 1 and 2, in ns
    ring     address of the steps arena's first word, or 0.  With it the step is acknowledged, and the published steps
             behind it are run, each announced by the next even number, until entries are refused, `limit_ns` have
             passed, or the scheduler has to be woken and `bell` cannot do it
    bell     a connected datagram socket to wake the scheduler by; -1: none

    Returns how many entries of the last step were refused.  Whether the scheduler has to be woken for the last step is
    left to the caller.

    A step may be computed in parts, whose layers FIRST_LAYER and END_LAYER of the parameter block name: each but the
    last with `ring` 0, the last with `limit_ns` 0, so that no other step follows it.  The parts have the same results
    as the whole.

    Others: run every step announced after `number`; returns the first odd number, or the last number seen when
    `limit_ns` have passed without an announcement.
    """
    if param(params, pb.RANK) == 0:
        begun = monotonic_ns()
        now = begun
        while True:
            at = timing + 32 * (step % _SLOTS)
            put_i64(at + _BEGUN, now)
            refused = plan_part(params, step)
            plan_needed(params)
            announce(control, number, param(params, pb.RANKS))
            forward.run_step(params)
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
            number += 2
    while True:
        seen = number
        number = _wait_for_announcement(control, seen, param(params, pb.RANK), limit_ns)
        if number == seen or number & 1:
            return number
        forward.run_step(params)


HEAD_ARGUMENTS = 3
ENTRY_ARGUMENTS = 8
