"""How rank 0 waits for the next step before it goes to sleep."""

from __future__ import annotations

from numba import njit

from shm import step_ring
from shm.atomics import load_acquire, monotonic_ns, pause
from stages.worker.kernels.simd import JIT

_HEAD = 8 * step_ring.HEAD


@njit(**JIT)
def await_head(control, step, limit_ns):
    """Whether step `step` is published within `limit_ns`. `control`: address of the steps arena's first word."""
    begun = monotonic_ns()
    while True:
        for _ in range(64):
            if load_acquire(control + _HEAD) >= step:
                return True
            pause()
        if monotonic_ns() - begun > limit_ns:
            return False
