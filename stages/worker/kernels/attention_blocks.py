"""Scores and weighted values of a block of queries: K and V of a split are converted to f32 once for all of its rows.

Rows are computed in tiles of `TILE_ROWS`; a last tile that is not full computes rows without a meaning behind the
block's, for which all buffers have room.  A row's chains are those of attention_tiles.py, to the bit.

KV_F32 is the memory for what is converted: 64 dims of K of 64 positions (64, 64), which fit into the first-level cache
beside Q; then V of a split, in columns of 64 dims: (ceil(head_dim / 64), 256, 64).
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
    WIDTH,
    code_bytes,
    converted,
    factors_at,
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
    prefetch,
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
UNROLLED = 4  # dims of K that are multiplied in each turn of a loop
K_STEP = 4 * WIDTH  # bytes between dims of converted K, and between positions of converted V
V_AHEAD = 8 * K_STEP  # bytes of converted V between what is fetched from the second-level cache and what is multiplied
V_COLUMN = KV_SPLIT * K_STEP  # bytes of a column of converted V
ENDS = 4 * BUFFER_ROWS  # bytes from a row's first position of the split, i32, to the end of its positions


# ------------------------------------------------------------------ conversion


@numba.njit(**INNER)
def convert_keys(kv, table, group, to, dim, end, page_tokens):
    """Dims dim .. end-1 of K of the 64 positions from 16 * group of the split on; table: TABLE.

    dim: a multiple of 32.
    """
    at, step = table + 8 * group, code_bytes(kv) * page_tokens
    skipped, e_step = dim * step, scale_bytes(kv) * page_tokens
    k0, k1 = get_i64(at) + skipped, get_i64(at + 8) + skipped
    k2, k3 = get_i64(at + 16) + skipped, get_i64(at + 24) + skipped
    at += 128
    skipped = dim // 32 * e_step
    e0, e1 = get_i64(at) + skipped, get_i64(at + 8) + skipped
    e2, e3 = get_i64(at + 16) + skipped, get_i64(at + 24) + skipped
    for block in range(dim, end, 32):
        f0, f1, f2, f3 = key_factor(kv, e0), key_factor(kv, e1), key_factor(kv, e2), key_factor(kv, e3)
        for _ in range(block, min(block + 32, end)):
            store_f32(to, converted(kv, k0, f0))
            store_f32(to + 64, converted(kv, k1, f1))
            store_f32(to + 128, converted(kv, k2, f2))
            store_f32(to + 192, converted(kv, k3, f3))
            k0, k1, k2, k3, to = k0 + step, k1 + step, k2 + step, k3 + step, to + K_STEP
        e0, e1, e2, e3 = e0 + e_step, e1 + e_step, e2 + e_step, e3 + e_step


def _named(function: Any, columns: int) -> Any:
    """Compile a function of so many columns, with their number in its name.

    The symbols of two functions with one name and the same arguments differ by a number alone: the count of functions
    in the process that compiled them.  Where a process loads the code of several processes from numba's cache, one
    symbol would stand for both.  (Entries that are stored as object code are linked apart.)
    """
    function.__name__ = function.__qualname__ = f"{function.__name__}_{columns}"
    return numba.njit(**INNER)(function)


def _make_convert(columns: int) -> Any:
    """Conversion of 16 * `columns` dims of V."""
    four = columns == 4

    def convert(kv, table, begin, end, to, dim, head_dim):
        """Dims from `dim` on of positions begin .. end-1; to: of position 0; table: TABLE."""
        width, row = code_bytes(kv), code_bytes(kv) * head_dim
        e_row = 4 * (head_dim // 32)
        j = begin
        while j < end:
            group = j // LANES
            stop, at = min(end, LANES * (group + 1)), table + 256 + 8 * group
            v = get_i64(at) + j % LANES * row + dim * width
            e = factors_at(table, head_dim) + j * e_row + dim // 32 * 4
            for place in range(to + K_STEP * j, to + K_STEP * stop, K_STEP):
                factor = value_factor(kv, e)
                store_f32(place, converted(kv, v, factor))
                if four:
                    store_f32(place + 64, converted(kv, v + LANES * width, factor))
                    factor = value_factor(kv, e + 4)
                    store_f32(place + 128, converted(kv, v + 2 * LANES * width, factor))
                    store_f32(place + 192, converted(kv, v + 3 * LANES * width, factor))
                v += row
                e += e_row
            j = stop

    return _named(convert, columns)


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


@intrinsic(prefer_literal=True)
def outer_fmas(typingctx: Any, acc: Any, rows: Any, stride: Any, columns: Any, turns: Any) -> Any:
    """`outer_fma` `turns` times (a literal): with the f32 that follow each other in rows, and with vectors of f32 at
    `columns`, `K_STEP` bytes further each time.

    Written out, so that few other instructions are among the products: those compete for the same ports.
    """
    if not (isinstance(acc, Tile) and isinstance(turns, types.IntegerLiteral)):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        result, address, step, at, _ = args
        sums = [builder.extract_value(result, i) for i in range(acc.n)]
        places = [address]
        for _ in range(1, acc.n // COLUMNS):
            places.append(builder.add(places[-1], step))
        for turn in range(turns.literal_value):
            offsets = [ir.Constant(at.type, K_STEP * turn + 64 * n) for n in range(COLUMNS)]
            vectors = [load(builder, builder.add(at, offset), f32x16.ir) for offset in offsets]
            for m, place in enumerate(places):
                row = splat(builder, load(builder, builder.add(place, ir.Constant(at.type, 4 * turn)), FLOAT))
                for n, vector in enumerate(vectors):
                    i = m * COLUMNS + n
                    sums[i] = call(builder, "llvm.fma.v16f32", f32x16.ir, [row, vector, sums[i]])
        for i, total in enumerate(sums):
            result = builder.insert_value(result, total, i)
        return result

    return acc(acc, types.int64, types.int64, types.int64, turns), codegen


@numba.njit(**INNER)
def block_scores(q, s, k, rows, dim, end, head_dim, scale, keys, keys_step, values, values_step):
    """Chains of scores of rows at 64 positions over dims dim .. end-1, whose converted K is at `k`.

    q: rows of head_dim f32; s: rows of 256, from `s` on: the chains so far (dim 0: none), then longer; the last dims
    end them, times `scale`.
    keys, values: each the address of 4 addresses, from which on a line every keys_step, values_step bytes is prefetched
    into the second-level cache, head_dim of them, one with each dim of a tile.
    """
    factor, tiles = splat_f32(scale if end == head_dim else np.float32(1.0)), 0
    for r in range(0, rows, TILE_ROWS):
        for c in range(0, 64 * VECTORS, 64 * COLUMNS):
            ahead, step = np.int64(0), np.int64(0)
            if tiles < 4:
                ahead, step = get_i64(keys + 8 * tiles), keys_step
            elif tiles < 8:
                ahead, step = get_i64(values + 8 * (tiles - 4)), values_step
            if ahead == 0:
                ahead, step = k, np.int64(0)
            ahead += dim * step
            at_q, at_k, at_s = q + 4 * (r * head_dim + dim), k + c, s + 4 * r * KV_SPLIT + c
            acc = f32_tile(SUMS)
            if dim != 0:
                acc = tile_load(acc, at_s, 4 * KV_SPLIT, 64, COLUMNS)
            for _ in range(dim, end, UNROLLED):
                for _ in range(UNROLLED):
                    prefetch_l2(ahead)
                    ahead += step
                acc = outer_fmas(acc, at_q, 4 * head_dim, at_k, UNROLLED)
                at_q += 4 * UNROLLED
                at_k += K_STEP * UNROLLED
            tile_store(tile_scale(acc, factor), at_s, 4 * KV_SPLIT, 64, COLUMNS)
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
            for line in range(0, 64 * columns, 64):
                prefetch(at_v + V_AHEAD + line)
            b = tile_load(b, at_v, 0, 64, columns)
            acc = outer_fma(acc, s + 4 * j, 4 * KV_SPLIT, b)
            at_v += K_STEP
        for j in range(common, end):
            b = tile_load(b, at_v, 0, 64, columns)
            acc = outer_fma_within(acc, s + 4 * j, 4 * KV_SPLIT, b, splat_i32(j), limits)
            at_v += K_STEP
        tile_store(acc, o, 4 * head_dim, 64, columns)

    return _named(values, columns)


wide = _make_values(COLUMNS)
thin = _make_values(1) if COLUMNS > 1 else wide


@numba.njit(**INNER)
def tile_values(s, o, v, limits, head_dim):
    """Weighted values of a split for one tile of rows, each at the positions that it sees; limits: of its first row."""
    whole = head_dim // (LANES * COLUMNS) * (LANES * COLUMNS)
    for dim in range(0, whole, LANES * COLUMNS):
        wide(s, o + 4 * dim, v + dim // WIDTH * V_COLUMN + dim % WIDTH * 4, limits, head_dim)
    for dim in range(whole, head_dim, LANES):
        thin(s, o + 4 * dim, v + dim // WIDTH * V_COLUMN + dim % WIDTH * 4, limits, head_dim)
