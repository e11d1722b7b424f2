"""LoRA adapters: y += scale * B (A x) for the tokens that have one: entries that only adapters need.

    find_adapter(params, tag)                                           1 + the slot of an adapter
    list_adapted(params, kept)                                          the plan's list of tokens with an adapter
    shrink(params, layer, target, places, x, columns)                   S = A x, for matrices with the same input
    expand(params, layer, target, place, out, out_stride, first, end)   y = fma(B S, scale, y), rows of one rank

Both products are those of dense matrices (matmul.py), so a token's values depend on its own row and its adapter alone.
The plan lists the tokens with an adapter by its slot (plan.py): each adapter is multiplied with all of its tokens.

With few such tokens every rank computes S of all for itself (OWN_ADAPTER_SUMS); with many, the ranks share them and
wait (ADAPTER_SUMS).  S of place p of the i-th of these tokens is at (ADAPTER_PLACES i + p) * ADAPTER_SUMS_STRIDE.
"""

from __future__ import annotations

from numba import njit

from stages.worker.kernels import elementwise as ew
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels import plan as p
from stages.worker.kernels.adapter_table import (
    A_FORMAT,
    B_FORMAT,
    MAX_ADAPTERS,
    PAIR_RANK,
    PAIR_WORDS,
    SCALE,
    TARGETS,
    A,
    B,
)
from stages.worker.kernels.buffer_sizes import ADAPTED_PLAN, ADAPTED_ROWS, ADAPTER_PLACES, DELTA_BYTES
from stages.worker.kernels.entries import INNER, run_entry
from stages.worker.kernels.formats.description import GROUP
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.rank_sync import share, wait_for_ranks
from stages.worker.kernels.simd import JIT, get_f32, get_i64, put_i64
from stages.worker.kernels.split_combine import copy

_N_TARGETS, _GROUP_BYTES = len(TARGETS), 4 * GROUP


@njit(**INNER)
def _adapted_at(params, i):
    """Address of the word that has number `i` of the tokens with an adapter."""
    return p.sample_at(params, param(params, pb.STEP_SAMPLES)) + 8 * i


@njit(**INNER)
def _group_at(params, group):
    """Address of slot and end of a group of tokens with the same adapter."""
    return _adapted_at(params, param(params, pb.STEP_TOKENS)) + 8 * ADAPTED_PLAN * group


@njit(**JIT)
def find_adapter(params, tag):
    """Entry: 1 + slot of the adapter with that tag; -1 when it is not loaded."""
    tags = param(params, pb.ADAPTERS)
    for slot in range(MAX_ADAPTERS):
        if get_i64(tags + 8 * slot) == tag:
            return 1 + slot
    return -1


@njit(**JIT)
def list_adapted(params, kept):
    """Entry: list the tokens with an adapter, of the plan's `kept` entries, by its slot, and where each slot's end.

    Returns nothing.
    """
    n = groups = 0
    for slot in range(MAX_ADAPTERS):
        before = n
        for i in range(kept):
            entry = p.entry_at(params, i)
            if param(entry, p.P_ADAPTER) == 1 + slot:
                for t in range(param(entry, p.P_COUNT)):
                    put_i64(_adapted_at(params, n), param(entry, p.P_TOKEN) + t)
                    n += 1
        if n > before:
            group = _group_at(params, groups)
            put_i64(group, slot)
            put_i64(group + 8, n)
            groups += 1
    put_i64(param(params, pb.PLAN) + 8 * p.ADAPTED, n)


@njit(**INNER)
def _pair_at(params, slot, layer, target):
    """Address of the words of an adapter's pair of matrices; `layer` is an address at LAYERS."""
    index = (layer - param(params, pb.LAYERS)) // (8 * pb.LAYER_WORDS)
    number = (slot * param(params, pb.N_LAYERS) + index) * _N_TARGETS + target
    return param(params, pb.ADAPTERS) + 8 * (MAX_ADAPTERS + number * PAIR_WORDS)


@njit(**INNER)
def _sums(params, adapted):
    """Address of S for a step with so many adapted tokens."""
    return param(params, pb.OWN_ADAPTER_SUMS) if adapted <= pb.FEW else param(params, pb.ADAPTER_SUMS)


