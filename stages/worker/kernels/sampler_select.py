"""The candidate of the whole vocabulary at which a running sum of weights reaches a target, without a sort.

Weights are added in the order of keys: the values (VAL), or how typical these are.  The weights of all candidates are
summed by parts of the vocabulary, ranges of keys.  The candidates of the part in which the sum reaches the target are
gathered and divided again, and the last few hundred are sorted.  A few samples decide how all candidates are divided:

- by bins of one width between the highest and lowest samples, if no bin has many samples.  One pass fills all bins.
- else by pivots, quantiles of the samples, as in sample sort.  A pass sums the weights above a pivot, and a binary
  search finds the two pivots between which the target lies.  A value that is several quantiles gets a pivot on either
  side of it, so that candidates of one value are a part of their own.  The passes depend on the order of the values
  alone: outliers, levels and scales do not matter.  Some candidates are always divided by pivots.

The sums are those of the definition (docs/numerics.md) where no f64 sum is rounded: then any order gives the same bits.
Callers make sure of that (sampler_sums.py).  The scratch is drawn in sampler_vocabulary.py; the keys and W are read,
PARTS keeps the parts of all candidates with their sums, and I2, K1, ID hold keys, weights and ids of the candidates of
a part.
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import BINS, BINS_AT, NUMBERS_AT, PIVOT_BYTES, PIVOTS, SAMPLES
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_candidates import sort_list
from stages.worker.kernels.sampler_vocabulary import BY_VALUE, key_at, keys_at, nth_equal, padded, parts_at
from stages.worker.kernels.simd import (
    LANES,
    f32_to_f64,
    first_lanes,
    get_f32,
    get_f64,
    get_i32,
    lanes_set,
    load_f32,
    load_i32,
    lowest_bit,
    maximum,
    minimum,
    put_f32,
    put_f64,
    put_i32,
    reduce_add_f64,
    select,
    splat_f32,
    splat_f64,
    store_f32,
    store_i32,
    to_f32,
    to_i32,
)

MOST_SPLITS = 16  # then what is left is sorted; 3 or 4 leave a few hundred of 150,000
_LIST = 512  # candidates, at most, that are sorted instead of split; SAMPLES or more
_SMALLEST_RANGE = 1e-30  # of bins: their number divided by it must be finite
_SOME, _ALL = 1, 2  # of the candidates are in bins; the others, perhaps most, are in the last one
_STALE = -1  # PARTS is of other keys or weights
_UNKNOWN = -1.0  # a sum that no pass has computed
_F = np.float32
_CROWDED = 40  # samples of one bin, at most: many additions in turn to one sum are slow
_SUMS, _SAMPLES_AT = 4 * (PIVOTS + 1), 2 * PIVOT_BYTES
_HIGH, _SCALE, _HAS_BINS, _VALUE = (NUMBERS_AT + 64 + 4 * i for i in range(4))


@numba.njit(**INNER)
def _put_next(to, at):
    """Store at `to` the smallest f32 above the one at `at`, which is below inf."""
    bits = get_i32(at)
    if get_f32(at) == _F(0.0):
        bits = np.int64(0)  # of -0, too
    put_i32(to, bits + 1 if bits >= 0 else bits - 1)


@numba.njit(**INNER)
def _sample(x, key, n, samples):
    """SAMPLES of the keys of n candidates, descending."""
    for i in range(SAMPLES):
        start = i * n // SAMPLES
        width = (i + 1) * n // SAMPLES - start
        # Places are scattered, so that no period of the vocabulary is met.
        value = key_at(x + 4 * (start + (i * 40503 & 0xFFFF) * width // 0x10000), key)
        j = i
        while j > 0 and get_f32(samples + 4 * j - 4) < value:
            put_f32(samples + 4 * j, get_f32(samples + 4 * j - 4))
            j -= 1
        put_f32(samples + 4 * j, value)


@numba.njit(**INNER)
def _choose_pivots(pivots, samples):
    """Pivots, descending, with about as many candidates between any two."""
    for number in range(PIVOTS):
        put_f32(pivots + 4 * number, get_f32(samples + 4 * ((number + 1) * SAMPLES // (PIVOTS + 1))))
        put_f64(pivots + _SUMS + 8 * number, _UNKNOWN)
    for number in range(PIVOTS - 1):
        at = pivots + 4 * number
        if get_f32(at) == get_f32(at + 4):
            _put_next(at, at)


@numba.njit(**INNER)
def _bin(value, high, scale):
    return np.int64(min(max((high - value) * scale, _F(0.0)), _F(BINS - 1)))


@numba.njit(**INNER)
def _choose_bins(parts, threshold):
    """Whether bins of the values from `threshold` on are of use; then what defines them is written down."""
    samples, n = parts + _SAMPLES_AT, SAMPLES
    put_i32(parts + _HAS_BINS, 0)
    while n > 8 and not get_f32(samples + 4 * n - 4) >= threshold:
        n -= 1
    high, low = get_f32(samples + 8), get_f32(samples + 4 * (n - 3))  # outliers are in the outer bins
    if n < SAMPLES:  # the wanted value may be the threshold, below the samples, and must not be in the last bin
        low = min(max(threshold, low - (high - low) * _F(0.125)), low)
    if not _F(_SMALLEST_RANGE) < high - low < _F(np.inf):
        return False
    scale = _F(BINS - 2) / (high - low)
    for i in range(_CROWDED, n):
        later, earlier = get_f32(samples + 4 * i), get_f32(samples + 4 * (i - _CROWDED))
        if _bin(later, high, scale) == _bin(earlier, high, scale):
            return False
    put_f32(parts + _HIGH, high)
    put_f32(parts + _SCALE, scale)
    put_i32(parts + _HAS_BINS, _ALL if n == SAMPLES else _SOME)
    return True


@numba.njit(**INNER)
def _fill_bins(scratch, key, vocab, parts):
    """Sum the weights of all candidates by bins."""
    w, bins, numbers = scratch + 4 * padded(vocab), parts + BINS_AT, parts + NUMBERS_AT
    for i in range(BINS + LANES):
        put_f64(bins + 8 * i, 0.0)
    for lane in range(LANES):  # most candidates may be in the last bin
        put_i32(numbers + 4 * lane, BINS - 1 + lane)
    high, scale = splat_f32(get_f32(parts + _HIGH)), splat_f32(get_f32(parts + _SCALE))
    zero, most = splat_f32(_F(0.0)), to_f32(load_i32(numbers))
    for i in range(0, vocab, LANES):
        number = minimum(maximum((high - keys_at(scratch + 4 * i, key)) * scale, zero), most)
        store_i32(numbers, to_i32(number))
        for lane in range(LANES):
            at = bins + 8 * get_i32(numbers + 4 * lane)
            put_f64(at, get_f64(at) + np.float64(get_f32(w + 4 * (i + lane))))


@numba.njit(**INNER)
def _end_of_bin(parts, number):
    """The lowest value of bin `number`, by bisection of the f32 in their order."""
    high, scale, at = get_f32(parts + _HIGH), get_f32(parts + _SCALE), parts + _VALUE
    outside, inside = -0x7F800001, 0x7F800000  # as signed integers, magnitudes and signs of f32; below -inf, and inf
    while inside - outside > 1:
        middle = (inside + outside) >> 1
        put_i32(at, middle if middle >= 0 else -middle | 0x80000000)
        if _bin(get_f32(at), high, scale) <= number:
            inside = middle
        else:
            outside = middle
    put_i32(at, inside if inside >= 0 else -inside | 0x80000000)
    return get_f32(at)


@numba.njit(**INNER)
def weight_from(x, key, w, n, value):
    """The sum of the weights of those of n candidates whose key is `value` or more."""
    bound, zero, sums = splat_f32(value), splat_f32(_F(0.0)), splat_f64(0.0)
    for i in range(0, 4 * n, 4 * LANES):
        sums = sums + f32_to_f64(select(keys_at(x + i, key) >= bound, load_f32(w + i), zero))
    return reduce_add_f64(sums)


@numba.njit(**INNER)
def _sum_above(x, key, w, n, pivots, number):
    """Weights of the candidates whose key is a pivot's or more."""
    at = pivots + _SUMS + 8 * number
    if get_f64(at) == _UNKNOWN:
        put_f64(at, weight_from(x, key, w, n, get_f32(pivots + 4 * number)))
    return get_f64(at)


