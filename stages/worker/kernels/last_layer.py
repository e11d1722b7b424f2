"""What the last layer moves when some tokens of the step are not needed behind their K and V (needed_plan.py).

Rows of the needed tokens move to the front of their buffers, in which they then are rows 0, 1, ... of a step of their
own.  A row only moves towards the front, and each rank moves a part of every row's columns, in the order of the rows:
no rank reads what another one writes.
"""

from __future__ import annotations

from numba import njit

from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels import plan as p
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.formats.description import GROUP
from stages.worker.kernels.packed_activations import pack_row, packed
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.projections import normed, normed_q
from stages.worker.kernels.rank_sync import node_share, share
from stages.worker.kernels.split_combine import copy

_LINE = 4 * GROUP  # bytes: 16 f32, or a record


@njit(**INNER)
def _gather(needed, source, source_stride, to, to_stride, lines, least):
    """Copy lines lines[0] .. lines[1]-1 of the needed rows; `least`: of entries with at most so many of them."""
    n = GROUP * (lines[1] - lines[0])
    for e in range(param(param(needed, pb.PLAN), p.ENTRIES_KEPT)):
        entry = p.entry_at(needed, e)
        if param(entry, p.P_COUNT) > least:
            continue
        for i in range(param(entry, p.P_COUNT)):
            x = source + (param(entry, p.P_SOURCE) + i) * source_stride + _LINE * lines[0]
            y = to + (param(entry, p.P_TOKEN) + i) * to_stride + _LINE * lines[0]
            if x != y:
                copy(x, y, n)


@njit(**INNER)
def gather_stream(params, tokens):
    """Of X, and of the normed rows and their records, the needed ones. While K and V of the tokens are written."""
    needed, width = param(params, pb.NEEDED_BLOCK), param(params, pb.WIDTH)
    rows = param(param(params, pb.PLAN), p.NEEDED)
    x, groups = param(params, pb.X), share(params, width // GROUP)
    _gather(needed, x, 4 * width, x, 4 * width, groups, rows)
    stride = param(params, pb.NORM_Q_STRIDE)
    records = (width + 31) // 32
    groups, lines = node_share(params, width // GROUP), node_share(params, records)  # each memory node has all
    if rows <= pb.FEW:  # every rank has normed rows of its own
        groups, lines = (0, width // GROUP), (0, records)
    _gather(needed, normed(params, tokens), 4 * width, normed(params, rows), 4 * width, groups, rows)
    _gather(needed, normed_q(params, tokens), stride, normed_q(params, rows), stride, lines, rows)
    to = packed(params, pb.NORM_P, rows)
    if to != 0:
        for i in range(rows):
            pack_row(normed_q(params, rows) + i * stride, lines[0], lines[1], width, to, i)


@njit(**INNER)
def gather_kv_and_angles(params):
    """Of ROPE the needed rows, and of QKV those of K and V that attention writes itself. While Q is computed."""
    needed, dim = param(params, pb.NEEDED_BLOCK), param(params, pb.HEAD_DIM)
    at, stride = param(params, pb.ROPE), param(params, pb.ROPE_STRIDE)
    _gather(needed, at, stride, at, stride, share(params, stride // _LINE), param(params, pb.STEP_TOKENS))
    at = param(params, pb.QKV) + 4 * param(params, pb.N_HEADS) * dim
    stride = param(params, pb.QKV_STRIDE)
    _gather(needed, at, stride, at, stride, share(params, 2 * param(params, pb.N_KV_HEADS) * dim // GROUP), 1)
