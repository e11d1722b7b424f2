"""The matrix products of a layer, and what belongs to them: norm before, bias, gate and residual after.

Each function computes this rank's row groups for all tokens of the step: the pieces that it claims (row_claims.py).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.worker.kernels import elementwise as ew
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels import plan as p
from stages.worker.kernels.adapter_table import DOWN, GATE, OUTPUT, UP, K, Q, V
from stages.worker.kernels.buffer_sizes import COPIED_BYTES, GATED_BYTES, MIN_CHUNK
from stages.worker.kernels.entries import INNER, MERGED, run_entry
from stages.worker.kernels.features import TILE_TOKENS
from stages.worker.kernels.format_traits import IS_DENSE, group_bytes, trait
from stages.worker.kernels.formats.description import BLOCK, GROUP
from stages.worker.kernels.packed_activations import pack_row, packed, packed_row, uses_tiles
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.quantize_activations import RECORD, quantize_row
from stages.worker.kernels.rank_sync import node_share, share, wait_for_node, wait_for_ranks
from stages.worker.kernels.row_claims import first_piece, next_piece, piece_end, piece_start, units_at_once
from stages.worker.kernels.simd import get_f32, get_i64
from stages.worker.kernels.split_combine import copy


@njit(**INNER)
def norm_row(params, x, weight, bias, y):
    """y = norm of a row x (width f32) of the residual stream; without a weight a copy."""
    width, eps = param(params, pb.WIDTH), get_f32(params + 8 * pb.EPS)
    if weight == 0:
        copy(x, y, width)
    elif param(params, pb.LAYER_NORM):
        ew.layer_norm(x, weight, bias, y, width, eps)
    else:
        ew.rms_norm(x, weight, y, width, eps)


@njit(**INNER)
def norm_and_quantize(params, weight, bias, rows, of_samples):
    """Norm of `rows` rows of X (`of_samples`: of the samples' rows) and their records: `normed`, `normed_q`, NORM_P.

    With many rows the ranks of each memory node make all of them: every rank reads all in the products that follow.
    """
    few = rows <= pb.FEW
    first, end = (0, rows) if few else node_share(params, rows)
    width = param(params, pb.WIDTH)
    floats, records, to = normed(params, rows), normed_q(params, rows), packed(params, pb.NORM_P, rows)
    for i in range(first, end):
        t = get_i64(p.sample_at(params, i)) if of_samples else i
        y = floats + 4 * i * width
        norm_row(params, param(params, pb.X) + 4 * t * width, weight, bias, y)
        record = records + i * param(params, pb.NORM_Q_STRIDE)
        quantize_row(y, width, record)
        if to != 0:
            pack_row(record, 0, (width + BLOCK - 1) // BLOCK, width, to, i)
    if not few:
        wait_for_node(params)


@njit(**INNER)
def normed(params, rows):
    """Address of the normed rows, f32 (rows, width)."""
    return param(params, pb.OWN_NORM) if rows <= pb.FEW else param(params, pb.NORM)


@njit(**INNER)
def normed_q(params, rows):
    """Address of the normed rows' records, NORM_Q_STRIDE bytes apart."""
    return param(params, pb.OWN_NORM_Q) if rows <= pb.FEW else param(params, pb.NORM_Q)


@njit(**INNER)
def project(
    params, kind, w, columns, rows, floats, records, records_stride, packed_records, tokens, out, out_stride, first, end
):
    """Groups first .. end-1 of a matrix times what its format wants: f32 rows or records (packed: or 0)."""
    x, stride = records, records_stride
    if trait(kind, IS_DENSE):
        x, stride = floats, 4 * columns
    if not uses_tiles(params, kind, tokens):
        packed_records = 0
    scratch = param(params, pb.MULTIPLY)
    run_entry(
        param(params, pb.MATMUL),
        (kind, w, columns, first, end, x, stride, packed_records, tokens, out, out_stride, scratch),
    )


@njit(**INNER)
def shrink(params, layer, target, places, x, columns):
    """A x of the adapters of this step, for `places` matrices from `target` on whose input is f32 rows x."""
    if param(param(params, pb.PLAN), p.ADAPTED):
        run_entry(param(params, pb.SHRINK), (params, layer, target, places, x, columns))


@njit(**INNER)
def expand(params, layer, target, place, out, out_stride, first, end):
    """Add B (A x) of the adapters of this step to row groups first .. end-1 of a product, after `shrink`."""
    if param(param(params, pb.PLAN), p.ADAPTED):
        run_entry(param(params, pb.EXPAND), (params, layer, target, place, out, out_stride, first, end))


@njit(**MERGED)
def _project_groups(params, kind, weights, rows, tokens, out, stride, first, end):
    """Row groups first .. end-1 of the product of a matrix (its format, its address) and the normed X, into `out`."""
    project(
        params,
        kind,
        weights,
        param(params, pb.WIDTH),
        rows,
        normed(params, tokens),
        normed_q(params, tokens),
        param(params, pb.NORM_Q_STRIDE),
        packed(params, pb.NORM_P, tokens),
        tokens,
        out,
        stride,
        first,
        end,
    )


@njit(**INNER)
def _project_normed(params, layer, target, place, matrix, rows, tokens, out):
    """This rank's pieces of q, k or v with their bias, for all tokens, into QKV at `out`.

    target  which of the three it is to adapters; `place`: of its sums (`shrink`)
    matrix  format, address and address of the bias
    """
    width = param(params, pb.WIDTH)
    stride, groups, in_turn = param(params, pb.QKV_STRIDE), rows // GROUP, 1 + target - Q
    at_once = units_at_once(params, group_bytes(matrix[0], width), tokens)
    piece = first_piece(params, groups, in_turn, at_once)
    while piece:
        first, end = piece_start(piece), piece_end(piece)
        _project_groups(params, matrix[0], matrix[1], rows, tokens, out, stride, first, end)
        expand(params, layer, target, place, out, stride, first, end)
        if matrix[2]:
            for t in range(tokens):
                ew.add(out + t * stride + 64 * first, matrix[2] + 64 * first, GROUP * (end - first))
        piece = next_piece(params, groups, in_turn, at_once)


@njit(**INNER)
def _q_rows(params):
    return param(params, pb.N_HEADS) * param(params, pb.HEAD_DIM)


@njit(**INNER)
def _multiply_q(params, layer, tokens):
    matrix = param(layer, pb.Q_FORMAT), param(layer, pb.Q), param(layer, pb.Q_BIAS)
    _project_normed(params, layer, Q, 0, matrix, _q_rows(params), tokens, param(params, pb.QKV))


@njit(**INNER)
def _multiply_kv(params, layer, tokens, place):
    """`place`: of the sums of K; those of V are next."""
    rows = param(params, pb.N_KV_HEADS) * param(params, pb.HEAD_DIM)
    out = param(params, pb.QKV) + 4 * _q_rows(params)
    matrix = param(layer, pb.K_FORMAT), param(layer, pb.K), param(layer, pb.K_BIAS)
    _project_normed(params, layer, K, place, matrix, rows, tokens, out)
    matrix = param(layer, pb.V_FORMAT), param(layer, pb.V), param(layer, pb.V_BIAS)
    _project_normed(params, layer, V, place + V - K, matrix, rows, tokens, out + 4 * rows)


@njit(**INNER)
def project_qkv(params, layer, tokens):
    """QKV of this rank's rows: the projections of the normed X."""
    shrink(params, layer, Q, V - Q + 1, normed(params, tokens), param(params, pb.WIDTH))
    _multiply_q(params, layer, tokens)
    _multiply_kv(params, layer, tokens, K - Q)


@njit(**INNER)
def project_q(params, layer, tokens):
    """The part of `project_qkv` that is Q."""
    shrink(params, layer, Q, 1, normed(params, tokens), param(params, pb.WIDTH))
    _multiply_q(params, layer, tokens)


@njit(**INNER)
def project_kv(params, layer, tokens):
    """The part of `project_qkv` that is K and V."""
    shrink(params, layer, K, V - K + 1, normed(params, tokens), param(params, pb.WIDTH))
    _multiply_kv(params, layer, tokens, 0)


@njit(**INNER)
def _nearby(params, kind, records, stride, columns, packed_records, rows, copies):
    """Addresses of the records of `rows` rows, which ranks of all memory nodes have written, and of these packed or 0.

    Every rank reads all of them in a product.  If they are many, the ranks of a node first copy them to memory of
    their node, at `copies`, so that each crosses from node to node once and not for every rank: packed if the product
    goes by tiles, which then read at most a few rows of the others.  `stride`: bytes between rows.
    """
    if copies == 0 or rows * stride < COPIED_BYTES or trait(kind, IS_DENSE) != 0:
        return records, packed_records
    by_tiles = packed_records != 0 and uses_tiles(params, kind, rows)
    source, nbytes = records, rows * stride
    if by_tiles:
        source, nbytes = packed_records, (rows + TILE_TOKENS - 1) // TILE_TOKENS * packed_row(columns)
    first, end = node_share(params, nbytes // RECORD)
    copy(source + RECORD * first, copies + RECORD * first, RECORD // 4 * (end - first))
    wait_for_node(params)
    return (records, copies) if by_tiles else (copies, 0)


@njit(**MERGED)
def project_output(params, layer, tokens):
    """X += W_o attn_out, this rank's rows."""
    columns = param(params, pb.N_HEADS) * param(params, pb.HEAD_DIM)
    kind, stride = param(layer, pb.O_FORMAT), param(params, pb.ATTN_OUT_Q_STRIDE)
    copies = param(params, pb.ATTN_OUT_COPY)
    records, by_16 = _nearby(
        params,
        kind,
        param(params, pb.ATTN_OUT_Q),
        stride,
        columns,
        packed(params, pb.ATTN_OUT_P, tokens),
        tokens,
        copies,
    )
    residual(
        params,
        layer,
        OUTPUT,
        kind,
        param(layer, pb.O),
        param(layer, pb.O_BIAS),
        param(layer, pb.POST_ATTENTION_NORM),
        param(layer, pb.ATTN_OUTPUT_NORM),
        param(layer, pb.ATTN_OUTPUT_NORM_BIAS),
        columns,
        param(params, pb.ATTN_OUT),
        records,
        stride,
        by_16,
        tokens,
    )


@njit(**INNER)
def residual(
    params,
    layer,
    target,
    kind,
    w,
    bias,
    norm,
    closing,
    closing_bias,
    columns,
    floats,
    records,
    records_stride,
    packed_records,
    tokens,
):
    """X += W y + bias, this rank's rows. With the weights of a `norm`: X += norm(W y + bias), this rank's tokens.

    With those of a `closing` norm: then X = norm(X).  `target`: which matrix of a layer W is to adapters.
    """
    width = param(params, pb.WIDTH)
    x, y = param(params, pb.X), param(params, pb.Y)
    factor = get_f32(params + 8 * pb.RESIDUAL_SCALE)
    shrink(params, layer, target, 1, floats, columns)
    at_once = units_at_once(params, group_bytes(kind, columns), tokens)
    piece = first_piece(params, width // GROUP, 1, at_once)
    while piece:
        first, end = piece_start(piece), piece_end(piece)
        project(
            params,
            kind,
            w,
            columns,
            width,
            floats,
            records,
            records_stride,
            packed_records,
            tokens,
            y,
            4 * width,
            first,
            end,
        )
        expand(params, layer, target, 0, y, 4 * width, first, end)
        n = GROUP * (end - first)
        for t in range(tokens):
            at = 4 * t * width + 64 * first
            if bias:
                ew.add(y + at, bias + 64 * first, n)
            if norm == 0:
                if factor == np.float32(1.0):
                    ew.add(x + at, y + at, n)
                else:
                    ew.add_scaled(x + at, y + at, factor, n)
        piece = next_piece(params, width // GROUP, 1, at_once)
    if norm:
        wait_for_ranks(params)
        first, end = share(params, tokens)
        for t in range(first, end):
            at = 4 * t * width
            ew.rms_norm(y + at, norm, y + at, width, get_f32(params + 8 * pb.EPS))
            ew.add(x + at, y + at, width)
    if closing:
        wait_for_ranks(params)
        first, end = share(params, tokens)
        for t in range(first, end):
            norm_row(params, x + 4 * t * width, closing, closing_bias, x + 4 * t * width)


@njit(**INNER)
def _add_bias(rows, stride, bias, first, groups, tokens):
    """Add a bias to groups `first` on of some tokens' rows, which begin at `rows`."""
    if bias:
        for t in range(tokens):
            ew.add(rows + t * stride, bias + 64 * first, GROUP * groups)


@njit(**MERGED)
def project_gate_up(params, layer, tokens):
    """HIDDEN of this rank's rows: act(W_gate x) * (W_up x), without a gate act(W_up x); and its records."""
    gate_up(
        params,
        layer,
        (param(layer, pb.GATE_FORMAT), param(layer, pb.GATE), param(layer, pb.GATE_BIAS)),
        (param(layer, pb.UP_FORMAT), param(layer, pb.UP), param(layer, pb.UP_BIAS)),
        0,
        param(params, pb.FFN),
        (normed(params, tokens), normed_q(params, tokens), packed(params, pb.NORM_P, tokens)),
        tokens,
        trait(param(layer, pb.DOWN_FORMAT), IS_DENSE) != 0,
        (
            param(params, pb.HIDDEN),
            param(params, pb.HIDDEN_Q),
            param(params, pb.HIDDEN_Q_STRIDE),
            packed(params, pb.HIDDEN_P, tokens),
        ),
    )


@njit(**MERGED)
def gate_up(params, layer, gate_matrix, up_matrix, skipped, ffn, x, tokens, keep, hidden):
    """act(W_gate x) * (W_up x) of this rank's of `ffn` rows, for `tokens` rows x of the residual stream's width.

    layer                   the layer whose adapters apply; 0: none do
    gate_matrix, up_matrix  format, address and bias; the gate's address is 0 where there is none
    skipped                 row groups of both matrices before the first row
    x                       addresses of the f32 rows, of their records, which are NORM_Q_STRIDE bytes apart, and of
                            these packed, or 0
    keep                    whether the result is needed in f32 (for a dense matrix), not as records
    hidden                  addresses of the result: f32 rows of `ffn`, records; bytes between rows of these; address
                            of these packed, or 0
    """
    width = param(params, pb.WIDTH)
    floats, records, stride = x[0], x[1], param(params, pb.NORM_Q_STRIDE)
    at_once = max(MIN_CHUNK, GATED_BYTES // (64 * tokens) // MIN_CHUNK * MIN_CHUNK)
    gate = param(params, pb.GATED)
    is_gated = gate_matrix[1] != 0
    adapts = layer != 0 and param(param(params, pb.PLAN), p.ADAPTED) != 0
    if adapts:
        shrink(params, layer, GATE, UP - GATE + 1, floats, width)
    units, claimed = ffn // (MIN_CHUNK * GROUP), 0
    if layer != 0:
        unit_bytes = MIN_CHUNK * group_bytes(up_matrix[0], width)
        if is_gated:
            unit_bytes += MIN_CHUNK * group_bytes(gate_matrix[0], width)
        claimed = units_at_once(params, unit_bytes, tokens)
    piece = first_piece(params, units, 1, claimed)
    while piece:
        first, end = MIN_CHUNK * piece_start(piece), MIN_CHUNK * piece_end(piece)
        while first < end:
            n = min(at_once, end - first)
            up = gate + 64 * tokens * n
            at = skipped + first
            # matmul writes group g at 64 * g: let the first one land at the start.
            if is_gated:
                project(
                    params,
                    gate_matrix[0],
                    gate_matrix[1],
                    width,
                    ffn,
                    floats,
                    records,
                    stride,
                    x[2],
                    tokens,
                    gate - 64 * at,
                    64 * n,
                    at,
                    at + n,
                )
                if adapts:
                    expand(params, layer, GATE, 0, gate - 64 * at, 64 * n, at, at + n)
                _add_bias(gate, 64 * n, gate_matrix[2], first, n, tokens)
            project(
                params,
                up_matrix[0],
                up_matrix[1],
                width,
                ffn,
                floats,
                records,
                stride,
                x[2],
                tokens,
                up - 64 * at,
                64 * n,
                at,
                at + n,
            )
            if adapts:
                expand(params, layer, UP, UP - GATE, up - 64 * at, 64 * n, at, at + n)
            _add_bias(up, 64 * n, up_matrix[2], first, n, tokens)
            for t in range(tokens):
                y = up + t * 64 * n
                if keep or adapts:  # adapters of the next matrix read f32
                    y = hidden[0] + 4 * t * ffn + 64 * first
                if not is_gated:
                    ew.gelu(up + t * 64 * n, y, GROUP * n)
                elif param(params, pb.GELU):
                    ew.gelu_times(gate + t * 64 * n, up + t * 64 * n, y, GROUP * n)
                else:
                    ew.silu_times(gate + t * 64 * n, up + t * 64 * n, y, GROUP * n)
                if not keep:
                    block, blocks = GROUP * first // BLOCK, (GROUP * n + BLOCK - 1) // BLOCK
                    row = hidden[1] + t * hidden[2]
                    quantize_row(y, GROUP * n, row + block * RECORD)
                    if hidden[3] != 0:
                        pack_row(row, block, block + blocks, ffn, hidden[3], t)
            first += n
        piece = next_piece(params, units, 1, claimed)


@njit(**MERGED)
def project_down(params, layer, tokens):
    """X += W_down hidden, this rank's rows."""
    kind, stride = param(layer, pb.DOWN_FORMAT), param(params, pb.HIDDEN_Q_STRIDE)
    records, by_16 = _nearby(
        params,
        kind,
        param(params, pb.HIDDEN_Q),
        stride,
        param(params, pb.FFN),
        packed(params, pb.HIDDEN_P, tokens),
        tokens,
        param(params, pb.HIDDEN_COPY),
    )
    residual(
        params,
        layer,
        DOWN,
        kind,
        param(layer, pb.DOWN),
        param(layer, pb.DOWN_BIAS),
        param(layer, pb.POST_FFN_NORM),
        param(layer, pb.LAYER_OUTPUT_NORM),
        param(layer, pb.LAYER_OUTPUT_NORM_BIAS),
        param(params, pb.FFN),
        param(params, pb.HIDDEN),
        records,
        stride,
        by_16,
        tokens,
    )


@njit(**MERGED)
def project_head(params, samples):
    """LOGITS of this rank's rows of the vocabulary, for all samples."""
    vocab, width = param(params, pb.VOCAB), param(params, pb.WIDTH)
    groups = (vocab + GROUP - 1) // GROUP
    factor, cap = get_f32(params + 8 * pb.LOGIT_SCALE), get_f32(params + 8 * pb.LOGIT_CAP)
    at_once = units_at_once(params, group_bytes(param(params, pb.HEAD_FORMAT), width), samples)
    piece = first_piece(params, groups, 1, at_once)
    while piece:
        first, end = piece_start(piece), piece_end(piece)
        kind, weights, stride = param(params, pb.HEAD_FORMAT), param(params, pb.HEAD), param(params, pb.LOGITS_STRIDE)
        _project_groups(params, kind, weights, vocab, samples, param(params, pb.LOGITS), stride, first, end)
        for i in range(samples):
            logits = param(params, pb.LOGITS) + i * param(params, pb.LOGITS_STRIDE) + 64 * first
            if factor != np.float32(1.0):
                ew.scale(logits, factor, GROUP * (end - first))
            if cap != np.float32(0.0):
                ew.soft_cap(logits, cap, GROUP * (end - first))
        piece = next_piece(params, groups, 1, at_once)
