"""Softmax of one KV split, and the combination of splits in ascending order (docs/numerics.md, attention)."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import BUFFER_ROWS
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    LANES,
    VNNI,
    Tile,
    exp,
    f32_tile,
    f32x16,
    fma,
    fold,
    get_f32,
    load_f32,
    load_f32_part,
    maximum,
    put_f32,
    reduce_add,
    reduce_max,
    splat_f32,
    splat_f32_at,
    store_f32,
    store_f32_part,
    tile_exp,
    tile_load,
    tile_operation,
    tile_store,
)
from stages.worker.kernels.simd.arithmetic import extreme

AT_ONCE = 4 if VNNI else 2  # vectors whose exponentials are computed at once
PADDED = 64  # positions: rows of scores are filled up to whole tiles of 4 vectors
# Bytes from M in the state of rows to their L, then m and l of a split, and to factors of M and m.
STATE_TOTAL, STATE_M, STATE_L, STATE_A, STATE_B = (4 * BUFFER_ROWS * n for n in range(1, 6))


def _emit_fill(builder: Any, vectors: list[Any], value: Any) -> None:
    vectors[:] = [value] * len(vectors)


def _emit_subtract(builder: Any, vectors: list[Any], value: Any) -> None:
    vectors[:] = [builder.fsub(vector, value) for vector in vectors]


def _emit_max(builder: Any, vectors: list[Any], others: list[Any]) -> None:
    vectors[:] = [extreme(">")(builder, a, b) for a, b in zip(vectors, others, strict=True)]


tile_fill = tile_operation("tile_fill", (f32x16,), _emit_fill, "Every vector of a tile replaced by one.")
tile_subtract = tile_operation("tile_subtract", (f32x16,), _emit_subtract, "Every vector of a tile minus one.")
tile_max = tile_operation("tile_max", (Tile,), _emit_max, "a > b ? a : b of the vectors of two tiles.")
fold_max = fold("fold_max", extreme(">"), "start, then v > that ? v : that, of the vectors v in their order.")
fold_add = fold("fold_add", lambda b, v, total: b.fadd(total, v), "start + the vectors, in their order.")


@numba.njit(**INNER)
def hide(s, n):
    """Scores of one row's first n positions to -inf, so that their weights are 0; n below 1: none."""
    low = splat_f32(np.float32(-np.inf))
    for i in range(0, n, LANES):
        store_f32_part(s + 4 * i, low, min(n - i, LANES))


@numba.njit(**INNER)
def _pad(s, n):
    """Scores of one row from n on to -inf, up to the end of its 64 positions; returns how many there are then."""
    low = np.float32(-np.inf)
    at = s + 4 * (n // LANES * LANES)
    padded = (n + PADDED - 1) // PADDED * PADDED
    if n % LANES:
        store_f32(at, load_f32_part(at, n % LANES, low))
        at += 64
    while at < s + 4 * padded:
        store_f32(at, splat_f32(low))
        at += 64
    return padded


@numba.njit(**INNER)
def greatest_score(s, n, m_at):
    """m of one row's first n scores to m_at. What follows them, up to the end of 64 positions, becomes -inf."""
    low = splat_f32(np.float32(-np.inf))
    best = tile_fill(f32_tile(4), low)
    for at in range(s, s + 4 * _pad(s, n), 256):
        best = tile_max(tile_load(best, at, 0, 64, 4), best)
    put_f32(m_at, reduce_max(fold_max(best, low)))


@numba.njit(**INNER)
def softmax_weights(s, n, m_at, l_at):
    """Scores of one row's first n positions to weights, after `greatest_score`; l of the split to l_at."""
    top, lanes = splat_f32_at(m_at), splat_f32(np.float32(0.0))
    end = s + 4 * ((n + PADDED - 1) // PADDED * PADDED)
    for at in range(s, end, 64 * AT_ONCE):
        e = tile_exp(tile_subtract(tile_load(f32_tile(AT_ONCE), at, 0, 64, AT_ONCE), top))
        tile_store(e, at, 0, 64, AT_ONCE)
        lanes = fold_add(e, lanes)
    put_f32(l_at, reduce_add(lanes))


@numba.njit(**INNER)
def combine_rows(acc, o, state, begun, first, reached, head_dim):
    """Take a split's m, l and O of rows begun .. reached-1 into M, L and ACC; rows from `first` on start with it.

    state: arrays M, L, m, l, a, b of `BUFFER_ROWS` f32, in which rows that have not started mean nothing.
    """
    for at in range(state + 4 * begun, state + 4 * first, 64):
        old, m = load_f32(at), load_f32(at + STATE_M)
        new = maximum(old, m)
        a, b = exp(old - new), exp(m - new)
        store_f32(at, new)
        store_f32(at + STATE_TOTAL, fma(load_f32(at + STATE_TOTAL), a, load_f32(at + STATE_L) * b))
        store_f32(at + STATE_A, a)
        store_f32(at + STATE_B, b)
    for r in range(begun, first):
        a, b = splat_f32_at(state + STATE_A + 4 * r), splat_f32_at(state + STATE_B + 4 * r)
        for i in range(4 * r * head_dim, 4 * (r + 1) * head_dim, 64):
            store_f32(acc + i, fma(load_f32(acc + i), a, load_f32(o + i) * b))
    for at in range(state + 4 * first, state + 4 * reached, 4):
        put_f32(at, get_f32(at + STATE_M))
        put_f32(at + STATE_TOTAL, get_f32(at + STATE_L))
    copy(o + 4 * first * head_dim, acc + 4 * first * head_dim, (reached - first) * head_dim)


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


@numba.njit(**INNER)
def finish_rows(acc, state, out, out_stride, rows, group_size, head_dim):
    """out = O / L for rows (query, head of the group); the heads of a query follow each other in `out`."""
    one = splat_f32(np.float32(1.0))
    for at in range(state, state + 4 * rows, 64):
        store_f32(at + STATE_A, one / load_f32(at + STATE_TOTAL))
    to, left = out, group_size
    for r in range(rows):
        factor = splat_f32_at(state + STATE_A + 4 * r)
        for i in range(0, 4 * head_dim, 64):
            store_f32(to + i, load_f32(acc + i) * factor)
        acc += 4 * head_dim
        to += 4 * head_dim
        left -= 1
        if left == 0:
            to += out_stride - 4 * group_size * head_dim
            left = group_size