@numba.njit(**INNER)
def _take(scratch, vocab, x, key, w, ids, n, low, high):
    """I2, K1, ID become those of n candidates (0 as `ids`: all) that are `low` or more and below `high`; their number.

    They may be those that are read.  16 lanes behind them are -inf and 0.
    """
    size = 4 * padded(vocab)
    to_x, to_w, to_ids = scratch + 7 * size, scratch + 5 * size, scratch + 4 * size
    lowest, highest = splat_f32(low), splat_f32(high)
    count = 0
    for i in range(0, n, LANES):
        v = keys_at(x + 4 * i, key)
        found = lanes_set((v >= lowest) & (v < highest)) & ((1 << min(n - i, LANES)) - 1)
        while found:
            at = i + lowest_bit(found)
            put_f32(to_x + 4 * count, key_at(x + 4 * at, key))
            put_f32(to_w + 4 * count, get_f32(w + 4 * at))
            put_i32(to_ids + 4 * count, get_i32(ids + 4 * at) if ids else at)
            count += 1
            found &= found - 1
    store_f32(to_x + 4 * count, splat_f32(_F(-np.inf)))
    store_f32(to_w + 4 * count, splat_f32(_F(0.0)))
    return count


@numba.njit(**INNER)
def walk(scratch, vocab, n, total, target):
    """Add the weights (W, by id) of the list's n candidates to `total` until it reaches `target`.

    Returns how many it took, n + 1 if all together do not, and the sum.
    """
    size = 4 * padded(vocab)
    w, ids = scratch + size, scratch + 4 * size
    for i in range(n):
        total += np.float64(get_f32(w + 4 * get_i32(ids + 4 * i)))
        if total >= target:
            return i + 1, total
    return n + 1, total


