"""Correctly rounded f32 fused multiply-add on NumPy arrays, on any CPU.

The product of two f32 is exact in f64.  Adding the third in f64 rounds once, converting to f32 rounds a
second time, and the two together differ from one rounding only where the f64 sum is the midpoint of two
f32 and the first rounding hid on which side of it the exact sum lies.  There the sum is rounded to odd
(Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008) before the conversion.
"""

from __future__ import annotations

import numpy as np

F32 = np.ndarray | np.float32

# A f64 that is the midpoint of two normal f32 has these low 29 bits of its significand.
_LOW_BITS = np.int64((1 << 29) - 1)
_MIDPOINT = np.int64(1 << 28)
_SMALLEST_NORMAL = 2.0**-126


def fma(a: F32, b: F32, c: F32) -> np.ndarray:
    """`a * b + c` rounded once, half to even; f32 arrays (broadcast against each other), f32 result."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        total = np.add(product, c, dtype=np.float64)
        bits = np.atleast_1d(total).view(np.int64)
        doubtful = (bits & _LOW_BITS) == _MIDPOINT
        doubtful |= np.abs(np.atleast_1d(total)) < _SMALLEST_NORMAL  # subnormal f32: midpoints lie elsewhere
        if doubtful.any():
            where = np.nonzero(doubtful)
            addend = np.broadcast_to(np.asarray(c, np.float64), total.shape)
            bits[where] = _round_to_odd(np.atleast_1d(product)[where], np.atleast_1d(addend)[where])
            total = bits.view(np.float64).reshape(total.shape)
        return total.astype(np.float32)


def _round_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y (f64, 1-d): the exact sum, or the one of its two neighbours whose last bit is 1; as int64."""
    total = x + y
    # TwoSum (Knuth): `error` is exactly what the rounding of `total` left out.
    y_part = total - x
    error = (x - (total - y_part)) + (y - y_part)
    bits = total.view(np.int64).copy()
    inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    bits[inexact & away_from_zero] += 1
    bits[inexact & ~away_from_zero] -= 1
    return bits
