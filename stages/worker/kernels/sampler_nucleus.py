"""top_p of the whole vocabulary, without a sort of what it keeps.

sampler_select.py finds the last candidate that is kept; sampler_sums.py says why its sums are those of the definition.
They are exact unless p is close to 1: behind the last candidate that is kept, with weight w, each of the vocabulary's n
has at most w, so that the share 1 - p is at most n * w / sum.  If p is above 1 - n * 2^-28, the weights are rounded
first.  Where a rounding decides, the candidates are sorted.
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import DIGIT
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_candidates import sort_list
from stages.worker.kernels.sampler_cut import CUT, SORTED, describe, weight_of
from stages.worker.kernels.sampler_select import find, forget_parts, walk, weight_from
from stages.worker.kernels.sampler_sums import MAY_ROUND, round_weights
from stages.worker.kernels.sampler_vocabulary import (
    BY_VALUE,
    gather_above,
    gather_between,
    largest,
    padded,
    weigh_vocabulary,
)
from stages.worker.kernels.simd import get_f32, put_f32, put_i32

_LAST_BOUND = 90.0  # a candidate whose value is further below the largest one has a weight of 0
_F = np.float32


@numba.njit(**INNER)
def _cut(scratch, vocab, p, all_weights, threshold):
    """Find the last candidate that is kept, and describe the list. Returns its id and the value that is about its own.

    The id is -1 where only a sort decides which it is. threshold: its value is hardly below.
    """
    enough, slack = np.float64(p) * all_weights, 0.0
    if np.float64(p) > 1.0 - vocab * MAY_ROUND:
        slack = round_weights(scratch + 4 * padded(vocab), vocab, all_weights)
        if slack < 0.0:
            return -1, _F(-np.inf)
    forget_parts(scratch, vocab)
    identity, total = find(scratch, BY_VALUE, vocab, enough + slack, threshold)
    if identity < 0:
        return -1, _F(-np.inf)
    value = get_f32(scratch + 4 * identity)
    if slack != 0.0 and total - weight_of(scratch, vocab, identity) >= enough - slack:
        return -1, value
    describe(scratch, vocab, identity, total, slack)
    return identity, value


@numba.njit(**INNER)
def _sort_prefix(scratch, vocab, threshold, enough):
    """The list becomes the candidates that are `threshold` or more. Returns their number and that of those to keep."""
    size = 4 * padded(vocab)
    n = gather_above(scratch, vocab, threshold, scratch + 3 * size, scratch + 4 * size)
    sort_list(scratch, vocab, n, True)
    return n, walk(scratch, vocab, n, 0.0, enough)[0]


@numba.njit(**INNER)
def top_p(scratch, vocab, p):
    """Keep the shortest prefix of the sorted vocabulary (VAL) with share p of the weight.

    Returns the length of the list, or CUT (sampler_cut.py).
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
        n = gather_between(scratch, BY_VALUE, vocab, threshold, top, SORTED + 1, values, ids)
        if n > SORTED:
            if last or weight_from(scratch, BY_VALUE, w, vocab, threshold) >= enough * 0.999999:
                break
        elif last or walk(scratch, vocab, n, 0.0, np.inf)[1] >= enough * 0.999999:
            sort_list(scratch, vocab, n, True)
            kept = walk(scratch, vocab, n, 0.0, enough)[0]
            if last or kept <= n:
                return min(kept, n)
        below = below * _F(2.0)
    if top < _F(np.inf):
        identity, value = _cut(scratch, vocab, p, all_weights, threshold)
        if identity >= 0:
            return CUT
        threshold = value - _F(1.0)
        weigh_vocabulary(scratch, w, sums, vocab, top)
    n, kept = _sort_prefix(scratch, vocab, threshold, enough)
    if kept > n:
        n, kept = _sort_prefix(scratch, vocab, _F(-np.inf), enough)
    return min(kept, n)
