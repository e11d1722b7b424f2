"""The FFN of a layer that is a mixture of experts: an entry of its own, compiled only for models that have one.

    x += residual_scale * (sum over a token's experts e, ascending: weight_e * W_down_e (act(W_gate_e x) * (W_up_e x)))

docs/numerics.md defines router, weights and sums.  All experts' rows are one matrix in `.bin`, so that an expert is a
range of row groups.  Each expert is computed for all tokens that are given to it at once:

1. The ranks route some tokens each: ROUTES.  With few tokens every rank routes all for itself (OWN_ROUTES).
2. Every rank sorts the pairs of a token and an expert by expert, then token: PAIR_ENDS, PAIRS.  All find the same.
3. By expert: the rows of its tokens are copied together (GATHERED); the rank's rows of gate and up go to HIDDEN, whose
   row i is of pair i.  The shared expert takes the tokens as they are: SHARED_HIDDEN.
4. By expert, ascending: the rank's rows of down, times the pair's weight, are added to the token's row of Y.  Then Y is
   added to X.

A token's values depend on its own row alone, and are added in an order that neither the batch nor the ranks change.

    a row of ROUTES      i32 experts by (logit descending, number ascending) | f32 weight of each, of the shared one
    a row of the logits  f32 of each expert, padded to whole row groups | 16 f32, the first of the shared expert's gate
    PAIRS                i32 token of each pair, then f32 weight of each
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.worker.kernels import elementwise as ew
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels.buffer_sizes import GATED_BYTES, GATHERED_ROWS, MIN_CHUNK, ROUTED_AT_ONCE
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.features import TILE_TOKENS
from stages.worker.kernels.format_traits import IS_DENSE, trait
from stages.worker.kernels.formats.description import BLOCK, GROUP
from stages.worker.kernels.packed_activations import pack_row, packed, packed_row
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.projections import gate_up, normed, normed_q, project
from stages.worker.kernels.rank_sync import DOWN, GATE_UP, phase_begin, phase_end, share, wait_for_ranks
from stages.worker.kernels.simd import (
    JIT,
    LANES,
    exp,
    get_f32,
    get_i32,
    get_i64,
    load_f32_part,
    put_f32,
    put_i32,
    put_i64,
    reduce_add,
    splat_f32,
    store_f32,
    store_f32_part,
)
from stages.worker.kernels.split_combine import copy

# ------------------------------------------------------------------ routes


@njit(**INNER)
def _choose(logits, n, k, ids, values):
    """The k largest of n f32 by (value descending, number ascending): their numbers (i32) and values (f32)."""
    kept = 0
    for e in range(n):
        v = get_f32(logits + 4 * e)
        if kept == k:
            if not v > get_f32(values + 4 * (k - 1)):
                continue
            kept -= 1
        at = kept
        while at > 0 and v > get_f32(values + 4 * (at - 1)):
            put_f32(values + 4 * at, get_f32(values + 4 * (at - 1)))
            put_i32(ids + 4 * at, get_i32(ids + 4 * (at - 1)))
            at -= 1
        put_f32(values + 4 * at, v)
        put_i32(ids + 4 * at, e)
        kept += 1


@njit(**INNER)
def _sum_of_exp(logits, n, largest):
    """Lane sum of exp(logit - largest) over n f32."""
    lanes, top = splat_f32(np.float32(0.0)), splat_f32(largest)
    for i in range(0, n, LANES):
        part = load_f32_part(logits + 4 * i, min(n - i, LANES), np.float32(-np.inf))
        lanes = lanes + exp(part - top)
    return reduce_add(lanes)


@njit(**INNER)
def _weigh(logits, n, k, normalize, values):
    """The k largest logits at `values`, the largest first, to weights: their parts of the sum over n, or over the k."""
    largest = get_f32(values)
    top = splat_f32(largest)
    total = np.float32(0.0) if normalize else _sum_of_exp(logits, n, largest)
    for i in range(0, k, LANES):
        rest = min(k - i, LANES)
        store_f32_part(values + 4 * i, exp(load_f32_part(values + 4 * i, rest, np.float32(0.0)) - top), rest)
    if normalize:
        for i in range(k):
            total = total + get_f32(values + 4 * i)
    by = splat_f32(total)
    for i in range(0, k, LANES):
        rest = min(k - i, LANES)
        store_f32_part(values + 4 * i, load_f32_part(values + 4 * i, rest, np.float32(0.0)) / by, rest)


@njit(**INNER)
def _put_sigmoid(x, to):
    """1 / (1 + exp(-x)) of the f32 at x, to address `to`."""
    one = splat_f32(np.float32(1.0))
    store_f32_part(to, one / (one + exp(-splat_f32(get_f32(x)))), 1)


@njit(**INNER)
def _route(params, layer, tokens):
    """Route the tokens; returns the address of their routes."""
    few = tokens <= pb.FEW
    first, end = (0, tokens) if few else share(params, tokens)
    routes = param(params, pb.OWN_ROUTES) if few else param(params, pb.ROUTES)
    n, k = param(params, pb.N_EXPERTS), param(params, pb.EXPERTS_USED)
    width, record_stride = param(params, pb.WIDTH), param(params, pb.NORM_Q_STRIDE)
    groups = (n + GROUP - 1) // GROUP
    logits, stride = param(params, pb.ROUTER_LOGITS), 64 * (groups + 1)
    while first < end:
        rows = min(ROUTED_AT_ONCE, end - first)
        x = normed(params, tokens) + 4 * first * width
        q = normed_q(params, tokens) + first * record_stride
        kind, w = param(layer, pb.ROUTER_FORMAT), param(layer, pb.ROUTER)
        project(params, kind, w, width, n, x, q, record_stride, 0, rows, logits, stride, 0, groups)
        shared = param(layer, pb.SHARED_ROUTER)
        if shared:
            kind, at = param(layer, pb.SHARED_ROUTER_FORMAT), logits + 64 * groups
            project(params, kind, shared, width, 1, x, q, record_stride, 0, rows, at, stride, 0, 1)
        for i in range(rows):
            of_token, route = logits + i * stride, routes + 4 * (2 * k + 1) * (first + i)
            _choose(of_token, n, k, route, route + 4 * k)
            _weigh(of_token, n, k, param(params, pb.NORMALIZE_ROUTES), route + 4 * k)
            if shared:
                _put_sigmoid(of_token + 64 * groups, route + 8 * k)
            else:
                put_f32(route + 8 * k, np.float32(1.0))
        first += rows
    if not few:
        wait_for_ranks(params)
    return routes


@njit(**INNER)
def _sort(params, routes, tokens):
    """Write PAIRS by (expert, token), and at PAIR_ENDS, i64, the number of pairs up to the end of each expert's."""
    n, k = param(params, pb.N_EXPERTS), param(params, pb.EXPERTS_USED)
    ends, pairs = param(params, pb.PAIR_ENDS), param(params, pb.PAIRS)
    weights, stride = pairs + 4 * tokens * k, 4 * (2 * k + 1)
    for e in range(n + 1):
        put_i64(ends + 8 * e, 0)
    for t in range(tokens):
        for i in range(k):
            at = ends + 8 * (get_i32(routes + t * stride + 4 * i) + 1)
            put_i64(at, get_i64(at) + 1)
    for e in range(n):
        put_i64(ends + 8 * (e + 1), get_i64(ends + 8 * (e + 1)) + get_i64(ends + 8 * e))
    # Now each expert's beginning, which becomes its end while its pairs are written.
    for t in range(tokens):
        for i in range(k):
            at = ends + 8 * get_i32(routes + t * stride + 4 * i)
            place = get_i64(at)
            put_i32(pairs + 4 * place, t)
            put_f32(weights + 4 * place, get_f32(routes + t * stride + 4 * (k + i)))
            put_i64(at, place + 1)


