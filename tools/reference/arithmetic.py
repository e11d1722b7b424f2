"""The elementwise half of docs/numerics.md on f32 arrays.

It uses no transcendental function of NumPy, whose bits depend on the CPU.  Every function takes and returns f32 and
works along the last axis; values are rounded where the page defines it and nowhere else (NumPy's f32 add, multiply,
divide and square root are correctly rounded).
"""

from __future__ import annotations

import numpy as np

from tools.reference.fma import fma

LANES = 16
BLOCK = 32
F16_MAX = np.float32(65504)

_F = np.float32
_INV_LN2 = _F(1.4426950408889634)
_LN2_HI = _F(0.693359375)
_LN2_LO = _F(-2.12194440e-4)
_EXP = [
    _F(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
]
_EXP_LOW, _EXP_HIGH = _F(-87.3), _F(88.7)


def _power_of_two(k: np.ndarray) -> np.ndarray:
    """2^k for int32 k in the range of normal numbers."""
    return ((k + 127) << 23).astype(np.int32).view(np.float32)


def exp(x: np.ndarray) -> np.ndarray:
    """The exponential function of docs/numerics.md."""
    x = np.asarray(x, np.float32)
    clamped = np.minimum(np.maximum(x, _EXP_LOW), _EXP_HIGH)
    k = np.rint(clamped * _INV_LN2)
    r = fma(-k, _LN2_LO, fma(-k, _LN2_HI, clamped))
    p = np.full_like(r, _EXP[0])
    for coefficient in _EXP[1:]:
        p = fma(p, r, coefficient)
    y = fma(p, r * r, r) + _F(1)
    whole = k.astype(np.int32)
    half = whole >> 1
    y = y * _power_of_two(half) * _power_of_two(whole - half)
    return np.where(x < _EXP_LOW, _F(0), y)


def rows_of_lanes(x: np.ndarray) -> np.ndarray:
    """(..., n) to (..., ceil(n / 16), 16), zero padded."""
    n = x.shape[-1]
    rows = -(-n // LANES)
    padded = np.zeros((*x.shape[:-1], rows * LANES), np.float32)
    padded[..., :n] = x
    return padded.reshape(*x.shape[:-1], rows, LANES)


def reduce_lanes(lanes: np.ndarray) -> np.ndarray:
    """(..., 16) to (...): halves are added, 8, 4, 2, 1."""
    width = LANES // 2
    while width:
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
        width //= 2
    return lanes[..., 0]


def lane_sum(x: np.ndarray) -> np.ndarray:
    """Sum over the last axis by plain additions."""
    rows = rows_of_lanes(x)
    lanes = np.zeros_like(rows[..., 0, :])
    for i in range(rows.shape[-2]):
        lanes = lanes + rows[..., i, :]
    return reduce_lanes(lanes)


def lane_sum_of_squares(x: np.ndarray) -> np.ndarray:
    """Sum of squares over the last axis by fma."""
    rows = rows_of_lanes(x)
    lanes = np.zeros_like(rows[..., 0, :])
    for i in range(rows.shape[-2]):
        lanes = fma(rows[..., i, :], rows[..., i, :], lanes)
    return reduce_lanes(lanes)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: np.float32) -> np.ndarray:
    """x (..., n), weight (n,), both f32."""
    mean = lane_sum_of_squares(x) / _F(x.shape[-1]) + _F(eps)
    r = _F(1) / np.sqrt(mean)
    return (x * r[..., None]) * weight


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: np.float32) -> np.ndarray:
    """x (..., n), weight and bias (n,), all f32."""
    d = x - (lane_sum(x) / _F(x.shape[-1]))[..., None]
    r = _F(1) / np.sqrt(lane_sum_of_squares(d) / _F(x.shape[-1]) + _F(eps))
    y = (d * r[..., None]) * weight
    return y if bias is None else y + bias


def soft_cap(x: np.ndarray, cap: np.float32) -> np.ndarray:
    """cap * tanh(x / cap); a cap of 0 changes nothing."""
    if cap == 0:
        return x
    z = x * (_F(1) / _F(cap))
    return _F(cap) * (_F(1) - _F(2) / (exp(_F(2) * z) + _F(1)))


def silu(g: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x)) with the exponential of docs/numerics.md."""
    return g / (_F(1) + exp(-g))


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh form."""
    z = _F(0.7978845608) * fma(_F(0.044715) * x * x, x, x)
    t = _F(1) - _F(2) / (exp(_F(2) * z) + _F(1))
    return _F(0.5) * x * (_F(1) + t)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x (..., n) in blocks of 32 (zero padded) to codes (..., blocks, 32) i8 and scales (..., blocks) f32."""
    n = x.shape[-1]
    blocks = np.zeros((*x.shape[:-1], -(-n // BLOCK) * BLOCK), np.float32)
    blocks[..., :n] = x
    blocks = blocks.reshape(*x.shape[:-1], -1, BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    zero = amax < _F(2.0**-100)
    inv = _F(127) / np.where(zero, _F(1), amax)
    scale = np.where(zero, _F(0), amax * _F(1 / 127))
    codes = np.clip(np.rint(blocks * inv[..., None]), -127, 127)
    codes[zero | np.isnan(amax)] = 0  # a block with a NaN: its scale is NaN
    return codes.astype(np.int8), scale


def stored(x: np.ndarray, kv_type: str) -> np.ndarray:
    """What reading K or V back gives: x (..., head_dim) f32 rounded to the stored type, as f32."""
    if kv_type == "f32":
        return x
    if kv_type == "f16":
        return np.clip(x, -F16_MAX, F16_MAX).astype(np.float16).astype(np.float32)
    if kv_type == "int8":
        codes, scale = quantize(np.clip(x, -127 * F16_MAX, 127 * F16_MAX))
        narrow = np.minimum(scale, F16_MAX).astype(np.float16).astype(np.float32)
        return (narrow[..., None] * codes.astype(np.float32)).reshape(*x.shape[:-1], -1)
    raise ValueError(f"kv_type is {kv_type!r}, expected 'f16', 'f32' or 'int8'")
