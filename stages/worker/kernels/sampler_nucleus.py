"""top_p of the whole vocabulary, and the draw from what it keeps, without a sort of what it keeps.

The definition (docs/numerics.md) adds the weights one after the other, in the order of values.  A sum of f64 in which
nothing is rounded is the same in any order.  Weights are f32, so multiples of the last place of the smallest of
them, w, which is above w * 2^-24; while sums stay below w * 2^29, an f64 holds them exactly.  Then the weights are
added by bins of values, ids ascending, and only the bin in which the sum reaches what is wanted is put in order.
Where the condition does not hold, or where few candidates are kept, the candidates above a threshold are sorted.

`top_p` returns the length of the sorted list, or CUT: then the list is not made, its last candidate and its
sum are in the scratch, and W and VAL stay as they are until `draw_of_cut` or `list_of_cut`.  The scratch is drawn in
sampler_vocabulary.py; SHARES:

    bins      SHARE_BINS f64, and 16 more for what belongs to none of them, a lane each
    numbers   16 i32       bins of 16 candidates
    results   4 f64        lowest value that bins were made for, sum and id of the last candidate, whether the
                           bins are those of all values from the lowest one on
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import DIGIT, SHARE_BINS
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_candidates import sort_list
from stages.worker.kernels.sampler_vocabulary import (
    gather_above,
    gather_between,
    largest,
    nth_equal,
    padded,
    shares_at,
    weigh_vocabulary,
)
from stages.worker.kernels.simd import (
    LANES,
    f32_to_f64,
    get_f32,
    get_f64,
    get_i32,
    load_f32,
    load_i32,
    maximum,
    minimum,
    put_f32,
    put_f64,
    put_i32,
    reduce_add_f64,
    reduce_add_i32,
    reduce_max,
    select,
    select_i32,
    splat_f32,
    splat_f64,
    splat_i32,
    store_i32,
    to_f32,
    to_i32,
)

CUT = -1
SORTED = 2048  # candidates, at most, that are sorted without bins before
MOST_SPLITS = 3  # of a bin into bins
_EXACT = 2.0**28  # bound of a sum, in units of its smallest weight
_SMALLEST_RANGE = 1e-30  # of values in bins: their number divided by it must be finite
_LAST_BOUND = 90.0  # a candidate whose value is further below the largest one has a weight of 0
_F = np.float32
_NUMBERS = 8 * (SHARE_BINS + LANES)
_LOW, _SUM, _ID, _IS_FILLED = (_NUMBERS + 64 + 8 * i for i in range(4))


@numba.njit(**INNER)
def _survey(x, w, n, threshold):
    """Of the n f32 at x that are `threshold` or more: count, sum of weights, smallest value, smallest weight."""
    bound, most, zero = splat_f32(threshold), splat_f32(_F(np.inf)), splat_f32(_F(0.0))
    lowest, lightest = most, most
    sums, counts, one, none = splat_f64(0.0), splat_i32(0), splat_i32(1), splat_i32(0)
    for i in range(0, n, LANES):
        v, weight = load_f32(x + 4 * i), load_f32(w + 4 * i)
        found = v >= bound
        sums = sums + f32_to_f64(select(found, weight, zero))
        counts = counts + select_i32(found, one, none)
        lowest = minimum(select(found, v, most), lowest)
        lightest = minimum(select(found, weight, most), lightest)
    return reduce_add_i32(counts), reduce_add_f64(sums), -reduce_max(-lowest), -reduce_max(-lightest)


@numba.njit(**INNER)
def _bin_of(v, low, high, scale, outside):
    """Bins of 16 values: ascending as they descend from `high` to `low`; `outside` for the others."""
    inside = (v >= low) & (v <= high)
    return to_i32(select(inside, (high - v) * scale, outside))


@numba.njit(**INNER)
def _scale(low, high):
    return _F(SHARE_BINS - 1) / (high - low)


@numba.njit(**INNER)
def _outside(shares):
    """The bins of lanes that belong to no bin, as f32."""
    for lane in range(LANES):
        put_i32(shares + _NUMBERS + 4 * lane, SHARE_BINS + lane)
    return to_f32(load_i32(shares + _NUMBERS))


@numba.njit(**INNER)
def _fill(scratch, vocab, low, high):
    """Sum the weights of the values from `low` to `high` by bins."""
    shares, w = shares_at(scratch, vocab), scratch + 4 * padded(vocab)
    for i in range(SHARE_BINS + LANES):
        put_f64(shares + 8 * i, 0.0)
    outside, scale = _outside(shares), splat_f32(_scale(low, high))
    lowest, highest = splat_f32(low), splat_f32(high)
    for i in range(0, vocab, LANES):
        store_i32(shares + _NUMBERS, _bin_of(load_f32(scratch + 4 * i), lowest, highest, scale, outside))
        for lane in range(LANES):
            at = shares + 8 * get_i32(shares + _NUMBERS + 4 * lane)
            put_f64(at, get_f64(at) + np.float64(get_f32(w + 4 * (i + lane))))


@numba.njit(**INNER)
def _range_of_bin(scratch, vocab, low, high, number):
    """Count, smallest and largest value of the candidates in bin `number`; there is one."""
    outside, scale = _outside(shares_at(scratch, vocab)), splat_f32(_scale(low, high))
    lowest, highest, wanted = splat_f32(low), splat_f32(high), splat_i32(number)
    most, least = splat_f32(_F(np.inf)), splat_f32(_F(-np.inf))
    smallest, greatest = most, least
    counts, one, none = splat_i32(0), splat_i32(1), splat_i32(0)
    for i in range(0, vocab, LANES):
        v = load_f32(scratch + 4 * i)
        is_here = _bin_of(v, lowest, highest, scale, outside) == wanted
        smallest = minimum(select(is_here, v, most), smallest)
        greatest = maximum(select(is_here, v, least), greatest)
        counts = counts + select_i32(is_here, one, none)
    return reduce_add_i32(counts), -reduce_max(-smallest), reduce_max(greatest)


@numba.njit(**INNER)
def _reaches(total, target, exceeds):
    return total > target if exceeds else total >= target


@numba.njit(**INNER)
def _walk(scratch, vocab, n, total, target, exceeds):
    """Add the weights (W, by id) of the list's n candidates to `total` until it reaches `target`.

    Returns how many it took, n + 1 if all together do not, and the sum.
    """
    size = 4 * padded(vocab)
    w, ids = scratch + size, scratch + 4 * size
    for i in range(n):
        total += np.float64(get_f32(w + 4 * get_i32(ids + 4 * i)))
        if _reaches(total, target, exceeds):
            return i + 1, total
    return n + 1, total


@numba.njit(**INNER)
def _find_equal(scratch, vocab, n, value, total, target, exceeds):
    """`_find` among n candidates of one value, behind others whose weights are `total`: id and sum."""
    first = nth_equal(scratch, vocab, value, 1)
    weight = np.float64(get_f32(scratch + 4 * padded(vocab) + 4 * first))
    count = np.int64((target - total) / weight) - 1
    count = count if count > 1 else np.int64(1)
    while count <= n and not _reaches(total + count * weight, target, exceeds):
        count += 1
    return (nth_equal(scratch, vocab, value, count) if count <= n else -1), total + count * weight


@numba.njit(**INNER)
def _find(scratch, vocab, n, low, high, is_filled, target, exceeds):
    """The first candidate, of n values from `high` down to `low`, whose running sum reaches (or exceeds) `target`.

    Sums must be exact in any order. is_filled: whether the bins are those from low to high.
    Returns its id, -1 if none does; the sum; whether the bins are those from low to high now.
    """
    size, shares = 4 * padded(vocab), shares_at(scratch, vocab)
    values, ids = scratch + 3 * size, scratch + 4 * size
    total, split = 0.0, 0
    while n > SORTED and high - low > _F(_SMALLEST_RANGE) and split <= MOST_SPLITS:
        if split or not is_filled:
            _fill(scratch, vocab, low, high)
        number = 0
        while number < SHARE_BINS and not _reaches(total + get_f64(shares + 8 * number), target, exceeds):
            total += get_f64(shares + 8 * number)
            number += 1
        if number == SHARE_BINS:
            return -1, total, False
        n, low, high = _range_of_bin(scratch, vocab, low, high, number)
        split += 1
    if low == high:
        identity, total = _find_equal(scratch, vocab, n, low, total, target, exceeds)
        return identity, total, split == 1
    n = gather_between(scratch, vocab, low, high, vocab, values, ids)
    sort_list(scratch, vocab, n, True)
    reached, total = _walk(scratch, vocab, n, total, target, exceeds)
    return (get_i32(ids + 4 * (reached - 1)) if reached <= n else -1), total, split == 1


@numba.njit(**INNER)
def top_p(scratch, vocab, p):
    """Keep the shortest prefix of the sorted vocabulary (VAL) with share p of the weight.

    Returns the length of the list, or CUT.
    """
    size, shares = 4 * padded(vocab), shares_at(scratch, vocab)
    w, values, ids = scratch + size, scratch + 3 * size, scratch + 4 * size
    top = largest(scratch, vocab)
    if top == _F(-np.inf):
        put_f32(values, top)
        put_i32(ids, 0)
        return 1
    enough = np.float64(p) * weigh_vocabulary(scratch, w, scratch + 8 * size + 4 * (1 << DIGIT), vocab, top)
    below = _F(2.0)
    while True:
        last = below > _F(_LAST_BOUND)
        threshold = _F(-np.inf) if last else top - below
        n = gather_between(scratch, vocab, threshold, top, SORTED + 1, values, ids)
        lowest = lightest = _F(0.0)
        if n > SORTED:
            n, about, lowest, lightest = _survey(scratch, w, vocab, threshold)
        else:
            _, about = _walk(scratch, vocab, n, 0.0, np.inf, False)
        if last or about >= enough * 0.999999:
            if n > SORTED and about < _EXACT * np.float64(lightest):
                identity, total, is_filled = _find(scratch, vocab, n, lowest, top, False, enough, False)
                if identity >= 0:
                    put_f64(shares + _LOW, np.float64(lowest))
                    put_f64(shares + _SUM, total)
                    put_f64(shares + _ID, np.float64(identity))
                    put_f64(shares + _IS_FILLED, 1.0 if is_filled else 0.0)
                    return CUT
            else:
                if n > SORTED:
                    n = gather_above(scratch, vocab, threshold, values, ids)
                sort_list(scratch, vocab, n, True)
                kept, _ = _walk(scratch, vocab, n, 0.0, enough, False)
                if last or kept <= n:
                    return min(kept, n)
        below = below * _F(2.0)


@numba.njit(**INNER)
def list_of_cut(scratch, vocab):
    """Make the list that `top_p` has not made; returns its length."""
    size = 4 * padded(vocab)
    values, ids = scratch + 3 * size, scratch + 4 * size
    identity = np.int64(get_f64(shares_at(scratch, vocab) + _ID))
    n = gather_above(scratch, vocab, get_f32(scratch + 4 * identity), values, ids)
    sort_list(scratch, vocab, n, True)
    while get_i32(ids + 4 * (n - 1)) != identity:  # behind it are those of the same value and a larger id
        n -= 1
    return n


@numba.njit(**INNER)
def draw_of_cut(scratch, vocab, u):
    """The id that is drawn with the random number `u` from the list that `top_p` has not made."""
    shares = shares_at(scratch, vocab)
    total = get_f64(shares + _SUM)
    threshold = u * total
    if threshold < total:
        low, is_filled = _F(get_f64(shares + _LOW)), get_f64(shares + _IS_FILLED) != 0.0
        return _find(scratch, vocab, vocab, low, largest(scratch, vocab), is_filled, threshold, True)[0]
    return np.int64(get_f64(shares + _ID))
