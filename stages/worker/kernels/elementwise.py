"""Norm, RoPE, gate, residual and the writing of K and V: one row of f32 at a time.

Arithmetic as in docs/numerics.md, for any number of values in a row.  Every function takes byte addresses and returns
nothing, or a scalar; the modules of the forward pass distribute rows over ranks.  Whole vectors are loaded and stored
without masks: without AVX-512 a masked store takes several times as long.
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.simd import (
    INLINE,
    JIT,
    LANES,
    absolute,
    exp,
    f32_to_half,
    f32x16,
    fma,
    get_u8,
    get_u16,
    lanes_set,
    load_f32,
    load_f32_part,
    maximum,
    minimum,
    put_8,
    put_16,
    reduce_add,
    reduce_max,
    round_even,
    splat_f32,
    sqrt,
    store_f16,
    store_f32,
    store_f32_part,
    store_low8,
    to_i32,
)
from stages.worker.kernels.simd.vectors import operation, pick

F16_MAX = 65504.0
INT8_MAX = 127 * F16_MAX  # the largest value of an int8 cache: the largest code and scale
_TINY = float(2.0**-100)  # blocks with a smaller maximum are stored as zeros
_BY_127 = float(np.float32(1.0 / 127.0))

# 32 values as 16 pairs: the first of each, the second of each, and back.
evens = operation(
    "evens", f32x16, (f32x16, f32x16), lambda b, x, y: pick(b, x, list(range(0, 32, 2)), y), "Lanes 0, 2, ..."
)
odds = operation(
    "odds", f32x16, (f32x16, f32x16), lambda b, x, y: pick(b, x, list(range(1, 32, 2)), y), "Lanes 1, 3, ..."
)
zip_low = operation(
    "zip_low",
    f32x16,
    (f32x16, f32x16),
    lambda b, x, y: pick(b, x, [i // 2 + 16 * (i % 2) for i in range(16)], y),
    "x0, y0, x1, ... y7.",
)
zip_high = operation(
    "zip_high",
    f32x16,
    (f32x16, f32x16),
    lambda b, x, y: pick(b, x, [8 + i // 2 + 16 * (i % 2) for i in range(16)], y),
    "x8, y8, x9, ... y15.",
)


@numba.njit(**JIT)
def rms_norm(x, weight, y, n, eps):
    """y = (x * r) * weight over n f32 values, r = 1 / sqrt(mean square + eps)."""
    lanes = splat_f32(np.float32(0.0))
    whole = n // LANES * LANES
    for i in range(0, 4 * whole, 64):
        v = load_f32(x + i)
        lanes = fma(v, v, lanes)
    if whole < n:
        v = load_f32_part(x + 4 * whole, n - whole, np.float32(0.0))
        lanes = fma(v, v, lanes)
    mean = splat_f32(reduce_add(lanes)) / splat_f32(np.float32(n))
    r = splat_f32(np.float32(1.0)) / sqrt(mean + splat_f32(eps))
    for i in range(0, 4 * whole, 64):
        store_f32(y + i, (load_f32(x + i) * r) * load_f32(weight + i))
    if whole < n:
        v = load_f32_part(x + 4 * whole, n - whole, np.float32(0.0))
        w = load_f32_part(weight + 4 * whole, n - whole, np.float32(0.0))
        store_f32_part(y + 4 * whole, (v * r) * w, n - whole)


@numba.njit(**JIT)
def layer_norm(x, weight, bias, y, n, eps):
    """y = ((x - mean) * r) * weight + bias over n f32 values (a multiple of 16), r = 1 / sqrt(variance + eps).

    `bias` 0: none.
    """
    lanes = splat_f32(np.float32(0.0))
    for i in range(0, 4 * n, 64):
        lanes = lanes + load_f32(x + i)
    count = splat_f32(np.float32(n))
    mean = splat_f32(reduce_add(lanes)) / count
    lanes = splat_f32(np.float32(0.0))
    for i in range(0, 4 * n, 64):
        d = load_f32(x + i) - mean
        lanes = fma(d, d, lanes)
    r = splat_f32(np.float32(1.0)) / sqrt(splat_f32(reduce_add(lanes)) / count + splat_f32(eps))
    for i in range(0, 4 * n, 64):
        z = ((load_f32(x + i) - mean) * r) * load_f32(weight + i)
        if bias:
            z = z + load_f32(bias + i)
        store_f32(y + i, z)


@numba.njit(**JIT)
def rms_norm_part(x, n, eps, part, weight, y, size):
    """y = (part * r) * weight over `size` f32 values, r of the n values at x (a multiple of 16), as in `rms_norm`."""
    lanes = splat_f32(np.float32(0.0))
    for i in range(0, 4 * n, 64):
        v = load_f32(x + i)
        lanes = fma(v, v, lanes)
    mean = splat_f32(reduce_add(lanes)) / splat_f32(np.float32(n))
    r = splat_f32(np.float32(1.0)) / sqrt(mean + splat_f32(eps))
    for i in range(0, 4 * size, 64):
        store_f32(y + i, (load_f32(part + i) * r) * load_f32(weight + i))


@numba.njit(**JIT)
def scale(x, factor, n):
    """x *= factor over n f32 values."""
    by = splat_f32(factor)
    whole = n // LANES * LANES
    for i in range(0, 4 * whole, 64):
        store_f32(x + i, load_f32(x + i) * by)
    if whole < n:
        i, rest = 4 * whole, n - whole
        store_f32_part(x + i, load_f32_part(x + i, rest, np.float32(0.0)) * by, rest)


@numba.njit(**JIT)
def add_scaled(x, y, factor, n):
    """x = fma(y, factor, x) over n f32 values (a multiple of 16)."""
    by = splat_f32(factor)
    for i in range(0, 4 * n, 64):
        store_f32(x + i, fma(load_f32(y + i), by, load_f32(x + i)))


@numba.njit(**INLINE)
def _capped(x, largest, inverse):
    """largest * tanh(x * inverse), 16 lanes."""
    one, two = splat_f32(np.float32(1.0)), splat_f32(np.float32(2.0))
    z = x * inverse
    t = one - two / (exp(two * z) + one)
    return largest * t


@numba.njit(**JIT)
def soft_cap(x, cap, n):
    """x = cap * tanh(x / cap) over n f32 values."""
    largest, inverse = splat_f32(cap), splat_f32(np.float32(1.0) / cap)
    whole = n // LANES * LANES
    for i in range(0, 4 * whole, 64):
        store_f32(x + i, _capped(load_f32(x + i), largest, inverse))
    if whole < n:
        i, rest = 4 * whole, n - whole
        store_f32_part(x + i, _capped(load_f32_part(x + i, rest, np.float32(0.0)), largest, inverse), rest)


@numba.njit(**JIT)
def add(x, y, n):
    """x += y over n f32 values."""
    whole = n // LANES * LANES
    for i in range(0, 4 * whole, 64):
        store_f32(x + i, load_f32(x + i) + load_f32(y + i))
    if whole < n:
        i, rest = 4 * whole, n - whole
        a = load_f32_part(x + i, rest, np.float32(0.0))
        store_f32_part(x + i, a + load_f32_part(y + i, rest, np.float32(0.0)), rest)


@numba.njit(**JIT)
def silu_times(gate, up, y, n):
    """y = silu(gate) * up over n f32 values."""
    one = splat_f32(np.float32(1.0))
    whole = n // LANES * LANES
    for i in range(0, 4 * whole, 64):
        g = load_f32(gate + i)
        store_f32(y + i, (g / (one + exp(-g))) * load_f32(up + i))
    if whole < n:
        i, rest = 4 * whole, n - whole
        g = load_f32_part(gate + i, rest, np.float32(0.0))
        u = load_f32_part(up + i, rest, np.float32(0.0))
        store_f32_part(y + i, (g / (one + exp(-g))) * u, rest)


@numba.njit(**INLINE)
def _gelu(x):
    """gelu(x), the tanh form, 16 lanes."""
    one, two, half = splat_f32(np.float32(1.0)), splat_f32(np.float32(2.0)), splat_f32(np.float32(0.5))
    cubic, outer = splat_f32(np.float32(0.044715)), splat_f32(np.float32(0.7978845608))
    z = outer * fma(cubic * x * x, x, x)
    t = one - two / (exp(two * z) + one)
    return half * x * (one + t)


@numba.njit(**JIT)
def gelu_times(gate, up, y, n):
    """y = gelu(gate) * up over n f32 values, the tanh form."""
    whole = n // LANES * LANES
    for i in range(0, 4 * whole, 64):
        store_f32(y + i, _gelu(load_f32(gate + i)) * load_f32(up + i))
    if whole < n:
        i, rest = 4 * whole, n - whole
        u = load_f32_part(up + i, rest, np.float32(0.0))
        store_f32_part(y + i, _gelu(load_f32_part(gate + i, rest, np.float32(0.0))) * u, rest)


@numba.njit(**JIT)
def gelu(x, y, n):
    """y = gelu(x) over n f32 values, the tanh form."""
    whole = n // LANES * LANES
    for i in range(0, 4 * whole, 64):
        store_f32(y + i, _gelu(load_f32(x + i)))
    if whole < n:
        i, rest = 4 * whole, n - whole
        store_f32_part(y + i, _gelu(load_f32_part(x + i, rest, np.float32(0.0))), rest)


@numba.njit(**JIT)
def rope_angles(cos_hi, sin_hi, cos_lo, sin_lo, cosine, sine, n):
    """Cosines and sines (n f32 each) of one position's n pairs, from its rows of the two RoPE tables."""
    for i in range(0, n, LANES):
        rest = min(n - i, LANES)
        ch = load_f32_part(cos_hi + 4 * i, rest, np.float32(0.0))
        sh = load_f32_part(sin_hi + 4 * i, rest, np.float32(0.0))
        cl = load_f32_part(cos_lo + 4 * i, rest, np.float32(0.0))
        sl = load_f32_part(sin_lo + 4 * i, rest, np.float32(0.0))
        store_f32_part(cosine + 4 * i, fma(ch, cl, -(sh * sl)), rest)
        store_f32_part(sine + 4 * i, fma(sh, cl, ch * sl), rest)


