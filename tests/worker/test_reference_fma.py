"""The reference fma rounds once: compared with rational arithmetic, at random and where two roundings would err."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tools.reference.fma import fma

MAX = Fraction(float(np.finfo(np.float32).max))


def nearest_f32(value: Fraction, zero: float) -> np.float32:
    """Round half to even from the definition: the multiple of the local spacing that is nearest."""
    if value == 0:
        return np.float32(zero)
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    spacing = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / spacing) * spacing  # Fraction rounds half to even
    result = np.inf if rounded > MAX else float(rounded)
    return np.float32(-result if value < 0 else result)


def expected(a: float, b: float, c: float) -> np.float32:
    product_sign = np.copysign(1.0, a) * np.copysign(1.0, b)
    # An exact zero is -0 only when both addends are; a sum that rounds to zero keeps its sign.
    negative_zero = a * b == 0 and c == 0 and product_sign < 0 and np.copysign(1.0, c) < 0
    value = Fraction(a) * Fraction(b) + Fraction(c)
    result = nearest_f32(value, -0.0 if negative_zero else 0.0)
    return np.float32(-0.0) if value < 0 and result == 0 else result


def same(x: np.ndarray, y: np.float32) -> bool:
    return np.asarray(x, np.float32).tobytes() == np.asarray(y, np.float32).tobytes()


f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
tiny = st.floats(-(2.0**-120), 2.0**-120, width=32)
whole = st.integers(-(1 << 24), 1 << 24).map(float)


@given(st.one_of(f32, tiny, whole), st.one_of(f32, tiny, whole), st.one_of(f32, tiny, whole))
@example(2.0**-149, 0.5, 2.0**-149)  # halfway between two subnormals
@example(2.0**-149, 0.5, 0.0)
@example(-(2.0**-149), 2.0**-149, 0.0)  # rounds to -0
@example(-0.0, 1.0, -0.0)
@example(1.0, -1.0, 1.0)
@example(float(MAX), 1.0, 2.0**103)  # halfway to the next power of two: overflows
@example(float(MAX), 1.0, 2.0**103 * (1 - 2.0**-24))
def test_any_three_numbers(a: float, b: float, c: float) -> None:
    assert same(
        fma(np.array([a], np.float32), np.array([b], np.float32), np.array([c], np.float32))[0], expected(a, b, c)
    )


@given(
    st.integers(1 << 23, (1 << 24) - 1),
    st.integers(-60, 60),
    st.sampled_from([-1, 1]),
    st.integers(1, 40),
    st.booleans(),
)
def test_just_beside_a_midpoint(significand: int, exponent: int, side: int, distance: int, odd: bool) -> None:
    """The addend is half a unit away, the product a hair: f64 drops the hair and then breaks the tie wrongly."""
    c = float(significand | odd) * 2.0**exponent
    half = 2.0 ** (exponent - 1)
    # (half + hair) as a product of two f32: half * (1 + k 2^-23) squared is beyond f64's reach of c.
    factor = 1.0 + side * 2.0**-23
    for a, b in ((half * factor, 1.0), (half * factor, factor), (half, 1.0 + side * 2.0**-12)):
        assert same(fma(np.float32(a), np.float32(b), np.float32(c)), expected(a, float(np.float32(b)), c))
    hair = side * 2.0 ** (exponent - 30 - distance)
    # The midpoint itself as the addend cannot be f32; as the product (c's significand + 1/2) it can.
    a, b = float(np.float32(2.0 * (significand >> 12) + 1)), 2.0 ** (exponent - 1)
    assert same(fma(np.float32(a), np.float32(b), np.float32(hair)), expected(a, b, hair))


@pytest.mark.parametrize("hair", [2.0**-80, -(2.0**-80), 0.0])
def test_a_midpoint_of_two_f32_and_a_hair(hair: float) -> None:
    """4097 * 4097 = 2^24 + 2^13 + 1 is the midpoint of two f32; f64 alone would lose the hair and tie."""
    a = np.float32(4097)
    result = fma(a, a, np.float32(hair))
    assert result == np.float32(16785409 + (1 if hair > 0 else -1))
    assert same(result, expected(4097.0, 4097.0, hair))


def test_broadcasts_and_keeps_shape() -> None:
    a, b = np.ones((3, 1), np.float32), np.arange(4, dtype=np.float32)
    assert fma(a, b, np.float32(1)).tolist() == [[1, 2, 3, 4]] * 3
    assert fma(np.float32(2), np.float32(3), np.float32(4)).shape == ()


def test_infinities_pass_through() -> None:
    inf = np.float32(np.inf)
    assert fma(inf, np.float32(2), np.float32(1)) == inf
    assert np.isnan(fma(inf, np.float32(1), -inf))
