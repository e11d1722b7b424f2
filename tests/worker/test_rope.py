"""RoPE tables: correct to the last bit of f32 where f64 can decide it, and within a few units when combined."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stages.worker.rope import FRACTION_BITS, rope_frequencies, rope_tables
from tools.reference.exact_forward import rotations


@pytest.mark.parametrize(("base", "n_rot"), [(10000.0, 32), (100000.0, 64), (500000.0, 128), (1.0, 2)])
def test_frequencies_are_powers_of_the_base(base: float, n_rot: int) -> None:
    frequencies = [f / (1 << FRACTION_BITS) for f in rope_frequencies(base, n_rot)]
    expected = [base ** (-2 * i / n_rot) for i in range(n_rot // 2)]
    assert np.allclose(frequencies, expected, rtol=4e-15, atol=0)


def test_the_low_table_is_f64_cosine_rounded() -> None:
    """|error| of the f64 value is below 1e-13, so f32 differs only at a near tie: by one unit, rarely."""
    tables = rope_tables(100000.0, 64, 8192)
    angles = np.array([[r * 100000.0 ** (-2 * i / 64) for i in range(32)] for r in range(256)])
    for table, function in ((tables.cos_lo, math.cos), (tables.sin_lo, math.sin)):
        expected = np.vectorize(function)(angles).astype(np.float32)
        assert np.mean(table != expected) < 1e-3
        assert np.abs(table.astype(np.float64) - expected).max() < 2.0**-24


def test_position_zero_is_no_turn() -> None:
    tables = rope_tables(10000.0, 32, 1)
    assert [t.shape for t in tables] == [(256, 16), (256, 16), (1, 16), (1, 16)]
    assert (tables.cos_lo[0] == 1).all()
    assert (tables.sin_lo[0] == 0).all()
    assert (tables.cos_hi == 1).all()


def test_far_positions_combine_from_both_tables() -> None:
    positions = np.array([0, 255, 256, 8191, 100_000, 131_071])
    factors = np.linspace(1, 32, 64).astype(np.float32)
    cosine, sine = rotations(rope_tables(500000.0, 128, 131072, factors, 2.0), positions)
    angles = positions[:, None] * np.array([500000.0 ** (-2 * i / 128) / float(f) / 2 for i, f in enumerate(factors)])
    assert np.abs(cosine - np.cos(angles)).max() < 2e-7
    assert np.abs(sine - np.sin(angles)).max() < 2e-7


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0.0, 32, 16), "rope base is 0.0"),
        ((10000.0, 31, 16), "n_rot is 31"),
        ((10000.0, 32, 16, np.ones(3, np.float32)), "3 values, expected 16"),
        ((10000.0, 32, 16, np.zeros(16, np.float32)), "rope factor is 0.0"),
        ((10000.0, 32, 16, None, math.nan), "rope scale is nan"),
    ],
)
def test_what_has_no_angle_is_refused(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rope_tables(*arguments)
