"""A list of candidates that is not made: what top_p, typical_p and top_k leave where they keep thousands.

To sort so many takes longer than all else that the sampler does, and hardly any step needs it.  The list is described
instead: it ends with the candidate ID by (value descending, id ascending), and the sum of its weights, SUM, is that of
the definition but for SLACK at most (sampler_sums.py).  W has the weights of VAL, rounded where SLACK is above 0, and
PARTS, if it is not forgotten, divides VAL by its values (sampler_select.py).  Of VAL all that come behind ID are no
candidates, until `drop_others` gives them the value -inf.  Their weights remain in W, and in the sums of PARTS: they
come behind all that a step or the draw looks for.

Steps that change values, and XTC, work on VAL as on the whole vocabulary, and `leave` describes the list anew.  Its
weights are computed when a step, or the draw, needs them (`weigh_cut`): not twice if values change once more.  No
candidate may get the value -inf by them (`stays_finite`), which would no longer be told from those that were dropped.
The scratch is drawn in sampler_vocabulary.py.
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import CUT_AT, DIGIT
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_candidates import gather_best, sort_list, top_k
from stages.worker.kernels.sampler_filters import drop_likely, least_value
from stages.worker.kernels.sampler_scalars import next_above
from stages.worker.kernels.sampler_select import find, forget_parts
from stages.worker.kernels.sampler_sums import round_weights, sum_of
from stages.worker.kernels.sampler_vocabulary import (
    BY_VALUE,
    gather_above,
    key_at,
    keys_at,
    largest,
    last_equal,
    padded,
    parts_at,
    weigh_vocabulary,
)
from stages.worker.kernels.simd import (
    LANES,
    f32_to_f64,
    get_f32,
    get_f64,
    load_f32,
    minimum,
    put_f32,
    put_f64,
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
SUM, SLACK, ID = (CUT_AT + 8 * i for i in range(3))
_UNKNOWN = -1.0  # as SUM
_LARGEST = 1e38  # of values that further steps are sure to keep finite
_F = np.float32


# ------------------------------------------------------------------ describing the list


@numba.njit(**INNER)
def describe(scratch, vocab, identity, total, slack):
    """Write down the last candidate, the sum and its slack."""
    results = parts_at(scratch, vocab)
    put_f64(results + ID, np.float64(identity))
    put_f64(results + SUM, total)
    put_f64(results + SLACK, slack)


@numba.njit(**INNER)
def weight_of(scratch, vocab, identity):
    """W of an id."""
    return np.float64(get_f32(scratch + 4 * padded(vocab) + 4 * identity))


@numba.njit(**INNER)
def _last_value(scratch, vocab):
    return get_f32(scratch + 4 * np.int64(get_f64(parts_at(scratch, vocab) + ID)))


@numba.njit(**INNER)
def drop_behind(scratch, key, vocab, identity):
    """VAL: -inf for the candidates that come behind `identity` by (key descending, id ascending)."""
    low, last = splat_f32(_F(-np.inf)), key_at(scratch + 4 * identity, key)
    bound = splat_f32(last)
    middle = identity // LANES * LANES
    for i in range(middle, min(middle + LANES, vocab)):
        other = key_at(scratch + 4 * i, key)
        if other < last or (other == last and i > identity):
            put_f32(scratch + 4 * i, _F(-np.inf))
    for i in range(0, middle, LANES):
        store_f32(scratch + 4 * i, select(keys_at(scratch + 4 * i, key) >= bound, load_f32(scratch + 4 * i), low))
    for i in range(middle + LANES, vocab, LANES):
        store_f32(scratch + 4 * i, select(keys_at(scratch + 4 * i, key) > bound, load_f32(scratch + 4 * i), low))


@numba.njit(**INNER)
def drop_others(scratch, vocab):
    """-inf for what is not in the list."""
    drop_behind(scratch, BY_VALUE, vocab, np.int64(get_f64(parts_at(scratch, vocab) + ID)))


@numba.njit(**INNER)
def _last_of(x, vocab):
    """The last of the candidates above -inf, of which there is one, by (value descending, id ascending)."""
    low, most = splat_f32(_F(-np.inf)), splat_f32(_F(np.inf))
    lowest = most
    for i in range(0, 4 * vocab, 4 * LANES):
        v = load_f32(x + i)
        lowest = minimum(select(v > low, v, most), lowest)
    return last_equal(x, vocab, -reduce_max(-lowest))


@numba.njit(**INNER)
def _weigh(scratch, vocab):
    """W of VAL; returns its sum."""
    size = 4 * padded(vocab)
    sums = scratch + 8 * size + 4 * (1 << DIGIT)
    return weigh_vocabulary(scratch, scratch + size, sums, vocab, largest(scratch, vocab))


@numba.njit(**INNER)
def leave(scratch, vocab):
    """The list is of the candidates above -inf, of which there is one; all are finite. Returns CUT."""
    describe(scratch, vocab, _last_of(scratch, vocab), _UNKNOWN, 0.0)
    return CUT


@numba.njit(**INNER)
def is_weighed(scratch, vocab):
    """Whether W and SUM are known."""
    return get_f64(parts_at(scratch, vocab) + SUM) != _UNKNOWN


@numba.njit(**INNER)
def weigh_cut(scratch, vocab):
    """W and SUM of what `leave` has left. Returns CUT, or the length of the list where only that is certain."""
    w, results = scratch + 4 * padded(vocab), parts_at(scratch, vocab)
    total = _weigh(scratch, vocab)
    slack = round_weights(w, vocab, total)
    if slack < 0.0:
        return list_of_cut(scratch, vocab)
    put_f64(results + SUM, total if slack == 0.0 else sum_of(w, vocab))
    put_f64(results + SLACK, slack)
    forget_parts(scratch, vocab)
    return CUT


@numba.njit(**INNER)
def list_of_cut(scratch, vocab):
    """Make the list; returns its length."""
    size = 4 * padded(vocab)
    drop_others(scratch, vocab)
    n = gather_above(scratch, vocab, _last_value(scratch, vocab), scratch + 3 * size, scratch + 4 * size)
    sort_list(scratch, vocab, n, True)
    return n


@numba.njit(**INNER)
def _share_of_sum(scratch, vocab, share):
    """Bounds of the sum of weights times `share`."""
    total, slack = get_f64(parts_at(scratch, vocab) + SUM), get_f64(parts_at(scratch, vocab) + SLACK)
    return share * (total - slack), share * (total + slack)


@numba.njit(**INNER)
def stays_finite(scratch, vocab, factor, shift):
    """Whether no candidate's value becomes infinite if it is multiplied by `factor` and then moved by up to `shift`."""
    most = max(abs(np.float64(largest(scratch, vocab))), abs(np.float64(_last_value(scratch, vocab))))
    return most * abs(factor) + abs(shift) < _LARGEST


