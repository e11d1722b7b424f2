"""Attention over KV pages: one block of queries against one kv head, KV split by KV split.

A *block* is some queries of one sequence, times the heads that share a kv head: its *rows*.  K and V are read once for
all of them.  Every row's arithmetic is that of docs/numerics.md, whatever shares its block; splits of 256 positions are
combined in ascending order.

Scratch of one rank, in f32 words from `scratch` (`attention_words`):

    Q       (ROWS, head_dim)     the block's queries, packed
    S       (ROWS, 256)          scores, then weights, of the current split
    O       (ROWS, head_dim)     weighted values of the current split
    ACC     (ROWS, head_dim)     combined so far
    STATE   (ROWS, 4)            M, L so far; m, l of the split
    TABLE   (4, 16) addresses    of each 16 positions of the split: K, K scales, V, V scales
    NEXT    (4) addresses        of K of the first 64 positions that are read after the split, or 0
    AFTER   (4) addresses        the same of what is read after the call; written by the caller (`set_next_prefetch`)

`ENTRIES` has the entry (entries.py) for each type of cache.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from shm.pages import KV_SPLIT
from stages.worker.kernels.attention_tiles import (
    AFTER,
    F16,
    F32,
    INT8,
    NEXT,
    TILE_ROWS,
    VECTORS,
    all_scores,
    all_values,
    code_bytes,
    scale_bytes,
)
from stages.worker.kernels.buffer_sizes import ROWS
from stages.worker.kernels.elementwise import soft_cap
from stages.worker.kernels.entries import INNER, MERGED
from stages.worker.kernels.simd import JIT, LANES, get_f32, get_i32, get_i64, put_i64, splat_f32, store_f32
from stages.worker.kernels.split_combine import combine, finish, hide, softmax_weights


@numba.njit(**MERGED)
def table_at(scratch, head_dim):
    """Address of TABLE."""
    return scratch + 4 * ROWS * (3 * head_dim + KV_SPLIT + 4)


@numba.njit(**INNER)
def set_next_prefetch(to, pages, head_at, page_bytes, tables, split, last, page_tokens, k_width):
    """Write K's addresses of the first 64 positions of a split of a row to `to` (NEXT or AFTER).

    Of the row's last position (`last`) on, the last 16 are named again; a `split` past it or below 0 is nothing.
    """
    position = split * KV_SPLIT
    place, slot = position // page_tokens, position % page_tokens
    is_there = 0 <= position <= last
    for group in range(VECTORS):
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
    # Tiles read four places at once, and ahead_step for the four after them.
    groups = min(KV_SPLIT, (n + 2 * VECTORS * LANES - 1) // (VECTORS * LANES) * VECTORS * LANES) // LANES
    place, slot = split * KV_SPLIT // page_tokens, split * KV_SPLIT % page_tokens
    base = pages + get_i32(tables + 4 * place) * page_bytes + head_at
    first_base, first_slot = base, slot
    for group in range(groups):
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
):
    """Compute split `index` for the rows of Q, whose queries have positions first + row // group_size.

    Row r attends to positions up to its own, with a window to so many.  The last one has positions in the split.
    Leaves m and l in STATE and the weighted values in O.  Returns the first row that has positions in the split.
    """
    s = scratch + 4 * ROWS * head_dim
    o = s + 4 * ROWS * KV_SPLIT
    state = o + 8 * ROWS * head_dim
    table = table_at(scratch, head_dim)
    begin = index * KV_SPLIT
    skipped = max(0, begin - first) * group_size
    last = first + (rows - 1) // group_size
    n = min(KV_SPLIT, last + 1 - begin)
    _fill_table(
        table, pages, head_at, page_bytes, tables, index, n, page_tokens, code_bytes(kv), scale_bytes(kv), head_dim
    )
    todo = rows - skipped
    at_q, at_s = scratch + 4 * skipped * head_dim, s + 4 * skipped * KV_SPLIT
    at_o = o + 4 * skipped * head_dim
    low = np.int64(0)  # the first position of the split that a row sees
    if window:
        low = max(low, first + skipped // group_size + 1 - window - begin)
    groups = (n + LANES - 1) // LANES
    for group in range(low // (VECTORS * LANES) * VECTORS, groups, VECTORS):
        all_scores(kv, at_q, at_s, table, group, groups, todo, head_dim, page_tokens, scale)
    zero = splat_f32(np.float32(0.0))
    for i in range(0, 4 * todo * head_dim, 64):
        store_f32(at_o + i, zero)
    for r in range(skipped, rows):
        seen = min(KV_SPLIT, first + r // group_size + 1 - begin)
        if cap != np.float32(0.0):
            soft_cap(s + 4 * (r * KV_SPLIT + low), cap, seen - low)
        if window:
            hide(s + 4 * r * KV_SPLIT, first + r // group_size + 1 - window - begin)
        softmax_weights(s + 4 * r * KV_SPLIT, seen, state + 16 * r)
    # All rows see positions shared .. common - 1; before and after them the rows of each query go on by themselves.
    common, shared = min(KV_SPLIT, first + skipped // group_size + 1 - begin), np.int64(0)
    if window:
        shared = max(shared, last + 1 - window - begin)
        for query in range(skipped // group_size, (rows - 1) // group_size + 1):
            own = max(np.int64(0), first + query + 1 - window - begin)
            stop = shared if shared < common else min(KV_SPLIT, first + query + 1 - begin)
            if own < stop:
                r = query * group_size
                at_sr, at_or = s + 4 * r * KV_SPLIT, o + 4 * r * head_dim
                all_values(kv, at_sr, at_or, table, group_size, own, stop, head_dim, page_tokens)
    if shared < common:
        all_values(kv, at_s, at_o, table, todo, shared, common, head_dim, page_tokens)
        # Neighbouring queries share the positions that the first of them sees: tiles of several rows take less time.
        at_once, queries = max(1, TILE_ROWS // group_size), rows // group_size
        for query in range(skipped // group_size + 1, queries, at_once):
            together = min(at_once, queries - query)
            seen = min(KV_SPLIT, first + query + 1 - begin)
            for other in range(query, query + together):
                r = other * group_size
                at_sr, at_or = s + 4 * r * KV_SPLIT, o + 4 * r * head_dim
                if other == query:
                    begun, stop, n_rows = common, seen, together * group_size
                else:
                    begun, stop, n_rows = seen, min(KV_SPLIT, first + other + 1 - begin), group_size
                if begun < stop:
                    all_values(kv, at_sr, at_or, table, n_rows, begun, stop, head_dim, page_tokens)
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
):
    """All splits for `queries` queries packed in Q, rows (query, head of the group), to `out`.

    scale_at: the scale of scores, f32, and 8 bytes later their soft cap (0: none).
    out: f32 of the group's first head for the first query; the group's heads follow each other.
    With `only` >= 0: nothing but that split, whose results stay in STATE and O.  AFTER is read.
    window: positions that a query attends to, itself included; 0: all.
    """
    rows = queries * group_size
    o = scratch + 4 * ROWS * (head_dim + KV_SPLIT)
    acc = o + 4 * ROWS * head_dim
    state = acc + 4 * ROWS * head_dim
    scale, cap = get_f32(scale_at), get_f32(scale_at + 8)
    begin, end = lowest_split(first, window), (first + queries - 1) // KV_SPLIT + 1
    if only >= 0:
        begin, end = only, only + 1
    table = table_at(scratch, head_dim)
    for index in range(begin, end):
        if index + 1 < end:
            set_next_prefetch(
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
        reached = rows  # the rows after it see later splits only
        if window:
            reached = min(rows, ((index + 1) * KV_SPLIT + window - 1 - first) * group_size)
        begun = attend_split(
            kv,
            scratch,
            pages,
            head_at,
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
        )
        if only < 0:
            for r in range(begun, reached):
                at = state + 16 * r
                o_r, m, l = o + 4 * r * head_dim, get_f32(at + 8), get_f32(at + 12)  # noqa: E741
                is_first = index == lowest_split(first + r // group_size, window)
                combine(acc + 4 * r * head_dim, at, o_r, m, l, head_dim, is_first)
    if only < 0:
        for r in range(rows):
            place = out + r // group_size * out_stride + r % group_size * 4 * head_dim
            finish(acc + 4 * r * head_dim, state + 16 * r, place, head_dim)


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
        )

    # Entries are compiled in several processes and loaded into one, where their symbols differ by this name alone.
    attend_pages.__name__ = attend_pages.__qualname__ = f"attend_{name}"
    return numba.njit(**JIT)(attend_pages)


ENTRIES = {name: _entry(name, cache) for name, cache in (("f16", F16), ("f32", F32), ("int8", INT8))}
ENTRY_ARGUMENTS = 15
