"""Quantizes rows of f32 to super-blocks of 256 values: Q4_K and Q6_K, with the bytes of llama.cpp's quantizer.

A sub-block's scale (and minimum) is a weighted least-squares fit, tried for several roundings of the codes; the best
of them is kept.  The scales of a super-block are then rounded to multiples of one f16 number, and the codes made anew.

    Q4_K    x = d * scale * q - dmin * minimum    8 sub-blocks of 32, q 0 to 15, scale and minimum 0 to 63
    Q6_K    x = d * scale * (q - 32)              16 sub-blocks of 16, q 0 to 63, scale -128 to 127

All sums run over a sub-block in order, in f32, without fused multiplications: that makes them reproducible, as in
https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-quants.c.  Arrays have a sub-block's values along the
first axis, so that a reduction adds them one after the other.

The fits take nearly all of the time.  fit_k_compiled.py has them as a kernel of the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

SUPER = 256
_F = np.float32
_LEAST = _F(1e-15)  # sub-blocks with smaller values become zeros


def quantize_q4_k(x: np.ndarray, fits: Fits) -> np.ndarray:
    """(super-blocks, 256) f32 to (super-blocks, 144) u8."""
    n = x.shape[0]
    values = np.ascontiguousarray(x.reshape(n * 8, 32).T)
    codes, scale, minimum = fits.with_minimum(values)
    scale, minimum = scale.reshape(n, 8), minimum.reshape(n, 8)
    d, six_scales = _six_bits(scale)
    dmin, six_minimums = _six_bits(minimum)
    step = (d.astype(_F) * six_scales).reshape(-1)
    least = (dmin.astype(_F) * six_minimums).reshape(-1)
    again = np.clip(np.rint((values + least) / np.where(step == 0, _F(1), step)), 0, 15)
    codes = np.where(step == 0, codes, again).astype(np.uint8).T.reshape(n, 4, 2, 32)
    low, high = six_scales[:, :4].astype(np.uint8), six_scales[:, 4:].astype(np.uint8)
    low_m, high_m = six_minimums[:, :4].astype(np.uint8), six_minimums[:, 4:].astype(np.uint8)
    packed = [low | high >> 4 << 6, low_m | high_m >> 4 << 6, high & 15 | (high_m & 15) << 4]
    nibbles = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(n, 128)
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *packed, nibbles], axis=1)


def _six_bits(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, 8) f32 as multiples 0 to 63 (f32) of one f16 each, (n, 1)."""
    most = np.maximum(numbers.max(axis=1, keepdims=True), _F(0))
    inverse = np.where(most > 0, _F(63) / np.where(most > 0, most, _F(1)), _F(0))
    # Numbers are not negative, but for a scale of values that hardly differ: it counts as 0.
    return (most / _F(63)).astype(np.float16), np.clip(np.rint(inverse * numbers), 0, 63)


