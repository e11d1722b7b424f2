"""RoPE tables: correct to the last bit of f32 where f64 can decide it, and within a few units when combined."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stages.worker.rope import FRACTION_BITS, Yarn, rope_frequencies, rope_tables
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


@pytest.mark.parametrize(("base", "n_rot", "scale", "original"), [(10000.0, 128, 16.0, 4096), (1e6, 64, 4.0, 32768)])
def test_yarn_is_the_formula_of_the_paper(base: float, n_rot: int, scale: float, original: int) -> None:
    """Written down again in f64: r turns of pair i in the original context, ramp between beta_slow and beta_fast."""
    found = rope_frequencies(base, n_rot, None, scale, Yarn(original))

    def pair_of(turns: float) -> float:
        return n_rot * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(pair_of(32.0)), math.ceil(pair_of(1.0))
    for i, frequency in enumerate(found):
        own = base ** (-2 * i / n_rot)
        divided = min(1.0, max(0.0, (i - low) / (high - low)))
        expected = own / scale * divided + own * (1 - divided)
        assert frequency / (1 << FRACTION_BITS) == pytest.approx(expected, rel=1e-12)
    assert found[0] == rope_frequencies(base, n_rot)[0], "fast pairs keep their frequency"
    assert found[-1] == rope_frequencies(base, n_rot, None, scale)[-1], "slow ones are divided"


def test_yarn_makes_cosines_and_sines_larger() -> None:
    positions = np.array([0, 3, 700])
    tables = rope_tables(10000.0, 64, 1024, None, 4.0, Yarn(256), 1.5)
    cosine, sine = rotations(tables, positions)
    assert np.allclose(np.hypot(cosine, sine), 1.5 * (1 + 0.1 * math.log(4.0)), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0.0, 32, 16), "rope base is 0.0"),
        ((10000.0, 31, 16), "n_rot is 31"),
        ((10000.0, 32, 16, np.ones(3, np.float32)), "3 values, expected 16"),
        ((10000.0, 32, 16, np.zeros(16, np.float32)), "rope factor is 0.0"),
        ((10000.0, 32, 16, None, math.nan), "rope scale is nan"),
        ((1.0, 32, 16, None, 2.0, Yarn(64)), "rope base is 1.0, expected more than 1 with YaRN"),
        ((10000.0, 32, 16, None, 1.0, None, math.inf), "rope magnitude is inf"),
    ],
)
def test_what_has_no_angle_is_refused(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rope_tables(*arguments)