@numba.njit(**INNER)
def _has_other_weight(x, key, w, n, value, weight):
    """Whether any of those of n candidates whose key is `value` has another weight. No lane behind n has that key."""
    wanted, usual, others = splat_f32(value), splat_f32(weight), first_lanes(0)
    for i in range(0, 4 * n, 4 * LANES):
        others = others | ((keys_at(x + i, key) == wanted) & ~(load_f32(w + i) == usual))
    return lanes_set(others) != 0


@numba.njit(**INNER)
def _find_equal(x, key, w, ids, n, value, total, target, is_typical):
    """`find` among those of n candidates that have one key, behind others whose weights are `total`.

    is_typical: whether keys are distances to the mean: two values, on either side of it, may have one. Then -1.
    """
    first = get_f32(w + 4 * nth_equal(x, key, n, value, np.int64(1)))
    if first == _F(0.0) or (is_typical and _has_other_weight(x, key, w, n, value, first)):
        return -1, total
    weight = np.float64(first)
    count = np.int64(min((target - total) / weight, np.float64(n))) - 1
    count = count if count > 1 else np.int64(1)
    while count < n and total + count * weight < target:
        count += 1
    at = nth_equal(x, key, n, value, count)
    return (get_i32(ids + 4 * at) if ids else at), total + count * weight


@numba.njit(**INNER)
def _is_one_value(parts, x, key, n, low, high):
    """Whether the candidates in a range have one key; only looked for where the samples in it, two or more, have."""
    samples, value, times = parts + _SAMPLES_AT, _F(0.0), 0
    for i in range(SAMPLES):
        sample = get_f32(samples + 4 * i)
        if low <= sample < high:
            if times and sample != value:
                return False, value
            value = sample
            times += 1
    if times < 2:
        return False, value
    lowest, highest, wanted, others = splat_f32(low), splat_f32(high), splat_f32(value), first_lanes(0)
    for i in range(0, 4 * n, 4 * LANES):
        v = keys_at(x + i, key)
        others = others | ((v >= lowest) & (v < highest) & ~(v == wanted))
    return lanes_set(others) == 0, value