# ------------------------------------------------------------------ steps


@numba.njit(**INNER)
def min_p_of_cut(scratch, vocab, p):
    """min_p of the list."""
    w, results = scratch + 4 * padded(vocab), parts_at(scratch, vocab)
    top = largest(scratch, vocab)
    bound = min(least_value(top, p), top)
    if _last_value(scratch, vocab) >= bound:
        return
    threshold, most, zero = splat_f32(bound), splat_f32(_F(np.inf)), splat_f32(_F(0.0))
    lowest, sums = most, splat_f64(0.0)
    for i in range(0, 4 * vocab, 4 * LANES):
        v = load_f32(scratch + i)
        lowest = minimum(select(v >= threshold, v, most), lowest)
        sums = sums + f32_to_f64(select(v >= threshold, load_f32(w + i), zero))
    put_f64(results + SUM, reduce_add_f64(sums))
    put_f64(results + ID, np.float64(last_equal(scratch, vocab, -reduce_max(-lowest))))


@numba.njit(**INNER)
def top_p_of_cut(scratch, vocab, p):
    """top_p of the list. Returns whether it is certain, and done."""
    results = parts_at(scratch, vocab)
    slack = get_f64(results + SLACK)
    least, most = _share_of_sum(scratch, vocab, np.float64(p))
    identity, total = find(scratch, BY_VALUE, vocab, most + slack, _last_value(scratch, vocab))
    if identity < 0 or (slack != 0.0 and total - weight_of(scratch, vocab, identity) >= least - slack):
        return False
    describe(scratch, vocab, identity, total, slack)
    return True


