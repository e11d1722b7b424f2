"""Activations to int8 in blocks of 32: the records that quantized matrices are multiplied with.

A record (32 values, 64 bytes = one cache line, 64-byte aligned):

    0   q        32 x s8
    32  scale    f32
    36  ssum     f32    scale * f32(h0 + h1)
    40  start4   i32    B - 8 (h0 + h1): the start of integer sums for codes with zero point 8 (Q4_0)
    44  start5   i32    B - 16 (h0 + h1), for zero point 16 (Q5_0, MXFP4)
    48  start8   i32    B - 128 (h0 + h1), for zero point 128 (Q8_0, IQ4_NL, IQ4_XS); B where dots.py subtracts it
    52  start6   i32    B - 32 h0 and, at 56, B - 32 h1, for zero point 32 and two scales a block (Q6_K, Q3_K)
    60  zero     i32    B, for all other codes

A sum of products of unsigned codes that begins there needs no further correction.  B is BASE_BITS of dots.py; h0 and h1
are the exact sums of q over each half of 16.  A row of K values is ceil(K / 32) records.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.worker.kernels.buffer_sizes import RECORD
from stages.worker.kernels.dots import BASE_BITS, STARTS_BIASED
from stages.worker.kernels.formats import BLOCK
from stages.worker.kernels.simd import (
    INLINE,
    JIT,
    absolute,
    lanes_set,
    load_f32,
    load_f32_part,
    maximum,
    minimum,
    put_f32,
    put_i32,
    reduce_add_i32,
    reduce_max,
    round_even,
    splat_f32,
    store_low8,
    to_i32,
)

SCALE, SSUM, START4, START5, START8, START6, ZERO = 32, 36, 40, 44, 48, 52, 60

_BIAS = -128 if STARTS_BIASED else 0
_TINY = np.float32(2.0**-100)
_TOP = np.float32(127)
_INVERSE_TOP = np.float32(1 / 127)


@njit(**INLINE)
def quantize_block(low, high, to):
    """Write the record at `to` of 32 values: `low` the first 16 (f32x16), `high` the others."""
    largest = reduce_max(maximum(absolute(low), absolute(high)))
    inverse, scale = np.float32(0), np.float32(0)
    if lanes_set((low == low) & (high == high)) != 0xFFFF:
        scale = np.float32(np.nan)  # NaN must not become a plausible number
    elif largest >= _TINY:
        inverse = _TOP / largest
        scale = largest * _INVERSE_TOP
    top, bottom, factor = splat_f32(_TOP), splat_f32(-_TOP), splat_f32(inverse)
    q0 = to_i32(maximum(minimum(round_even(low * factor), top), bottom))
    q1 = to_i32(maximum(minimum(round_even(high * factor), top), bottom))
    store_low8(to, q0)
    store_low8(to + 16, q1)
    h0, h1 = reduce_add_i32(q0), reduce_add_i32(q1)
    total = h0 + h1
    put_f32(to + SCALE, scale)
    put_f32(to + SSUM, scale * np.float32(total))
    put_i32(to + START4, BASE_BITS - 8 * total)
    put_i32(to + START5, BASE_BITS - 16 * total)
    put_i32(to + START8, BASE_BITS + _BIAS * total)
    put_i32(to + START6, BASE_BITS - 32 * h0)
    put_i32(to + START6 + 4, BASE_BITS - 32 * h1)
    put_i32(to + ZERO, BASE_BITS)


@njit(**JIT)
def quantize_row(x, n, to):
    """Records of `n` f32 at address `x` to address `to`: ceil(n / 32) of them, zero padded."""
    whole = n // BLOCK
    for b in range(whole):
        quantize_block(load_f32(x + b * 128), load_f32(x + b * 128 + 64), to + b * RECORD)
    rest = n - whole * BLOCK
    if rest > 0:
        zero = np.float32(0)
        low = load_f32_part(x + whole * 128, min(rest, 16), zero)
        high = load_f32_part(x + whole * 128 + 64, max(rest - 16, 0), zero)
        quantize_block(low, high, to + whole * RECORD)


@njit(**JIT)
def quantize_rows(x, x_stride, n, to, to_stride, first, end):
    """`quantize_row` for rows first .. end-1; strides in bytes."""
    for t in range(first, end):
        quantize_row(x + t * x_stride, n, to + t * to_stride)
