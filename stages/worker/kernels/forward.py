"""A whole step in one jitted function, which every rank runs.

    run_step(params)

Ranks claim pieces of matrices, groups of 16 rows (row_claims.py), and split attention by units, norms by token, and
samples by row.  A value is computed by one rank, in an order that does not depend on the split, so the rank count does
not change a bit.  Ranks wait for each other where one reads what another has written:

    plan | embedding | per layer: q, k, v | [K, V of chunks] | [prefixes] | attn_out | x | gated | x | ... logits | done

The last layer computes only K and V of tokens that are neither sampled nor pooled (needed_plan.py):

    k, v | K, V of chunks, needed rows move | q of these | attn_out | ...

With few tokens every rank norms and quantizes all of them for itself (NORM is its own then); with many, the ranks share
them and wait once more.  Nothing is allocated here; `params` is the parameter block (parameter_block.py).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shm import step_ring
from shm.atomics import futex_wait, load_acquire, monotonic_ns, pause, store_release
from stages.worker.kernels import elementwise as ew
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels import plan as p
from stages.worker.kernels.attention_units import attend, quantize_straddling, write_kv_of_chunks
from stages.worker.kernels.entries import INNER, MERGED, call_entry, run_entry
from stages.worker.kernels.formats.description import GROUP
from stages.worker.kernels.last_layer import gather_kv_and_angles, gather_stream
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.pooling import pool_entries
from stages.worker.kernels.projections import (
    norm_and_quantize,
    norm_row,
    project_down,
    project_gate_up,
    project_head,
    project_kv,
    project_output,
    project_q,
    project_qkv,
)
from stages.worker.kernels.rank_sync import (
    ATTENTION,
    DOWN,
    EMBED,
    GATE_UP,
    HEAD,
    KEYS,
    NORM,
    OUTPUT,
    PREFETCH_BYTES,
    QKV,
    SAMPLE,
    hidden_share,
    phase_begin,
    phase_end,
    share,
    wait_before_output,
    wait_before_q,
    wait_for_ranks,
    wait_prefetching,
)
from stages.worker.kernels.shared_prefixes import attend_prefixes
from stages.worker.kernels.simd import get_f32, get_i64, put_i32

_OUTPUT_START, _MAX_TOP = 8 * step_ring.OUTPUT_START, step_ring.MAX_TOP
_SCORED = 8 * step_ring.SCORED
_ROW_INTS, _ROW_FLOATS, _MAX_MASK = 8 * step_ring.ROW_INTS, 4 * step_ring.ROW_FLOATS, 4 * step_ring.MAX_MASK
_MAX_BIAS = 4 * step_ring.MAX_BIAS
_NO_MASK, _MASK_SLOTS = step_ring.NO_MASK, step_ring.MASK_SLOTS
MASK_WAIT_NS = 3_000_000  # that a step waits for token masks in all; then samples without one are left to a later step
_MASK_SLICE_NS = 50_000  # of that wait, without the core: the process that writes the masks may need it


@njit(**INNER)
def _angles(params, tables, position, pairs, to):
    """Cosines and sines of a position to `to`; `tables`: word of the first of the four tables, in their order."""
    high, low = position // 256 * pairs * 4, position % 256 * pairs * 4
    ew.rope_angles(
        param(params, tables + 2) + high,
        param(params, tables + 3) + high,
        param(params, tables) + low,
        param(params, tables + 1) + low,
        to,
        to + param(params, pb.SINES),
        pairs,
    )


@njit(**MERGED)
def _embed(params, tokens):
    """X (the embedding) and ROPE (cosines and sines of the position) of this rank's tokens."""
    first, end = share(params, tokens)
    width, pairs = param(params, pb.WIDTH), param(params, pb.N_ROT) // 2
    for t in range(first, end):
        at = p.token_at(params, t)
        position, token = get_i64(at), get_i64(at + 8)
        x = param(params, pb.X) + 4 * t * width
        kind, w = param(params, pb.EMBEDDING_FORMAT), param(params, pb.EMBEDDING)
        run_entry(param(params, pb.EMBED_ROW), (kind, w, width, token, x))
        factor = get_f32(params + 8 * pb.EMBEDDING_SCALE)
        if factor != np.float32(1.0):
            ew.scale(x, factor, width)
        if param(params, pb.TOKEN_TYPE):
            ew.add(x, param(params, pb.TOKEN_TYPE), width)
        if param(params, pb.POSITIONS):
            kind, w, y = param(params, pb.POSITIONS_FORMAT), param(params, pb.POSITIONS), param(params, pb.Y)
            run_entry(param(params, pb.EMBED_ROW), (kind, w, width, position, y + 4 * t * width))
            ew.add(x, y + 4 * t * width, width)
        if param(params, pb.EMBEDDING_NORM):
            norm_row(params, x, param(params, pb.EMBEDDING_NORM), param(params, pb.EMBEDDING_NORM_BIAS), x)
        if param(params, pb.POSITIONS):
            continue
        angles = param(params, pb.ROPE) + t * param(params, pb.ROPE_STRIDE)
        _angles(params, pb.COS_LO, position, pairs, angles)
        if param(params, pb.LOCAL_COS_LO):
            _angles(params, pb.LOCAL_COS_LO, position, pairs, angles + param(params, pb.ROPE_STRIDE) // 2)


@njit(**INNER)
def _wait_for_mask(params, row, known, epoch, deadline):
    """Address of the mask for the token after `known` tokens of the row; 0 if it is not there at `deadline` (ns)."""
    at = row * _MASK_SLOTS + known % _MASK_SLOTS
    ready, tag = param(params, pb.MASK_READY) + 8 * at, (epoch << 32) | known
    while load_acquire(ready) != tag:
        for _ in range(256):
            pause()
        if load_acquire(ready) == tag:
            break
        if monotonic_ns() > deadline:
            return 0
        futex_wait(ready, load_acquire(ready) & 0xFFFFFFFF, _MASK_SLICE_NS)
    return param(params, pb.MASKS) + at * param(params, pb.MASK_STRIDE)


@njit(**MERGED)
def _sample(params, index, deadline):
    """Draw one sample; write its outputs to the slot and, for an entry with one sample, the row's next token.

    A token of the prompt is scored instead.
    `deadline`, ns: when a token mask, if it needs one, counts as missing.
    """
    slot = param(param(params, pb.PLAN), p.SLOT)
    planned = p.sample_at(params, index)
    token_index, place, entry = get_i64(planned), get_i64(planned + 8), p.entry_at(params, get_i64(planned + 16))
    row, samples = param(entry, p.P_ROW), param(entry, p.P_SAMPLES)
    known = get_i64(p.token_at(params, token_index)) + 1
    tokens = param(params, pb.TOKENS) + row * param(params, pb.TOKENS_STRIDE)
    ints = param(params, pb.ROW_INTS_AT) + row * _ROW_INTS
    out = slot * param(params, pb.OUT_STRIDE) + 4 * place
    epoch, mask, token = param(entry, p.P_MASKS), 0, _NO_MASK
    if epoch != 0:
        mask = _wait_for_mask(params, row, known, epoch, deadline)
    if epoch == 0 or mask != 0:
        token = call_entry(
            param(params, pb.DRAW),
            (
                param(params, pb.LOGITS) + index * param(params, pb.LOGITS_STRIDE),
                param(params, pb.VOCAB),
                tokens,
                known,
                get_i64(ints + _OUTPUT_START),
                ints,
                param(params, pb.ROW_FLOATS_AT) + row * _ROW_FLOATS,
                param(params, pb.MASK_IDS) + row * _MAX_MASK,
                param(params, pb.BIAS_IDS) + row * _MAX_BIAS,
                param(params, pb.BIAS) + row * _MAX_BIAS,
                mask,
                param(params, pb.BREAKERS) + row * param(params, pb.MASK_STRIDE),
                param(params, pb.SAMPLER),
                param(params, pb.OUT_LOGPROB) + out,
                param(params, pb.OUT_TOP_ID) + _MAX_TOP * out,
                param(params, pb.OUT_TOP_LP) + _MAX_TOP * out,
            ),
        )
    put_i32(param(params, pb.OUT_TOKEN) + out, token)
    is_scored = get_i64(ints + _SCORED) > 0 and known < get_i64(ints + _OUTPUT_START)
    if samples == 1 and not is_scored:
        put_i32(tokens + 4 * known, token)


@njit(**INNER)
def _attend_and_feed(params, layer, index, tokens):
    """A layer from its attention on, for tokens whose Q is in QKV and whose K and V are in their pages or in QKV."""
    width, ffn = param(params, pb.WIDTH), param(params, pb.FFN)
    now = phase_begin(params)
    if param(param(params, pb.PLAN), p.SHARED) and param(layer, pb.WINDOW) == 0:
        attend_prefixes(params, layer)
        phase_end(params, ATTENTION, now)
        wait_for_ranks(params)
        now = phase_begin(params)
    attend(params, layer)
    phase_end(params, ATTENTION, now)
    wait_before_output(params, layer, PREFETCH_BYTES)
    quantize_straddling(params, tokens)
    now = phase_begin(params)
    project_output(params, layer, tokens)
    phase_end(params, OUTPUT, now)
    kind, w = param(layer, pb.GATE_FORMAT), param(layer, pb.GATE)
    if w == 0:
        kind, w = param(layer, pb.UP_FORMAT), param(layer, pb.UP)
    wait_prefetching(params, kind, w, width, hidden_share(params, ffn), 0)
    now = phase_begin(params)
    norm_and_quantize(params, param(layer, pb.FFN_NORM), param(layer, pb.FFN_NORM_BIAS), tokens, False)
    now = phase_end(params, NORM, now)
    if param(layer, pb.ROUTER):
        run_entry(param(params, pb.EXPERTS), (params, layer, tokens))
    else:
        project_gate_up(params, layer, tokens)
        phase_end(params, GATE_UP, now)
        groups = share(params, width // GROUP)
        wait_prefetching(params, param(layer, pb.DOWN_FORMAT), param(layer, pb.DOWN), ffn, groups, 0)
        now = phase_begin(params)
        project_down(params, layer, tokens)
        phase_end(params, DOWN, now)
    if index + 1 < param(params, pb.N_LAYERS):
        wait_before_q(params, layer + 8 * pb.LAYER_WORDS)
    else:
        groups = share(params, (param(params, pb.VOCAB) + GROUP - 1) // GROUP)
        wait_prefetching(params, param(params, pb.HEAD_FORMAT), param(params, pb.HEAD), width, groups, 0)


@njit(**INNER)
def _write_kv_of_chunks(params, layer):
    now = phase_begin(params)
    write_kv_of_chunks(params, layer)
    phase_end(params, KEYS, now)


@njit(**INNER)
def _run_layer(params, index, tokens, chunks):
    layer = param(params, pb.LAYERS) + 8 * pb.LAYER_WORDS * index
    now = phase_begin(params)
    norm_and_quantize(params, param(layer, pb.ATTN_NORM), param(layer, pb.ATTN_NORM_BIAS), tokens, False)
    now = phase_end(params, NORM, now)
    project_qkv(params, layer, tokens)
    phase_end(params, QKV, now)
    wait_before_output(params, layer, 0)
    if chunks:
        _write_kv_of_chunks(params, layer)
        wait_for_ranks(params)
    _attend_and_feed(params, layer, index, tokens)


@njit(**INNER)
def _run_last_layer(params, index, tokens):
    """The last layer where not all tokens are needed (needed_plan.py): K and V of all, the others' hidden states."""
    layer = param(params, pb.LAYERS) + 8 * pb.LAYER_WORDS * index
    rows, needed = param(param(params, pb.PLAN), p.NEEDED), param(params, pb.NEEDED_BLOCK)
    now = phase_begin(params)
    norm_and_quantize(params, param(layer, pb.ATTN_NORM), param(layer, pb.ATTN_NORM_BIAS), tokens, False)
    now = phase_end(params, NORM, now)
    project_kv(params, layer, tokens)
    phase_end(params, QKV, now)
    wait_before_q(params, layer)
    _write_kv_of_chunks(params, layer)
    if rows == 0:
        return
    now = phase_begin(params)
    gather_stream(params, tokens)
    phase_end(params, QKV, now)
    wait_for_ranks(params)
    now = phase_begin(params)
    gather_kv_and_angles(params)
    project_q(needed, layer, rows)
    phase_end(params, QKV, now)
    wait_before_output(params, layer, 0)
    _attend_and_feed(needed, layer, index, rows)


@njit(**INNER)
def run_step(params):
    """The planned step, or the planned part of it; all ranks call it, each with its own parameter block."""
    plan = param(params, pb.PLAN)
    tokens, samples, chunks = param(plan, p.TOKENS), param(plan, p.SAMPLES), param(plan, p.HAS_CHUNKS)
    has_masks, has_pooled = param(plan, p.HAS_MASKS), param(plan, p.HAS_POOLED)
    rank, ranks = param(params, pb.RANK), param(params, pb.RANKS)
    progress = param(params, pb.PROGRESS_AT)
    first, end, n_layers = param(plan, p.FIRST_LAYER), param(plan, p.END_LAYER), param(params, pb.N_LAYERS)
    if tokens:
        if first == 0:
            now = phase_begin(params)
            _embed(params, tokens)
            phase_end(params, EMBED, now)
            wait_for_ranks(params)
        for index in range(first, end):
            if index + 1 < n_layers or param(plan, p.NEEDED) == tokens:
                _run_layer(params, index, tokens, chunks)
            else:
                _run_last_layer(params, index, tokens)
            if rank == 0:
                store_release(progress, get_i64(progress) + 1)
        if end == n_layers and param(plan, p.NEEDED) != tokens:
            params = param(params, pb.NEEDED_BLOCK)  # also of a part that has no layers, only the samples
    if end < n_layers:
        wait_for_ranks(params)
        return
    if has_pooled:
        pool_entries(params)
    if samples:
        now = phase_begin(params)
        norm_and_quantize(params, param(params, pb.FINAL_NORM), param(params, pb.FINAL_NORM_BIAS), samples, True)
        now = phase_end(params, NORM, now)
        project_head(params, samples)
        phase_end(params, HEAD, now)
        wait_for_ranks(params)
        now = phase_begin(params)
        rounds, deadline = 1, 0
        if has_masks:  # samples without a mask first: meanwhile masks are completed
            rounds, deadline = 2, monotonic_ns() + MASK_WAIT_NS
        for i in range(rounds * samples):
            index = i % samples
            needs_mask = param(p.entry_at(params, get_i64(p.sample_at(params, index) + 16)), p.P_MASKS) != 0
            if index % ranks == rank and needs_mask == (i >= samples):
                _sample(params, index, deadline)
        phase_end(params, SAMPLE, now)
    if rank == 0:
        store_release(progress, get_i64(progress) + 1)
    wait_for_ranks(params)
