"""Sequences of a step that share the pages of a prefix: single queries attend to it together, as one block.

The plan of a step (plan.py) names them: entries of one query whose page tables begin with the same pages, for one or
more whole KV splits.  Each such *prefix group* (prefix_groups.py) has a leader, one of its entries, through which the
others are linked.  Before the step's units of attention (attention_units.py), `attend_prefixes` computes the splits of
the prefix for all queries of a group and stores what they leave for each head: M, L and the combined values, in
4 * (head_dim + 16) bytes at SPLIT_RESULTS, like a split.  The entry's own unit begins with these, at the first split
that is not shared.  A row's arithmetic does not depend on the block that it is in, so the bytes are those of a sequence
that shares nothing.
"""

from __future__ import annotations

from numba import njit

from shm.pages import KV_SPLIT
from stages.worker.kernels import attention, split_combine
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels import plan as p
from stages.worker.kernels.attention_units import pack_queries, prefix_result_at, run_attention, set_next_unit
from stages.worker.kernels.buffer_sizes import BLOCK_ROWS
from stages.worker.kernels.entries import INNER, MERGED
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.simd import get_f32, put_f32

# Rows of a block that take about as long as the conversion of K and V for it, with AVX-512.  With AVX2 alone f16 is not
# converted for small blocks, and other sizes of blocks made no difference that could be measured.
CONVERSION_ROWS = 12


@njit(**INNER)
def block_members(members, group, kv_heads, ranks):
    """Members of a prefix group whose queries are one block: the number with which the busiest rank has least to do."""
    most = BLOCK_ROWS // group
    best, least = most, 0
    for n in range(1, members + 1):
        if n > most:
            break
        units = (members + n - 1) // n * kv_heads
        cost = (units + ranks - 1) // ranks * (n * group + CONVERSION_ROWS)
        if least == 0 or cost <= least:
            best, least = n, cost
    return best


@njit(**INNER)
def _attend_prefix(params, layer, leader, first, n, kv_head, head_at):
    """The prefix, for the queries of `n` members from entry `first` on, and one KV head."""
    dim, heads = param(params, pb.HEAD_DIM), param(params, pb.N_HEADS)
    group = heads // param(params, pb.N_KV_HEADS)
    scratch = param(params, pb.ATTENTION)
    at = first
    for i in range(n):
        entry = p.entry_at(params, at)
        pack_queries(params, layer, param(entry, p.P_TOKEN), 1, kv_head, scratch + 4 * i * group * dim)
        at = param(entry, p.P_NEXT)
    set_next_unit(params, layer, leader, kv_head, -1)
    last = param(leader, p.P_PREFIX) * KV_SPLIT - 1
    # To the entry of attention they are heads of one query. The layer has no window (forward.py).
    run_attention(params, layer, leader, head_at, last, 1, n * group, 0, 0, -1, 1, 0)
    state, acc = attention.state_at(scratch, dim), attention.combined_at(scratch, dim)
    at = first
    for i in range(n):
        entry = p.entry_at(params, at)
        for g in range(group):
            row = i * group + g
            to = prefix_result_at(params, entry, kv_head * group + g)
            put_f32(to, get_f32(state + 4 * row))
            put_f32(to + 4, get_f32(state + split_combine.STATE_TOTAL + 4 * row))
            split_combine.copy(acc + 4 * row * dim, to + 64, dim)
        at = param(entry, p.P_NEXT)


@njit(**MERGED)
def attend_prefixes(params, layer):
    """This rank's units of the prefix groups. Then ranks wait for each other."""
    rank, ranks, kv_heads = param(params, pb.RANK), param(params, pb.RANKS), param(params, pb.N_KV_HEADS)
    group, unit = param(params, pb.N_HEADS) // kv_heads, 0
    for e in range(param(param(params, pb.PLAN), p.ENTRIES_KEPT)):
        leader = p.entry_at(params, e)
        members = param(leader, p.P_MEMBERS)
        if members == 0:
            continue
        block = block_members(members, group, kv_heads, ranks)
        at = e
        for begin in range(0, members, block):
            n = min(block, members - begin)
            for head in range(kv_heads):
                if unit % ranks == rank:
                    head_at = param(layer, pb.KV_AT) + head * param(params, pb.HEAD_BYTES)
                    _attend_prefix(params, layer, leader, at, n, head, head_at)
                unit += 1
            for _ in range(n):
                at = param(p.entry_at(params, at), p.P_NEXT)
