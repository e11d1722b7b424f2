"""Softmax of one KV split, and the combination of splits in ascending order (docs/numerics.md, attention)."""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    LANES,
    exp,
    fma,
    get_f32,
    load_f32,
    load_f32_part,
    maximum,
    put_f32,
    reduce_add,
    reduce_max,
    splat_f32,
    store_f32,
    store_f32_part,
)


@numba.njit(**INNER)
def hide(s, n):
    """Scores of one row's first n positions to -inf, so that their weights are 0; n below 1: none."""
    low = splat_f32(np.float32(-np.inf))
    for i in range(0, n, LANES):
        store_f32_part(s + 4 * i, low, min(n - i, LANES))


@numba.njit(**INNER)
def softmax_weights(s, n, state):
    """Scores of one row's first n positions to weights; m and l of the split go to state[2], state[3]."""
    low = np.float32(-np.inf)
    best = splat_f32(low)
    whole = s + 4 * (n // LANES * LANES)
    for at in range(s, whole, 64):
        best = maximum(load_f32(at), best)
    if n % LANES:
        rest = load_f32_part(whole, n % LANES, low)
        store_f32(whole, rest)
        best = maximum(rest, best)
        whole += 64
    m = reduce_max(best)
    top = splat_f32(m)
    lanes = splat_f32(np.float32(0.0))
    for at in range(s, whole, 64):
        e = exp(load_f32(at) - top)
        store_f32(at, e)
        lanes = lanes + e
    put_f32(state + 8, m)
    put_f32(state + 12, reduce_add(lanes))


@numba.njit(**INNER)
def combine(acc, state, o, m, l, head_dim, first):  # noqa: E741 (l is the sum's name everywhere)
    """Take a split's (m, l, o) into (M, L) at state and O at acc; the first one starts them."""
    if first:
        put_f32(state, m)
        put_f32(state + 4, l)
        for i in range(0, 4 * head_dim, 64):
            store_f32(acc + i, load_f32(o + i))
        return
    old = get_f32(state)
    new = max(old, m)
    a = exp(splat_f32(old) - splat_f32(new))
    b = exp(splat_f32(m) - splat_f32(new))
    put_f32(state, new)
    store_f32_part(state + 4, fma(splat_f32(get_f32(state + 4)), a, splat_f32(l) * b), 1)
    for i in range(0, 4 * head_dim, 64):
        store_f32(acc + i, fma(load_f32(acc + i), a, load_f32(o + i) * b))


@numba.njit(**INNER)
def copy(x, y, n):
    """y = x, n f32 in whole vectors."""
    for i in range(0, 4 * n, 64):
        store_f32(y + i, load_f32(x + i))


@numba.njit(**INNER)
def finish(acc, state, out, head_dim):
    """out = O / L, by one division."""
    r = splat_f32(np.float32(1.0)) / splat_f32(get_f32(state + 4))
    for i in range(0, 4 * head_dim, 64):
        store_f32(out + i, load_f32(acc + i) * r)