@numba.njit(**INLINE)
def _copy_rest(x, y, begin, n):
    """y = x for f32 values begin .. n-1."""
    whole = begin + (n - begin) // LANES * LANES
    for i in range(4 * begin, 4 * whole, 64):
        store_f32(y + i, load_f32(x + i))
    if whole < n:
        store_f32_part(y + 4 * whole, load_f32_part(x + 4 * whole, n - whole, np.float32(0.0)), n - whole)


@numba.njit(**JIT)
def rotate(x, y, cosine, sine, n_rot, n):
    """y = RoPE of a head x (n f32): pairs (2i, 2i+1) of the first n_rot values are rotated, the rest is copied."""
    whole = n_rot // 32 * 32
    for i in range(0, whole, 32):
        low, high = load_f32(x + 4 * i), load_f32(x + 4 * i + 64)
        a, b = evens(low, high), odds(low, high)
        c, s = load_f32(cosine + 2 * i), load_f32(sine + 2 * i)
        a_rotated, b_rotated = fma(a, c, -(b * s)), fma(a, s, b * c)
        store_f32(y + 4 * i, zip_low(a_rotated, b_rotated))
        store_f32(y + 4 * i + 64, zip_high(a_rotated, b_rotated))
    if whole < n_rot:
        i = whole
        first = min(n_rot - i, 16)
        second = max(min(n_rot - i - 16, 16), 0)
        pairs = (n_rot - i) // 2
        low = load_f32_part(x + 4 * i, first, np.float32(0.0))
        high = load_f32_part(x + 4 * i + 64, second, np.float32(0.0))
        a, b = evens(low, high), odds(low, high)
        c = load_f32_part(cosine + 2 * i, pairs, np.float32(0.0))
        s = load_f32_part(sine + 2 * i, pairs, np.float32(0.0))
        a_rotated, b_rotated = fma(a, c, -(b * s)), fma(a, s, b * c)
        store_f32_part(y + 4 * i, zip_low(a_rotated, b_rotated), first)
        store_f32_part(y + 4 * i + 64, zip_high(a_rotated, b_rotated), second)
    _copy_rest(x, y, n_rot, n)


