"""The plan of a step: rank 0 reads the step's slot, checks every number in it, and writes the plan that all ranks use.

Rows, positions, counts, sample places, page numbers and token ids are compared with their bounds, and the page tables
are copied, so that a number that the scheduler changes later has no effect.  The copy has a table for each layer group
(shm/layer_groups.py), one after the other.  An entry with a number out of bounds gets
`BAD_ENTRY` as its tokens and is left out.  One that follows a token that was not sampled gets `NO_MASK`.

In i64 words at PLAN:

    0   entries kept   1  tokens   2  samples   3  whether any entry computes more than one position   4  slot
    5   whether any sample needs a token mask        6  whether any entry is pooled      7  tokens with an adapter
    8   first layer of the part that is computed now     9  end of its layers
    10  tokens that the last layer computes behind K and V (needed_plan.py)
    11  entries whose attention begins with a shared prefix (prefix_groups.py)
    12  entries: ENTRY_PLAN words each: row, start, count, samples, sample_base, first token, first place at
        SPLIT_RESULTS (-1: KV splits are not computed apart), byte of its page table at PLAN_TABLES, epoch of its masks,
        first pooled position (counted from the start) and number of them, 1 + slot of its adapter (0: none),
        in the plan of the last layer the number of its first token in the step's own plan,
        first place at SPLIT_RESULTS of a shared prefix (-1: none), KV splits of that prefix, next entry of its group
        (behind the last one the first), entries of the group that it leads (0: it leads none); valid where word 11 is
        not 0; then four words for the search of groups
    then tokens: position, id, entry (3 words each), then samples: token, place in the outputs, entry
    then the tokens with an adapter, by slot (1 word each), then for each of these slots: slot, end of its tokens
    (written by adapters.py).

A row names its adapter by its tag (adapter_table.py).  An entry whose adapter is not loaded is refused.
"""

from __future__ import annotations

from numba import njit

from shm import step_ring
from shm.pages import KV_SPLIT
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels.buffer_sizes import ENTRY_PLAN, PLAN_HEAD, SAMPLE_PLAN, SPLIT_UNITS, TOKEN_PLAN
from stages.worker.kernels.entries import INNER, call_entry, run_entry
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.simd import get_i32, get_i64, put_i32, put_i64

BAD_ENTRY = -2
(
    ENTRIES_KEPT,
    TOKENS,
    SAMPLES,
    HAS_CHUNKS,
    SLOT,
    HAS_MASKS,
    HAS_POOLED,
    ADAPTED,
    FIRST_LAYER,
    END_LAYER,
    NEEDED,
    SHARED,
) = range(12)
(
    P_ROW,
    P_START,
    P_COUNT,
    P_SAMPLES,
    P_SAMPLE_BASE,
    P_TOKEN,
    P_SPLIT,
    P_TABLE,
    P_MASKS,
    P_POOL_FIRST,
    P_POOL_COUNT,
    P_ADAPTER,
    P_SOURCE,
    P_SHARED,
    P_PREFIX,
    P_NEXT,
    P_MEMBERS,
    P_EQUAL,
    P_SAVED,
    P_DEPTH,
    P_BELOW,
) = range(21)

_SLOTS, _SLOT_WORDS, _ENTRY_WORDS = step_ring.SLOTS, step_ring.SLOT_WORDS, step_ring.ENTRY_WORDS
_N_ENTRIES, _STEP = step_ring.SLOT_ENTRIES, step_ring.SLOT_STEP
_ROW, _START, _COUNT, _SAMPLES, _BASE, _MASKS, _POOL_FIRST, _POOL_COUNT = (
    step_ring.ROW,
    step_ring.START,
    step_ring.COUNT,
    step_ring.SAMPLES,
    step_ring.SAMPLE_BASE,
    step_ring.ENTRY_FLAGS,
    step_ring.POOL_FIRST,
    step_ring.POOL_COUNT,
)
_ROW_INTS, _ADAPTER = 8 * step_ring.ROW_INTS, 8 * step_ring.ADAPTER
_NO_MASK, _MASK_SLOTS, _MAX_POOLED = step_ring.NO_MASK, step_ring.MASK_SLOTS, step_ring.MAX_POOLED


@njit(**INNER)
def entry_at(params, entry):
    """Address of the plan of entry number `entry`."""
    return param(params, pb.PLAN) + 8 * (PLAN_HEAD + ENTRY_PLAN * entry)


@njit(**INNER)
def token_at(params, token):
    """Address of the plan of token number `token` of the step."""
    return param(params, pb.PLAN) + 8 * (PLAN_HEAD + ENTRY_PLAN * param(params, pb.MAX_ENTRIES) + TOKEN_PLAN * token)


@njit(**INNER)
def sample_at(params, sample):
    """Address of the plan of sample number `sample` of the step."""
    words = PLAN_HEAD + ENTRY_PLAN * param(params, pb.MAX_ENTRIES) + TOKEN_PLAN * param(params, pb.STEP_TOKENS)
    return param(params, pb.PLAN) + 8 * (words + SAMPLE_PLAN * sample)


