"""Sums of weights that are those of the definition (docs/numerics.md) although they are added in another order.

The definition adds weights one after the other, in f64.  Any order gives the same bits where no sum is rounded:

- Weights are f32, so multiples of the last place of the smallest one that is added, w, which is above w * 2^-24.  While
  sums stay below w * 2^29, an f64 holds them exactly.
- Elsewhere the weights are rounded first.  Let the sum of all be at least B, a power of two, and less than 2 B.
  Weights of B * 2^-29 or more are multiples of U = B * 2^-52 and add exactly.  If those alone reach B, the smaller
  ones, which follow, are added to sums whose last place is U: each adds itself rounded to a multiple of U.  Only where
  a weight lies in the middle between two multiples does its rounding depend on the sum: by half to even, it is one of
  the two.  Sums of rounded weights are exact, and those of the definition but for at most `slack`, U for each weight in
  the middle, and one more.  A candidate that the sum reaches with either sign of the slack is the definition's.
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import SUM_BLOCK
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    LANES,
    absolute,
    f32_to_f64,
    first_lanes,
    lanes_set,
    load_f32,
    reduce_add_f64,
    reduce_add_i32,
    select,
    select_i32,
    splat_f32,
    splat_f64,
    splat_i32,
    store_f32,
)

MAY_ROUND = 2.0**-28  # times the vocabulary: a share so close to 1, or closer, may need rounded weights
_F = np.float32


@numba.njit(**INNER)
def _has_light(w, n, bound):
    """Whether any of the n f32 at w is above 0 and below `bound`."""
    limit, zero = splat_f32(bound), splat_f32(_F(0.0))
    for start in range(0, n, SUM_BLOCK):
        light = first_lanes(0)
        for i in range(start, min(start + SUM_BLOCK, n), LANES):
            weight = load_f32(w + 4 * i)
            light = light | ((weight < limit) & (weight > zero))
        if lanes_set(light):
            return True
    return False


@numba.njit(**INNER)
def base_of(total):
    """The power of two B with B <= total < 2 B; `total` is at least 1."""
    base = 1.0
    while 2.0 * base <= total:
        base *= 2.0
    return base


@numba.njit(**INNER)
def round_weights(w, n, total):
    """Round the n f32 at w as the sums around `total`, the sum of all, round them.

    Returns the slack, which is 0 only if all stay as they are, or -1: not possible. The largest weight is 1, and what
    is lighter than B * 2^-29 is added behind what is not.
    """
    base = base_of(total)
    unit = base * 2.0**-52
    if not _has_light(w, n, _F(base * 2.0**-29)):
        return 0.0  # all are multiples of U, and no sum reaches 2 B
    small, heavy = splat_f32(_F(base * 2.0**-29)), splat_f32(_F(base * 2.0**-28))
    half, zero = splat_f32(_F(unit * 0.5)), splat_f32(_F(0.0))
    one, none, halves = splat_i32(1), splat_i32(0), splat_i32(0)
    all_sums, heavy_sums = splat_f64(0.0), splat_f64(0.0)
    for i in range(0, 4 * n, 4 * LANES):
        weight = load_f32(w + i)
        # The last place of base * 2^-29 and above is U, so this sum is a multiple of it.
        rounded = select(weight < small, (weight + small) - small, weight)
        halves = halves + select_i32(absolute(weight - rounded) == half, one, none)
        heavy_sums = heavy_sums + f32_to_f64(select(weight >= heavy, weight, zero))
        all_sums = all_sums + f32_to_f64(rounded)
        store_f32(w + i, rounded)
    # A unit more: bounds that are computed with it are rounded, and 0 says that W and `total` are the definition's.
    slack = (reduce_add_i32(halves) + 1) * unit
    is_possible = reduce_add_f64(heavy_sums) >= base and reduce_add_f64(all_sums) + slack < 2.0 * base
    return slack if is_possible else -1.0


@numba.njit(**INNER)
def sum_of(w, n):
    """The sum of n f32, in any order."""
    sums = splat_f64(0.0)
    for i in range(0, 4 * n, 4 * LANES):
        sums = sums + f32_to_f64(load_f32(w + i))
    return reduce_add_f64(sums)