@numba.njit(**JIT)
def rotate_neox(x, y, cosine, sine, n_rot, n):
    """As `rotate`, with NEOX pairs (i, i + n_rot / 2)."""
    half = n_rot // 2
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        a, b = load_f32(x + 4 * i), load_f32(x + 4 * (i + half))
        c, s = load_f32(cosine + 4 * i), load_f32(sine + 4 * i)
        store_f32(y + 4 * i, fma(a, c, -(b * s)))
        store_f32(y + 4 * (i + half), fma(a, s, b * c))
    if whole < half:
        i, rest = whole, half - whole
        a = load_f32_part(x + 4 * i, rest, np.float32(0.0))
        b = load_f32_part(x + 4 * (i + half), rest, np.float32(0.0))
        c = load_f32_part(cosine + 4 * i, rest, np.float32(0.0))
        s = load_f32_part(sine + 4 * i, rest, np.float32(0.0))
        store_f32_part(y + 4 * i, fma(a, c, -(b * s)), rest)
        store_f32_part(y + 4 * (i + half), fma(a, s, b * c), rest)
    _copy_rest(x, y, n_rot, n)


@numba.njit(**JIT)
def quantize_block(x, codes):
    """32 f32 values at x to 32 s8 at codes; returns the scale (f32).

    It is 0 for a block of (nearly) zeros, and NaN for a block with a NaN, which must not become a plausible number.
    Overflow saturates to +-INT8_MAX, as that of f16 to +-F16_MAX.
    """
    lowest, highest = splat_f32(np.float32(-INT8_MAX)), splat_f32(np.float32(INT8_MAX))
    low = minimum(highest, maximum(lowest, load_f32(x)))
    high = minimum(highest, maximum(lowest, load_f32(x + 64)))
    amax = reduce_max(maximum(absolute(low), absolute(high)))
    inverse, scale = np.float32(0.0), np.float32(0.0)
    if lanes_set((low == low) & (high == high)) != 0xFFFF:
        scale = np.float32(np.nan)
    elif amax >= np.float32(_TINY):
        inverse = np.float32(127.0) / amax
        scale = amax * np.float32(_BY_127)
    factor = splat_f32(inverse)
    smallest, largest = splat_f32(np.float32(-127.0)), splat_f32(np.float32(127.0))
    store_low8(codes, to_i32(maximum(minimum(round_even(low * factor), largest), smallest)))
    store_low8(codes + 16, to_i32(maximum(minimum(round_even(high * factor), largest), smallest)))
    return scale


