"""Scalar functions of the sampler, the same bits everywhere: a uniform random number, the logarithm, the next f64."""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.entries import INNER

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_LOG_TERMS = 12


@numba.njit(**INNER)
def uniform(seed, position, choice, stream):
    """[0, 1) with 53 bits: Philox4x32-10, key = seed, counter = (position, choice, stream, 0)."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    k0, k1 = np.uint64(seed) & low, np.uint64(seed) >> shift
    c0, c1 = np.uint64(position) & low, np.uint64(choice) & low
    c2, c3 = np.uint64(stream), np.uint64(0)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c0
        p1 = np.uint64(0xCD9E8D57) * c2
        c0 = (p1 >> shift) ^ c1 ^ k0
        c1 = p1 & low
        c2 = (p0 >> shift) ^ c3 ^ k1
        c3 = p0 & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return np.float64((c0 << np.uint64(21)) + (c1 >> np.uint64(11))) * 2.0**-53


@numba.njit(**INNER)
def next_above(x):
    """The least f64 above x, which is 0 or at least 2^-1022."""
    # Three quarters to one and a half of the distance to it: the sum is rounded to it.
    return x + x * (0.75 * 2.0**-52) if x > 0.0 else 2.0**-1074


@numba.njit(**INNER)
def log(x):
    """Natural logarithm of an f64 of at least 1."""
    k = 0
    while x >= 2.0:
        x *= 0.5
        k += 1
    x *= 0.5
    k += 1
    if x < _SQRT_HALF:
        x *= 2.0
        k -= 1
    z = (x - 1.0) / (x + 1.0)
    square = z * z
    p = 1.0 / (2 * _LOG_TERMS - 1)
    for i in range(_LOG_TERMS - 2, -1, -1):
        p = p * square + 1.0 / (2 * i + 1)
    return k * _LN2 + 2.0 * z * p