@numba.njit(**INNER)
def top_k_of_many(scratch, vocab, k):
    """The first k of the vocabulary (VAL), which has more than SORTED.

    Returns CUT, and then none is -inf, or the length of the list.
    """
    n, top = gather_best(scratch, scratch, vocab, k, SORTED + 1), largest(scratch, vocab)
    if top == _F(np.inf):  # a repetition penalty below 1 divides a value close to the largest f32
        return top_k(scratch, scratch, vocab, k)
    if n <= SORTED or top == _F(-np.inf):
        n = min(n, SORTED)
        sort_list(scratch, vocab, n, True)
        return min(n, k)
    w, one = scratch + 4 * padded(vocab), splat_f32(_F(1.0))
    for i in range(0, vocab, LANES):
        store_f32(w + 4 * i, one)
    for i in range(vocab, (vocab + LANES - 1) // LANES * LANES):
        put_f32(w + 4 * i, _F(0.0))
    forget_parts(scratch, vocab)
    identity = find(scratch, BY_VALUE, vocab, np.float64(k), _F(-np.inf))[0]
    if get_f32(scratch + 4 * identity) == _F(-np.inf):  # these are candidates, and the first if all become -inf
        return top_k(scratch, scratch, vocab, k)
    describe(scratch, vocab, identity, 0.0, 0.0)
    if k <= SORTED:
        return list_of_cut(scratch, vocab)
    drop_others(scratch, vocab)
    return leave(scratch, vocab)


@numba.njit(**INNER)
def top_k_of_cut(scratch, vocab, k):
    """top_k of the list. Returns CUT, or the length of the list that it makes."""
    drop_others(scratch, vocab)
    low, one, none, counts = splat_f32(_F(-np.inf)), splat_i32(1), splat_i32(0), splat_i32(0)
    for i in range(0, 4 * vocab, 4 * LANES):
        counts = counts + select_i32(load_f32(scratch + i) > low, one, none)
    return top_k_of_many(scratch, vocab, k) if k < reduce_add_i32(counts) else CUT


@numba.njit(**INNER)
def xtc_of_cut(scratch, vocab, threshold):
    """XTC of the list. Returns CUT, or 0: not certain, and nothing is done."""
    least, most = _share_of_sum(scratch, vocab, np.float64(threshold))
    if get_f64(parts_at(scratch, vocab) + SLACK) != 0.0:
        if least < most and least <= np.float64(_F(least)) <= most:
            return 0  # a weight may lie between the two; no other f32 does
        _weigh(scratch, vocab)  # unrounded
    drop_others(scratch, vocab)
    drop_likely(scratch, scratch + 4 * padded(vocab), vocab, least)
    return leave(scratch, vocab)


@numba.njit(**INNER)
def draw_of_cut(scratch, vocab, u):
    """The id that is drawn from the list with the random number `u`; -1: only the list decides."""
    results = parts_at(scratch, vocab)
    total, slack = get_f64(results + SUM), get_f64(results + SLACK)
    threshold = u * (total + slack) + slack
    if threshold >= total - slack:
        return np.int64(get_f64(results + ID)) if slack == 0.0 else np.int64(-1)
    identity, reached = find(scratch, BY_VALUE, vocab, next_above(threshold), _last_value(scratch, vocab))
    is_certain = slack == 0.0 or reached - weight_of(scratch, vocab, identity) <= u * (total - slack) - slack
    return identity if is_certain else np.int64(-1)
