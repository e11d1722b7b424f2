"""The fits of the K-quants' sub-blocks, 16 at a time, with the bytes of `checkpoint/quantize_k.py`, which defines them.

A lane is a sub-block: sums run over its values in order, in f32, as is said there.  The codes of the best try are made
again at the end from what they depend on.  Nothing here is used by a forward pass.

`scratch` holds the values of 16 sub-blocks, (32, 16) f32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    INLINE,
    JIT,
    absolute,
    load_f32,
    maximum,
    minimum,
    round_even,
    select,
    splat_f32,
    sqrt,
    store_f32,
)

WITH_MINIMUM, SIGNED = 0, 1
ENTRY_ARGUMENTS = 7
_Z, _ONE, _TENTH, _TOP = np.float32(0), np.float32(1), np.float32(0.1), np.float32(15)
_ZERO_POINT, _LEAST = np.float32(32), np.float32(1e-15)


@njit(**INLINE)
def _code(x, inverse, least, top):
    """Codes 0 to `top` of one value of each sub-block."""
    return minimum(maximum(round_even(inverse * (x - least)), splat_f32(_Z)), top)


@njit(**INLINE)
def _error(scratch, inverse, offset, scale, least, mean, top):
    """Sum of the weighted squares of the differences. `offset`: the minimum that the codes are made with."""
    total = splat_f32(_Z)
    for i in range(32):
        x = load_f32(scratch + 64 * i)
        difference = scale * _code(x, inverse, offset, top) + least - x
        total = total + (mean + absolute(x)) * (difference * difference)
    return total


@njit(**INNER)
def _fit_with_minimum(scratch, codes, stride, scale_at, minimum_at):
    zero, one, top = splat_f32(_Z), splat_f32(_ONE), splat_f32(_TOP)
    first = load_f32(scratch)
    least, most, squares = first, first, first * first
    for i in range(1, 32):
        x = load_f32(scratch + 64 * i)
        least, most, squares = minimum(x, least), maximum(x, most), squares + x * x
    least = minimum(least, zero)
    mean = sqrt(squares / splat_f32(np.float32(32)))
    sum_w, sum_x = zero, zero
    for i in range(32):
        x = load_f32(scratch + 64 * i)
        weight = mean + absolute(x)
        sum_w, sum_x = sum_w + weight, sum_x + weight * x
    flat = most == least
    inverse = top / select(flat, one, most - least)
    scale = one / inverse
    best_inverse, offset = inverse, least
    error = _error(scratch, inverse, least, scale, least, mean, top)
    for step in range(21):
        tenths = np.float32(-1) + _TENTH * np.float32(step) + _TOP
        inverse = splat_f32(tenths) / select(flat, one, most - least)
        sum_l, sum_l2, sum_xl = zero, zero, zero
        for i in range(32):
            x = load_f32(scratch + 64 * i)
            code = _code(x, inverse, least, top)
            weighted = (mean + absolute(x)) * code
            sum_l, sum_l2, sum_xl = sum_l + weighted, sum_l2 + weighted * code, sum_xl + weighted * x
        determinant = sum_w * sum_l2 - sum_l * sum_l
        usable = determinant > zero
        divisor = select(usable, determinant, one)
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / divisor
        new_least = (sum_l2 * sum_x - sum_l * sum_xl) / divisor
        positive = new_least > zero
        new_scale = select(positive, sum_xl / select(sum_l2 > zero, sum_l2, one), new_scale)
        new_least = select(positive, zero, new_least)
        new_error = _error(scratch, inverse, least, new_scale, new_least, mean, top)
        better = usable & (new_error < error) & ~flat
        best_inverse, offset = select(better, inverse, best_inverse), select(better, least, offset)
        scale, least = select(better, new_scale, scale), select(better, new_least, least)
        error = select(better, new_error, error)
    for i in range(32):
        code = _code(load_f32(scratch + 64 * i), best_inverse, offset, top)
        store_f32(codes + stride * i, select(flat, zero, code))
    store_f32(scale_at, select(flat, zero, scale))
    store_f32(minimum_at, -least)


@njit(**INLINE)
def _signed_code(x, inverse):
    low, high = splat_f32(-_ZERO_POINT), splat_f32(_ZERO_POINT - _ONE)
    return minimum(maximum(round_even(inverse * x), low), high)


@njit(**INNER)
def _fit_signed(scratch, codes, stride, scale_at):
    zero, one = splat_f32(_Z), splat_f32(_ONE)
    most = load_f32(scratch)
    for i in range(1, 16):
        x = load_f32(scratch + 64 * i)
        most = select(absolute(x) > absolute(most), x, most)
    empty = absolute(most) < splat_f32(_LEAST)
    most = select(empty, one, most)
    scale, best, best_inverse = zero, zero, zero
    for turn in range(19):
        step = 0 if turn == 0 else (turn - 10 if turn < 10 else turn - 9)
        inverse = splat_f32(-(_ZERO_POINT + _TENTH * np.float32(step))) / most
        sum_lx, sum_l2 = zero, zero
        for i in range(16):
            x = load_f32(scratch + 64 * i)
            code = _signed_code(x, inverse)
            weight = x * x
            sum_lx, sum_l2 = sum_lx + weight * x * code, sum_l2 + weight * code * code
        fitted = sum_lx / select(sum_l2 > zero, sum_l2, one)
        if turn == 0:
            scale = select(sum_l2 > zero, fitted, zero)
            best, best_inverse = scale * sum_lx, inverse
        else:
            better = (sum_l2 > zero) & (sum_lx * sum_lx > best * sum_l2)
            scale, best_inverse = select(better, fitted, scale), select(better, inverse, best_inverse)
            best = select(better, fitted * sum_lx, best)
    for i in range(16):
        code = _signed_code(load_f32(scratch + 64 * i), best_inverse)
        store_f32(codes + stride * i, select(empty, zero, code + splat_f32(_ZERO_POINT)))
    store_f32(scale_at, select(empty, zero, scale))


@njit(**JIT)
def fit_k(kind, x, n, codes, scale, least, scratch):
    """Fit `n` sub-blocks, a multiple of 16; x and codes: addresses of (32 or 16, n) f32.

    scale, least: addresses of (n,) f32, `least` of minus the minimum (WITH_MINIMUM).
    """
    size, stride = 32 if kind == WITH_MINIMUM else 16, 4 * n
    for at in range(0, stride, 64):
        for i in range(size):
            store_f32(scratch + 64 * i, load_f32(x + stride * i + at))
        if kind == WITH_MINIMUM:
            _fit_with_minimum(scratch, codes + at, stride, scale + at, least + at)
        else:
            _fit_signed(scratch, codes + at, stride, scale + at)
