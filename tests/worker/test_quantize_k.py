"""K-quants: the bytes of llama.cpp's quantizer, whatever else is quantized with them; what they lose."""

from __future__ import annotations

import ctypes
import hashlib

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.worker.checkpoint.quantize import NotFinite, quantize
from stages.worker.checkpoint.requantized import _is_finer

TYPES = ("Q4_K", "Q6_K")


def samples(kind: str, n: int = 64) -> np.ndarray:
    """(n, 256) f32, the same on every machine."""
    rng = np.random.default_rng([n, len(kind)])
    x = (rng.integers(-(1 << 20), 1 << 20, (n, 256)) * 2.0**-25).astype(np.float32)
    if kind == "cubes":
        x = x * x * x * np.float32(1e4)
    elif kind == "sparse":
        x[rng.random(x.shape) < 0.9] = 0
        x[1], x[2], x[3] = 0, 1, -1
    elif kind == "positive":
        x = np.abs(x) + np.float32(0.01)
    elif kind == "tiny":
        x *= np.float32(1e-8)
    return x


KINDS = ("even", "cubes", "sparse", "positive", "tiny")
# SHA-256 of what llama.cpp's quantize_row_q4_K_ref and quantize_row_q6_K_ref make of `samples`.
EXPECTED = {
    ("Q4_K", "even"): "0811ed886bfe9c0c",
    ("Q4_K", "cubes"): "e0fd51657dae2983",
    ("Q4_K", "sparse"): "ca7de347b41262c6",
    ("Q4_K", "positive"): "8ec6c2a451cac718",
    ("Q4_K", "tiny"): "10c03009d5e38577",
    ("Q6_K", "even"): "140194e709ccf88d",
    ("Q6_K", "cubes"): "d9f9d16668d9c9f8",
    ("Q6_K", "sparse"): "4cae29641ab78e62",
    ("Q6_K", "positive"): "4987389229e5b0ee",
    ("Q6_K", "tiny"): "5e5a715eae01be49",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_the_bytes_are_those_of_llama_cpp(name: str, kind: str) -> None:
    assert hashlib.sha256(quantize(samples(kind), name).tobytes()).hexdigest()[:16] == EXPECTED[name, kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_llama_cpp_itself(name: str, kind: str) -> None:
    """With the library of the `peers` group."""
    peer = pytest.importorskip("xllamacpp.xllamacpp")
    library = ctypes.CDLL(peer.__file__)
    row = getattr(library, f"quantize_row_{name[:2].lower()}_K_ref")
    row.argtypes, row.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    values = samples(kind, 2000)
    expected = np.zeros((2000, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]), np.uint8)
    row(values.ctypes.data, expected.ctypes.data, values.size)
    assert quantize(values, name).tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=20)
@given(name=st.sampled_from(TYPES), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-6, 10))
def test_super_blocks_do_not_depend_on_each_other_and_lose_little(name: str, seed: int, exponent: int) -> None:
    values = np.random.default_rng(seed).standard_normal((3, 512)).astype(np.float32) * np.float32(2.0**exponent)
    found = quantize(values, name)
    one_by_one = [quantize(part.reshape(1, 256), name) for part in values.reshape(-1, 256)]
    assert found.tobytes() == b"".join(part.tobytes() for part in one_by_one)
    back = gguf.dequantize(found, gguf.GGMLQuantizationType[name])
    error = float(np.sqrt(np.mean((back - values) ** 2) / np.mean(values**2)))
    assert error < {"Q4_K": 0.1, "Q6_K": 0.025}[name]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38, 2e6])
def test_values_that_have_no_scale_are_refused(name: str, value: float) -> None:
    values = np.zeros((1, 256), np.float32)
    values[0, 40] = value
    with pytest.raises(NotFinite):
        quantize(values, name)


@pytest.mark.parametrize("name", TYPES)
def test_the_greatest_values_have_finite_scales(name: str) -> None:
    values = np.full((2, 256), 1e6, np.float32)
    values[1, ::2] = -1e6
    back = gguf.dequantize(quantize(values, name), gguf.GGMLQuantizationType[name])
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back, values, rtol=0.1)


def test_half_the_layers_have_finer_types() -> None:
    finer = [layer for layer in range(32) if _is_finer(layer, 32)]
    assert finer == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
