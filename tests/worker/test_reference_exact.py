"""The exact reference against the definition, number by number, and against itself in pieces."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from fractions import Fraction

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.worker.conftest import TinyGguf
from tools.reference import arithmetic, exact_forward
from tools.reference.blocks import BLOCKS, DENSE, Matrix, Type, multiply_out, unpack
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.reference.float_forward import FloatModel
from tools.reference.fma import fma
from tools.tiny_gguf import LARGE, RECIPES, SHAPES, random_tensor

F = np.float32
Number = float | np.float32
FORMATS = [*DENSE, *BLOCKS]


def fma1(a: Number, b: Number, c: Number) -> np.float32:
    return F(fma(F(a), F(b), F(c)))


# ------------------------------------------------------------------ arithmetic


def test_exp_is_close_and_monotone() -> None:
    x = np.linspace(-87.3, 88.7, 200_001).astype(F)
    y = arithmetic.exp(x)
    reference = np.array([math.exp(float(v)) for v in x])
    assert np.abs(y / reference - 1).max() < 1.5e-7
    assert (np.diff(y) >= 0).all()


def test_exp_at_its_ends() -> None:
    x = np.array([0.0, -0.0, -87.3, np.nextafter(F(-87.3), F(-np.inf)), -1e30, -np.inf, 88.7, 1e30], F)
    y = arithmetic.exp(x)
    assert y[0] == y[1] == 1
    assert y[2] > 0
    assert (y[3:6] == 0).all()
    assert np.isfinite(y[6])
    assert y[7] == y[6]


@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_lane_sums_add_in_the_defined_order(n: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal(n).astype(F)
    plain, squares = np.zeros(16, F), np.zeros(16, F)
    for i, value in enumerate(x):
        plain[i % 16] += value
        squares[i % 16] = fma1(value, value, squares[i % 16])
    for lanes, got in ((plain, arithmetic.lane_sum(x)), (squares, arithmetic.lane_sum_of_squares(x))):
        for width in (8, 4, 2, 1):
            for i in range(width):
                lanes[i] = lanes[i] + lanes[i + width]
        assert got.tobytes() == lanes[0].tobytes()


@given(arrays(F, 64, elements=st.floats(-1e4, 1e4, width=32)))
def test_quantized_activations(x: np.ndarray) -> None:
    codes, scales = arithmetic.quantize(x)
    for b in range(2):
        block = x[32 * b : 32 * b + 32]
        amax = np.abs(block).max()
        if amax < 2.0**-100:
            assert scales[b] == 0
            assert not codes[b].any()
            continue
        assert scales[b] == amax * F(1 / 127)
        inverse = F(127) / amax
        expected = [max(-127, min(127, round(Fraction(float(v * inverse))))) for v in block]
        assert codes[b].tolist() == expected


def test_short_rows_are_padded_with_zeros() -> None:
    codes, scales = arithmetic.quantize(np.full((2, 40), 3, F))
    assert codes.shape == (2, 2, 32)
    assert codes[:, 1, 8:].any() == np.False_
    assert scales.tolist() == [[float(F(3) * F(1 / 127))] * 2] * 2


def test_values_read_from_the_kv_cache() -> None:
    x = np.zeros((1, 32), F)
    x[0, :4] = [1e6, -1e6, 1 + 2.0**-11, 2.0**-24]
    assert arithmetic.stored(x, "f32") is x
    assert arithmetic.stored(x, "f16")[0, :4].tolist() == [65504, -65504, 1.0, 2.0**-24]
    y = np.linspace(-2, 2, 64, dtype=F)[None]
    scale = np.abs(y[:, :32]).max() * F(1 / 127)
    assert arithmetic.stored(y, "int8")[0, 0] == F(np.float16(scale)) * F(-127)
    with pytest.raises(ValueError, match="kv_type is 'f8'"):
        arithmetic.stored(x, "f8")


def test_gates() -> None:
    x = np.linspace(-12, 12, 4001).astype(F)
    wide = x.astype(np.float64)
    assert np.allclose(arithmetic.silu(x), wide / (1 + np.exp(-wide)), atol=1e-6)
    tanh_form = 0.5 * wide * (1 + np.tanh(0.7978845608 * (wide + 0.044715 * wide**3)))
    assert np.allclose(arithmetic.gelu(x), tanh_form, atol=2e-6)


# ------------------------------------------------------------------ matrices


@pytest.mark.parametrize("kind", FORMATS, ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_blocks_equal_gguf_dequantize(kind: Type, rows: int) -> None:
    data = random_tensor(kind, rows, 512, np.random.default_rng(rows), 0.05)
    matrix = unpack(data, kind)
    values = multiply_out(matrix) if isinstance(matrix, Matrix) else matrix
    assert isinstance(matrix, Matrix) == (kind not in DENSE)
    assert values.dtype == F
    assert (values == gguf.dequantize(data, kind)).all()


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="IQ2_XS"):
        unpack(np.zeros((1, 74), np.uint8), Type.IQ2_XS)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda t: t.name)
def test_matmul_number_by_number(kind: Type) -> None:
    """The table of docs/numerics.md in plain Python, one output at a time."""
    rng = np.random.default_rng(5)
    weights = unpack(random_tensor(kind, 3, 256, rng, 0.1), kind)
    x = rng.standard_normal((2, 256)).astype(F)
    x[1, 32:64] = 0
    got = exact_forward.matmul(weights, x)
    for n in range(2):
        codes, scales = arithmetic.quantize(x[n])
        for r in range(3):
            acc = F(0)
            if not isinstance(weights, Matrix):
                for k in range(256):
                    acc = fma1(weights[r, k], x[n, k], acc)
            else:
                width = weights.width
                for p in range(256 // width):
                    q = codes.reshape(-1)[p * width : (p + 1) * width].astype(int)
                    scale = scales[p * width // 32]
                    dot = int((weights.codes[p, r].astype(int) * q).sum())
                    d = weights.scales[p, r]
                    acc = fma1(fma1(F(exact_forward.BASE + dot), d, -exact_forward.BASE * d), scale, acc)
                    if weights.minimums is not None:
                        acc = fma1(weights.minimums[p, r], scale * F(int(q.sum())), acc)
            assert got[n, r].tobytes() == acc.tobytes()


# ------------------------------------------------------------------ attention


def test_attention_number_by_number_across_a_kv_split() -> None:
    rng = np.random.default_rng(9)
    first, head_dim, kv_heads, heads = 257, 32, 1, 2
    q = (2 * rng.standard_normal((2, heads, head_dim))).astype(F)
    k = rng.standard_normal((first + 2, kv_heads, head_dim)).astype(F)
    v = rng.standard_normal((first + 2, kv_heads, head_dim)).astype(F)
    got = exact_forward.attention(q, k, v, first).reshape(2, heads, head_dim)
    t, h = 1, 1  # the second query sees positions 0 .. 258: a whole KV split and three positions
    parts = []
    for begin, end in ((0, 256), (256, first + t + 1)):
        scores = []
        for j in range(begin, end):
            acc = F(0)
            for d in range(head_dim):
                acc = fma1(q[t, h, d], k[j, 0, d], acc)
            scores.append(acc * F(1 / math.sqrt(head_dim)))
        largest = max(scores)
        weights = [arithmetic.exp(s - largest)[()] for s in scores]
        out = np.zeros(head_dim, F)
        for j, e in zip(range(begin, end), weights, strict=True):
            out = fma(np.full(head_dim, e), v[j, 0], out)
        parts.append((largest, arithmetic.lane_sum(np.array(weights, F)), out))
    (m0, l0, o0), (m1, l1, o1) = parts
    new = max(m0, m1)
    a, b = arithmetic.exp(m0 - new), arithmetic.exp(m1 - new)
    total = fma(l0, a, l1 * b)
    expected = fma(o0, a, o1 * b) * (F(1) / total)
    assert got[t, h].tobytes() == expected.tobytes()


# ------------------------------------------------------------------ the whole pass


@pytest.mark.parametrize("kv_type", ["f16", "f32", "int8"])
@pytest.mark.parametrize("shape", ["small", "odd", "grouped", "super", "wide", "biased"])
def test_chunked_prompts_give_the_same_bytes(tiny_gguf: TinyGguf, shape: str, kv_type: str) -> None:
    model = ExactModel(tiny_gguf(shape))
    tokens = np.random.default_rng(1).integers(0, 260, 20)
    whole = ExactSequence(model, kv_type).extend(tokens)
    sequence = ExactSequence(model, kv_type)
    pieces = [sequence.extend(tokens[:1]), sequence.extend(tokens[1:8]), sequence.extend(tokens[8:])]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()
    last = ExactSequence(model, kv_type).extend(tokens, last_only=True)
    assert last.tobytes() == whole[-1:].tobytes()


def test_chunked_prompts_give_the_same_bytes_across_splits(tiny_gguf: TinyGguf) -> None:
    model = ExactModel(tiny_gguf("small"))
    tokens = np.random.default_rng(2).integers(0, 260, 530)
    whole = ExactSequence(model).extend(tokens)
    sequence = ExactSequence(model)
    pieces = [sequence.extend(tokens[a:b]) for a, b in ((0, 200), (200, 300), (300, 513), (513, 530))]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_exact_and_float_reference_agree(tiny_gguf: TinyGguf, recipe: str) -> None:
    """Logits have deviation 3: int8 activations change them by 0.1, dense weights (f32 activations) hardly at all."""
    path = tiny_gguf("super", recipe, seed=3)
    tokens = np.random.default_rng(3).integers(0, 300, 24)
    exact_logits = ExactSequence(ExactModel(path), "f32").extend(tokens)
    difference = np.abs(exact_logits - FloatModel(path).logits(tokens))
    assert difference.max() < (1e-3 if recipe in ("F32", "F16", "BF16") else 1.5)
    assert difference.mean() < 0.1


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in LARGE])
def test_exact_and_float_reference_agree_in_every_shape(tiny_gguf: TinyGguf, shape: str) -> None:
    path = tiny_gguf(shape, "F32")
    tokens = np.random.default_rng(4).integers(0, 261, 32)
    exact_logits = ExactSequence(ExactModel(path), "f32").extend(tokens)
    assert np.abs(exact_logits - FloatModel(path).logits(tokens)).max() < 1e-3


def test_bytes_do_not_depend_on_numpy_dispatch(tiny_gguf: TinyGguf) -> None:
    """NumPy chooses loops by CPU feature; with all features off the bytes are the same."""
    path = tiny_gguf("grouped", "Q5_K_M")
    program = (
        "import sys, hashlib; from pathlib import Path\n"
        "from tools.reference.exact_forward import ExactModel, ExactSequence\n"
        "logits = ExactSequence(ExactModel(Path(sys.argv[1])), 'int8').extend(range(40))\n"
        "print(hashlib.sha256(logits.tobytes()).hexdigest())\n"
    )
    simd = np.show_config(mode="dicts")["SIMD Extensions"]
    digests = {
        subprocess.run(
            [sys.executable, "-c", program, str(path)],
            env={**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for disabled in ("", " ".join(simd.get("found", [])))
    }
    assert len(digests) == 1


def test_another_architecture_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("x", np.zeros(32, F))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture is 'mamba'"):
        FloatModel(tmp_path / "m.gguf")
