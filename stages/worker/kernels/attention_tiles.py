"""Scores and weighted values of attention: register tiles of query rows against K and V of one split.

K and V are read as f32 from pages of f16, f32 or int8.  Scores are chains over ascending d (16 positions side by
side), values chains over ascending j (16 dims side by side), as docs/numerics.md orders them.

Blocks of few rows are computed here, others in attention_blocks.py.  A single query is bound by memory: while K or V of
64 positions is multiplied, the next 64 positions are prefetched line by line, evenly, so that computing and fetching
overlap, and of f16 and f32 the first quarter of what is read 192 positions later.  The second-level cache reads the
rest of such a run ahead by itself, so more lines are on their way than the core has buffers for.  TABLE and NEXT are in
the scratch that attention.py draws.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shm.pages import KV_SPLIT
from stages.worker.kernels.buffer_sizes import V_DIMS
from stages.worker.kernels.entries import INNER, MERGED
from stages.worker.kernels.simd import (
    INLINE,
    LANES,
    VNNI,
    Tile,
    f16x16,
    f32_tile,
    f32x16,
    get_i64,
    i32x16,
    prefetch,
    splat_f32,
    store_f32,
    tile_load,
    tile_put,
    tile_store,
)
from stages.worker.kernels.simd.register_tiles import tile_operation
from stages.worker.kernels.simd.vectors import FLOAT, call, load, splat

VECTORS = 4  # of 16 positions whose K is fetched together
WIDTH = VECTORS * LANES  # positions of K that are read or converted at once, and dims of a column of V
# Vectors of 16 positions (scores) or 16 dims (values) that a register tile of so many rows spans.  Sums, K or V and a
# factor fit into 32 registers of 512 bits; without AVX-512 a vector takes 2 of 16, and they hold no more than this.
COLUMNS = dict.fromkeys((1, 2, 3, 4, 6), VECTORS) if VNNI else {1: 4, 2: 2, 3: 1, 4: 1, 6: 1}
FOLLOWING = 3 * VECTORS  # addresses of K in NEXT and AFTER
NEXT, AFTER, KV_F32 = 512, 512 + 8 * FOLLOWING, 512 + 16 * FOLLOWING  # bytes from TABLE
ALONE = 4  # rows up to which a tile is a single query's, and reads K and V from far away
# Bytes, with f16, of each 4 KB that is read 192 positions later, prefetched with each dim or position.  Nothing of int8
# is: it would take 1.02 of the time in the second-level cache, and 0.96 to 1.0 from memory.
BEGUN = 16


@intrinsic(prefer_literal=True)
def outer_fma(typingctx: Any, acc: Any, rows: Any, stride: Any, columns: Any) -> Any:
    """acc[m][n] = fma(f32 at rows + m * stride, columns[n], acc[m][n]), for a tile of m * n vectors."""
    if not (isinstance(acc, Tile) and isinstance(columns, Tile)):
        return None
    n_columns = columns.n

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        result, address, step, vectors = args
        for m in range(acc.n // n_columns):
            scalar = builder.load(builder.inttoptr(address, FLOAT.as_pointer()), align=4)
            row = splat(builder, scalar)
            for n in range(n_columns):
                i = m * n_columns + n
                arguments = [row, builder.extract_value(vectors, n), builder.extract_value(result, i)]
                result = builder.insert_value(result, call(builder, "llvm.fma.v16f32", f32x16.ir, arguments), i)
            address = builder.add(address, step)
        return result

    return acc(acc, numba.types.int64, numba.types.int64, columns), codegen


def _emit_scale(builder: Any, vectors: list[Any], factor: Any) -> None:
    vectors[:] = [builder.fmul(vector, factor) for vector in vectors]


tile_scale = tile_operation("tile_scale", (f32x16,), _emit_scale, "Every vector of a tile times one vector.")


# ------------------------------------------------------------------ loading K and V as f32

# The type of a cache is a numba type, carried by an argument without a meaningful value: one source, one
# compilation for each.
F16, F32, INT8 = np.uint16(0), np.float32(0), np.int8(0)


@intrinsic
def code_bytes(typingctx: Any, kv: Any) -> Any:
    """Bytes of a value in this type of cache."""
    width = kv.bitwidth // 8
    return types.int64(kv), lambda context, builder, sig, args: ir.Constant(ir.IntType(64), width)


@intrinsic
def scale_bytes(typingctx: Any, kv: Any) -> Any:
    """Bytes of a scale, 0 where there are none."""
    width = 2 if kv == types.int8 else 0
    return types.int64(kv), lambda context, builder, sig, args: ir.Constant(ir.IntType(64), width)


def emit_factor(builder: Any, kv: Any, over_keys: bool, at: Any) -> Any:
    """What 16 values of this type of cache are multiplied with; of no meaning in a cache without scales.

    at: address of their scales: of 16 positions, or, in FACTORS, the one of a position's 32 dims.
    """
    if kv != types.int8:
        return ir.Constant(f32x16.ir, ir.Undefined)
    if over_keys:
        return builder.fpext(load(builder, at, f16x16.ir), f32x16.ir)
    return splat(builder, load(builder, at, FLOAT))


def emit_converted(builder: Any, kv: Any, at: Any, factor: Any) -> Any:
    """16 values at an address as f32."""
    if kv == types.float32:
        return load(builder, at, f32x16.ir)
    if kv == types.uint16:
        return builder.fpext(load(builder, at, f16x16.ir), f32x16.ir)
    codes = builder.sext(load(builder, at, ir.VectorType(ir.IntType(8), LANES)), i32x16.ir)
    return builder.fmul(factor, builder.sitofp(codes, f32x16.ir))


def _factor(over_keys: bool) -> Any:
    def implementation(typingctx: Any, kv: Any, at: Any) -> Any:
        return f32x16(kv, types.int64), lambda context, builder, sig, args: emit_factor(builder, kv, over_keys, args[1])

    return intrinsic(implementation)


key_factor, value_factor = _factor(True), _factor(False)  # (kv, address of the scales); see `emit_factor`


@intrinsic
def converted(typingctx: Any, kv: Any, at: Any, factor: Any) -> Any:
    """16 values of this type of cache as f32, times their factors."""
    return f32x16(kv, types.int64, f32x16), lambda context, builder, sig, args: emit_converted(builder, kv, *args[1:])


@numba.njit(**MERGED)
def factors_at(table, head_dim):
    """Address of FACTORS; table: TABLE."""
    return table + KV_F32 + 4 * KV_SPLIT * ((head_dim + V_DIMS - 1) // V_DIMS * V_DIMS)


@numba.njit(**INNER)
def convert_factors(kv, table, begin, end, head_dim):
    """The scales of V of positions begin .. end-1 to FACTORS, and of those with which they are 16; table: TABLE.

    Each would take five instructions where it is used, and 32 dims of one query take 10 to 14.
    """
    if scale_bytes(kv) == 0:
        return
    blocks = head_dim // 32
    to = factors_at(table, head_dim) + 64 * blocks * (begin // LANES)
    for group in range(begin // LANES, (end + LANES - 1) // LANES):
        at = get_i64(table + 384 + 8 * group)
        for _ in range(blocks):
            store_f32(to, key_factor(kv, at))
            at, to = at + 2 * LANES, to + 4 * LANES


def _make_scores(rows: int) -> Any:
    """Scores of `rows` rows at 64 positions, COLUMNS of 16 at a time."""
    columns, alone = COLUMNS[rows], rows <= ALONE
    n_tile = rows * columns
    two, four = columns >= 2, columns == 4

    @numba.njit(**INLINE)
    def dim(kv, acc, q, row_bytes, k0, k1, k2, k3, f0, f1, f2, f3):
        """Add one dim of K to the scores."""
        b = tile_put(f32_tile(columns), 0, converted(kv, k0, f0))
        if two:
            b = tile_put(b, 1, converted(kv, k1, f1))
        if four:
            b = tile_put(b, 2, converted(kv, k2, f2))
            b = tile_put(b, 3, converted(kv, k3, f3))
        return outer_fma(acc, q, row_bytes, b)

    @numba.njit(**INNER)
    def part(kv, q, s, table, group, ahead, begun, head_dim, page_tokens, scale):
        """Scores at groups of 16 positions from `group` on.

        ahead, begun: addresses in TABLE, of the places of what is prefetched whole, and of what begins to be.
        """
        acc = f32_tile(n_tile)
        at = table + 8 * group
        k0 = k1 = k2 = k3 = get_i64(at)
        a0 = a1 = a2 = a3 = get_i64(ahead)
        e0 = e1 = e2 = e3 = get_i64(at + 128)
        if two:
            k1, a1, e1 = get_i64(at + 8), get_i64(ahead + 8), get_i64(at + 136)
        if four:
            k2, a2, e2 = get_i64(at + 16), get_i64(ahead + 16), get_i64(at + 144)
            k3, a3, e3 = get_i64(at + 24), get_i64(ahead + 24), get_i64(at + 152)
        b0 = b2 = get_i64(begun)
        if four:
            b2 = get_i64(begun + 16)
        step, row_bytes = code_bytes(kv) * page_tokens, 4 * head_dim
        begun_step = BEGUN // 2 * code_bytes(kv)
        skipped = WIDTH * (LANES * 2 * code_bytes(kv) - begun_step)
        ahead_step = step if ahead < table + 256 else code_bytes(kv) * LANES
        f0 = f1 = f2 = f3 = key_factor(kv, e0)
        for block in range(0, head_dim, 32):
            f0 = key_factor(kv, e0)
            if two:
                f1 = key_factor(kv, e1)
            if four:
                f2, f3 = key_factor(kv, e2), key_factor(kv, e3)
            for d in range(block, min(block + 32, head_dim)):
                if alone:
                    prefetch(a0 + d * ahead_step)
                    if two:
                        prefetch(a1 + d * ahead_step)
                    if four:
                        prefetch(a2 + d * ahead_step)
                        prefetch(a3 + d * ahead_step)
                    if scale_bytes(kv) == 0:
                        prefetch(b0 + d * begun_step)
                        if four:
                            prefetch(b2 + d * begun_step)
                acc = dim(kv, acc, q, row_bytes, k0, k1, k2, k3, f0, f1, f2, f3)
                k0, k1, k2, k3, q = k0 + step, k1 + step, k2 + step, k3 + step, q + 4
            e_step = scale_bytes(kv) * page_tokens
            e0, e1, e2, e3 = e0 + e_step, e1 + e_step, e2 + e_step, e3 + e_step
            if (block + 32) % WIDTH == 0:
                b0, b2 = b0 + skipped, b2 + skipped
        tile_store(tile_scale(acc, splat_f32(scale)), s + 64 * group, 4 * KV_SPLIT, 64, columns)

    @numba.njit(**INNER)
    def scores(kv, q, s, table, group, groups, head_dim, page_tokens, scale):
        """q: rows of head_dim f32; s: rows of 256 f32, written from 16 * group on; table: TABLE.

        The split has `groups` groups of 16 positions.  A tile past them is left out, unless it prefetches.
        """
        # With so few rows memory is what takes time: they prefetch what comes next, a little with each dim.
        # A place that repeats the first is past the end: V comes next.
        ahead = table + 256
        if alone and group + VECTORS < KV_SPLIT // LANES and get_i64(table + 8 * group + 32) != get_i64(table):
            ahead = table + 8 * group + 32
        begun = group + 3 * VECTORS
        begun = table + 8 * begun if begun < KV_SPLIT // LANES else table + 256 + 8 * (begun - KV_SPLIT // LANES)
        stop = VECTORS if alone else min(VECTORS, groups - group)
        for i in range(0, stop, columns):
            part(kv, q, s, table, group + i, ahead + 8 * i, begun + 8 * i, head_dim, page_tokens, scale)

    return scores


def _make_values(rows: int, columns: int) -> Any:
    """Weighted values of `rows` rows in 16 * `columns` dims."""
    n_tile, two, four, alone = rows * columns, columns >= 2, columns == 4, rows <= ALONE

    @numba.njit(**INLINE)
    def position(kv, acc, s, v, e, width):
        """Add one position of V to the values."""
        factor = value_factor(kv, e)  # a block of 32 dims has one scale
        b = tile_put(f32_tile(columns), 0, converted(kv, v, factor))
        if two:
            b = tile_put(b, 1, converted(kv, v + 16 * width, factor))
        if four:
            factor = value_factor(kv, e + 4)
            b = tile_put(b, 2, converted(kv, v + 32 * width, factor))
            b = tile_put(b, 3, converted(kv, v + 48 * width, factor))
        return outer_fma(acc, s, 4 * KV_SPLIT, b)

    @numba.njit(**INNER)
    def values(kv, s, o, table, dim, begin, end, head_dim, page_tokens):
        """o: rows of head_dim f32; adds positions begin .. end-1 of the split to dims from `dim` on."""
        width = code_bytes(kv)
        row_bytes, e_bytes = width * head_dim, 4 * (head_dim // 32)
        factors = factors_at(table, head_dim) + dim // 32 * 4
        span, begun_step = LANES * columns * width, BEGUN // 2 * width  # bytes of a position
        acc = tile_load(f32_tile(n_tile), o + 4 * dim, 4 * head_dim, 64, columns)
        j = begin
        while j < end:
            group, slot = j // LANES, j % LANES
            stop = min(end, LANES * (group + 1))
            v = get_i64(table + 256 + 8 * group) + slot * row_bytes + dim * width
            e = factors + j * e_bytes
            if alone:
                # Prefetched with each position: V 64 positions ahead, or a dim of K of what follows the split; and a
                # little of V 192 positions ahead, or of that K.
                begun = table + 256 + 8 * (group // VECTORS * VECTORS + 3 * VECTORS)
                if group >= VECTORS:
                    begun += NEXT - 256 - 8 * KV_SPLIT // LANES
                b0, b2 = get_i64(begun), get_i64(begun + 16)
                if b0 == 0:  # nothing follows
                    b0 = b2 = get_i64(table + 256)
                begun_at = dim // WIDTH * (WIDTH * LANES * 2 * width) + j % WIDTH * begun_step
                b0, b2 = b0 + begun_at, b2 + begun_at
                following = get_i64(table + 256)
                if group + VECTORS < KV_SPLIT // LANES:
                    following = get_i64(table + 288 + 8 * group)
                if following != get_i64(table + 256):
                    if dim * width % 64 == 0:  # where a line begins
                        ahead = following + slot * row_bytes + dim * width
                        for i in range(j, stop):
                            prefetch(ahead)
                            if span > 64:
                                prefetch(ahead + 64)
                            if span > 128:
                                prefetch(ahead + 128)
                                prefetch(ahead + 192)
                            if scale_bytes(kv) == 0:
                                prefetch(b0)
                                prefetch(b2)
                            b0, b2 = b0 + begun_step, b2 + begun_step
                            ahead += row_bytes
                            acc = position(kv, acc, s + 4 * i, v, e, width)
                            v, e = v + row_bytes, e + e_bytes
                        j = stop
                elif dim % WIDTH == 0 and get_i64(table + NEXT) != 0:
                    step, skipped = width * page_tokens, dim + j % WIDTH
                    k0, k1 = get_i64(table + NEXT) + skipped * step, get_i64(table + NEXT + 8) + skipped * step
                    k2, k3 = get_i64(table + NEXT + 16) + skipped * step, get_i64(table + NEXT + 24) + skipped * step
                    with_keys = min(stop, j + head_dim - skipped)
                    for i in range(j, with_keys):
                        prefetch(k0)
                        prefetch(k1)
                        prefetch(k2)
                        prefetch(k3)
                        if scale_bytes(kv) == 0:
                            prefetch(b0)
                            prefetch(b2)
                        b0, b2 = b0 + begun_step, b2 + begun_step
                        k0, k1, k2, k3 = k0 + step, k1 + step, k2 + step, k3 + step
                        acc = position(kv, acc, s + 4 * i, v, e, width)
                        v, e = v + row_bytes, e + e_bytes
                    j = max(j, with_keys)
            for i in range(j, stop):
                acc = position(kv, acc, s + 4 * i, v, e, width)
                v, e = v + row_bytes, e + e_bytes
            j = stop
        tile_store(acc, o + 4 * dim, 4 * head_dim, 64, columns)

    return values


scores_1, scores_2, scores_3, scores_4, scores_6 = (_make_scores(n) for n in (1, 2, 3, 4, 6))
wide_1, wide_2, wide_3, wide_4, wide_6 = (_make_values(n, COLUMNS[n]) for n in (1, 2, 3, 4, 6))
WIDE_1, WIDE_2, WIDE_3, WIDE_4, WIDE_6 = (LANES * COLUMNS[n] for n in (1, 2, 3, 4, 6))  # dims of a tile
thin_1, thin_3, thin_6 = (_make_values(n, 1) for n in (1, 3, 6))


@numba.njit(**MERGED)
def all_scores(kv, q, s, table, group, groups, rows, head_dim, page_tokens, scale):
    """Scores of all rows at the 64 positions from 16 * group of the split on; it has `groups` groups of 16."""
    r = 0
    while r < rows:
        left = rows - r
        at_q, at_s = q + 4 * r * head_dim, s + 4 * r * KV_SPLIT
        if left >= 6:
            scores_6(kv, at_q, at_s, table, group, groups, head_dim, page_tokens, scale)
            r += 6
        elif left >= 4:
            scores_4(kv, at_q, at_s, table, group, groups, head_dim, page_tokens, scale)
            r += 4
        elif left == 3:
            scores_3(kv, at_q, at_s, table, group, groups, head_dim, page_tokens, scale)
            r += 3
        elif left == 2:
            scores_2(kv, at_q, at_s, table, group, groups, head_dim, page_tokens, scale)
            r += 2
        else:
            scores_1(kv, at_q, at_s, table, group, groups, head_dim, page_tokens, scale)
            r += 1


@numba.njit(**INNER)
def all_values(kv, s, o, table, rows, begin, end, head_dim, page_tokens):
    """Add positions begin .. end-1 of the split to O of all rows."""
    r = 0
    while r < rows:
        left = rows - r
        n = 6 if left >= 6 else (4 if left >= 4 else left)
        at_s, at_o = s + 4 * r * KV_SPLIT, o + 4 * r * head_dim
        dim = 0
        while dim + 64 <= head_dim:
            if n == 6:
                for d in range(dim, dim + 64, WIDE_6):
                    wide_6(kv, at_s, at_o, table, d, begin, end, head_dim, page_tokens)
            elif n == 4:
                for d in range(dim, dim + 64, WIDE_4):
                    wide_4(kv, at_s, at_o, table, d, begin, end, head_dim, page_tokens)
            elif n == 3:
                for d in range(dim, dim + 64, WIDE_3):
                    wide_3(kv, at_s, at_o, table, d, begin, end, head_dim, page_tokens)
            elif n == 2:
                for d in range(dim, dim + 64, WIDE_2):
                    wide_2(kv, at_s, at_o, table, d, begin, end, head_dim, page_tokens)
            else:
                for d in range(dim, dim + 64, WIDE_1):
                    wide_1(kv, at_s, at_o, table, d, begin, end, head_dim, page_tokens)
            dim += 64
        while dim < head_dim:
            if n == 6:
                thin_6(kv, at_s, at_o, table, dim, begin, end, head_dim, page_tokens)
            elif n == 3:
                thin_3(kv, at_s, at_o, table, dim, begin, end, head_dim, page_tokens)
            else:
                for i in range(n):
                    at_si, at_oi = at_s + 4 * i * KV_SPLIT, at_o + 4 * i * head_dim
                    thin_1(kv, at_si, at_oi, table, dim, begin, end, head_dim, page_tokens)
            dim += LANES
        r += n
