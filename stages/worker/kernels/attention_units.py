"""Attention of a step: which rank computes which unit, where its K and V are, and where the results go.

A unit is a block of queries of one sequence and one kv head, or one KV split of a single query.  Units are numbered
alike on every rank, and unit u belongs to rank u modulo the number of ranks.  So the blocks of a sequence are of nearly
one size (`block_queries`): a full block and a remainder for each kv head would be the same ranks' share each time.
Where the kv heads are equal shares of the ranks, a rank computes its share of a single query's heads together instead,
and the splits are no units.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shm.atomics import atomic_add, store_release
from shm.pages import KV_SPLIT
from stages.worker.kernels import attention, attention_tiles, split_combine
from stages.worker.kernels import elementwise as ew
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels import plan as p
from stages.worker.kernels.buffer_sizes import BLOCK_ROWS, TILE_ROWS
from stages.worker.kernels.entries import INNER, MERGED, run_entry
from stages.worker.kernels.formats.description import GROUP
from stages.worker.kernels.packed_activations import pack_row, packed
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.quantize_activations import RECORD, quantize_row
from stages.worker.kernels.rank_sync import share, wait_for_ranks
from stages.worker.kernels.simd import get_f32, get_i32, get_i64, prefetch, put_f32

# Tokens whose K of one head is written together: they share cache lines, which leave the first-level cache otherwise.
KEYS_AT_ONCE = 16
LEAST_ROWS = 2 * TILE_ROWS  # of a block, on average, that is made so that each rank has as many
EVEN_UNITS = 4  # blocks of a rank from which on one more or less is a small part of its work


@njit(**INNER)
def _rotate(params, layer, token, heads, n_heads, head, norm, y):
    """y = RoPE of head `head` of `n_heads` heads at `heads`; with the weights of a `norm`, after their RMS norm."""
    dim = param(params, pb.HEAD_DIM)
    x = heads + 4 * head * dim
    if norm:
        eps = get_f32(params + 8 * pb.EPS)
        if param(layer, pb.NORM_ALL_HEADS):
            ew.rms_norm_part(heads, n_heads * dim, eps, x, norm + 4 * head * dim, y, dim)
        else:
            ew.rms_norm(x, norm, y, dim, eps)
        x = y
    angles = param(params, pb.ROPE) + token * param(params, pb.ROPE_STRIDE) + param(layer, pb.ANGLES)
    sine = angles + param(params, pb.SINES)
    if param(params, pb.NEOX_ROPE):
        ew.rotate_neox(x, y, angles, sine, param(params, pb.N_ROT), dim)
    else:
        ew.rotate(x, y, angles, sine, param(params, pb.N_ROT), dim)


@njit(**INNER)
def pack_queries(params, layer, token, queries, kv_head, scratch):
    """The rotated queries of a block into Q of the attention scratch: rows (query, head of the group)."""
    dim = param(params, pb.HEAD_DIM)
    group = param(params, pb.N_HEADS) // param(params, pb.N_KV_HEADS)
    to = scratch
    norm = param(layer, pb.Q_NORM)
    for t in range(token, token + queries):
        x = param(params, pb.QKV) + t * param(params, pb.QKV_STRIDE)
        for g in range(group):
            _rotate(params, layer, t, x, param(params, pb.N_HEADS), kv_head * group + g, norm, to)
            to += 4 * dim


@njit(**INNER)
def page_table(params, layer, entry):
    """Address of the entry's page table for the layer's group."""
    return param(params, pb.PLAN_TABLES) + param(entry, p.P_TABLE) + param(layer, pb.TABLE_AT)


@njit(**INNER)
def quantize_attn_out(params, token, kv_head):
    """ATTN_OUT_Q, and ATTN_OUT_P, of a group of heads, when its values are whole records."""
    n = param(params, pb.N_HEADS) // param(params, pb.N_KV_HEADS) * param(params, pb.HEAD_DIM)
    if n % 32 == 0:
        x = param(params, pb.ATTN_OUT) + token * param(params, pb.ATTN_OUT_STRIDE) + 4 * kv_head * n
        row, first = param(params, pb.ATTN_OUT_Q) + token * param(params, pb.ATTN_OUT_Q_STRIDE), kv_head * n // 32
        quantize_row(x, n, row + first * RECORD)
        to = packed(params, pb.ATTN_OUT_P, param(param(params, pb.PLAN), p.TOKENS))
        if to != 0:
            pack_row(row, first, first + n // 32, param(params, pb.N_HEADS) * param(params, pb.HEAD_DIM), to, token)


@njit(**INNER)
def write_kv(params, layer, entry, token, kv_head, head_at, scratch):
    """K and V of one token and kv head into its page."""
    dim, page_tokens = param(params, pb.HEAD_DIM), param(params, pb.PAGE_TOKENS)
    position = get_i64(p.token_at(params, token))
    number = get_i32(page_table(params, layer, entry) + 4 * (position // page_tokens))
    at = param(params, pb.PAGES) + number * param(params, pb.PAGE_BYTES) + head_at
    kv_heads = param(params, pb.N_KV_HEADS)
    k = param(params, pb.QKV) + token * param(params, pb.QKV_STRIDE) + 4 * param(params, pb.N_HEADS) * dim
    v = k + 4 * (kv_heads + kv_head) * dim
    _rotate(params, layer, token, k, kv_heads, kv_head, param(layer, pb.K_NORM), scratch)
    half = param(params, pb.HEAD_BYTES) // 2
    slot, width = position % page_tokens, param(params, pb.KV_WIDTH)
    if width == 2:
        ew.write_kv_f16(scratch, v, at, at + half, slot, page_tokens, dim, scratch + 4 * dim)
    elif width == 4:
        ew.write_kv_f32(scratch, v, at, at + half, slot, page_tokens, dim, scratch + 4 * dim)
    else:
        ew.write_kv_int8(scratch, v, at, at + half, slot, page_tokens, dim, scratch + 4 * dim)


@njit(**INNER)
def prefetch_page(params, layer, entry, head_at):
    """Prefetch the cache lines of the page that a single query's K is written to, and read from."""
    position, page_tokens = param(entry, p.P_START), param(params, pb.PAGE_TOKENS)
    number = get_i32(page_table(params, layer, entry) + 4 * (position // page_tokens))
    at = param(params, pb.PAGES) + number * param(params, pb.PAGE_BYTES) + head_at
    step = param(params, pb.KV_WIDTH) * page_tokens
    at += position % page_tokens * param(params, pb.KV_WIDTH)
    for d in range(param(params, pb.HEAD_DIM)):
        prefetch(at + d * step)


@njit(**MERGED)
def write_kv_of_chunks(params, layer):
    """K and V of this rank's share of the tokens of entries with several tokens."""
    heads = param(params, pb.N_KV_HEADS)
    first, end = share(params, param(param(params, pb.PLAN), p.TOKENS))
    for begin in range(first, end, KEYS_AT_ONCE):
        for head in range(heads):
            at = param(layer, pb.KV_AT) + head * param(params, pb.HEAD_BYTES)
            for t in range(begin, min(end, begin + KEYS_AT_ONCE)):
                entry = p.entry_at(params, get_i64(p.token_at(params, t) + 16))
                if param(entry, p.P_COUNT) > 1:
                    write_kv(params, layer, entry, t, head, at, param(params, pb.ATTENTION))


@njit(**MERGED)
def combine_splits(params, entry, token, kv_head, lowest, splits, scratch):
    """Combine splits `lowest` .. `splits - 1` of a query's group of heads, in ascending order, into ATTN_OUT."""
    dim, heads = param(params, pb.HEAD_DIM), param(params, pb.N_HEADS)
    group = heads // param(params, pb.N_KV_HEADS)
    size = 4 * (dim + GROUP)
    for g in range(group):
        head = kv_head * group + g
        for s in range(lowest, splits):
            at = param(params, pb.SPLIT_RESULTS) + size * (param(entry, p.P_SPLIT) + s * heads + head)
            split_combine.combine(scratch + 64, scratch, at + 64, get_f32(at), get_f32(at + 4), dim, s == lowest)
        out = param(params, pb.ATTN_OUT) + token * param(params, pb.ATTN_OUT_STRIDE) + 4 * head * dim
        split_combine.finish(scratch + 64, scratch, out, dim)


@njit(**INNER)
def set_next_unit(params, layer, entry, head, split):
    """Set what attention prefetches at the end of a unit: K of a split of a single query, or nothing (split -1)."""
    dim, head_at = param(params, pb.HEAD_DIM), param(layer, pb.KV_AT) + head * param(params, pb.HEAD_BYTES)
    attention.set_next_prefetch(
        attention.table_at(param(params, pb.ATTENTION), dim) + attention_tiles.AFTER,
        param(params, pb.PAGES),
        head_at,
        param(params, pb.PAGE_BYTES),
        page_table(params, layer, entry),
        split,
        param(entry, p.P_START),
        param(params, pb.PAGE_TOKENS),
        param(params, pb.KV_WIDTH),
    )


@njit(**INNER)
def run_attention(params, layer, entry, head_at, first, queries, group, out, out_stride, only, heads, head_step):
    """Run the entry of attention (attention.attend) for the queries in this rank's scratch, over an entry's pages."""
    run_entry(
        param(params, pb.ATTEND),
        (
            param(params, pb.ATTENTION),
            param(params, pb.PAGES),
            head_at,
            param(params, pb.PAGE_BYTES),
            page_table(params, layer, entry),
            first,
            queries,
            group,
            param(params, pb.HEAD_DIM),
            param(params, pb.PAGE_TOKENS),
            params + 8 * pb.SCORE_SCALE,
            out,
            out_stride,
            only,
            param(layer, pb.WINDOW),
            heads,
            head_step,
        ),
    )


@njit(**MERGED)
def attend_split(params, layer, entry, token, kv_head, head_at, index, lowest, splits, splits_done):
    """One split of a single query; the rank that finishes the last of its splits combines them."""
    dim, heads = param(params, pb.HEAD_DIM), param(params, pb.N_HEADS)
    group = heads // param(params, pb.N_KV_HEADS)
    scratch = param(params, pb.ATTENTION)
    pack_queries(params, layer, token, 1, kv_head, scratch)
    run_attention(params, layer, entry, head_at, param(entry, p.P_START), 1, group, 0, 0, index, 1, 0)
    o, state = attention.output_at(scratch, dim), attention.state_at(scratch, dim)
    for g in range(group):
        at = param(entry, p.P_SPLIT) + index * heads + kv_head * group + g
        at = param(params, pb.SPLIT_RESULTS) + 4 * (dim + GROUP) * at
        put_f32(at, get_f32(state + split_combine.STATE_M + 4 * g))
        put_f32(at + 4, get_f32(state + split_combine.STATE_L + 4 * g))
        split_combine.copy(o + 4 * g * dim, at + 64, dim)
    if atomic_add(splits_done, 1) == splits - lowest - 1:
        store_release(splits_done, 0)
        combine_splits(params, entry, token, kv_head, lowest, splits, scratch)
        quantize_attn_out(params, token, kv_head)


@njit(**INNER)
def prefix_result_at(params, entry, head):
    """Address of what a shared prefix leaves for one head of an entry's query: M, L, and from byte 64 on ACC."""
    size = 4 * (param(params, pb.HEAD_DIM) + GROUP)
    return param(params, pb.SPLIT_RESULTS) + size * (param(entry, p.P_SHARED) + head)


@njit(**INNER)
def _continue_prefix(params, entry, kv_head, row, scratch):
    """What the shared prefix leaves for a group of heads into STATE and ACC, rows from `row` on.

    The next split is combined with it.
    """
    dim, group = param(params, pb.HEAD_DIM), param(params, pb.N_HEADS) // param(params, pb.N_KV_HEADS)
    state, acc = attention.state_at(scratch, dim), attention.combined_at(scratch, dim)
    for g in range(group):
        at = prefix_result_at(params, entry, kv_head * group + g)
        put_f32(state + 4 * (row + g), get_f32(at))
        put_f32(state + split_combine.STATE_TOTAL + 4 * (row + g), get_f32(at + 4))
        split_combine.copy(at + 64, acc + 4 * (row + g) * dim, dim)


@njit(**INNER)
def _prefix_splits(params, entry, window):
    """KV splits of the shared prefix that an entry's query begins behind (shared_prefixes.py); 0: it begins at none."""
    if window or param(param(params, pb.PLAN), p.SHARED) == 0 or param(entry, p.P_SHARED) < 0:
        return 0
    return param(entry, p.P_PREFIX)


@njit(**INNER)
def _first_split(params, entry, window):
    """The KV split that a single query's own splits begin with."""
    return max(attention.lowest_split(param(entry, p.P_START), window), _prefix_splits(params, entry, window))


@njit(**INNER)
def attend_queries(params, layer, entry, token, first, queries, kv_head, head_at):
    """A block of queries of one sequence from position `first` on."""
    pack_queries(params, layer, token, queries, kv_head, param(params, pb.ATTENTION))
    stride = param(params, pb.ATTN_OUT_STRIDE)
    _attend_all_splits(params, layer, entry, token, first, queries, kv_head, head_at, stride, 0, 1, 0)
    for t in range(token, token + queries):
        quantize_attn_out(params, t, kv_head)


@njit(**INNER)
def attend_heads(params, layer, entry, token, kv_head, heads, step):
    """A single query's heads of `heads` KV heads, every `step`-th from `kv_head` on; writes their K and V."""
    dim, group = param(params, pb.HEAD_DIM), param(params, pb.N_HEADS) // param(params, pb.N_KV_HEADS)
    scratch, head_bytes = param(params, pb.ATTENTION), param(params, pb.HEAD_BYTES)
    first_at = param(layer, pb.KV_AT) + kv_head * head_bytes
    prefix = _prefix_splits(params, entry, param(layer, pb.WINDOW))
    for i in range(heads):
        head_at = first_at + i * step * head_bytes
        prefetch_page(params, layer, entry, head_at)
        write_kv(params, layer, entry, token, kv_head + i * step, head_at, scratch)
    for i in range(heads):
        pack_queries(params, layer, token, 1, kv_head + i * step, scratch + 4 * i * group * dim)
    if prefix:
        for i in range(heads):
            _continue_prefix(params, entry, kv_head + i * step, i * group, scratch)
    start, between, apart = param(entry, p.P_START), 4 * step * group * dim, step * head_bytes
    _attend_all_splits(params, layer, entry, token, start, 1, kv_head, first_at, between, prefix, heads, apart)
    for i in range(heads):
        quantize_attn_out(params, token, kv_head + i * step)


@njit(**INNER)
def _attend_all_splits(
    params, layer, entry, token, first, queries, kv_head, head_at, out_stride, prefix, heads, head_step
):
    """Run the entry of attention for the queries in its scratch, behind `prefix` shared splits.

    `out_stride`, `heads`, `head_step`: as there.
    """
    dim, group = param(params, pb.HEAD_DIM), param(params, pb.N_HEADS) // param(params, pb.N_KV_HEADS)
    out = param(params, pb.ATTN_OUT) + token * param(params, pb.ATTN_OUT_STRIDE) + 4 * kv_head * group * dim
    run_attention(params, layer, entry, head_at, first, queries, group, out, out_stride, -1 - prefix, heads, head_step)


@njit(**INNER)
def attend_all(params, layer, entry, token, last, queries, kv_head, head_at):
    """A block of queries that attend to all positions up to `last`, the entry's last one.

    To the entry of attention they are heads of one query at that position.
    """
    dim, group = param(params, pb.HEAD_DIM), param(params, pb.N_HEADS) // param(params, pb.N_KV_HEADS)
    scratch = param(params, pb.ATTENTION)
    pack_queries(params, layer, token, queries, kv_head, scratch)
    # To the place of the queries, which have been read.
    run_attention(params, layer, entry, head_at, last, 1, queries * group, scratch, 0, -1, 1, 0)
    for i in range(queries):
        out = param(params, pb.ATTN_OUT) + (token + i) * param(params, pb.ATTN_OUT_STRIDE) + 4 * kv_head * group * dim
        split_combine.copy(scratch + 4 * i * group * dim, out, group * dim)
        quantize_attn_out(params, token + i, kv_head)


@njit(**INNER)
def block_queries(count, group, kv_heads, ranks):
    """Queries of each block but the last of an entry's `count` queries; `group` rows each."""
    if count == 1:
        return 1
    most = BLOCK_ROWS // group
    blocks = (count + most - 1) // most
    # Few units are divided evenly where a whole number falls to each rank.
    while (
        blocks * kv_heads % ranks != 0
        and blocks * kv_heads < EVEN_UNITS * ranks
        and (blocks + 1) * LEAST_ROWS <= count * group
    ):
        blocks += 1
    # A tile takes as long for some rows as for all of its rows: fill those that are needed anyway.
    rows = (count + blocks - 1) // blocks * group
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    return min(most, tiles * TILE_ROWS // group)


@njit(**INNER)
def rank_of_block(head, begin, count, block, ranks):
    """The rank of the block of queries from `begin` on, where rank 0 has the first one of head 0.

    Blocks are dealt out in turns, head by head. Later ones take longer: no rank has the last one of every head.
    """
    blocks = (count + block - 1) // block
    return (head * (blocks + (blocks % ranks == 0)) + begin // block) % ranks


@njit(**INNER)
def own_heads(rank, ranks, kv_heads, unit):
    """First KV head of a rank for a single query, end of them, and step; `unit`: number of the first head's unit.

    Equal shares are neighbours: they are next to each other in each page.
    """
    if kv_heads % ranks == 0:
        each = kv_heads // ranks
        return rank * each, (rank + 1) * each, 1
    return (rank - unit) % ranks, kv_heads, ranks


@njit(**MERGED)
def attend_splits(params, layer, e, unit):
    """This rank's splits of a single query, entry `e`, whose units are numbered from `unit` on. Returns their end.

    All heads of a split come before the next one: they are next to each other in its pages.
    """
    rank, ranks, kv_heads = param(params, pb.RANK), param(params, pb.RANKS), param(params, pb.N_KV_HEADS)
    entry = p.entry_at(params, e)
    start, token = param(entry, p.P_START), param(entry, p.P_TOKEN)
    splits, lowest = start // KV_SPLIT + 1, attention.lowest_split(start, param(layer, pb.WINDOW))
    end = unit + (splits - lowest) * kv_heads
    for own in range((rank - unit) % ranks, end - unit, ranks):
        index, head = lowest + own // kv_heads, own % kv_heads
        head_at = param(layer, pb.KV_AT) + head * param(params, pb.HEAD_BYTES)
        if index == splits - 1:
            prefetch_page(params, layer, entry, head_at)
            write_kv(params, layer, entry, token, head, head_at, param(params, pb.ATTENTION))
        after = own + ranks
        if unit + after < end:
            set_next_unit(params, layer, entry, after % kv_heads, lowest + after // kv_heads)
        else:
            set_next_unit(params, layer, entry, head, -1)
        splits_done = param(params, pb.SPLITS_DONE) + 64 * (e * kv_heads + head)
        attend_split(params, layer, entry, token, head, head_at, index, lowest, splits, splits_done)
    return end


@njit(**MERGED)
def attend_single(params, layer, e, unit):
    """This rank's heads of a single query, entry `e`; `unit`: number of its first unit."""
    rank, ranks = param(params, pb.RANK), param(params, pb.RANKS)
    kv_heads, window = param(params, pb.N_KV_HEADS), param(layer, pb.WINDOW)
    entry, entries = p.entry_at(params, e), param(param(params, pb.PLAN), p.ENTRIES_KEPT)
    start, token = param(entry, p.P_START), param(entry, p.P_TOKEN)
    own = _first_split(params, entry, window)
    at_once = 1
    if start // KV_SPLIT > own and param(params, pb.ATTENDS_ALL) == 0:
        at_once = max(1, attention.MANY_ROWS * kv_heads // param(params, pb.N_HEADS))
    head, end, step = own_heads(rank, ranks, kv_heads, unit)
    while head < end:
        heads = min(at_once, (end - head + step - 1) // step)
        after = head + heads * step
        if after < end:
            set_next_unit(params, layer, entry, after, own)
        else:
            following, of = entry, np.int64(-1)
            after = head
            if e + 1 < entries and param(p.entry_at(params, e + 1), p.P_COUNT) == 1:
                first = own_heads(rank, ranks, kv_heads, unit + kv_heads)[0]
                if first < kv_heads:
                    after, following = first, p.entry_at(params, e + 1)
                    of = _first_split(params, following, window)
            set_next_unit(params, layer, following, after, of)
        if param(params, pb.ATTENDS_ALL):
            head_at = param(layer, pb.KV_AT) + head * param(params, pb.HEAD_BYTES)
            prefetch_page(params, layer, entry, head_at)
            write_kv(params, layer, entry, token, head, head_at, param(params, pb.ATTENTION))
            attend_all(params, layer, entry, token, start, 1, head, head_at)
            head += step
        else:
            attend_heads(params, layer, entry, token, head, heads, step)
            head += heads * step


@njit(**MERGED)
def attend(params, layer):
    """This rank's units of a layer."""
    rank, ranks = param(params, pb.RANK), param(params, pb.RANKS)
    kv_heads = param(params, pb.N_KV_HEADS)
    group = param(params, pb.N_HEADS) // kv_heads
    unit, entries = 0, param(param(params, pb.PLAN), p.ENTRIES_KEPT)
    for e in range(entries):
        entry = p.entry_at(params, e)
        start, count, token = param(entry, p.P_START), param(entry, p.P_COUNT), param(entry, p.P_TOKEN)
        if param(entry, p.P_SPLIT) >= 0:
            unit = attend_splits(params, layer, e, unit)
            continue
        if count == 1:
            attend_single(params, layer, e, unit)
            unit += kv_heads
            continue
        block = block_queries(count, group, kv_heads, ranks)
        for head in range(kv_heads):
            head_at = param(layer, pb.KV_AT) + head * param(params, pb.HEAD_BYTES)
            for begin in range(0, count, block):
                if (unit + rank_of_block(head, begin, count, block, ranks)) % ranks == rank:
                    queries = min(block, count - begin)
                    if param(params, pb.ATTENDS_ALL):
                        attend_all(params, layer, entry, token + begin, start + count - 1, queries, head, head_at)
                    else:
                        attend_queries(params, layer, entry, token + begin, start + begin, queries, head, head_at)
        unit += kv_heads * ((count + block - 1) // block)


@njit(**MERGED)
def quantize_straddling(params, tokens):
    """ATTN_OUT_Q and ATTN_OUT_P where records span groups of heads: they are made when all heads are done."""
    heads, dim = param(params, pb.N_HEADS), param(params, pb.HEAD_DIM)
    if heads // param(params, pb.N_KV_HEADS) * dim % 32 != 0:
        to = packed(params, pb.ATTN_OUT_P, tokens)
        first, end = share(params, tokens)
        for t in range(first, end):
            x = param(params, pb.ATTN_OUT) + t * param(params, pb.ATTN_OUT_STRIDE)
            row = param(params, pb.ATTN_OUT_Q) + t * param(params, pb.ATTN_OUT_Q_STRIDE)
            quantize_row(x, heads * dim, row)
            if to != 0:
                pack_row(row, 0, (heads * dim + 31) // 32, heads * dim, to, t)
        wait_for_ranks(params)
