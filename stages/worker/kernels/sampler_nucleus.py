"""top_p of the whole vocabulary, and the draw from what it keeps, without a sort of what it keeps.

The definition (docs/numerics.md) adds the weights one after the other, in the order of values.  sampler_select.py finds
the same candidate in any order, if no f64 sum is rounded:

- Weights are f32, so multiples of the last place of the smallest one that is added, w, which is above w * 2^-24.  While
  sums stay below w * 2^29, an f64 holds them exactly.  They do unless p is close to 1: behind the last candidate that
  is kept, each of the vocabulary's n has at most w, so that the share 1 - p is at most n * w / sum.
- If p is above 1 - n * 2^-28, the weights are rounded first.  Let the sum of all be at least B, a power of two, and
  less than 2 B.  Weights of B * 2^-29 or more are multiples of U = B * 2^-52 and add exactly.  If those alone reach B,
  the smaller ones, which follow, are added to sums whose last place is U: each adds itself rounded to a multiple of U.
  Only where a weight lies in the middle between two multiples does its rounding depend on the sum: by half to even, it
  is one of the two.  Sums of rounded weights are exact, and those of the definition but for at most `slack`, U for each
  weight in the middle.  A candidate that the sum reaches with either sign of the slack is the definition's.
- Where it is not, the candidates are sorted.

`top_p` returns the length of the sorted list, or CUT: then the list is not made, its last candidate and its sum are in
the scratch, and W and VAL stay as they are until `draw_of_cut` or `list_of_cut`; `min_p_of_cut` shortens it.  The
scratch is drawn in sampler_vocabulary.py.
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import CUT_AT, DIGIT, SUM_BLOCK
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_candidates import sort_list
from stages.worker.kernels.sampler_filters import least_value
from stages.worker.kernels.sampler_select import find, walk, weight_from
from stages.worker.kernels.sampler_vocabulary import (
    gather_above,
    gather_between,
    largest,
    last_equal,
    padded,
    parts_at,
    weigh_vocabulary,
)
from stages.worker.kernels.simd import (
    LANES,
    absolute,
    f32_to_f64,
    first_lanes,
    get_f32,
    get_f64,
    get_i32,
    lanes_set,
    load_f32,
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
    store_f32,
)

CUT = -1
SORTED = 4096  # candidates, at most, that are sorted before anything else is tried
_EXACT = 2.0**-28  # share of the weight behind the last candidate, for each of the vocabulary, so that sums are exact
_LAST_BOUND = 90.0  # a candidate whose value is further below the largest one has a weight of 0
_F = np.float32
_SUM, _SLACK, _ID = (CUT_AT + 8 * i for i in range(3))


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
def _round_weights(w, n, total):
    """Round the n f32 at w as the sums around `total`, the sum of all, round them. Returns the slack; -1: not possible.

    The largest weight is 1.
    """
    base = 1.0
    while 2.0 * base <= total:
        base *= 2.0
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
    n_halves = reduce_add_i32(halves)
    slack = (n_halves + 1) * unit if n_halves else 0.0  # a unit more: bounds that are computed with it are rounded
    is_possible = reduce_add_f64(heavy_sums) >= base and reduce_add_f64(all_sums) + slack < 2.0 * base
    return slack if is_possible else -1.0


@numba.njit(**INNER)
def _weight_of(scratch, vocab, identity):
    return np.float64(get_f32(scratch + 4 * padded(vocab) + 4 * identity))


@numba.njit(**INNER)
def _cut(scratch, vocab, p, all_weights, threshold):
    """Find the last candidate that top_p keeps, and write it down. Returns the value that is about its own.

    _ID is -1 where only a sort decides which it is. threshold: its value is hardly below.
    """
    results, enough, slack = parts_at(scratch, vocab), np.float64(p) * all_weights, 0.0
    put_f64(results + _ID, -1.0)
    if np.float64(p) > 1.0 - vocab * _EXACT:
        slack = _round_weights(scratch + 4 * padded(vocab), vocab, all_weights)
        if slack < 0.0:
            return _F(-np.inf)
    identity, total = find(scratch, vocab, enough + slack, False, threshold, False)
    if identity < 0:
        return _F(-np.inf)
    if slack == 0.0 or total - _weight_of(scratch, vocab, identity) < enough - slack:
        put_f64(results + _SUM, total)
        put_f64(results + _SLACK, slack)
        put_f64(results + _ID, np.float64(identity))
    return get_f32(scratch + 4 * identity)


@numba.njit(**INNER)
def _sort_prefix(scratch, vocab, threshold, enough):
    """The list becomes the candidates that are `threshold` or more. Returns their number and that of those to keep."""
    size = 4 * padded(vocab)
    n = gather_above(scratch, vocab, threshold, scratch + 3 * size, scratch + 4 * size)
    sort_list(scratch, vocab, n, True)
    return n, walk(scratch, vocab, n, 0.0, enough, False)[0]


@numba.njit(**INNER)
def top_p(scratch, vocab, p):
    """Keep the shortest prefix of the sorted vocabulary (VAL) with share p of the weight.

    Returns the length of the list, or CUT.
    """
    size = 4 * padded(vocab)
    w, values, ids = scratch + size, scratch + 3 * size, scratch + 4 * size
    sums = scratch + 8 * size + 4 * (1 << DIGIT)
    top = largest(scratch, vocab)
    if top == _F(-np.inf):
        put_f32(values, top)
        put_i32(ids, 0)
        return 1
    all_weights = weigh_vocabulary(scratch, w, sums, vocab, top)
    enough = np.float64(p) * all_weights
    below, last, threshold = _F(2.0), False, _F(-np.inf)
    while not last:
        last = bool(below > _F(_LAST_BOUND))
        threshold = _F(-np.inf) if last else top - below
        n = gather_between(scratch, vocab, threshold, top, SORTED + 1, values, ids)
        if n > SORTED:
            if last or weight_from(scratch, w, vocab, threshold) >= enough * 0.999999:
                break
        elif last or walk(scratch, vocab, n, 0.0, np.inf, False)[1] >= enough * 0.999999:
            sort_list(scratch, vocab, n, True)
            kept = walk(scratch, vocab, n, 0.0, enough, False)[0]
            if last or kept <= n:
                return min(kept, n)
        below = below * _F(2.0)
    if top < _F(np.inf):
        threshold = _cut(scratch, vocab, p, all_weights, threshold) - _F(1.0)
        if get_f64(parts_at(scratch, vocab) + _ID) >= 0.0:
            return CUT
        weigh_vocabulary(scratch, w, sums, vocab, top)
    n, kept = _sort_prefix(scratch, vocab, threshold, enough)
    if kept > n:
        n, kept = _sort_prefix(scratch, vocab, _F(-np.inf), enough)
    return min(kept, n)


@numba.njit(**INNER)
def min_p_of_cut(scratch, vocab, p):
    """min_p of the list that `top_p` has not made."""
    w, results = scratch + 4 * padded(vocab), parts_at(scratch, vocab)
    top = largest(scratch, vocab)
    bound = min(least_value(top, p), top)
    if get_f32(scratch + 4 * np.int64(get_f64(results + _ID))) >= bound:
        return
    threshold, most, zero = splat_f32(bound), splat_f32(_F(np.inf)), splat_f32(_F(0.0))
    lowest, sums = most, splat_f64(0.0)
    for i in range(0, 4 * vocab, 4 * LANES):
        v = load_f32(scratch + i)
        lowest = minimum(select(v >= threshold, v, most), lowest)
        sums = sums + f32_to_f64(select(v >= threshold, load_f32(w + i), zero))
    put_f64(results + _SUM, reduce_add_f64(sums))
    put_f64(results + _ID, np.float64(last_equal(scratch, vocab, -reduce_max(-lowest))))


@numba.njit(**INNER)
def list_of_cut(scratch, vocab):
    """Make the list that `top_p` has not made; returns its length."""
    size = 4 * padded(vocab)
    values, ids = scratch + 3 * size, scratch + 4 * size
    identity = np.int64(get_f64(parts_at(scratch, vocab) + _ID))
    n = gather_above(scratch, vocab, get_f32(scratch + 4 * identity), values, ids)
    sort_list(scratch, vocab, n, True)
    while get_i32(ids + 4 * (n - 1)) != identity:  # behind it are those of the same value and a larger id
        n -= 1
    return n


@numba.njit(**INNER)
def draw_of_cut(scratch, vocab, u):
    """The id that is drawn with the random number `u` from the list that `top_p` has not made; -1: the list decides."""
    results = parts_at(scratch, vocab)
    total, slack = get_f64(results + _SUM), get_f64(results + _SLACK)
    threshold = u * (total + slack) + slack
    if threshold >= total - slack:
        return np.int64(get_f64(results + _ID)) if slack == 0.0 else np.int64(-1)
    identity, reached = find(scratch, vocab, threshold, True, _F(-np.inf), True)
    is_certain = slack == 0.0 or reached - _weight_of(scratch, vocab, identity) <= u * (total - slack) - slack
    return identity if is_certain else np.int64(-1)
