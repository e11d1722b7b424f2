"""Filters of the sampler that select candidates by their probability: min_p, top_n_sigma and XTC.

Equal the reference implementation (tools/reference/sampling_filters.py).  A filter of the whole vocabulary that selects
by a threshold gives the others the value -inf: nothing need be sorted.  The scratch is drawn in sampler_vocabulary.py.
"""

from __future__ import annotations

from math import sqrt

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import DIGIT, SUM_BLOCK
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_candidates import weigh_list
from stages.worker.kernels.sampler_scalars import log
from stages.worker.kernels.sampler_vocabulary import largest, last_equal, padded, weigh_vocabulary
from stages.worker.kernels.simd import (
    LANES,
    f32_to_f64,
    get_f32,
    get_i32,
    load_f32,
    load_f32_part,
    minimum,
    put_f32,
    put_i32,
    reduce_add_f64,
    reduce_max,
    select,
    splat_f32,
    splat_f64,
    store_f32,
)

_F = np.float32


# ------------------------------------------------------------------ thresholds


@numba.njit(**INNER)
def _keep_above(scratch, vocab, n, whole, threshold):
    """Keep the candidates that are `threshold` or more. Returns their number, `n` for the whole vocabulary."""
    if not whole:
        values = scratch + 12 * padded(vocab)
        kept = 1
        while kept < n and get_f32(values + 4 * kept) >= threshold:
            kept += 1
        return kept
    low, bound = splat_f32(_F(-np.inf)), splat_f32(threshold)
    for i in range(0, vocab, LANES):
        v = load_f32(scratch + 4 * i)
        store_f32(scratch + 4 * i, select(v >= bound, v, low))
    return n


@numba.njit(**INNER)
def least_value(top, p):
    """The least value whose probability is `p` times that of the value `top`, or more."""
    return _F(np.float64(top) - log(1.0 / np.float64(p)))


@numba.njit(**INNER)
def min_p(scratch, vocab, n, whole, p):
    """Keep the candidates with a probability of `p` times the highest one or more."""
    top = largest(scratch, vocab) if whole else get_f32(scratch + 12 * padded(vocab))
    return _keep_above(scratch, vocab, n, whole, least_value(top, p))


@numba.njit(**INNER)
def _deviation_of_vocabulary(x, vocab):
    """Standard deviation of the values above -inf; there is one."""
    low, zero, one = splat_f32(_F(-np.inf)), splat_f32(_F(0.0)), splat_f32(_F(1.0))
    count = total = squares = 0.0
    for start in range(0, vocab, SUM_BLOCK):
        lanes, ones = splat_f64(0.0), splat_f64(0.0)
        for i in range(start, min(start + SUM_BLOCK, vocab), LANES):
            v = load_f32_part(x + 4 * i, min(vocab - i, LANES), _F(-np.inf))
            lanes = lanes + f32_to_f64(select(v > low, v, zero))
            ones = ones + f32_to_f64(select(v > low, one, zero))
        total += reduce_add_f64(lanes)
        count += reduce_add_f64(ones)
    mean = splat_f64(total / count)
    for start in range(0, vocab, SUM_BLOCK):
        lanes = splat_f64(0.0)
        for i in range(start, min(start + SUM_BLOCK, vocab), LANES):
            v = load_f32_part(x + 4 * i, min(vocab - i, LANES), _F(-np.inf))
            distance = f32_to_f64(select(v > low, v, zero)) - mean
            lanes = lanes + distance * distance * f32_to_f64(select(v > low, one, zero))
        squares += reduce_add_f64(lanes)
    return sqrt(squares / count)


@numba.njit(**INNER)
def _deviation_of_list(values, n):
    """The same of a sorted list."""
    while n > 1 and get_f32(values + 4 * (n - 1)) == _F(-np.inf):
        n -= 1
    total = squares = 0.0
    for i in range(n):
        total += np.float64(get_f32(values + 4 * i))
    mean = total / n
    for i in range(n):
        distance = np.float64(get_f32(values + 4 * i)) - mean
        squares += distance * distance
    return sqrt(squares / n)


@numba.njit(**INNER)
def top_n_sigma(scratch, vocab, n, whole, sigmas):
    """Keep the candidates whose value is at most `sigmas` standard deviations below the highest one."""
    values = scratch if whole else scratch + 12 * padded(vocab)
    top = largest(scratch, vocab) if whole else get_f32(values)
    if top == _F(-np.inf):
        return n
    deviation = _deviation_of_vocabulary(values, vocab) if whole else _deviation_of_list(values, n)
    return _keep_above(scratch, vocab, n, whole, _F(np.float64(top) - np.float64(sigmas) * deviation))


# ------------------------------------------------------------------ XTC


@numba.njit(**INNER)
def drop_likely(x, w, n, enough):
    """Of the n candidates at x that are above -inf and weigh `enough` or more, -inf for all but the last.

    n: the whole vocabulary. The last one is that by (value descending, id ascending).
    """
    low, most, zero, bound = splat_f32(_F(-np.inf)), splat_f32(_F(np.inf)), splat_f32(_F(0.0)), splat_f64(enough)
    lowest = most
    for i in range(0, 4 * n, 4 * LANES):
        v, weight = load_f32(x + i), load_f32(w + i)
        is_likely = (v > low) & (weight > zero) & (f32_to_f64(weight) >= bound)
        lowest = minimum(select(is_likely, v, most), lowest)
    value = -reduce_max(-lowest)
    if value == _F(np.inf):
        return
    last = last_equal(x, n, value)
    for i in range(0, 4 * n, 4 * LANES):
        v, weight = load_f32(x + i), load_f32(w + i)
        is_likely = (v > low) & (weight > zero) & (f32_to_f64(weight) >= bound)
        store_f32(x + i, select(is_likely, low, v))
    put_f32(x + 4 * last, value)


@numba.njit(**INNER)
def xtc(scratch, vocab, n, whole, threshold):
    """Of the candidates with a probability of `threshold` or more, drop all but the last. Returns their number."""
    size = 4 * padded(vocab)
    w, values, ids = scratch + size, scratch + 3 * size, scratch + 4 * size
    if whole:
        top = largest(scratch, vocab)
        if top > _F(-np.inf):
            total = weigh_vocabulary(scratch, w, scratch + 8 * size + 4 * (1 << DIGIT), vocab, top)
            drop_likely(scratch, w, vocab, np.float64(threshold) * total)
        return n
    enough = np.float64(threshold) * weigh_list(scratch, vocab, n)
    found = 0
    for i in range(n):
        weight = get_f32(w + 4 * i)
        if weight > _F(0.0) and np.float64(weight) >= enough:
            found += 1
    kept = 0
    for i in range(n):
        weight = get_f32(w + 4 * i)
        if weight > _F(0.0) and np.float64(weight) >= enough:
            found -= 1
            if found:
                continue
        put_f32(values + 4 * kept, get_f32(values + 4 * i))
        put_i32(ids + 4 * kept, get_i32(ids + 4 * i))
        kept += 1
    return kept
