"""Attention over KV pages: one block of queries against one kv head, segment by segment.

A *block* is some queries of one sequence, times the heads that share a kv head: its *rows*.  K and V are
read once for all of them.  Every row's arithmetic is that of docs/numerics.md, whatever shares its
block: scores are chains over ascending d (16 positions side by side), values chains over ascending j
(16 dims side by side), segments of 256 positions merge in ascending order.

Scratch of one rank, in f32 words from `scratch` (see `scratch_words`):

    Q       (ROWS, head_dim)     the block's queries, packed
    S       (ROWS, 256)          scores, then weights, of the segment under way
    O       (ROWS, head_dim)     weighted values of the segment under way
    ACC     (ROWS, head_dim)     merged so far
    STATE   (ROWS, 4)            M, L so far; m, l of the segment
    TABLE   (4, 16) addresses    of each 16 positions of the segment: K, K scales, V, V scales
    NEXT    (4) addresses        of K of the first 64 positions that are read after the segment, or 0
    AFTER   (4) addresses        the same of what is read after the call; the caller's to write (`announce`)

A single query is bound by memory: while K or V of 64 positions is multiplied, the next 64 are asked for line
by line, evenly, so that computing and fetching overlap.

`ENTRIES` has the function for each type of cache, an entry (linkage.py).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stages.worker.kernels.entries import INNER, MERGED
from stages.worker.kernels.simd import (
    JIT,
    LANES,
    Tile,
    exp,
    f16x16,
    f32_tile,
    f32x16,
    fma,
    get_f32,
    get_i32,
    get_i64,
    i32x16,
    load_f32,
    load_f32_part,
    maximum,
    prefetch,
    put_f32,
    put_i64,
    reduce_add,
    reduce_max,
    splat_f32,
    store_f32,
    store_f32_part,
    tile_load,
    tile_put,
    tile_store,
)
from stages.worker.kernels.simd.register_tiles import tile_operation
from stages.worker.kernels.simd.vectors import FLOAT, call, load, splat

SEGMENT = 256
ROWS = 24  # most rows of a block
VECTORS = 4  # of 16 positions (scores) or 16 dims (values) that a register tile spans
NEXT, AFTER = 512, 544  # bytes from TABLE
ALONE = 4  # rows up to which a tile is a single query's, and reads K and V from far away


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


def _reader(over_keys: bool) -> Any:
    def implementation(typingctx: Any, kv: Any, at: Any, scales: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _, place, factors = args
            if kv == types.float32:
                return load(builder, place, f32x16.ir)
            if kv == types.uint16:
                return builder.fpext(load(builder, place, f16x16.ir), f32x16.ir)
            codes = builder.sext(load(builder, place, ir.VectorType(ir.IntType(8), LANES)), i32x16.ir)
            if over_keys:
                factor = builder.fpext(load(builder, factors, f16x16.ir), f32x16.ir)
            else:
                factor = splat(builder, builder.fpext(load(builder, factors, ir.HalfType()), FLOAT))
            return builder.fmul(factor, builder.sitofp(codes, f32x16.ir))

        return f32x16(kv, types.int64, types.int64), codegen

    return intrinsic(implementation)


read_key = _reader(True)  # (kv, address of 16 codes, of their 16 scales): 16 positions of one dim
read_value = _reader(False)  # (kv, address of 16 codes, of their one scale): 16 dims of one position


def _make_scores(rows: int) -> Any:
    """Scores of `rows` rows at 64 positions."""
    n_tile, columns, alone = rows * VECTORS, VECTORS, rows <= ALONE

    @numba.njit(**INNER)
    def scores(kv, q, s, table, group, head_dim, page_tokens, scale):
        """q: rows of head_dim f32; s: rows of 256 f32, written from 16 * group on; table: TABLE."""
        acc = f32_tile(n_tile)
        b = f32_tile(columns)
        at = table + 8 * group
        k0, k1, k2, k3 = get_i64(at), get_i64(at + 8), get_i64(at + 16), get_i64(at + 24)
        step = code_bytes(kv) * page_tokens
        # With so few rows memory is what takes time: ask for what comes next, a little with each dim.
        # A place that repeats the first is past the end: V comes next.
        a0 = a1 = a2 = a3 = ask = np.int64(0)
        if alone:
            if group + VECTORS < SEGMENT // LANES and get_i64(at + 32) != get_i64(table):
                a0, a1, a2, a3, ask = get_i64(at + 32), get_i64(at + 40), get_i64(at + 48), get_i64(at + 56), step
            else:
                v = table + 256
                a0, a1, a2, a3 = get_i64(v), get_i64(v + 8), get_i64(v + 16), get_i64(v + 24)
                ask = code_bytes(kv) * LANES
        if scale_bytes(kv):
            e0, e1, e2, e3 = get_i64(at + 128), get_i64(at + 136), get_i64(at + 144), get_i64(at + 152)
            for d in range(head_dim):
                e = d // 32 * 2 * page_tokens
                if alone:
                    prefetch(a0 + d * ask)
                    prefetch(a1 + d * ask)
                    prefetch(a2 + d * ask)
                    prefetch(a3 + d * ask)
                b = tile_put(b, 0, read_key(kv, k0 + d * step, e0 + e))
                b = tile_put(b, 1, read_key(kv, k1 + d * step, e1 + e))
                b = tile_put(b, 2, read_key(kv, k2 + d * step, e2 + e))
                b = tile_put(b, 3, read_key(kv, k3 + d * step, e3 + e))
                acc = outer_fma(acc, q + 4 * d, 4 * head_dim, b)
        else:
            for d in range(head_dim):
                if alone:
                    prefetch(a0 + d * ask)
                    prefetch(a1 + d * ask)
                    prefetch(a2 + d * ask)
                    prefetch(a3 + d * ask)
                b = tile_put(b, 0, read_key(kv, k0 + d * step, 0))
                b = tile_put(b, 1, read_key(kv, k1 + d * step, 0))
                b = tile_put(b, 2, read_key(kv, k2 + d * step, 0))
                b = tile_put(b, 3, read_key(kv, k3 + d * step, 0))
                acc = outer_fma(acc, q + 4 * d, 4 * head_dim, b)
        tile_store(tile_scale(acc, splat_f32(scale)), s + 64 * group, 4 * SEGMENT, 64, columns)

    return scores


@numba.njit(**MERGED)
def ask_for_keys(table, i, head_dim, step):
    """Prefetch part i of 64 of the K of NEXT; rows of a dim are `step` bytes apart."""
    at = table + NEXT
    k0, k1, k2, k3 = get_i64(at), get_i64(at + 8), get_i64(at + 16), get_i64(at + 24)
    for d in range(i * head_dim // 64, (i + 1) * head_dim // 64):
        prefetch(k0 + d * step)
        prefetch(k1 + d * step)
        prefetch(k2 + d * step)
        prefetch(k3 + d * step)


def _make_values(rows: int, columns: int) -> Any:
    """Weighted values of `rows` rows in 16 * `columns` dims."""
    n_tile, wide, alone = rows * columns, columns == VECTORS, rows <= ALONE

    @numba.njit(**INNER)
    def values(kv, s, o, table, dim, begin, end, head_dim, page_tokens):
        """o: rows of head_dim f32; adds positions begin .. end-1 of the segment to dims from `dim` on."""
        width, scaled = code_bytes(kv), scale_bytes(kv) > 0
        b = f32_tile(columns)
        acc = tile_load(f32_tile(n_tile), o + 4 * dim, 4 * head_dim, 64, columns)
        j = begin
        while j < end:
            group = j // LANES
            stop = min(end, LANES * (group + 1))
            v = get_i64(table + 256 + 8 * group) + width * ((j % LANES) * head_dim + dim)
            e = np.int64(0)
            if scaled:
                e = get_i64(table + 384 + 8 * group) + 2 * ((j % LANES) * (head_dim // 32))
            # Asked for in passing: V of 64 positions on, or K of what comes after the segment.
            ahead, row_bytes, rest = np.int64(0), width * head_dim, False
            if alone:
                if group + VECTORS < SEGMENT // LANES and get_i64(table + 288 + 8 * group) != get_i64(table + 256):
                    ahead = get_i64(table + 288 + 8 * group) + (j % LANES) * row_bytes if dim == 0 else np.int64(0)
                else:
                    rest = dim + LANES * columns >= head_dim and get_i64(table + NEXT) != 0
            for i in range(j, stop):
                if alone:
                    if ahead != 0:
                        for line in range(0, row_bytes, 64):
                            prefetch(ahead + line)
                        ahead += row_bytes
                    elif rest:
                        ask_for_keys(table, i % (VECTORS * LANES), head_dim, width * page_tokens)
                # A block of 32 dims has one scale.
                b = tile_put(b, 0, read_value(kv, v, e + 2 * (dim // 32)))
                if wide:
                    b = tile_put(b, 1, read_value(kv, v + 16 * width, e + 2 * ((dim + 16) // 32)))
                    b = tile_put(b, 2, read_value(kv, v + 32 * width, e + 2 * ((dim + 32) // 32)))
                    b = tile_put(b, 3, read_value(kv, v + 48 * width, e + 2 * ((dim + 48) // 32)))
                acc = outer_fma(acc, s + 4 * i, 4 * SEGMENT, b)
                v += width * head_dim
                if scaled:
                    e += 2 * (head_dim // 32)
            j = stop
        tile_store(acc, o + 4 * dim, 4 * head_dim, 64, columns)

    return values


# ------------------------------------------------------------------ softmax and merging


@numba.njit(**INNER)
def _weigh(s, n, state):
    """Scores of one row's first n positions to weights; m and l of the segment go to state[2], state[3]."""
    low = np.float32(-np.inf)
    best = splat_f32(low)
    end = (n + LANES - 1) // LANES * LANES
    for i in range(0, end, LANES):
        best = maximum(load_f32_part(s + 4 * i, min(n - i, LANES), low), best)
    m = reduce_max(best)
    top = splat_f32(m)
    lanes = splat_f32(np.float32(0.0))
    for i in range(0, end, LANES):
        e = exp(load_f32_part(s + 4 * i, min(n - i, LANES), low) - top)
        store_f32(s + 4 * i, e)
        lanes = lanes + e
    put_f32(state + 8, m)
    put_f32(state + 12, reduce_add(lanes))


