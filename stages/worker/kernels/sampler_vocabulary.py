"""The sampler's scratch, and its passes over the logits of the whole vocabulary.

Scratch of one rank (`sampler_bytes`), n = vocabulary rounded up to SUM_BLOCK, in this order:

    VAL    n f32        the whole vocabulary's values, while nothing is selected
    W      n f32        weights exp(v - v_max), of VAL or of the list
    COUNT  n i32        how often an id was seen; zero whenever no step is using it
    CV     n f32        values of the listed candidates
    ID     n i32        their ids
    K1, K2 n i32 each   keys while sorting
    I2     n i32        ids while sorting
    HIST   2048 i32     digit counts
    SUM    n / 1024 f64 block sums
    BEST   n / 64 f32   block maxima
    PARTS               pivots of all keys, pivots of some, samples, bins of all keys (sampler_select.py); a list that
                        is not made (sampler_cut.py)
    REPEAT tokens + 1 i32  lengths of repetitions, by distance
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import DIGIT, MAX_BLOCK, PARTS_BYTES, SUM_BLOCK
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    LANES,
    absolute,
    bits_of,
    exp,
    f32_to_f64,
    first_lanes,
    get_f32,
    lanes_set,
    load_f32,
    load_f32_part,
    lowest_bit,
    maximum,
    put_f32,
    put_f64,
    put_i32,
    reduce_add_f64,
    reduce_max,
    splat_f32,
    splat_f64,
    splat_i32,
    store_f32,
)

LOWEST = -3.0e38  # stands for -inf where it is multiplied
_F = np.float32
BY_VALUE = (False, _F(0.0), _F(0.0))


@numba.njit(**INNER)
def padded(vocab):
    """`vocab` rounded up to SUM_BLOCK: elements of each array of the scratch."""
    return (vocab + SUM_BLOCK - 1) // SUM_BLOCK * SUM_BLOCK


@numba.njit(**INNER)
def parts_at(scratch, vocab):
    """Address of PARTS."""
    n = padded(vocab)
    return scratch + 32 * n + 4 * (1 << DIGIT) + 8 * (n // SUM_BLOCK) + 4 * (n // MAX_BLOCK)


@numba.njit(**INNER)
def repeat_at(scratch, vocab):
    """Address of REPEAT."""
    return parts_at(scratch, vocab) + PARTS_BYTES


@numba.njit(**INNER)
def largest(x, n):
    """Maximum of n f32."""
    low = _F(-np.inf)
    a, b = splat_f32(low), splat_f32(low)
    whole = n // 32 * 32
    for i in range(0, 4 * whole, 128):
        a = maximum(load_f32(x + i), a)
        b = maximum(load_f32(x + i + 64), b)
    for i in range(whole, n, LANES):
        a = maximum(load_f32_part(x + 4 * i, min(n - i, LANES), low), a)
    return reduce_max(maximum(a, b))


@numba.njit(**INNER)
def is_finite(x, n):
    """Whether none of n f32 is infinite or NaN."""
    magnitude, largest = splat_i32(0x7FFFFFFF), splat_i32(0x7F7FFFFF)
    bad = first_lanes(0)
    whole = n // LANES * LANES
    for i in range(0, 4 * whole, 64):
        bad = bad | ((bits_of(load_f32(x + i)) & magnitude) > largest)
    if whole < n:
        v = load_f32_part(x + 4 * whole, n - whole, _F(0.0))
        bad = bad | ((bits_of(v) & magnitude) > largest)
    return lanes_set(bad) == 0


@numba.njit(**INNER)
def first_largest(x, n):
    """The lowest index of the maximum of n f32."""
    top = splat_f32(largest(x, n))
    for i in range(0, n, LANES):
        found = lanes_set(load_f32_part(x + 4 * i, min(n - i, LANES), _F(-np.inf)) == top)
        found &= (1 << min(n - i, LANES)) - 1
        if found:
            return i + lowest_bit(found)
    return 0


@numba.njit(**INNER)
def _count_bits(bits):
    """Set bits of a number below 2^16."""
    bits -= (bits >> 1) & 0x5555
    bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
    bits = (bits + (bits >> 4)) & 0x0F0F
    return (bits + (bits >> 8)) & 0x1F


@numba.njit(**INNER)
def rank_of(x, n, index):
    """1 + the number of n f32 that come before the one at `index`: larger ones, and equal ones before it."""
    pivot = splat_f32(get_f32(x + 4 * index))
    before = 0
    for i in range(0, n, LANES):
        part = load_f32_part(x + 4 * i, min(n - i, LANES), _F(-np.inf))
        before += _count_bits(lanes_set(part > pivot))
        if i <= index:
            equal = lanes_set(part == pivot)
            before += _count_bits(equal & ((1 << min(index - i, LANES)) - 1))
    return before + 1


@numba.njit(**INNER)
def weigh_vocabulary(x, w, sums, n, top):
    """w = exp(x - top) over n f32, f64 sums of blocks at `sums`; returns the sequential sum of these."""
    m = splat_f32(top)
    low = _F(-np.inf)
    total = 0.0
    for start in range(0, n, SUM_BLOCK):
        lanes = splat_f64(0.0)
        stop = min(start + SUM_BLOCK, n)
        for i in range(start, stop, LANES):
            e = exp(load_f32_part(x + 4 * i, min(stop - i, LANES), low) - m)
            store_f32(w + 4 * i, e)
            lanes = lanes + f32_to_f64(e)
        block = reduce_add_f64(lanes)
        put_f64(sums + start // SUM_BLOCK * 8, block)
        total += block
    return total


@numba.njit(**INNER)
def key_at(address, key):
    """The key of the value at `address`: the value, or how typical it is.

    key: whether it is the latter, the largest value, the mean of the differences to it.
    """
    v, (is_typical, top, mean) = get_f32(address), key
    return -abs(max(v - top, _F(LOWEST)) - mean) if is_typical else v


@numba.njit(**INNER)
def keys_at(address, key):
    """The same of LANES values."""
    v, (is_typical, top, mean) = load_f32(address), key
    if is_typical:
        return -absolute(maximum(v - splat_f32(top), splat_f32(_F(LOWEST))) - splat_f32(mean))
    return v


@numba.njit(**INNER)
def gather_between(x, key, n, low, high, limit, keys, ids):
    """Keys and ids of those of n candidates whose key is `low` to `high`, by ascending id; returns how many.

    Ends when there are `limit` or more, with at most LANES - 1 more.
    """
    lowest, highest = splat_f32(low), splat_f32(high)
    count = 0
    for i in range(0, n, LANES):
        v = keys_at(x + 4 * i, key)
        found = lanes_set((v >= lowest) & (v <= highest)) & ((1 << min(n - i, LANES)) - 1)
        while found:
            identity = i + lowest_bit(found)
            put_f32(keys + 4 * count, key_at(x + 4 * identity, key))
            put_i32(ids + 4 * count, identity)
            count += 1
            found &= found - 1
        if count >= limit:
            break
    return count


@numba.njit(**INNER)
def gather_above(x, n, threshold, values, ids):
    """The same of all values that are `threshold` or more."""
    return gather_between(x, BY_VALUE, n, threshold, _F(np.inf), n, values, ids)


@numba.njit(**INNER)
def nth_equal(x, key, n, value, number):
    """The index of the `number`-th, from 1, of n candidates whose key equals `value`; there are so many."""
    wanted = splat_f32(value)
    for i in range(0, n, LANES):
        found = lanes_set(keys_at(x + 4 * i, key) == wanted) & ((1 << min(n - i, LANES)) - 1)
        count = _count_bits(found)
        if count >= number:
            for _ in range(number - 1):
                found &= found - 1
            return i + lowest_bit(found)
        number -= count
    return n - 1


@numba.njit(**INNER)
def last_equal(x, n, value):
    """The highest index of those of n f32 that equal `value`; there is one."""
    wanted = splat_f32(value)
    for i in range((n - 1) // LANES * LANES, -1, -LANES):
        found = lanes_set(load_f32_part(x + 4 * i, min(n - i, LANES), _F(np.inf)) == wanted)
        while found & (found - 1):
            found &= found - 1
        if found:
            return i + lowest_bit(found)
    return 0
