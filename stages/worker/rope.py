"""RoPE tables by integer arithmetic alone, so that their bits do not depend on a libm or a CPU.

Angle of pair i at position p: `p * freq_i`, `freq_i = base^(-2i/n_rot) / (factor_i * scale)`; with YaRN, low pairs
keep their frequency and only the others are divided by the scale.  All computations are in fixed point with
`FRACTION_BITS` fractional bits: logarithm and exponential of the base by series, cosine and sine of `freq_i` by series,
then rotations by it.  The error is below 2^-160; the only rounding is to f32 at the end (half to even).
docs/numerics.md defines how kernels combine the two tables.

Called once at ingest, and by the reference implementation.  Independent of models and files.
"""

from __future__ import annotations

from fractions import Fraction
from math import ldexp
from typing import NamedTuple

import numpy as np

FRACTION_BITS = 192
SPAN = 256  # positions of the low table; the high table steps by it
_ONE = 1 << FRACTION_BITS


class RopeTables(NamedTuple):
    """Row r of the `lo` tables belongs to position r, row r of the `hi` tables to position 256 r.

    cos_lo, sin_lo  (256, n_rot / 2) f32
    cos_hi, sin_hi  (ceil(context_length / 256), n_rot / 2) f32
    """

    cos_lo: np.ndarray
    sin_lo: np.ndarray
    cos_hi: np.ndarray
    sin_hi: np.ndarray


class Yarn(NamedTuple):
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): which pairs keep their frequency.

    Those that turn more than `beta_fast` times within the original context keep it, those that turn less than
    `beta_slow` times are divided by the scale, and in between the two are mixed.
    """

    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def _fixed(value: Fraction) -> int:
    return (value.numerator << FRACTION_BITS) // value.denominator


def _multiply(a: int, b: int) -> int:
    return (a * b) >> FRACTION_BITS


def _log_near_one(value: Fraction) -> int:
    """ln of a value in [2/3, 2], by 2 atanh((v - 1) / (v + 1)); fixed point."""
    z = _fixed((value - 1) / (value + 1))
    square, power, total, k = _multiply(z, z), z, 0, 1
    while power not in (0, -1):  # an arithmetic shift ends at -1, not at 0
        total += power // k
        power = _multiply(power, square)
        k += 2
    return 2 * total


_LN2 = _log_near_one(Fraction(2))


def _log(value: Fraction) -> int:
    """ln(value) for value > 0; fixed point."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    mantissa = value / Fraction(2) ** exponent
    if mantissa < 1:
        mantissa, exponent = mantissa * 2, exponent - 1
    return exponent * _LN2 + _log_near_one(mantissa)


def _exp(x: int) -> int:
    """exp of a fixed-point number; fixed point."""
    k, r = divmod(x, _LN2)
    term, total, n = _ONE, 0, 1
    while term:
        total += term
        term = _multiply(term, r) // n
        n += 1
    return total << k if k >= 0 else total >> -k


def _cos_sin(x: int) -> tuple[int, int]:
    """Cosine and sine of a fixed-point angle by their series (no reduction: |x| is small here)."""
    square = _multiply(x, x)
    sums = []
    for term, n in ((_ONE, 1), (x, 2)):
        total = 0
        while term not in (0, -1):
            total += term
            term = -_multiply(term, square) // (n * (n + 1))
            n += 2
        sums.append(total)
    return sums[0], sums[1]


def _round_f32(x: int) -> float:
    """The f32 nearest to a fixed-point number, half to even (magnitudes here are never subnormal)."""
    magnitude = abs(x)
    shift = magnitude.bit_length() - 24
    if shift > 0:
        kept, rest, half = magnitude >> shift, magnitude & ((1 << shift) - 1), 1 << (shift - 1)
        if rest > half or (rest == half and kept & 1):
            kept += 1
        result = ldexp(kept, shift - FRACTION_BITS)
    else:
        result = ldexp(magnitude, -FRACTION_BITS)
    return -result if x < 0 else result


def _rotations(
    cosine: int, sine: int, n: int, magnitude: int = _ONE
) -> tuple[list[float], list[float], tuple[int, int]]:
    """Cosines and sines of 0, 1, ... n - 1 times an angle in f32, and of n times the angle in fixed point.

    Those in f32 are multiplied with `magnitude` (fixed point) before they are rounded.
    """
    c, s = _ONE, 0
    cosines, sines = [], []
    for _ in range(n):
        cosines.append(_round_f32(_multiply(c, magnitude)))
        sines.append(_round_f32(_multiply(s, magnitude)))
        c, s = (c * cosine - s * sine) >> FRACTION_BITS, (s * cosine + c * sine) >> FRACTION_BITS
    return cosines, sines, (c, s)


