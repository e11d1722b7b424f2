"""Weights times activations: y[t, r] = sum over k of W[r, k] x[t, k], as docs/numerics.md orders it.

    matmul(kind, w, columns, first, end, x, x_stride, packed, tokens, out, out_stride, scratch)

computes row groups first .. end-1 (16 rows each) of the matrix at address `w`, whose format has GGML's type number
`kind` and whose bytes formats/description.py draws, for `tokens` rows of activations.  It writes 16 f32 for each group
and token at `out + token * out_stride + 64 * group`.  `x` holds int8 records (quantize_activations.py), or f32 rows for
dense weights.  `packed`: 0, or the same records packed (packed_activations.py), of 16 tokens or more of a quantized
format, which AMX tiles multiply then.  `scratch` is the address of `MATMUL_BYTES` of the caller's own, 64-byte aligned.
Addresses and strides are int64, in bytes.

One token is a matrix times a vector (gemv.py), more go through unpacked chunks (gemm.py, amx_gemm.py).  Every
accumulator sees the same operations in the same order either way, so all batches give equal bytes.
"""

from __future__ import annotations

from numba import njit

from stages.worker.kernels.amx_gemm import gemm_by_tiles
from stages.worker.kernels.gemm import gemm
from stages.worker.kernels.gemv import gemv
from stages.worker.kernels.simd import AMX, JIT

ENTRY_ARGUMENTS = 12


@njit(**JIT)
def matmul(kind, w, columns, first, end, x, x_stride, packed, tokens, out, out_stride, scratch):
    """Entry: see the top of the file; returns nothing."""
    if tokens == 1:
        gemv(kind, w, columns, first, end, x, out)
    elif tokens > 1:
        if AMX and packed != 0:
            gemm_by_tiles(kind, w, columns, first, end, x, x_stride, packed, tokens, out, out_stride, scratch)
        else:
            gemm(kind, w, columns, first, end, x, x_stride, tokens, out, out_stride, scratch)
