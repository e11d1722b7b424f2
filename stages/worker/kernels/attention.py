"""Attention over KV pages: one block of queries against one kv head, KV split by KV split.

A *block* is some queries of one sequence, times the heads that share a kv head: its *rows*.  K and V are read and
converted to f32 once for all of them (attention_blocks.py); a block of few rows, such as those of a single query, reads
them from their pages for each tile of rows, and prefetches (attention_tiles.py).  Every row's arithmetic is that of
docs/numerics.md, whatever shares its block; splits of 256 positions are combined in ascending order.

Scratch of one rank, in f32 words from `scratch` (`attention_words`); rows R = BUFFER_ROWS:

    Q       (R, head_dim)        the block's queries, packed
    S       (R, 256)             scores, then weights, of the current split
    O       (R, head_dim)        weighted values of the current split
    ACC     (R, head_dim)        combined so far
    STATE   (6, R)               M, L so far; m, l of the split; factors of O and of the split's O
    LIMITS  (2, R) i32           the first position of the split that a row sees, and the end of its positions
    TABLE   (4, 16) addresses    of each 16 positions of the split: K, K scales, V, V scales
    NEXT    (12) addresses       of each 16 of the first 192 positions that are read after the split: K; or 0
    AFTER   (12) addresses       the same of what is read after the call; written by the caller (`set_next_prefetch`)
    KV_F32                       K, then V, as f32: see attention_blocks.py
    FACTORS (256, hd/32)         int8: the scales of V of each position of the split, as f32

`ENTRIES` has the entry (entries.py) for each type of cache.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from shm.pages import KV_SPLIT
from stages.worker.kernels.attention_blocks import (
    ENDS,
    block_scores,
    convert_keys,
    convert_values,
    set_limits,
    tile_values,
)
from stages.worker.kernels.attention_tiles import (
    AFTER,
    F16,
    F32,
    FOLLOWING,
    INT8,
    KV_F32,
    NEXT,
    VECTORS,
    WIDTH,
    all_scores,
    all_values,
    code_bytes,
    convert_factors,
    scale_bytes,
)
from stages.worker.kernels.buffer_sizes import BUFFER_ROWS, KEY_DIMS, TILE_ROWS
from stages.worker.kernels.elementwise import soft_cap
from stages.worker.kernels.entries import INNER, MERGED
from stages.worker.kernels.simd import JIT, LANES, VNNI, get_f32, get_i32, get_i64, put_i64, splat_f32, store_f32
from stages.worker.kernels.split_combine import (
    STATE_L,
    STATE_M,
    combine_rows,
    finish_rows,
    greatest_score,
    hide,
    softmax_weights,
)

# Rows up to which a block reads K and V from their pages, of caches without scales and with them: converting them first
# takes more time.  With AVX2, the conversion of f16 shares no port with the products, the scaling of int8 does; f32, of
# which nothing is converted, has the bound of f16 and has not been measured.
DIRECT_ROWS, DIRECT_SCALED_ROWS = (8, 8) if VNNI else (90, 10)
MANY_ROWS = 48  # bound of the rows of one query, of several KV heads


@numba.njit(**MERGED)
def output_at(scratch, head_dim):
    """Address of O."""
    return scratch + 4 * BUFFER_ROWS * (head_dim + KV_SPLIT)


@numba.njit(**MERGED)
def combined_at(scratch, head_dim):
    """Address of ACC."""
    return output_at(scratch, head_dim) + 4 * BUFFER_ROWS * head_dim


@numba.njit(**MERGED)
def state_at(scratch, head_dim):
    """Address of STATE."""
    return scratch + 4 * BUFFER_ROWS * (3 * head_dim + KV_SPLIT)


@numba.njit(**MERGED)
def limits_at(scratch, head_dim):
    """Address of LIMITS."""
    return state_at(scratch, head_dim) + 24 * BUFFER_ROWS


@numba.njit(**MERGED)
def table_at(scratch, head_dim):
    """Address of TABLE."""
    return scratch + 4 * BUFFER_ROWS * (3 * head_dim + KV_SPLIT + 8)


@numba.njit(**INNER)
def set_next_prefetch(to, pages, head_at, page_bytes, tables, split, last, page_tokens, k_width):
    """Write K's addresses of the first 192 positions of a split of a row to `to` (NEXT or AFTER).

    Of the row's last position (`last`) on, the last 16 are named again; a `split` past it or below 0 is nothing.
    """
    position = split * KV_SPLIT
    place, slot = position // page_tokens, position % page_tokens
    is_there = 0 <= position <= last
    for group in range(FOLLOWING):
        at = np.int64(0)
        if is_there:
            at = pages + get_i32(tables + 4 * place) * page_bytes + head_at + slot * k_width
            if position + LANES <= last:
                position += LANES
                slot += LANES
                if slot == page_tokens:
                    place, slot = place + 1, np.int64(0)
        put_i64(to + 8 * group, at)


@numba.njit(**INNER)
def _fill_table(table, pages, head_at, page_bytes, tables, split, n, page_tokens, k_width, e_width, head_dim):
    """Fill TABLE for the first n positions of a split of the row whose page table is at `tables` (i32).

    head_at: byte of this layer's and head's K in a page; k_width, e_width: bytes of a code, of a scale.
    Places past n repeat the first one: what is read there is not used.
    """
    codes = head_dim * page_tokens * k_width
    both = codes + head_dim // 32 * page_tokens * e_width
    place, slot = split * KV_SPLIT // page_tokens, split * KV_SPLIT % page_tokens
    base = pages + get_i32(tables + 4 * place) * page_bytes + head_at
    first_base, first_slot = base, slot
    for group in range(KV_SPLIT // LANES):
        if LANES * group >= n:
            base, slot = first_base, first_slot
        elif slot == page_tokens:
            place, slot = place + 1, np.int64(0)
            base = pages + get_i32(tables + 4 * place) * page_bytes + head_at
        put_i64(table + 8 * group, base + slot * k_width)
        put_i64(table + 128 + 8 * group, base + codes + slot * e_width)
        put_i64(table + 256 + 8 * group, base + both + slot * head_dim * k_width)
        put_i64(table + 384 + 8 * group, base + both + codes + slot * (head_dim // 32) * e_width)
        slot += LANES


@numba.njit(**INNER)
def lowest_split(position, window):
    """The first split that a query at `position` sees; `window` 0: it sees all positions."""
    if window == 0:
        return 0
    return max(0, position + 1 - window) // KV_SPLIT


@numba.njit(**INNER)
def _direct_values(kv, s, o, table, limits, rows, group_size, head_dim, page_tokens):
    """Weighted values of few rows: together where all of them see a position, query by query before and after that."""
    zero = splat_f32(np.float32(0.0))
    for i in range(0, 4 * rows * head_dim, 64):
        store_f32(o + i, zero)
    shared, common = get_i32(limits + 4 * (rows - 1)), get_i32(limits + ENDS)
    for r in range(0, rows, group_size):
        start, end = get_i32(limits + 4 * r), get_i32(limits + 4 * r + ENDS)
        stop = shared if shared < common else end
        if start < stop:
            at_s, at_o = s + 4 * r * KV_SPLIT, o + 4 * r * head_dim
            all_values(kv, at_s, at_o, table, group_size, start, stop, head_dim, page_tokens)
    if shared < common:
        all_values(kv, s, o, table, rows, shared, common, head_dim, page_tokens)
        # Neighbouring queries share the positions that the first of them sees: tiles of several rows take less time.
        at_once = max(1, TILE_ROWS // group_size) * group_size
        for of in range(group_size, rows, at_once):
            together, seen = min(at_once, rows - of), get_i32(limits + 4 * of + ENDS)
            for r in range(of, of + together, group_size):
                begin, n_rows = seen, group_size
                if r == of:
                    begin, n_rows = common, together
                end = get_i32(limits + 4 * r + ENDS)
                if begin < end:
                    at_s, at_o = s + 4 * r * KV_SPLIT, o + 4 * r * head_dim
                    all_values(kv, at_s, at_o, table, n_rows, begin, end, head_dim, page_tokens)


@numba.njit(**MERGED)
def attend_split(
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
    cap,
    window,
    place,
):
    """Compute split `index` for `rows` rows of Q from row `place` on, of queries from position `first` on.

    Row r of these is of position first + r // group_size, and attends to positions up to it, with a window to so many.
    The last one has positions in the split.
    Leaves m and l in STATE and the weighted values in O.  Returns the first row that has positions in the split.
    """
    s = scratch + 4 * BUFFER_ROWS * head_dim
    o, state, table = output_at(scratch, head_dim), state_at(scratch, head_dim), table_at(scratch, head_dim)
    begin = index * KV_SPLIT
    skipped = max(0, begin - first) * group_size
    todo = rows - skipped
    at_q, at_o = scratch + 4 * (place + skipped) * head_dim, o + 4 * (place + skipped) * head_dim
    at_s = s + 4 * skipped * KV_SPLIT
    limits = limits_at(scratch, head_dim)
    set_limits(limits, begin, first, skipped, rows, group_size, window)
    limits += 4 * skipped
    low, n = get_i32(limits), get_i32(limits + 4 * (todo - 1) + ENDS)
    _fill_table(
        table, pages, head_at, page_bytes, tables, index, n, page_tokens, code_bytes(kv), scale_bytes(kv), head_dim
    )
    groups = (n + LANES - 1) // LANES
    is_direct = todo <= (DIRECT_ROWS if scale_bytes(kv) == 0 else DIRECT_SCALED_ROWS)
    convert_factors(kv, table, low, n, head_dim)
    converted, seen = table + KV_F32, np.int64(0)
    for group in range(low // WIDTH * VECTORS, groups, VECTORS):
        if is_direct:
            all_scores(kv, at_q, at_s, table, group, groups, todo, head_dim, page_tokens, scale)
            continue
        # The first tiles of rows may see less of the split than the last one.
        while get_i32(limits + ENDS + 4 * min(seen + TILE_ROWS, todo) - 4) <= LANES * group:
            seen += TILE_ROWS
        keys, width = table + NEXT, code_bytes(kv)
        if group + VECTORS < KV_SPLIT // LANES:
            keys = table + 8 * (group + VECTORS)
        for dim in range(0, head_dim, KEY_DIMS):
            end = min(dim + KEY_DIMS, head_dim)
            convert_keys(kv, table, group, converted, dim, end, page_tokens)
            block_scores(
                at_q + 4 * seen * head_dim,
                at_s + 4 * seen * KV_SPLIT + 64 * group,
                converted,
                todo - seen,
                dim,
                end,
                head_dim,
                scale,
                keys,
                width * page_tokens,
                table + 256 + 8 * group,
                width * LANES,
            )
    at_once = todo
    if not is_direct:
        convert_values(kv, table, low, n, converted, head_dim)
        at_once = TILE_ROWS  # the weights of a tile stay in the first-level cache
    at_m = state + STATE_M + 4 * (place + skipped)
    for tile in range(0, todo, at_once):
        stop = min(tile + at_once, todo)
        for r in range(tile, stop):
            start, end = get_i32(limits + 4 * r), get_i32(limits + 4 * r + ENDS)
            at = at_s + 4 * r * KV_SPLIT
            if cap != np.float32(0.0):
                soft_cap(at + 4 * low, cap, end - low)
            if window:
                hide(at, start)
            greatest_score(at, end, at_m + 4 * r)
        # A row's maximum takes long to compute, but those of several rows overlap.
        for r in range(tile, stop):
            at = at_m + 4 * r
            softmax_weights(at_s + 4 * r * KV_SPLIT, get_i32(limits + 4 * r + ENDS), at, at + STATE_L - STATE_M)
        if not is_direct:
            tile_values(at_s + 4 * tile * KV_SPLIT, at_o + 4 * tile * head_dim, converted, limits + 4 * tile, head_dim)
    if is_direct:
        _direct_values(kv, at_s, at_o, table, limits, todo, group_size, head_dim, page_tokens)
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
    window,
    heads,
    head_step,
):
    """All splits for `queries` queries packed in Q, rows (query, head of the group), to `out` (0: they stay in ACC).

    scale_at: the scale of scores, f32, and 8 bytes later their soft cap (0: none).
    out: f32 of the group's first head for the first query; the group's heads follow each other.
    With `only` >= 0: nothing but that split, whose results stay in STATE and O.  With `only` < -1 and no window: the
    splits from -1 - only on, which follow what ACC and STATE hold of those before.  AFTER is read.
    window: positions that a query attends to, itself included; 0: all.
    With `heads` > 1: rows (KV head, head of its group) of one query, at most MANY_ROWS.  The heads' K are `head_step`
    bytes apart, and their groups `out_stride` in `out`.
    """
    rows = queries * group_size
    o, state = output_at(scratch, head_dim), state_at(scratch, head_dim)
    acc = combined_at(scratch, head_dim)
    scale, cap = get_f32(scale_at), get_f32(scale_at + 8)
    begin, end = lowest_split(first, window), (first + queries - 1) // KV_SPLIT + 1
    if only >= 0:
        begin, end = only, only + 1
    elif only < -1:
        begin = -1 - only
    table = table_at(scratch, head_dim)
    # All heads of a split before the next one: they are next to each other in its pages.
    for unit in range(begin * heads, end * heads):
        index, head = unit // heads, unit % heads
        if unit + 1 < end * heads:
            set_next_prefetch(
                table + NEXT,
                pages,
                head_at + (unit + 1) % heads * head_step,
                page_bytes,
                tables,
                (unit + 1) // heads,
                first + queries - 1,
                page_tokens,
                code_bytes(kv),
            )
        else:
            for i in range(0, 8 * FOLLOWING, 8):
                put_i64(table + NEXT + i, get_i64(table + AFTER + i))
        reached = rows  # the rows after it see later splits only
        if window:
            reached = min(rows, ((index + 1) * KV_SPLIT + window - 1 - first) * group_size)
        begun = attend_split(
            kv,
            scratch,
            pages,
            head_at + head * head_step,
            page_bytes,
            tables,
            index,
            first,
            reached,
            group_size,
            head_dim,
            page_tokens,
            scale,
            cap,
            window,
            head * rows,
        )
        if only < 0 and head == heads - 1:
            started = begun  # rows from there on start with this split
            while started < reached and lowest_split(first + started // group_size, window) != index:
                started += group_size
            # Heads of a single query all see every split.
            if heads > 1:
                started, reached = started * heads, reached * heads
            combine_rows(acc, o, state, begun, started, reached, head_dim)
    if only < 0 and out != 0:
        finish_rows(acc, state, out, out_stride, heads * rows, group_size, head_dim)


def _entry(name: str, cache: Any) -> Any:
    """`attend` over pages of one type."""

    def attend_pages(
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
        window,
        heads,
        head_step,
    ):
        attend(
            cache,
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
            window,
            heads,
            head_step,
        )

    # Entries are compiled in several processes and loaded into one, where their symbols differ by this name alone.
    attend_pages.__name__ = attend_pages.__qualname__ = f"attend_{name}"
    return numba.njit(**JIT)(attend_pages)


ENTRIES = {name: _entry(name, cache) for name, cache in (("f16", F16), ("f32", F32), ("int8", INT8))}
ENTRY_ARGUMENTS = 17
