"""Blocks are those of the `gguf` package, bit for bit, for any finite values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.worker.checkpoint.quantize import NotFinite, quantize

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16")
LIMIT = 60000.0  # scales stay within f16


def expected(values: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(TYPES),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-30, 12),
    blocks=st.integers(1, 5),
    steps=st.sampled_from([0, 1, 4, 16]),
)
def test_random_blocks(name: str, seed: int, exponent: int, blocks: int, steps: int) -> None:
    """With `steps` the values are a few multiples of a number: ties and equal values."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((3, 32 * blocks)).astype(np.float32)
    values = np.round(values * steps) / np.float32(steps) if steps else values
    values = np.clip(values * np.float32(2.0**exponent), -LIMIT, LIMIT).astype(np.float32)
    assert quantize(values, name).tobytes() == expected(values, name).tobytes()


@pytest.mark.parametrize("name", TYPES)
def test_special_blocks(name: str) -> None:
    rows = [np.zeros(32), -np.zeros(32), np.full(32, 3.0), np.full(32, -3.0), np.r_[1.0, -1.0, np.zeros(30)]]
    rows += [np.linspace(-1, 1, 32), np.r_[1e-30, np.zeros(31)], np.r_[-LIMIT, LIMIT, np.zeros(30)]]
    values = np.array(rows, np.float32)
    assert quantize(values, name).tobytes() == expected(values, name).tobytes()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_values_that_have_no_scale_are_refused(name: str, value: float) -> None:
    values = np.zeros((1, 64), np.float32)
    values[0, 40] = value
    with pytest.raises(NotFinite):
        quantize(values, name)