@numba.njit(**INNER)
def merge(acc, state, o, m, l, head_dim, first):  # noqa: E741 (l is the sum's name everywhere)
    """Take a segment's (m, l, o) into (M, L) at state and O at acc; the first one starts them."""
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


# ------------------------------------------------------------------ scratch and units


def scratch_words(head_dim: int) -> int:
    """f32 words of one rank's scratch."""
    return ROWS * (3 * head_dim + SEGMENT + 4) + 4 * 16 * 2 + 64


@numba.njit(**MERGED)
def table_at(scratch, head_dim):
    """Address of TABLE."""
    return scratch + 4 * ROWS * (3 * head_dim + SEGMENT + 4)


@numba.njit(**INNER)
def announce(to, pages, head_at, page_bytes, tables, segment, last, page_tokens, k_width):
    """Write K's addresses of the first 64 positions of a segment of a row to `to` (NEXT or AFTER).

    Of the row's last position (`last`) on, the last 16 are named again; a `segment` past it or below 0 is nothing.
    """
    for group in range(VECTORS):
        at = np.int64(0)
        if 0 <= segment * SEGMENT <= last:
            position = min(segment * SEGMENT + LANES * group, last // LANES * LANES)
            page = get_i32(tables + 4 * (position // page_tokens))
            at = pages + page * page_bytes + head_at + position % page_tokens * k_width
        put_i64(to + 8 * group, at)


@numba.njit(**INNER)
def _fill_table(table, pages, head_at, page_bytes, tables, segment, n, page_tokens, k_width, e_width, head_dim):
    """TABLE for the first n positions of a segment of the row whose page table stands at `tables` (i32).

    head_at: byte of this layer's and head's K in a page; k_width, e_width: bytes of a code, of a scale.
    Places past n repeat the first one: what is read there is not used.
    """
    codes = head_dim * page_tokens * k_width
    both = codes + head_dim // 32 * page_tokens * e_width
    # Tiles read four places at once, and ask for the four after them.
    groups = min(SEGMENT, (n + 2 * VECTORS * LANES - 1) // (VECTORS * LANES) * VECTORS * LANES) // LANES
    for group in range(groups):
        position = LANES * group if LANES * group < n else 0
        at = segment * SEGMENT + position
        page = get_i32(tables + 4 * (at // page_tokens))
        slot = at % page_tokens
        base = pages + page * page_bytes + head_at
        put_i64(table + 8 * group, base + slot * k_width)
        put_i64(table + 128 + 8 * group, base + codes + slot * e_width)
        put_i64(table + 256 + 8 * group, base + both + slot * head_dim * k_width)
        put_i64(table + 384 + 8 * group, base + both + codes + slot * (head_dim // 32) * e_width)


scores_1, scores_2, scores_3, scores_4, scores_6 = (_make_scores(n) for n in (1, 2, 3, 4, 6))
wide_1, wide_2, wide_3, wide_4, wide_6 = (_make_values(n, VECTORS) for n in (1, 2, 3, 4, 6))
thin_1, thin_3, thin_6 = (_make_values(n, 1) for n in (1, 3, 6))


@numba.njit(**MERGED)
def all_scores(kv, q, s, table, group, rows, head_dim, page_tokens, scale):
    r = 0
    while r < rows:
        left = rows - r
        at_q, at_s = q + 4 * r * head_dim, s + 4 * r * SEGMENT
        if left >= 6:
            scores_6(kv, at_q, at_s, table, group, head_dim, page_tokens, scale)
            r += 6
        elif left >= 4:
            scores_4(kv, at_q, at_s, table, group, head_dim, page_tokens, scale)
            r += 4
        elif left == 3:
            scores_3(kv, at_q, at_s, table, group, head_dim, page_tokens, scale)
            r += 3
        elif left == 2:
            scores_2(kv, at_q, at_s, table, group, head_dim, page_tokens, scale)
            r += 2
        else:
            scores_1(kv, at_q, at_s, table, group, head_dim, page_tokens, scale)
            r += 1


@numba.njit(**INNER)
def all_values(kv, s, o, table, rows, begin, end, head_dim, page_tokens):
    """Positions begin .. end-1 for all rows."""
    r = 0
    while r < rows:
        left = rows - r
        n = 6 if left >= 6 else (4 if left >= 4 else left)
        at_s, at_o = s + 4 * r * SEGMENT, o + 4 * r * head_dim
        dim = 0
        while dim + 64 <= head_dim:
            if n == 6:
                wide_6(kv, at_s, at_o, table, dim, begin, end, head_dim, page_tokens)
            elif n == 4:
                wide_4(kv, at_s, at_o, table, dim, begin, end, head_dim, page_tokens)
            elif n == 3:
                wide_3(kv, at_s, at_o, table, dim, begin, end, head_dim, page_tokens)
            elif n == 2:
                wide_2(kv, at_s, at_o, table, dim, begin, end, head_dim, page_tokens)
            else:
                wide_1(kv, at_s, at_o, table, dim, begin, end, head_dim, page_tokens)
            dim += 64
        while dim < head_dim:
            if n == 6:
                thin_6(kv, at_s, at_o, table, dim, begin, end, head_dim, page_tokens)
            elif n == 3:
                thin_3(kv, at_s, at_o, table, dim, begin, end, head_dim, page_tokens)
            else:
                for i in range(n):
                    at_si, at_oi = at_s + 4 * i * SEGMENT, at_o + 4 * i * head_dim
                    thin_1(kv, at_si, at_oi, table, dim, begin, end, head_dim, page_tokens)
            dim += LANES
        r += n


@numba.njit(**MERGED)
def segment(
    kv, scratch, pages, head_at, page_bytes, tables, index, first, rows, group_size, head_dim, page_tokens, scale
):
    """Segment `index` for rows whose queries, packed in Q, stand at positions first + row // group_size.

    Row r sees positions up to its own; leaves m, l in STATE and the weighted values in O.
    Returns the first row that reaches into the segment.
    """
    s = scratch + 4 * ROWS * head_dim
    o = s + 4 * ROWS * SEGMENT
    state = o + 8 * ROWS * head_dim
    table = table_at(scratch, head_dim)
    begin = index * SEGMENT
    skipped = max(0, begin - first) * group_size
    last = first + (rows - 1) // group_size
    n = min(SEGMENT, last + 1 - begin)
    _fill_table(
        table, pages, head_at, page_bytes, tables, index, n, page_tokens, code_bytes(kv), scale_bytes(kv), head_dim
    )
    todo = rows - skipped
    at_q, at_s = scratch + 4 * skipped * head_dim, s + 4 * skipped * SEGMENT
    at_o = o + 4 * skipped * head_dim
    for group in range(0, (n + LANES - 1) // LANES, VECTORS):
        all_scores(kv, at_q, at_s, table, group, todo, head_dim, page_tokens, scale)
    zero = splat_f32(np.float32(0.0))
    for i in range(0, 4 * todo * head_dim, 64):
        store_f32(at_o + i, zero)
    for r in range(skipped, rows):
        seen = min(SEGMENT, first + r // group_size + 1 - begin)
        _weigh(s + 4 * r * SEGMENT, seen, state + 16 * r)
    common = min(SEGMENT, first + skipped // group_size + 1 - begin)
    all_values(kv, at_s, at_o, table, todo, 0, common, head_dim, page_tokens)
    # Past the first query's position the rows part: those of one query go on together.
    query = skipped // group_size + 1
    while query * group_size < rows:
        seen = min(SEGMENT, first + query + 1 - begin)
        if seen > common:
            r = query * group_size
            at_sr, at_or = s + 4 * r * SEGMENT, o + 4 * r * head_dim
            all_values(kv, at_sr, at_or, table, group_size, common, seen, head_dim, page_tokens)
        query += 1
    return skipped


@numba.njit(**MERGED)
def attend(
    kv,
    scratch,
    pages,
    head_at,
    page_bytes,
    tables,
    first,
    queries,
    group_size,
    head_dim,
    page_tokens,
    scale_at,
    out,
    out_stride,
    only,
):
    """All segments for `queries` queries packed in Q, rows (query, head of the group), to `out`.

    out: f32 of the group's first head for the first query; the group's heads follow each other.
    With `only` >= 0: nothing but that segment, whose results stay in STATE and O.  AFTER is read.
    """
    rows = queries * group_size
    o = scratch + 4 * ROWS * (head_dim + SEGMENT)
    acc = o + 4 * ROWS * head_dim
    state = acc + 4 * ROWS * head_dim
    scale = get_f32(scale_at)
    begin, end = 0, (first + queries - 1) // SEGMENT + 1
    if only >= 0:
        begin, end = only, only + 1
    table = table_at(scratch, head_dim)
    for index in range(begin, end):
        if index + 1 < end:
            announce(
                table + NEXT,
                pages,
                head_at,
                page_bytes,
                tables,
                index + 1,
                first + queries - 1,
                page_tokens,
                code_bytes(kv),
            )
        else:
            for i in range(0, 32, 8):
                put_i64(table + NEXT + i, get_i64(table + AFTER + i))
        begun = segment(
            kv,
            scratch,
            pages,
            head_at,
            page_bytes,
            tables,
            index,
            first,
            rows,
            group_size,
            head_dim,
            page_tokens,
            scale,
        )
        if only < 0:
            for r in range(begun, rows):
                at = state + 16 * r
                o_r, m, l = o + 4 * r * head_dim, get_f32(at + 8), get_f32(at + 12)  # noqa: E741
                merge(acc + 4 * r * head_dim, at, o_r, m, l, head_dim, index == 0)
    if only < 0:
        for r in range(rows):
            place = out + r // group_size * out_stride + r % group_size * 4 * head_dim
            finish(acc + 4 * r * head_dim, state + 16 * r, place, head_dim)


@numba.njit(**JIT)
def attend_f16(
    scratch,
    pages,
    head_at,
    page_bytes,
    tables,
    first,
    queries,
    group_size,
    head_dim,
    page_tokens,
    scale_at,
    out,
    out_stride,
    only,
):
    """Entry: `attend` over f16 pages."""
    attend(
        F16,
        scratch,
        pages,
        head_at,
        page_bytes,
        tables,
        first,
        queries,
        group_size,
        head_dim,
        page_tokens,
        scale_at,
        out,
        out_stride,
        only,
    )


@numba.njit(**JIT)
def attend_f32(
    scratch,
    pages,
    head_at,
    page_bytes,
    tables,
    first,
    queries,
    group_size,
    head_dim,
    page_tokens,
    scale_at,
    out,
    out_stride,
    only,
):
    """Entry: `attend` over f32 pages."""
    attend(
        F32,
        scratch,
        pages,
        head_at,
        page_bytes,
        tables,
        first,
        queries,
        group_size,
        head_dim,
        page_tokens,
        scale_at,
        out,
        out_stride,
        only,
    )


@numba.njit(**JIT)
def attend_int8(
    scratch,
    pages,
    head_at,
    page_bytes,
    tables,
    first,
    queries,
    group_size,
    head_dim,
    page_tokens,
    scale_at,
    out,
    out_stride,
    only,
):
    """Entry: `attend` over int8 pages."""
    attend(
        INT8,
        scratch,
        pages,
        head_at,
        page_bytes,
        tables,
        first,
        queries,
        group_size,
        head_dim,
        page_tokens,
        scale_at,
        out,
        out_stride,
        only,
    )


ENTRIES = {"f16": attend_f16, "f32": attend_f32, "int8": attend_int8}
ENTRY_ARGUMENTS = 14
