"""The plan of the last layer: the tokens of a step whose hidden states are needed, because they are sampled or pooled.

Every token needs its K and V in the last layer, for the steps that follow.  What the layer computes behind these only
matters for the tokens that are sampled or pooled: of a prompt's last chunk that is one, of the chunks before none.  The
plan here is that of a step with these tokens alone, whose K and V and those of all tokens before are in the cache.  A
row depends on no other row of its step, so its bytes are the same.

It has the layout of plan.py, at NEEDED_PLAN, and is the PLAN of each rank's other parameter block, NEEDED_BLOCK; rank 0
writes it with the step's plan.  An entry's needed tokens are next to each other.  Attention itself writes K and V of an
entry with one token, which is therefore always kept; those of an entry that has one needed token are written twice, the
same.
"""

from __future__ import annotations

from numba import njit

from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels import plan as p
from stages.worker.kernels.buffer_sizes import ENTRY_PLAN, SPLIT_UNITS
from stages.worker.kernels.entries import INNER, run_entry
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.prefix_groups import group_prefixes
from stages.worker.kernels.simd import get_i64, put_i64


@njit(**INNER)
def _needed_of(entry):
    """First needed token of an entry, counted from its start, and number of them."""
    count, samples = param(entry, p.P_COUNT), param(entry, p.P_SAMPLES)
    if count == 1:
        return 0, 1
    if param(entry, p.P_POOL_COUNT):
        return param(entry, p.P_POOL_FIRST), param(entry, p.P_POOL_COUNT)
    return count - samples, samples


@njit(**INNER)
def _keep_needed(params, needed, entry, kept, tokens, samples):
    """Plan what is needed of an entry as entry `kept`, from token `tokens` and sample `samples` on."""
    first, n = _needed_of(entry)
    to, source = p.entry_at(needed, kept), param(entry, p.P_TOKEN) + first
    for i in range(ENTRY_PLAN):
        put_i64(to + 8 * i, param(entry, i))
    # Queries that attend to all positions are computed as of the entry's last one: it must remain the last.
    behind = param(entry, p.P_COUNT) - n if param(params, pb.ATTENDS_ALL) else first
    put_i64(to + 8 * p.P_START, param(entry, p.P_START) + behind)
    put_i64(to + 8 * p.P_COUNT, n)
    put_i64(to + 8 * p.P_TOKEN, tokens)
    put_i64(to + 8 * p.P_SPLIT, -1)
    put_i64(to + 8 * p.P_POOL_FIRST, 0)
    put_i64(to + 8 * p.P_SOURCE, source)
    for i in range(n):
        at, token = p.token_at(needed, tokens + i), p.token_at(params, source + i)
        put_i64(at, get_i64(token))
        put_i64(at + 8, get_i64(token + 8))
        put_i64(at + 16, kept)
    for i in range(param(entry, p.P_SAMPLES)):
        at = p.sample_at(needed, samples + i)
        put_i64(at, tokens + n - param(entry, p.P_SAMPLES) + i)
        put_i64(at + 8, get_i64(p.sample_at(params, samples + i) + 8))
        put_i64(at + 16, kept)
    return n


@njit(**INNER)
def plan_needed(params):
    """Only rank 0: write NEEDED and SHARED of the step's plan and, unless all tokens are needed, the plan of these."""
    plan, needed = param(params, pb.PLAN), param(params, pb.NEEDED_BLOCK)
    entries = param(plan, p.ENTRIES_KEPT)
    total = 0
    for i in range(entries):
        total += _needed_of(p.entry_at(params, i))[1]
    put_i64(plan + 8 * p.NEEDED, total)
    group_prefixes(params)
    if total == param(plan, p.TOKENS):
        return
    kept = tokens = samples = has_adapters = 0
    for i in range(entries):
        entry = p.entry_at(params, i)
        if _needed_of(entry)[1]:
            tokens += _keep_needed(params, needed, entry, kept, tokens, samples)
            kept += 1
            samples += param(entry, p.P_SAMPLES)
            if param(entry, p.P_ADAPTER):
                has_adapters = 1
    plan_of_needed = param(needed, pb.PLAN)
    put_i64(plan_of_needed + 8 * p.ENTRIES_KEPT, kept)
    put_i64(plan_of_needed + 8 * p.TOKENS, tokens)
    put_i64(plan_of_needed + 8 * p.SLOT, param(plan, p.SLOT))
    put_i64(plan_of_needed + 8 * p.ADAPTED, 0)
    if has_adapters:
        run_entry(param(params, pb.LIST_ADAPTED), (needed, kept))
    if kept * param(params, pb.N_KV_HEADS) < SPLIT_UNITS and param(params, pb.ATTENDS_ALL) == 0:
        p.assign_split_results(needed, kept)
    group_prefixes(needed)
