"""The head of a model that scores pairs of a query and a document: an entry of its own, compiled only for such models.

    score = w tanh(W_dense x + b_dense) + b        w x + b without a dense layer

x is the final hidden state of the first position.  The products are those of any matrix of their formats
(docs/numerics.md).  One rank computes a pair's score, in scratch of its own that nothing else uses between the last
layer and the sampler.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.worker.kernels import elementwise as ew
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.formats.description import GROUP
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.projections import project
from stages.worker.kernels.quantize_activations import quantize_row
from stages.worker.kernels.simd import JIT, get_f32, put_f32
from stages.worker.kernels.split_combine import copy


@njit(**INNER)
def _multiply(params, kind, w, x, groups, out):
    """out = the first `groups` row groups of a matrix times x (width f32)."""
    width, stride, records = param(params, pb.WIDTH), param(params, pb.NORM_Q_STRIDE), param(params, pb.OWN_NORM_Q)
    quantize_row(x, width, records)
    project(params, kind, w, width, GROUP * groups, x, records, stride, 0, 1, out, 4 * GROUP * groups, 0, groups)


@njit(**JIT)
def score_pair(params, x):
    """Entry: the first of the `width` f32 at x becomes the score, the others 0. Returns nothing."""
    width, dense = param(params, pb.WIDTH), param(params, pb.OWN_NORM)
    if param(params, pb.DENSE):
        _multiply(params, param(params, pb.DENSE_FORMAT), param(params, pb.DENSE), x, width // GROUP, dense)
        if param(params, pb.DENSE_BIAS):
            ew.add(dense, param(params, pb.DENSE_BIAS), width)
        ew.soft_cap(dense, np.float32(1.0), width)  # tanh
    else:
        copy(x, dense, width)
    scores = dense + 4 * width
    _multiply(params, param(params, pb.SCORE_FORMAT), param(params, pb.SCORE), dense, 1, scores)
    score = get_f32(scores)
    if param(params, pb.SCORE_BIAS):
        score += get_f32(param(params, pb.SCORE_BIAS))
    for i in range(width):
        put_f32(x + 4 * i, np.float32(0.0))
    put_f32(x, score)


ENTRY_ARGUMENTS = 2