@njit(**INNER)
def _is_sound(params, row, start, count, samples, base, masks, n_tokens, n_samples):
    """Whether the numbers of an entry are within their bounds; pages and token ids are checked apart."""
    return (
        0 <= row < param(params, pb.MAX_ROWS)
        and start >= 0
        and 1 <= count <= param(params, pb.STEP_TOKENS) - n_tokens
        and start + count <= min(param(params, pb.MAX_POSITIONS), param(params, pb.MAX_TOKENS))
        and 0 <= samples <= min(count, param(params, pb.STEP_SAMPLES) - n_samples)
        and (samples == 0 or 0 <= base <= param(params, pb.MAX_SAMPLES) - samples)
        and (masks == 0 or (masks > 0 and samples <= _MASK_SLOTS and param(params, pb.MASK_STRIDE) > 0))
    )


@njit(**INNER)
def _is_poolable(params, count, samples, base, first, pooled):
    """Whether the numbers of a pooled entry, which are read besides those of every entry, are within their bounds."""
    return (
        samples == 0
        and param(params, pb.POOLED_WIDTH) == param(params, pb.WIDTH)
        and 0 <= base < _MAX_POOLED
        and first >= 0
        and 1 <= pooled <= count - first
    )


@njit(**INNER)
def _copy_table(params, row, entry, positions):
    """Copy the page table that `positions` positions need; False when a page does not exist."""
    page_tokens, groups = param(params, pb.PAGE_TOKENS), param(params, pb.PAGE_GROUPS)
    n, places = (positions + page_tokens - 1) // page_tokens, param(params, pb.MAX_PAGES) // groups
    if n > places:
        return False
    source = param(params, pb.TABLES) + row * param(params, pb.TABLES_STRIDE)
    target = param(params, pb.PLAN_TABLES) + entry * param(params, pb.TABLES_STRIDE)
    n_pages = param(params, pb.N_PAGES)
    for i in range(n):
        for group in range(groups):
            page = get_i32(source + 4 * (i * groups + group))
            if page < 0 or page >= n_pages:
                return False
            put_i32(target + 4 * (group * places + i), page)
    return True


@njit(**INNER)
def _copy_tokens(params, row, start, count, entry, first):
    """Plan the entry's tokens; False when an id is not in the vocabulary."""
    source = param(params, pb.TOKENS) + row * param(params, pb.TOKENS_STRIDE)
    vocab = param(params, pb.VOCAB)
    for i in range(count):
        token = get_i32(source + 4 * (start + i))
        if token < 0 or token >= vocab:
            return False
        at = token_at(params, first + i)
        put_i64(at, start + i)
        put_i64(at + 8, token)
        put_i64(at + 16, entry)
    return True


@njit(**INNER)
def _refuse(params, slot, samples, base, reason):
    """Write `reason` to the places of the entry's samples, as far as these exist."""
    if base < 0 or samples < 1:
        return
    out = param(params, pb.OUT_TOKEN) + slot * param(params, pb.OUT_STRIDE)
    for i in range(base, min(base + samples, param(params, pb.MAX_SAMPLES))):
        put_i32(out + 4 * i, reason)


@njit(**INNER)
def _refuse_pooled(params, slot, base):
    if 0 <= base < _MAX_POOLED:
        put_i32(param(params, pb.POOL_STATES) + 4 * (slot * _MAX_POOLED + base), BAD_ENTRY)


@njit(**INNER)
def _is_void(params, row, start, count, samples):
    """Whether the step before has not sampled the token at `start`, for want of a mask. Then neither does this one."""
    token = param(params, pb.TOKENS) + row * param(params, pb.TOKENS_STRIDE) + 4 * start
    if get_i32(token) != _NO_MASK:
        return False
    if samples == 1:
        put_i32(token + 4 * count, _NO_MASK)
    return True


@njit(**INNER)
def plan_part(params, step):
    """Only rank 0: plan the step if its first part is next, and name the part's layers. Returns as `make_plan`.

    Later parts keep the plan of the first one.
    """
    plan, first, end = param(params, pb.PLAN), param(params, pb.FIRST_LAYER), param(params, pb.END_LAYER)
    refused = make_plan(params, step) if first == 0 else 0
    put_i64(plan + 8 * FIRST_LAYER, first)
    put_i64(plan + 8 * END_LAYER, end if end > 0 else param(params, pb.N_LAYERS))
    return refused


