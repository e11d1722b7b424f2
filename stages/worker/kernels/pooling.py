"""Pooling: the final hidden states of an entry's positions, summed up as fixed-point numbers (docs/numerics.md).

Sums of integers do not depend on their order: a prompt has the same sum in one step and in many, and a step that is
repeated writes the same numbers.  Each rank pools whole entries.  In a model that scores pairs, score_head.py makes a
score of each pooled position first.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shm import step_ring
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels import plan as p
from stages.worker.kernels.entries import INNER, run_entry
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.projections import norm_row
from stages.worker.kernels.simd import get_f32, get_i64, put_i32, put_i64

NOT_FINITE = -1
_MAX_POOLED, _MAX_HIDDEN = step_ring.MAX_POOLED, np.float32(step_ring.MAX_HIDDEN)
_SCALE = float(1 << step_ring.POOL_SCALE)
_TO_EVEN = 6755399441055744.0  # 1.5 * 2^52: adding it to an f64 below 2^51 rounds to a whole number, half to even


@njit(**INNER)
def _add_fixed(x, sums, n):
    """Add n f32 values to i64 sums; False if one of them is not finite or beyond MAX_HIDDEN."""
    is_good = True
    for i in range(n):
        value = get_f32(x + 4 * i)
        if not abs(value) <= _MAX_HIDDEN:
            is_good = False
            continue
        whole = (np.float64(value) * _SCALE + _TO_EVEN) - _TO_EVEN
        put_i64(sums + 8 * i, get_i64(sums + 8 * i) + np.int64(whole))
    return is_good


@njit(**INNER)
def _pool_entry(params, entry, slot):
    """Norm the pooled positions of one entry and sum them up; writes the entry's outcome."""
    width = param(params, pb.WIDTH)
    place = slot * _MAX_POOLED + param(entry, p.P_SAMPLE_BASE)
    sums = param(params, pb.POOLED) + 8 * width * place
    for i in range(width):
        put_i64(sums + 8 * i, 0)
    first, count = param(entry, p.P_TOKEN) + param(entry, p.P_POOL_FIRST), param(entry, p.P_POOL_COUNT)
    state = count
    for t in range(first, first + count):
        y = param(params, pb.Y) + 4 * t * width  # unused between the last layer and the next step
        norm_row(
            params,
            param(params, pb.X) + 4 * t * width,
            param(params, pb.FINAL_NORM),
            param(params, pb.FINAL_NORM_BIAS),
            y,
        )
        if param(params, pb.SCORE_HEAD):
            run_entry(param(params, pb.SCORE_HEAD), (params, y))
        if not _add_fixed(y, sums, width):
            state = NOT_FINITE
    put_i32(param(params, pb.POOL_STATES) + 4 * place, state)


@njit(**INNER)
def pool_entries(params):
    """Pool this rank's entries of the step, after the last layer."""
    plan = param(params, pb.PLAN)
    rank, ranks = param(params, pb.RANK), param(params, pb.RANKS)
    pooled = 0
    for i in range(param(plan, p.ENTRIES_KEPT)):
        entry = p.entry_at(params, i)
        if param(entry, p.P_POOL_COUNT) != 0:
            if pooled % ranks == rank:
                _pool_entry(params, entry, param(plan, p.SLOT))
            pooled += 1