# ------------------------------------------------------------------ gate and up


@njit(**INNER)
def _gather(params, layer, tokens, pair, rows):
    """Addresses of the f32 rows, of the records, and of these packed, of the tokens of `rows` pairs.

    Only what the matrices need is there.
    """
    width, stride = param(params, pb.WIDTH), param(params, pb.NORM_Q_STRIDE)
    floats, records = normed(params, tokens), normed_q(params, tokens)
    places = param(params, pb.PAIRS) + 4 * pair
    if rows == 1:
        t = get_i32(places)
        return floats + 4 * t * width, records + t * stride, 0
    x, q, to = param(params, pb.GATHERED), param(params, pb.GATHERED_Q), packed(params, pb.GATHERED_P, rows)
    dense = trait(param(layer, pb.GATE_EXPERTS_FORMAT), IS_DENSE) + trait(param(layer, pb.UP_EXPERTS_FORMAT), IS_DENSE)
    for i in range(rows):
        t = get_i32(places + 4 * i)
        if dense > 0:
            copy(floats + 4 * t * width, x + 4 * i * width, width)
        if dense < 2:
            copy(records + t * stride, q + i * stride, stride // 4)
            if to != 0:
                pack_row(q + i * stride, 0, (width + BLOCK - 1) // BLOCK, width, to, i)
    return x, q, to


@njit(**INNER)
def _hidden_packed(params, expert, first_pair, pairs):
    """Address of the packed records of an expert's pairs, which begin with whole groups of 16; 0: there are none."""
    to = packed(params, pb.HIDDEN_P, pairs)
    return to + (first_pair // TILE_TOKENS + expert) * packed_row(param(params, pb.FFN)) if to != 0 else 0


@njit(**INNER)
def _gate_up(params, gate_kind, gate, up_kind, up, down_kind, skipped, ffn, x, rows, hidden):
    """`gate_up` of matrices without biases."""
    keep = trait(down_kind, IS_DENSE) != 0
    gate_up(params, 0, (gate_kind, gate, 0), (up_kind, up, 0), skipped, ffn, x, rows, keep, hidden)


@njit(**INNER)
def _gate_up_of_experts(params, layer, tokens):
    """HIDDEN and its records: a row for each pair."""
    n, ffn = param(params, pb.N_EXPERTS), param(params, pb.FFN)
    hidden, hidden_q, stride = param(params, pb.HIDDEN), param(params, pb.HIDDEN_Q), param(params, pb.HIDDEN_Q_STRIDE)
    pair = 0
    for e in range(n):
        end = get_i64(param(params, pb.PAIR_ENDS) + 8 * e)
        to = _hidden_packed(params, e, pair, end - pair)
        while pair < end:
            rows = min(GATHERED_ROWS, end - pair)
            x = _gather(params, layer, tokens, pair, rows)
            _gate_up(
                params,
                param(layer, pb.GATE_EXPERTS_FORMAT),
                param(layer, pb.GATE_EXPERTS),
                param(layer, pb.UP_EXPERTS_FORMAT),
                param(layer, pb.UP_EXPERTS),
                param(layer, pb.DOWN_EXPERTS_FORMAT),
                e * ffn // GROUP,
                ffn,
                x,
                rows,
                (hidden + 4 * pair * ffn, hidden_q + pair * stride, stride, to),
            )
            pair += rows
            if to != 0:
                to += GATHERED_ROWS // TILE_TOKENS * packed_row(ffn)
    if param(layer, pb.SHARED_GATE):
        _gate_up(
            params,
            param(layer, pb.SHARED_GATE_FORMAT),
            param(layer, pb.SHARED_GATE),
            param(layer, pb.SHARED_UP_FORMAT),
            param(layer, pb.SHARED_UP),
            param(layer, pb.SHARED_DOWN_FORMAT),
            0,
            param(params, pb.SHARED_FFN),
            (normed(params, tokens), normed_q(params, tokens), packed(params, pb.NORM_P, tokens)),
            tokens,
            (
                param(params, pb.SHARED_HIDDEN),
                param(params, pb.SHARED_HIDDEN_Q),
                param(params, pb.SHARED_HIDDEN_Q_STRIDE),
                packed(params, pb.SHARED_HIDDEN_P, tokens),
            ),
        )


# ------------------------------------------------------------------ down


@njit(**INNER)
def _down(params, kind, w, skipped, ffn, hidden, rows, places, weights, weight_stride):
    """Y = fma(W_down hidden, weight, Y), this rank's rows.

    `hidden`: as `gate_up` writes it.  Its row i belongs to the token in i32 i at `places`, or to token i where that is
    0; the matrix's rows begin after `skipped` row groups.
    """
    width, y, out = param(params, pb.WIDTH), param(params, pb.Y), param(params, pb.GATED)
    first, end = share(params, width // GROUP)
    at_once = max(MIN_CHUNK, GATED_BYTES // (64 * rows) // MIN_CHUNK * MIN_CHUNK)
    while first < end:
        n = min(at_once, end - first)
        at = skipped + first
        to = out - 64 * at
        x, q, stride, packed_q = hidden
        project(params, kind, w, ffn, width, x, q, stride, packed_q, rows, to, 64 * n, at, at + n)
        for i in range(rows):
            t = get_i32(places + 4 * i) if places else i
            weight = get_f32(weights + i * weight_stride)
            ew.add_scaled(y + 4 * t * width + 64 * first, out + i * 64 * n, weight, GROUP * n)
        first += n


@njit(**INNER)
def _down_of_experts(params, layer, tokens, routes):
    """X += residual_scale * the weighted sum over each token's experts, this rank's rows."""
    n, k, width, ffn = (
        param(params, pb.N_EXPERTS),
        param(params, pb.EXPERTS_USED),
        param(params, pb.WIDTH),
        param(params, pb.FFN),
    )
    x, y, stride = param(params, pb.X), param(params, pb.Y), param(params, pb.HIDDEN_Q_STRIDE)
    first, end = share(params, width // GROUP)
    zero = splat_f32(np.float32(0.0))
    for t in range(tokens):
        for i in range(first, end):
            store_f32(y + 4 * t * width + 64 * i, zero)
    pairs, pair = param(params, pb.PAIRS), 0
    for e in range(n):
        rows = get_i64(param(params, pb.PAIR_ENDS) + 8 * e) - pair
        if rows:
            _down(
                params,
                param(layer, pb.DOWN_EXPERTS_FORMAT),
                param(layer, pb.DOWN_EXPERTS),
                e * width // GROUP,
                ffn,
                (
                    param(params, pb.HIDDEN) + 4 * pair * ffn,
                    param(params, pb.HIDDEN_Q) + pair * stride,
                    stride,
                    _hidden_packed(params, e, pair, rows),
                ),
                rows,
                pairs + 4 * pair,
                pairs + 4 * (tokens * k + pair),
                4,
            )
        pair += rows
    if param(layer, pb.SHARED_DOWN):
        _down(
            params,
            param(layer, pb.SHARED_DOWN_FORMAT),
            param(layer, pb.SHARED_DOWN),
            0,
            param(params, pb.SHARED_FFN),
            (
                param(params, pb.SHARED_HIDDEN),
                param(params, pb.SHARED_HIDDEN_Q),
                param(params, pb.SHARED_HIDDEN_Q_STRIDE),
                packed(params, pb.SHARED_HIDDEN_P, tokens),
            ),
            tokens,
            0,
            routes + 8 * k,
            4 * (2 * k + 1),
        )
    factor = get_f32(params + 8 * pb.RESIDUAL_SCALE)
    for t in range(tokens):
        at = 4 * t * width + 64 * first
        if factor == np.float32(1.0):
            ew.add(x + at, y + at, GROUP * (end - first))
        else:
            ew.add_scaled(x + at, y + at, factor, GROUP * (end - first))


@njit(**JIT)
def mix_experts(params, layer, tokens):
    """Entry: X += the mixture of experts of a layer, for the normed rows of all tokens of the step. All ranks call it.

    Returns nothing.
    """
    now = phase_begin(params)
    routes = _route(params, layer, tokens)
    _sort(params, routes, tokens)
    _gate_up_of_experts(params, layer, tokens)
    phase_end(params, GATE_UP, now)
    wait_for_ranks(params)
    now = phase_begin(params)
    _down_of_experts(params, layer, tokens, routes)
    phase_end(params, DOWN, now)


ENTRY_ARGUMENTS = 3
