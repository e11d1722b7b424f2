"""K-quants: the bytes of llama.cpp's quantizer, whatever else is quantized with them; what they lose."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.store import no_progress
from stages.worker.checkpoint import fit_k_compiled
from stages.worker.checkpoint.fit_k_compiled import choose_fits
from stages.worker.checkpoint.quantize import NotFinite, quantize
from stages.worker.checkpoint.quantize_k import PLAIN, Fits
from stages.worker.checkpoint.requantized import _is_finer
from stages.worker.kernels import compiled, stored_code

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


@pytest.fixture(params=["plain", pytest.param("compiled", marks=pytest.mark.slow)])
def fits(request: pytest.FixtureRequest) -> Fits:
    """Both implementations of the fits."""
    return PLAIN if request.param == "plain" else choose_fits(1 << 40, no_progress)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_the_bytes_are_those_of_llama_cpp(name: str, kind: str, fits: Fits) -> None:
    assert hashlib.sha256(quantize(samples(kind), name, fits).tobytes()).hexdigest()[:16] == EXPECTED[name, kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("n", [4, 5, 300])
def test_the_compiled_fits_are_the_plain_ones(name: str, kind: str, n: int) -> None:
    values = np.concatenate([samples(kind, n), samples(kind, n)[:1] * np.float32(3)])
    assert quantize(values, name, choose_fits(1 << 40, no_progress)).tobytes() == quantize(values, name).tobytes()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-60, 18), steps=st.sampled_from([0, 1, 2, 7]))
def test_the_compiled_fits_are_the_plain_ones_for_any_values(seed: int, exponent: int, steps: int) -> None:
    """With `steps` the values are a few multiples of a number: ties, flat sub-blocks and zeros."""
    values = np.random.default_rng(seed).standard_normal((5, 256)).astype(np.float32)
    values = np.round(values * steps) if steps else values
    values = np.clip(values * np.float32(2.0**exponent), -1e6, 1e6).astype(np.float32)
    compiled = choose_fits(1 << 40, no_progress)
    for name in TYPES:
        assert quantize(values, name, compiled).tobytes() == quantize(values, name).tobytes()


@pytest.mark.slow
def test_the_kernel_is_compiled_once_and_only_where_it_is_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.worker.kernels import fit_k  # imports the compiler

    assert (fit_k_compiled._WITH_MINIMUM, fit_k_compiled._SIGNED) == (fit_k.WITH_MINIMUM, fit_k.SIGNED)
    assert compiled.FIT_ARGUMENTS == fit_k.ENTRY_ARGUMENTS
    choose_fits(1 << 40, no_progress)
    monkeypatch.setattr(compiled.build, "build", None)  # it is stored
    assert choose_fits(1 << 40, no_progress) is not PLAIN
    assert choose_fits(1, no_progress) is not PLAIN
    monkeypatch.setattr(stored_code, "symbol_path", lambda name, kv_type: tmp_path / "absent")
    assert choose_fits(1, no_progress) is PLAIN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_llama_cpp_itself(name: str, kind: str, fits: Fits) -> None:
    """With the library of the `peers` group."""
    peer = pytest.importorskip("xllamacpp.xllamacpp")
    library = ctypes.CDLL(peer.__file__)
    row = getattr(library, f"quantize_row_{name[:2].lower()}_K_ref")
    row.argtypes, row.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    values = samples(kind, 2000)
    expected = np.zeros((2000, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]), np.uint8)
    row(values.ctypes.data, expected.ctypes.data, values.size)
    assert quantize(values, name, fits).tobytes() == expected.tobytes()


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