@njit(**INNER)
def _gather(params, i, rows, x, columns):
    """Address of the f32 rows of the adapted tokens i .. i + rows - 1, one after the other."""
    first = get_i64(_adapted_at(params, i))
    if get_i64(_adapted_at(params, i + rows - 1)) - first == rows - 1:  # they ascend within an entry
        is_run = True
        for j in range(1, rows):
            is_run = is_run and get_i64(_adapted_at(params, i + j)) == first + j
        if is_run:
            return x + 4 * columns * first
    to = param(params, pb.ADAPTER_GATHERED)
    for j in range(rows):
        copy(x + 4 * columns * get_i64(_adapted_at(params, i + j)), to + 4 * columns * j, columns)
    return to


@njit(**JIT)
def shrink(params, layer, target, places, x, columns):
    """Entry: S of targets `target` .. `target + places - 1`, whose input is the f32 rows x (`columns`) of all tokens.

    All ranks call it.  Returns nothing.
    """
    adapted = param(param(params, pb.PLAN), p.ADAPTED)
    few = adapted <= pb.FEW
    first, end = (0, adapted) if few else share(params, adapted)
    sums, stride = _sums(params, adapted), param(params, pb.ADAPTER_SUMS_STRIDE)
    group = stop = 0
    while stop < adapted:
        words = _group_at(params, group)
        begin, slot, stop = stop, get_i64(words), get_i64(words + 8)
        i, last = max(begin, first), min(stop, end)
        while i < last:
            rows = min(ADAPTED_ROWS, last - i)
            source = _gather(params, i, rows, x, columns)
            for place in range(places):
                pair = _pair_at(params, slot, layer, target + place)
                w = param(pair, A)
                if w:
                    groups = (param(pair, PAIR_RANK) + GROUP - 1) // GROUP
                    run_entry(
                        param(params, pb.MATMUL),
                        (
                            param(pair, A_FORMAT),
                            w,
                            columns,
                            0,
                            groups,
                            source,
                            4 * columns,
                            0,
                            rows,
                            sums + (ADAPTER_PLACES * i + place) * stride,
                            ADAPTER_PLACES * stride,
                            param(params, pb.MULTIPLY),
                        ),
                    )
            i += rows
        group += 1
    if not few:
        wait_for_ranks(params)


@njit(**JIT)
def expand(params, layer, target, place, out, out_stride, first, end):
    """Entry: add B S, times the adapter's scale, to row groups first .. end-1 of the adapted tokens' rows at `out`.

    The row of token t is at `out + t * out_stride`, its group g 64 g bytes behind that.  Returns nothing.
    """
    adapted = param(param(params, pb.PLAN), p.ADAPTED)
    sums, stride = _sums(params, adapted), param(params, pb.ADAPTER_SUMS_STRIDE)
    delta = param(params, pb.ADAPTER_DELTA)
    group = stop = 0
    while stop < adapted:
        words = _group_at(params, group)
        i, slot, stop = stop, get_i64(words), get_i64(words + 8)
        group += 1
        pair = _pair_at(params, slot, layer, target)
        w, scale = param(pair, B), get_f32(pair + 8 * SCALE)
        if w == 0:
            continue
        while i < stop:
            rows = min(ADAPTED_ROWS, stop - i)
            at_once, at = DELTA_BYTES // (_GROUP_BYTES * rows), first
            while at < end:
                n = min(at_once, end - at)
                run_entry(
                    param(params, pb.MATMUL),
                    (
                        param(pair, B_FORMAT),
                        w,
                        param(pair, PAIR_RANK),
                        at,
                        at + n,
                        sums + (ADAPTER_PLACES * i + place) * stride,
                        ADAPTER_PLACES * stride,
                        0,
                        rows,
                        delta - 64 * at,
                        64 * n,
                        param(params, pb.MULTIPLY),
                    ),
                )
                for j in range(rows):
                    token = get_i64(_adapted_at(params, i + j))
                    ew.add_scaled(out + token * out_stride + 64 * at, delta + j * 64 * n, scale, GROUP * n)
                at += n
            i += rows


SHRINK_ARGUMENTS, EXPAND_ARGUMENTS, FIND_ARGUMENTS, LIST_ARGUMENTS = 6, 8, 2, 2