def _atan_inverse(n: int) -> int:
    """atan(1 / n); fixed point."""
    power, total, k = _ONE // n, 0, 1
    while power:
        total += power // k if k % 4 == 1 else -(power // k)
        power //= n * n
        k += 2
    return total


_PI = 16 * _atan_inverse(5) - 4 * _atan_inverse(239)  # Machin's formula


def _kept_share(base: float, n_rot: int, yarn: Yarn) -> list[Fraction]:
    """How much of its own frequency each pair keeps, from 0 to 1."""

    def pair_of(turns: float) -> tuple[int, int]:
        """The pair that turns so often within the original context, as a quotient."""
        ratio = Fraction(yarn.original_context) / Fraction(turns) * Fraction(_ONE, 2 * _PI)
        return n_rot * _log(ratio), 2 * _log(Fraction(base))

    fast, slow = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    low, high = max(0, fast[0] // fast[1]), min(n_rot - 1, -(-slow[0] // slow[1]))
    span = max(Fraction(1, 1000), Fraction(high - low))
    return [1 - min(Fraction(1), max(Fraction(0), (i - low) / span)) for i in range(n_rot // 2)]


def rope_magnitude(scale: float, yarn: Yarn | None, magnitude: float) -> Fraction:
    """What cosines and sines are multiplied with: `magnitude`, with YaRN times 1 + ln(scale) / 10."""
    factor = Fraction(magnitude)
    return factor * (1 + Fraction(_log(Fraction(scale)), 10 * _ONE)) if yarn and scale > 1 else factor


def rope_frequencies(
    base: float, n_rot: int, factors: np.ndarray | None = None, scale: float = 1.0, yarn: Yarn | None = None
) -> list[int]:
    """Angle per position of each pair (n_rot / 2 of them), fixed point with `FRACTION_BITS`.

    `factors` are the f32 divisors of a `rope_freqs` tensor (n_rot / 2), `scale` the scaling factor: linear, or that of
    YaRN.  Floats count with their exact value.  Raises `ValueError` for values out of bounds.
    """
    if n_rot <= 0 or n_rot % 2:
        raise ValueError(f"n_rot is {n_rot}, expected an even number of at least 2")
    divisors = [1.0] * (n_rot // 2) if factors is None else [float(f) for f in np.asarray(factors).ravel()]
    if len(divisors) != n_rot // 2:
        raise ValueError(f"rope factors: {len(divisors)} values, expected {n_rot // 2}")
    # The series of `_cos_sin` needs small angles: with these bounds they are below 16.
    given = [("base", base, 1.0), ("scale", scale, 0.25), *(("factor", f, 0.25) for f in divisors)]
    for name, value, least in given:
        if not least <= value < 1e30:
            raise ValueError(f"rope {name} is {value}, expected a number from {least} to 1e30")
    if yarn is not None and base <= 1:
        raise ValueError(f"rope base is {base}, expected more than 1 with YaRN")
    log_base = _log(Fraction(base))
    own = [Fraction(_exp(-log_base * 2 * i // n_rot), _ONE) / Fraction(f) for i, f in enumerate(divisors)]
    if yarn is None:
        return [_fixed(frequency / Fraction(scale)) for frequency in own]
    kept = _kept_share(base, n_rot, yarn)
    return [_fixed(f / Fraction(scale) * (1 - share) + f * share) for f, share in zip(own, kept, strict=True)]


def rope_tables(
    base: float,
    n_rot: int,
    context_length: int,
    factors: np.ndarray | None = None,
    scale: float = 1.0,
    yarn: Yarn | None = None,
    magnitude: float = 1.0,
) -> RopeTables:
    """The tables for positions 0 .. context_length - 1; arguments as in `rope_frequencies` and `rope_magnitude`.

    The high tables have the magnitude, so that a cosine or sine that is combined from both has it once.
    """
    n_hi = max(1, -(-context_length // SPAN))
    frequencies = rope_frequencies(base, n_rot, factors, scale, yarn)
    if not 1e-3 <= magnitude <= 1e3:
        raise ValueError(f"rope magnitude is {magnitude}, expected a number from 0.001 to 1000")
    largest = _fixed(rope_magnitude(scale, yarn, magnitude))
    tables = RopeTables(*(np.empty((n, n_rot // 2), np.float32) for n in (SPAN, SPAN, n_hi, n_hi)))
    for i, frequency in enumerate(frequencies):
        low_cos, low_sin, by_span = _rotations(*_cos_sin(frequency), SPAN)
        high_cos, high_sin, _ = _rotations(*by_span, n_hi, largest)
        for table, column in zip(tables, (low_cos, low_sin, high_cos, high_sin), strict=True):
            table[:, i] = column
    return tables