@numba.njit(**INNER)
def _part_of_bins(parts, total, target):
    """Whether few candidates are in the bin in which the sum, behind `total`, reaches the target; its range; the sum
    before it.
    """
    bins, number, before = parts + BINS_AT, 0, total
    while number < BINS - 1 and before + get_f64(bins + 8 * number) < target:
        before += get_f64(bins + 8 * number)
        number += 1
    if number == BINS - 1 and get_i32(parts + _HAS_BINS) == _SOME:
        return False, _F(0.0), _F(0.0), total
    return True, _end_of_bin(parts, number), (_end_of_bin(parts, number - 1) if number else _F(np.inf)), before


@numba.njit(**INNER)
def _part_of_pivots(x, key, w, n, pivots, total, target):
    """The range between pivots in which the sum reaches the target, or would, and the sum before it."""
    first, last = 0, PIVOTS  # the first pivot whose sum reaches the target is one of these
    while first < last:
        middle = (first + last) // 2
        bound = get_f32(pivots + 4 * middle)
        if total + _sum_above(x, key, w, n, pivots, middle) >= target:
            last = middle
        else:
            first = middle + 1
            while first < last and get_f32(pivots + 4 * first) == bound:
                put_f64(pivots + _SUMS + 8 * first, get_f64(pivots + _SUMS + 8 * first - 8))
                first += 1
    low, high = _F(-np.inf), _F(np.inf)
    if last < PIVOTS:
        low = get_f32(pivots + 4 * last)
    if last > 0:
        high = get_f32(pivots + 4 * last - 4)
        total += _sum_above(x, key, w, n, pivots, last - 1)
    return low, high, total


@numba.njit(**INNER)
def forget_parts(scratch, vocab):
    """Before a `find` with other keys or weights than the last one had."""
    put_i32(parts_at(scratch, vocab) + _HAS_BINS, _STALE)


@numba.njit(**INNER)
def find(scratch, key, vocab, target, threshold):
    """The first candidate by (key descending, id ascending) whose running sum of weights reaches `target`.

    key: what the keys of VAL are (`key_at`). None is inf, and vocab is above _LIST. threshold: its key is hardly below.
    Keys and weights are those of the last call, or PARTS has been forgotten. Returns its id and the sum. The id is -1
    if none does, or if only a sort shows which does (`_find_equal`).
    """
    size, parts = 4 * padded(vocab), parts_at(scratch, vocab)
    samples, pivots = parts + _SAMPLES_AT, parts
    x, w, ids, n, total = scratch, scratch + size, np.int64(0), vocab, 0.0
    has_parts, is_typical = get_i32(parts + _HAS_BINS) != _STALE, key[0]
    for split in range(MOST_SPLITS):
        if n <= _LIST:
            break
        if split or not has_parts:
            _sample(x, key, n, samples)
            _choose_pivots(pivots, samples)
            if split == 0 and _choose_bins(parts, threshold):
                _fill_bins(scratch, key, vocab, parts)
        has_range = False
        low = high = _F(0.0)
        if split == 0 and get_i32(parts + _HAS_BINS):
            has_range, low, high, total = _part_of_bins(parts, total, target)
            is_one, value = _is_one_value(parts, x, key, n, low, high)
            if has_range and is_one:
                return _find_equal(x, key, w, ids, n, value, total, target, is_typical)
        if not has_range:
            low, high, total = _part_of_pivots(x, key, w, n, pivots, total, target)
            put_f32(parts + _VALUE, low)
            _put_next(parts + _VALUE, parts + _VALUE)
            if get_f32(parts + _VALUE) == high:
                return _find_equal(x, key, w, ids, n, low, total, target, is_typical)
        n = _take(scratch, vocab, x, key, w, ids, n, low, high)
        key = BY_VALUE  # what was taken are keys
        x, w, ids = scratch + 7 * size, scratch + 5 * size, scratch + 4 * size
        pivots, samples = parts + PIVOT_BYTES, parts + _SAMPLES_AT + 4 * SAMPLES
    for i in range(0, 4 * n, 4 * LANES):
        store_f32(scratch + 3 * size + i, load_f32(scratch + 7 * size + i))
    sort_list(scratch, vocab, n, True)
    reached, total = walk(scratch, vocab, n, total, target)
    return (get_i32(scratch + 4 * size + 4 * (reached - 1)) if reached <= n else -1), total