@njit(**INNER)
def make_plan(params, step):
    """Write the plan of `step`; only rank 0. Returns how many entries were refused, -1 for a slot of another step."""
    slot = step % _SLOTS
    head = param(params, pb.SLOT_HEAD) + 8 * _SLOT_WORDS * slot
    plan = param(params, pb.PLAN)
    put_i64(plan + 8 * SLOT, slot)
    for i in (ENTRIES_KEPT, TOKENS, SAMPLES, HAS_CHUNKS, HAS_MASKS, HAS_POOLED, ADAPTED):
        put_i64(plan + 8 * i, 0)
    if get_i64(head + 8 * _STEP) != step:
        return -1
    entries = param(params, pb.ENTRIES) + slot * param(params, pb.ENTRIES_STRIDE)
    kept = n_tokens = n_samples = refused = chunks = has_masks = has_pooled = has_adapters = 0
    for i in range(min(max(get_i64(head + 8 * _N_ENTRIES), 0), param(params, pb.MAX_ENTRIES))):
        at = entries + 4 * _ENTRY_WORDS * i
        row, start, count = get_i32(at + 4 * _ROW), get_i32(at + 4 * _START), get_i32(at + 4 * _COUNT)
        samples, base, masks = get_i32(at + 4 * _SAMPLES), get_i32(at + 4 * _BASE), get_i32(at + 4 * _MASKS)
        pool_first, pooled = get_i32(at + 4 * _POOL_FIRST), get_i32(at + 4 * _POOL_COUNT)
        is_sound = _is_sound(params, row, start, count, samples, base, masks, n_tokens, n_samples)
        if pooled != 0 and not _is_poolable(params, count, samples, base, pool_first, pooled):
            is_sound = False
        adapter = 0
        if is_sound:
            tag = get_i64(param(params, pb.ROW_INTS_AT) + row * _ROW_INTS + _ADAPTER)
            if tag != 0:
                adapter = -1
                if param(params, pb.ADAPTERS):
                    adapter = call_entry(param(params, pb.FIND_ADAPTER), (params, tag))
                is_sound = adapter > 0
        if is_sound and masks != 0 and _is_void(params, row, start, count, samples):
            _refuse(params, slot, samples, base, _NO_MASK)
            continue
        if not (
            is_sound
            and _copy_table(params, row, kept, start + count)
            and _copy_tokens(params, row, start, count, kept, n_tokens)
        ):
            _refuse(params, slot, samples, base, BAD_ENTRY)
            if pooled != 0:
                _refuse_pooled(params, slot, base)
            refused += 1
            continue
        entry = entry_at(params, kept)
        put_i64(entry + 8 * P_ROW, row)
        put_i64(entry + 8 * P_START, start)
        put_i64(entry + 8 * P_COUNT, count)
        put_i64(entry + 8 * P_SAMPLES, samples)
        put_i64(entry + 8 * P_SAMPLE_BASE, base)
        put_i64(entry + 8 * P_TOKEN, n_tokens)
        put_i64(entry + 8 * P_SPLIT, -1)
        put_i64(entry + 8 * P_TABLE, kept * param(params, pb.TABLES_STRIDE))
        put_i64(entry + 8 * P_MASKS, masks)
        put_i64(entry + 8 * P_POOL_FIRST, pool_first)
        put_i64(entry + 8 * P_POOL_COUNT, pooled)
        put_i64(entry + 8 * P_ADAPTER, adapter)
        if adapter != 0:
            has_adapters = 1
        if pooled != 0:
            has_pooled = 1
        if masks != 0 and samples > 0:
            has_masks = 1
        for j in range(samples):
            sample = sample_at(params, n_samples + j)
            put_i64(sample, n_tokens + count - samples + j)
            put_i64(sample + 8, base + j)
            put_i64(sample + 16, kept)
        if count > 1:
            chunks = 1
        kept += 1
        n_tokens += count
        n_samples += samples
    put_i64(plan + 8 * ENTRIES_KEPT, kept)
    put_i64(plan + 8 * TOKENS, n_tokens)
    put_i64(plan + 8 * SAMPLES, n_samples)
    put_i64(plan + 8 * HAS_CHUNKS, chunks)
    put_i64(plan + 8 * HAS_MASKS, has_masks)
    put_i64(plan + 8 * HAS_POOLED, has_pooled)
    if has_adapters:
        run_entry(param(params, pb.LIST_ADAPTED), (params, kept))
    if kept * param(params, pb.N_KV_HEADS) < SPLIT_UNITS:
        assign_split_results(params, kept)
    return refused


@njit(**INNER)
def assign_split_results(params, kept):
    """Assign places at SPLIT_RESULTS to entries of one query and several KV splits, until all places are used.

    None where KV heads are equal shares of the ranks: a rank then computes its heads of a query itself, split by split.
    """
    if param(params, pb.N_KV_HEADS) % param(params, pb.RANKS) == 0:
        return
    used = 0
    heads = param(params, pb.N_HEADS)
    for i in range(kept):
        entry = entry_at(params, i)
        splits = param(entry, P_START) // KV_SPLIT + 1
        if param(entry, P_COUNT) == 1 and splits > 1 and used + splits * heads <= param(params, pb.N_SPLIT_RESULTS):
            put_i64(entry + 8 * P_SPLIT, used)
            used += splits * heads
