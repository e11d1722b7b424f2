"""Scores and weighted values of a block of queries: K and V of a split are converted to f32 once for all of its rows.

Rows are computed in tiles of `TILE_ROWS`; a last tile that is not full computes rows without a meaning behind the
block's, for which all buffers have room.  A row's chains are those of attention_tiles.py, to the bit.

KV_F32 is the memory for what is converted: K of 64 positions (head_dim, 64), then V of a split, in columns of 64 dims:
(ceil(head_dim / 64), 256, 64).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shm.pages import KV_SPLIT
from stages.worker.kernels.attention_tiles import (
    VECTORS,
    code_bytes,
    converted,
    key_factor,
    outer_fma,
    scale_bytes,
    tile_scale,
    value_factor,
)
from stages.worker.kernels.buffer_sizes import BUFFER_ROWS, TILE_ROWS
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    LANES,
    VNNI,
    Tile,
    f32_tile,
    f32x16,
    get_i32,
    get_i64,
    i32x16,
    prefetch_l2,
    put_i32,
    splat_f32,
    splat_i32,
    store_f32,
    tile_load,
    tile_store,
)
from stages.worker.kernels.simd.vectors import FLOAT, I32, call, load, splat

COLUMNS = VECTORS if VNNI else 1  # vectors of a tile's row: sums, K or V and a factor fit into the registers
SUMS = TILE_ROWS * COLUMNS  # vectors of a tile
WIDTH = VECTORS * LANES  # positions whose K is converted at once, and dims of a column of V
K_STEP = 4 * WIDTH  # bytes between dims of converted K, and between positions of converted V
V_COLUMN = KV_SPLIT * K_STEP  # bytes of a column of converted V
ENDS = 4 * BUFFER_ROWS  # bytes from a row's first position of the split, i32, to the end of its positions


# ------------------------------------------------------------------ conversion


@numba.njit(**INNER)
def convert_keys(kv, table, group, to, head_dim, page_tokens):
    """K of the 64 positions from 16 * group of the split on; table: TABLE."""
    at, step = table + 8 * group, code_bytes(kv) * page_tokens
    k0, k1, k2, k3 = get_i64(at), get_i64(at + 8), get_i64(at + 16), get_i64(at + 24)
    at += 128
    e0, e1, e2, e3 = get_i64(at), get_i64(at + 8), get_i64(at + 16), get_i64(at + 24)
    e_step = scale_bytes(kv) * page_tokens
    for block in range(0, head_dim, 32):
        f0, f1, f2, f3 = key_factor(kv, e0), key_factor(kv, e1), key_factor(kv, e2), key_factor(kv, e3)
        for _ in range(block, min(block + 32, head_dim)):
            store_f32(to, converted(kv, k0, f0))
            store_f32(to + 64, converted(kv, k1, f1))
            store_f32(to + 128, converted(kv, k2, f2))
            store_f32(to + 192, converted(kv, k3, f3))
            k0, k1, k2, k3, to = k0 + step, k1 + step, k2 + step, k3 + step, to + K_STEP
        e0, e1, e2, e3 = e0 + e_step, e1 + e_step, e2 + e_step, e3 + e_step


def _make_convert(columns: int) -> Any:
    """Conversion of 16 * `columns` dims of V."""
    four = columns == 4

    @numba.njit(**INNER)
    def convert(kv, table, begin, end, to, dim, head_dim):
        """Dims from `dim` on of positions begin .. end-1; to: of position 0; table: TABLE."""
        width, row = code_bytes(kv), code_bytes(kv) * head_dim
        e_row = scale_bytes(kv) * (head_dim // 32)
        j = begin
        while j < end:
            group = j // LANES
            stop, at = min(end, LANES * (group + 1)), table + 256 + 8 * group
            v = get_i64(at) + j % LANES * row + dim * width
            e = get_i64(at + 128) + j % LANES * e_row + dim // 32 * scale_bytes(kv)
            for place in range(to + K_STEP * j, to + K_STEP * stop, K_STEP):
                factor = value_factor(kv, e)
                store_f32(place, converted(kv, v, factor))
                if four:
                    store_f32(place + 64, converted(kv, v + LANES * width, factor))
                    factor = value_factor(kv, e + 2)
                    store_f32(place + 128, converted(kv, v + 2 * LANES * width, factor))
                    store_f32(place + 192, converted(kv, v + 3 * LANES * width, factor))
                v += row
                e += e_row
            j = stop

    return convert


convert_column, convert_part = _make_convert(VECTORS), _make_convert(1)


@numba.njit(**INNER)
def convert_values(kv, table, begin, end, to, head_dim):
    """V of positions begin .. end-1 of the split; table: TABLE."""
    whole = head_dim // WIDTH * WIDTH
    for dim in range(0, whole, WIDTH):
        convert_column(kv, table, begin, end, to + dim // WIDTH * V_COLUMN, dim, head_dim)
    for dim in range(whole, head_dim, LANES):
        convert_part(kv, table, begin, end, to + whole // WIDTH * V_COLUMN + 4 * (dim - whole), dim, head_dim)


# ------------------------------------------------------------------ which positions a row sees


@numba.njit(**INNER)
def set_limits(limits, begin, first, skipped, rows, group_size, window):
    """Write which positions of a split, which begins at `begin`, each row sees: its first one and their end.

    Row r's query has position first + r // group_size; it sees none before row `skipped`.  Rows past the block's, which
    fill its last tile, see what the last row sees.
    """
    r, seen = skipped, first + skipped // group_size + 1 - begin
    while r < rows:
        end, start = min(KV_SPLIT, seen), np.int64(0)
        if window:
            start = max(start, seen - window)
        stop = r + group_size
        if stop >= rows:
            stop = rows + TILE_ROWS
        for i in range(limits + 4 * r, limits + 4 * stop, 4):
            put_i32(i, start)
            put_i32(i + ENDS, end)
        r, seen = stop, seen + 1


# ------------------------------------------------------------------ products


@numba.njit(**INNER)
def block_scores(q, s, k, rows, head_dim, scale, keys, keys_step, values, values_step):
    """Scores of rows at 64 positions. q: rows of head_dim f32; s: rows of 256, written from `s` on; k: converted K.

    keys, values: each the address of 4 addresses, from which on a line every keys_step, values_step bytes is prefetched
    into the second-level cache, head_dim of them, one with each dim of a tile.
    """
    factor, tiles = splat_f32(scale), 0
    for r in range(0, rows, TILE_ROWS):
        for c in range(0, 64 * VECTORS, 64 * COLUMNS):
            ahead, step = np.int64(0), np.int64(0)
            if tiles < 4:
                ahead, step = get_i64(keys + 8 * tiles), keys_step
            elif tiles < 8:
                ahead, step = get_i64(values + 8 * (tiles - 4)), values_step
            if ahead == 0:
                ahead, step = k, np.int64(0)
            acc, b = f32_tile(SUMS), f32_tile(COLUMNS)
            at_q, at_k = q + 4 * r * head_dim, k + c
            for _ in range(head_dim):
                prefetch_l2(ahead)
                ahead += step
                b = tile_load(b, at_k, 0, 64, COLUMNS)
                acc = outer_fma(acc, at_q, 4 * head_dim, b)
                at_q += 4
                at_k += K_STEP
            tile_store(tile_scale(acc, factor), s + 4 * r * KV_SPLIT + c, 4 * KV_SPLIT, 64, COLUMNS)
            tiles += 1


@intrinsic(prefer_literal=True)
def outer_fma_within(typingctx: Any, acc: Any, rows: Any, stride: Any, columns: Any, j: Any, limits: Any) -> Any:
    """`outer_fma` for the rows m that see position j (i32 in all lanes): acc[m] is left as it is otherwise.

    limits: the address of row 0's limits.
    """
    if not (isinstance(acc, Tile) and isinstance(columns, Tile)):
        return None
    n_columns = columns.n

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        result, address, step, vectors, position, places = args
        for m in range(acc.n // n_columns):
            row = splat(builder, load(builder, address, FLOAT))
            start, end = (
                splat(builder, load(builder, builder.add(places, ir.Constant(places.type, 4 * m + offset)), I32))
                for offset in (0, ENDS)
            )
            is_seen = builder.and_(builder.icmp_signed("<=", start, position), builder.icmp_signed("<", position, end))
            for n in range(n_columns):
                i = m * n_columns + n
                before = builder.extract_value(result, i)
                arguments = [row, builder.extract_value(vectors, n), before]
                after = call(builder, "llvm.fma.v16f32", f32x16.ir, arguments)
                result = builder.insert_value(result, builder.select(is_seen, after, before), i)
            address = builder.add(address, step)
        return result

    return acc(acc, types.int64, types.int64, columns, i32x16, types.int64), codegen


def _make_values(columns: int) -> Any:
    """Weighted values of one tile of rows in 16 * `columns` dims."""
    sums = TILE_ROWS * columns

    @numba.njit(**INNER)
    def values(s, o, v, limits, head_dim):
        """s: weights of the rows; o: their dims; v: V of the dims at position 0, converted; limits: of the rows."""
        acc, b = f32_tile(sums), f32_tile(columns)
        # Later rows begin and end later. Positions that all rows see need no masks.
        begin, end = get_i32(limits), get_i32(limits + ENDS + 4 * (TILE_ROWS - 1))
        shared, common = get_i32(limits + 4 * (TILE_ROWS - 1)), get_i32(limits + ENDS)
        if common <= shared:
            shared = common = end
        at_v = v + K_STEP * begin
        for j in range(begin, shared):
            b = tile_load(b, at_v, 0, 64, columns)
            acc = outer_fma_within(acc, s + 4 * j, 4 * KV_SPLIT, b, splat_i32(j), limits)
            at_v += K_STEP
        for j in range(shared, common):
            b = tile_load(b, at_v, 0, 64, columns)
            acc = outer_fma(acc, s + 4 * j, 4 * KV_SPLIT, b)
            at_v += K_STEP
        for j in range(common, end):
            b = tile_load(b, at_v, 0, 64, columns)
            acc = outer_fma_within(acc, s + 4 * j, 4 * KV_SPLIT, b, splat_i32(j), limits)
            at_v += K_STEP
        tile_store(acc, o, 4 * head_dim, 64, columns)

    return values


wide = _make_values(COLUMNS)
thin = _make_values(1) if COLUMNS > 1 else wide


@numba.njit(**INNER)
def block_values(s, o, v, limits, rows, head_dim):
    """Weighted values of a split for rows, each at the positions that it sees; limits: of the first row."""
    whole = head_dim // (LANES * COLUMNS) * (LANES * COLUMNS)
    for r in range(0, rows, TILE_ROWS):
        at_s, at_o, at_limits = s + 4 * r * KV_SPLIT, o + 4 * r * head_dim, limits + 4 * r
        for dim in range(0, whole, LANES * COLUMNS):
            at_v = v + dim // WIDTH * V_COLUMN + dim % WIDTH * 4
            wide(at_s, at_o + 4 * dim, at_v, at_limits, head_dim)
        for dim in range(whole, head_dim, LANES):
            at_v = v + dim // WIDTH * V_COLUMN + dim % WIDTH * 4
            thin(at_s, at_o + 4 * dim, at_v, at_limits, head_dim)