def fit_with_minimum(x: np.ndarray, top: int = 15) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes 0 to `top` (as x), scale and minus the minimum of sub-blocks x, (32, n) f32."""
    weights = np.sqrt(_sum(x * x) / _F(len(x))) + np.abs(x)
    least, most = np.minimum(x.min(axis=0), _F(0)), x.max(axis=0)
    flat = most == least
    sum_w, sum_x = _sum(weights), _sum(weights * x)
    span = np.where(flat, _F(1), most - least)
    codes = np.clip(np.rint(_F(top) / span * (x - least)), 0, top)
    scale = _F(1) / (_F(top) / span)
    error = _weighted_error(scale * codes + least - x, weights)
    for step in range(21):
        inverse = (_F(-1) + _F(0.1) * _F(step) + _F(top)) / np.where(flat, _F(1), most - least)
        tried = np.clip(np.rint(inverse * (x - least)), 0, top)
        by_weight = weights * tried
        sum_l, sum_l2, sum_xl = _sum(by_weight), _sum(by_weight * tried), _sum(by_weight * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        usable = determinant > 0
        divisor = np.where(usable, determinant, _F(1))
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / divisor
        new_least = (sum_l2 * sum_x - sum_l * sum_xl) / divisor
        positive = new_least > 0
        new_scale = np.where(positive, sum_xl / np.where(sum_l2 > 0, sum_l2, _F(1)), new_scale)
        new_least = np.where(positive, _F(0), new_least)
        new_error = _weighted_error(new_scale * tried + new_least - x, weights)
        better = usable & (new_error < error) & ~flat
        codes = np.where(better, tried, codes)
        scale, least = np.where(better, new_scale, scale), np.where(better, new_least, least)
        error = np.where(better, new_error, error)
    return np.where(flat, _F(0), codes), np.where(flat, _F(0), scale), -least


def quantize_q6_k(x: np.ndarray, fits: Fits) -> np.ndarray:
    """(super-blocks, 256) f32 to (super-blocks, 210) u8."""
    n = x.shape[0]
    values = np.ascontiguousarray(x.reshape(n * 16, 16).T)
    codes, scale = fits.signed(values)
    scale = scale.reshape(n, 16)
    most = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    empty = np.abs(most) < _LEAST
    inverse = _F(-128) / np.where(empty, _F(1), most)
    d = np.where(empty, _F(0), _F(1) / inverse).astype(np.float16)
    eight = np.minimum(np.rint(inverse * scale), _F(127))
    eight = np.where(empty, _F(0), eight)
    step = (d.astype(_F) * eight).reshape(-1)
    again = np.clip(np.rint(values / np.where(step == 0, _F(1), step)), -32, 31) + _F(32)
    found = np.where(step == 0, codes, again).T.reshape(n, 256)
    q = np.where(empty, _F(0), found).astype(np.uint8).reshape(n, 2, 4, 32)
    low, high = q & 15, q >> 4
    nibbles = np.concatenate([low[:, :, :2].reshape(n, 2, 64) | low[:, :, 2:].reshape(n, 2, 64) << 4], axis=2)
    pairs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    scales = eight.astype(np.int8).view(np.uint8)
    return np.concatenate([nibbles.reshape(n, 128), pairs.reshape(n, 64), scales, d.view(np.uint8)], axis=1)


def fit_signed(x: np.ndarray, zero: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Codes 0 to 2 `zero` - 1 (as x) and scale of sub-blocks x, (16, n) f32."""
    at = np.abs(x).argmax(axis=0)[None]
    most = np.take_along_axis(x, at, axis=0)[0]
    empty = np.abs(most) < _LEAST
    most = np.where(empty, _F(1), most)
    weights = x * x
    codes = scale = best = np.zeros(0, _F)
    for step in (0, *range(-9, 0), *range(1, 10)):
        tried = np.clip(np.rint(-(_F(zero) + _F(0.1) * _F(step)) / most * x), -zero, zero - 1)
        sum_lx, sum_l2 = _sum(weights * x * tried), _sum(weights * tried * tried)
        fitted = sum_lx / np.where(sum_l2 > 0, sum_l2, _F(1))
        if not step:
            codes, scale = tried, np.where(sum_l2 > 0, fitted, _F(0))
            best = scale * sum_lx
            continue
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        codes, scale = np.where(better, tried, codes), np.where(better, fitted, scale)
        best = np.where(better, fitted * sum_lx, best)
    return np.where(empty, _F(0), codes + _F(zero)), np.where(empty, _F(0), scale)


def _sum(x: np.ndarray) -> np.ndarray:
    return np.add.reduce(x, axis=0)


def _weighted_error(difference: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return _sum(weights * (difference * difference))


class Fits(NamedTuple):
    """How sub-blocks are fitted: an implementation of `fit_with_minimum`, and one of `fit_signed`."""

    with_minimum: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
    signed: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


PLAIN = Fits(fit_with_minimum, fit_signed)