@numba.njit(**JIT)
def narrow(x, y, n):
    """n f32 at x to f16 at y: half to even, overflow to +-65504, NaN stays. y has room for 16 * k values."""
    smallest, largest = splat_f32(np.float32(-F16_MAX)), splat_f32(np.float32(F16_MAX))
    for i in range(0, n, LANES):
        v = load_f32_part(x + 4 * i, min(n - i, LANES), np.float32(0.0))
        store_f16(y + 2 * i, f32_to_half(minimum(largest, maximum(smallest, v))))


@numba.njit(**JIT)
def put_half(y, value, scratch):
    """One f32 as f16 at y: half to even, at high 65504, NaN stays. `scratch`: 32 bytes."""
    v = splat_f32(value)
    store_f16(scratch, f32_to_half(minimum(splat_f32(np.float32(F16_MAX)), v)))
    put_16(y, get_u16(scratch))


@numba.njit(**JIT)
def write_kv_f16(k, v, key, value, slot, page_tokens, n, scratch):
    """Position `slot` of a page: k, v are a head's n f32; key, value the head's K and V in the page."""
    narrow(k, scratch, n)
    for d in range(n):
        put_16(key + 2 * (d * page_tokens + slot), get_u16(scratch + 2 * d))
    narrow(v, value + 2 * slot * n, n)


@numba.njit(**JIT)
def write_kv_f32(k, v, key, value, slot, page_tokens, n, scratch):
    """As `write_kv_f16`, unrounded."""
    for d in range(n):
        put_16(key + 4 * (d * page_tokens + slot), get_u16(k + 4 * d))
        put_16(key + 4 * (d * page_tokens + slot) + 2, get_u16(k + 4 * d + 2))
    for i in range(0, n, LANES):
        store_f32(value + 4 * (slot * n + i), load_f32(v + 4 * i))


@numba.njit(**JIT)
def write_kv_int8(k, v, key, value, slot, page_tokens, n, scratch):
    """As `write_kv_f16`, codes and f16 scales (after the codes of K and of V)."""
    key_scales = key + n * page_tokens
    value_scales = value + n * page_tokens
    for i in range(0, n, 32):
        scale = quantize_block(k + 4 * i, scratch)
        for d in range(32):
            put_8(key + (i + d) * page_tokens + slot, get_u8(scratch + d))
        put_half(key_scales + 2 * (i // 32 * page_tokens + slot), scale, scratch)
        scale = quantize_block(v + 4 * i, value + slot * n + i)
        put_half(value_scales + 2 * (slot * (n // 32) + i // 32), scale, scratch)
