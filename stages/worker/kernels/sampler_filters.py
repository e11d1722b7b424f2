"""Filters of the sampler that select candidates by their probability: min_p, top_n_sigma, typical_p and XTC.

Equal the reference implementation (tools/reference/sampling_filters.py).  A filter of the whole vocabulary that selects
by a threshold gives the others the value -inf: nothing need be sorted.  The scratch is drawn in sampler_vocabulary.py.
"""

from __future__ import annotations

from math import sqrt

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import DIGIT, SUM_BLOCK
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_candidates import sort_list, weigh_list, write_weights
from stages.worker.kernels.sampler_scalars import log
from stages.worker.kernels.sampler_vocabulary import gather_above, largest, padded, weigh_vocabulary
from stages.worker.kernels.simd import (
    LANES,
    absolute,
    f32_to_f64,
    get_f32,
    get_i32,
    load_f32,
    load_f32_part,
    maximum,
    put_f32,
    put_i32,
    reduce_add_f64,
    select,
    splat_f32,
    splat_f64,
    store_f32,
)

_F = np.float32
_LOWEST = np.float32(-3.0e38)  # stands for -inf where it is multiplied
_FIRST_BOUND, _LAST_BOUND = 0.5, 200.0  # of scores; a candidate beyond the last one has a weight of 0


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


# ------------------------------------------------------------------ typical_p


@numba.njit(**INNER)
def _weighted_distances(x, w, vocab, top):
    """Block sum of w * (x - top) over the vocabulary."""
    m, low = splat_f32(top), splat_f32(_LOWEST)
    total = 0.0
    for start in range(0, vocab, SUM_BLOCK):
        lanes = splat_f64(0.0)
        for i in range(start, min(start + SUM_BLOCK, vocab), LANES):
            v = load_f32_part(x + 4 * i, min(vocab - i, LANES), _F(-np.inf))
            lanes = lanes + f32_to_f64(load_f32(w + 4 * i)) * f32_to_f64(maximum(v - m, low))
        total += reduce_add_f64(lanes)
    return total


@numba.njit(**INNER)
def _write_scores(x, scores, vocab, top, mean):
    """Minus the distance between `mean` and x - top; the highest score is the most typical candidate's."""
    m, low, middle = splat_f32(top), splat_f32(_LOWEST), splat_f32(mean)
    for i in range(0, vocab, LANES):
        store_f32(scores + 4 * i, -absolute(maximum(load_f32(x + 4 * i) - m, low) - middle))


@numba.njit(**INNER)
def _keep_typical(scratch, vocab, n, top, enough):
    """Of a list with scores as values: sort, put the values back, keep the first until their weights exceed `enough`.

    Returns their number, n + 1 if all together do not.
    """
    size = 4 * padded(vocab)
    w, values, ids = scratch + size, scratch + 3 * size, scratch + 4 * size
    sort_list(scratch, vocab, n, False)
    for i in range(n):
        put_f32(values + 4 * i, get_f32(scratch + 4 * get_i32(ids + 4 * i)))
    write_weights(scratch, vocab, n, top)
    total = 0.0
    for i in range(n):
        total += np.float64(get_f32(w + 4 * i))
        if total > enough:
            return i + 1
    return n + 1


@numba.njit(**INNER)
def typical_p(scratch, vocab, n, whole, p):
    """The list becomes the most typical candidates, with share `p` of the weight; -1: all values are -inf."""
    size = 4 * padded(vocab)
    w, values, ids, scores = scratch + size, scratch + 3 * size, scratch + 4 * size, scratch + 5 * size
    top = largest(scratch, vocab) if whole else get_f32(values)
    if top == _F(-np.inf):
        return -1
    if not whole:
        total = weigh_list(scratch, vocab, n)
        distances = 0.0
        for i in range(n):
            value = get_f32(values + 4 * i)
            put_f32(scratch + 4 * get_i32(ids + 4 * i), value)
            distances += np.float64(get_f32(w + 4 * i)) * np.float64(max(value - top, _LOWEST))
        mean = _F(distances / total)
        for i in range(n):
            distance = max(get_f32(values + 4 * i) - top, _LOWEST) - mean
            put_f32(values + 4 * i, distance if distance < _F(0.0) else -distance)
        n = min(n, _keep_typical(scratch, vocab, n, top, np.float64(p) * total))
        sort_list(scratch, vocab, n, False)
        return n
    sums = scratch + 8 * size + 4 * (1 << DIGIT)
    total = weigh_vocabulary(scratch, w, sums, vocab, top)
    mean = _F(_weighted_distances(scratch, w, vocab, top) / total)
    enough = np.float64(p) * total
    bound = _F(_FIRST_BOUND)
    while True:
        _write_scores(scratch, scores, vocab, top, mean)
        last = bound > _F(_LAST_BOUND)
        n = gather_above(scores, vocab, _F(-np.inf) if last else -bound, values, ids)
        about = 0.0
        if not last:
            for i in range(n):
                about += np.float64(get_f32(w + 4 * get_i32(ids + 4 * i)))
        if last or about >= enough * 0.999999:
            kept = _keep_typical(scratch, vocab, n, top, enough)
            if last or kept <= n:
                n = min(n, kept)
                sort_list(scratch, vocab, n, False)
                return n
            weigh_vocabulary(scratch, w, sums, vocab, top)
        bound = bound * _F(2.0)


# ------------------------------------------------------------------ XTC


@numba.njit(**INNER)
def xtc(scratch, vocab, n, whole, threshold):
    """Of the candidates with a probability of `threshold` or more, drop all but the last. Returns their number."""
    size = 4 * padded(vocab)
    w, values, ids = scratch + size, scratch + 3 * size, scratch + 4 * size
    if whole:
        top = largest(scratch, vocab)
        if top == _F(-np.inf):
            return n
        total = weigh_vocabulary(scratch, w, scratch + 8 * size + 4 * (1 << DIGIT), vocab, top)
        values = scratch
    else:
        total = weigh_list(scratch, vocab, n)
    enough = np.float64(threshold) * total
    last, found, lowest = -1, 0, _F(np.inf)
    for i in range(n):
        weight = get_f32(w + 4 * i)
        if weight > _F(0.0) and np.float64(weight) >= enough:
            found += 1
            if get_f32(values + 4 * i) <= lowest:
                last, lowest = i, get_f32(values + 4 * i)
    if found < 2:
        return n
    kept = 0
    for i in range(n):
        weight = get_f32(w + 4 * i)
        is_dropped = i != last and weight > _F(0.0) and np.float64(weight) >= enough
        if whole:
            if is_dropped:
                put_f32(values + 4 * i, _F(-np.inf))
        elif not is_dropped:
            put_f32(values + 4 * kept, get_f32(values + 4 * i))
            put_i32(ids + 4 * kept, get_i32(ids + 4 * i))
            kept += 1
    return n if whole else kept
