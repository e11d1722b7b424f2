"""typical_p: the candidates whose information is closest to the entropy.

Meister et al., "Locally typical sampling", 2023 (arXiv 2202.00666).  A score is minus the distance between a
candidate's information and the entropy.  Of the whole vocabulary, the candidate at which the weights, added by
descending score, exceed the share is found without a sort where thousands are kept (sampler_select.py).  Whether the
sums are those of the definition (sampler_sums.py) is looked up for what is kept.  Rounded weights serve where the light
ones come last, which is not so by itself: one may have a better score than the candidate of the highest value.  The
scratch is drawn in sampler_vocabulary.py.
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import SUM_BLOCK
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_candidates import sort_list, weigh_list
from stages.worker.kernels.sampler_cut import CUT, SORTED, drop_behind, leave, weight_of
from stages.worker.kernels.sampler_scalars import log, next_above
from stages.worker.kernels.sampler_select import find, forget_parts, walk
from stages.worker.kernels.sampler_sums import MAY_ROUND, base_of, round_weights
from stages.worker.kernels.sampler_vocabulary import LOWEST, gather_between, key_at, largest, padded
from stages.worker.kernels.simd import (
    LANES,
    exp,
    f32_to_f64,
    get_f32,
    get_i32,
    load_f32_part,
    maximum,
    put_f32,
    reduce_add_f64,
    splat_f32,
    splat_f64,
    store_f32,
)

UNCHANGED = CUT - 1
_F = np.float32
_FIRST_BOUND, _LAST_BOUND = 0.5, 200.0  # of distances; a candidate beyond the last one has a weight of 0
_LIGHT = 20.0  # sums of at most exp(20.1), 2^29, times the lightest weight are not rounded


@numba.njit(**INNER)
def _weigh(x, w, vocab, top):
    """w = exp(x - top) over the vocabulary. Returns the block sums of w and of w * (x - top)."""
    m, low = splat_f32(top), splat_f32(_F(LOWEST))
    total = distances = 0.0
    for start in range(0, vocab, SUM_BLOCK):
        weights, products = splat_f64(0.0), splat_f64(0.0)
        for i in range(start, min(start + SUM_BLOCK, vocab), LANES):
            d = load_f32_part(x + 4 * i, min(vocab - i, LANES), _F(-np.inf)) - m
            e = exp(d)
            store_f32(w + 4 * i, e)
            wide = f32_to_f64(e)
            weights = weights + wide
            products = products + wide * f32_to_f64(maximum(d, low))
        total += reduce_add_f64(weights)
        distances += reduce_add_f64(products)
    return total, distances


@numba.njit(**INNER)
def _sort_by_value(scratch, vocab, n):
    """Of a list with scores as values: put the values back and sort."""
    size = 4 * padded(vocab)
    for i in range(n):
        put_f32(scratch + 3 * size + 4 * i, get_f32(scratch + 4 * get_i32(scratch + 4 * size + 4 * i)))
    sort_list(scratch, vocab, n, False)
    return n


@numba.njit(**INNER)
def _last_typical(scratch, vocab, key, total, p):
    """The id of the last candidate that is kept; -1: only a sort decides. W may be rounded."""
    mean, enough, slack = np.float64(key[2]), np.float64(p) * total, 0.0
    # The heaviest candidate comes before all that are lighter than exp(2 * mean).
    is_rounded = np.float64(p) > 1.0 - vocab * MAY_ROUND and log(base_of(total)) - _LIGHT < 2.0 * mean
    if is_rounded:
        slack = round_weights(scratch + 4 * padded(vocab), vocab, total)
        if slack < 0.0:
            return -1
    forget_parts(scratch, vocab)
    identity, reached = find(scratch, key, vocab, next_above(enough + slack), _F(-np.inf))
    if identity < 0:
        return -1
    if is_rounded:
        is_certain = slack == 0.0 or reached - weight_of(scratch, vocab, identity) <= enough - slack
    else:
        lightest = mean + np.float64(key_at(scratch + 4 * identity, key))  # of the logarithms of the weights, or below
        is_certain = log(max(reached, 1.0)) <= lightest + _LIGHT
    return identity if is_certain else -1


@numba.njit(**INNER)
def _of_vocabulary(scratch, vocab, top, p):
    size = 4 * padded(vocab)
    w, values, ids = scratch + size, scratch + 3 * size, scratch + 4 * size
    total, distances = _weigh(scratch, w, vocab, top)
    key, enough = (bool(top < _F(np.inf)), top, _F(distances / total)), np.float64(p) * total
    bound, last = _F(_FIRST_BOUND), False
    while not last:
        last = bool(bound > _F(_LAST_BOUND))
        threshold = _F(-np.inf) if last else -bound
        n = gather_between(scratch, key, vocab, threshold, _F(np.inf), SORTED + 1, values, ids)
        if n > SORTED:
            break
        if last or walk(scratch, vocab, n, 0.0, np.inf)[1] >= enough * 0.999999:
            sort_list(scratch, vocab, n, True)
            kept = walk(scratch, vocab, n, 0.0, next_above(enough))[0]
            if last or kept <= n:
                return _sort_by_value(scratch, vocab, min(kept, n))
        bound = bound * _F(4.0)
    if top < _F(np.inf):
        identity = _last_typical(scratch, vocab, key, total, p)
        if identity >= 0:
            drop_behind(scratch, key, vocab, identity)
            return leave(scratch, vocab)
        _weigh(scratch, w, vocab, top)  # unrounded
    n = gather_between(scratch, key, vocab, _F(-np.inf), _F(np.inf), vocab, values, ids)
    sort_list(scratch, vocab, n, True)
    return _sort_by_value(scratch, vocab, min(n, walk(scratch, vocab, n, 0.0, next_above(enough))[0]))


@numba.njit(**INNER)
def _of_list(scratch, vocab, n, top, p):
    size = 4 * padded(vocab)
    w, values, ids = scratch + size, scratch + 3 * size, scratch + 4 * size
    total = weigh_list(scratch, vocab, n)
    distances = 0.0
    for i in range(n):
        distances += np.float64(get_f32(w + 4 * i)) * np.float64(max(get_f32(values + 4 * i) - top, _F(LOWEST)))
    mean = _F(distances / total)
    weights = scratch + 7 * size  # by place, until they are by id
    for i in range(n):
        put_f32(weights + 4 * i, get_f32(w + 4 * i))
    for i in range(n):
        value, identity = get_f32(values + 4 * i), get_i32(ids + 4 * i)
        put_f32(scratch + 4 * identity, value)
        put_f32(w + 4 * identity, get_f32(weights + 4 * i))
        distance = max(value - top, _F(LOWEST)) - mean
        put_f32(values + 4 * i, distance if distance < _F(0.0) else -distance)
    sort_list(scratch, vocab, n, False)
    kept = walk(scratch, vocab, n, 0.0, next_above(np.float64(p) * total))[0]
    return _sort_by_value(scratch, vocab, min(n, kept))


@numba.njit(**INNER)
def typical_p(scratch, vocab, n, whole, p):
    """Keep the most typical candidates with share `p` of the weight, of the whole vocabulary or of the list of n.

    Returns the length of the list, CUT (sampler_cut.py), or UNCHANGED: all values are -inf.
    """
    top = largest(scratch, vocab) if whole else get_f32(scratch + 12 * padded(vocab))
    if top == _F(-np.inf):
        return UNCHANGED
    return _of_vocabulary(scratch, vocab, top, p) if whole else _of_list(scratch, vocab, n, top, p)
