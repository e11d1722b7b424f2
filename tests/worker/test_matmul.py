"""Every format's kernels equal the exact reference byte for byte, for every batch, split and CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.worker.checkpoint.layout import groups_of
from stages.worker.checkpoint.layout import unpack as layout_unpack
from stages.worker.kernels import compiled, matmul
from stages.worker.kernels.buffer_sizes import RECORD, row_bytes
from stages.worker.kernels.dots import BASE_BITS, STARTS_BIASED
from stages.worker.kernels.formats import FORMATS, QUANTIZED
from stages.worker.kernels.quantize_activations import SCALE, SSUM
from tests.worker.conftest import IsaEnvironment
from tests.worker.instruction_sets import available_isas, tile_isas
from tests.worker.matrices import (
    activations,
    aligned,
    awkward,
    digest_of_products,
    fill_codes,
    multiply,
    packed,
    random_matrix,
)
from tools.reference.arithmetic import quantize
from tools.reference.blocks import BLOCKS, Type, unpack
from tools.reference.exact_forward import matmul as exact_matmul

assert compiled.MATMUL_ARGUMENTS == matmul.ENTRY_ARGUMENTS
SIZES = (1, 2, 3, 15, 16, 17, 31, 33, 63, 65)


def test_records_hold_the_reference_blocks() -> None:
    rng = np.random.default_rng(3)
    for columns in (*SIZES, 32, 64, 576):
        x = awkward(3, columns, rng)
        codes, scales = quantize(x)
        records, stride = activations(x, FORMATS["Q4_0"])
        assert stride == row_bytes(columns)
        for t in range(3):
            row = records[t * stride :][: codes.shape[1] * RECORD].reshape(-1, RECORD)
            assert row[:, :32].tobytes() == codes[t].tobytes()
            numbers = np.ascontiguousarray(row[:, SCALE:])
            halves = codes[t].reshape(-1, 2, 16).sum(axis=2, dtype=np.int32)
            total = halves.sum(axis=1)
            assert numbers[:, :4].tobytes() == scales[t].tobytes()
            assert numbers[:, 4:8].tobytes() == (scales[t] * total.astype(np.float32)).tobytes()
            starts = np.ascontiguousarray(numbers[:, 8:]).view(np.int32)
            expected = [
                -8 * total,
                -16 * total,
                (-128 if STARTS_BIASED else 0) * total,
                -32 * halves[:, 0],
                -32 * halves[:, 1],
                0 * total,
            ]
            assert (starts - BASE_BITS).tolist() == np.stack(expected, axis=1).tolist()


def test_non_finite_activations_stay_non_finite() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((1, 64), np.float32)
        x[0, 40] = bad
        records, _ = activations(x, FORMATS["Q4_0"])
        scales = [records[b * RECORD + SCALE :][:4].view(np.float32)[0] for b in range(2)]
        assert np.isfinite(scales[0])
        assert not np.isfinite(scales[1])
        assert SSUM == SCALE + 4


@pytest.mark.parametrize("name", FORMATS)
def test_kernels_equal_the_reference_implementation(name: str) -> None:
    rng = np.random.default_rng(4)
    unit = FORMATS[name].unit
    most = {1: 400, 32: 40, 256: 5}[unit]
    for tokens in (1, 2, 3, 4, 7, 8, 12, 13, 31):
        for rows in (1, 16, 33):
            units = int(rng.integers(1, most + 1))
            m = random_matrix(name, rows, units, rng)
            x = awkward(tokens, m.columns, rng)
            y = multiply(m, x)
            assert y.tobytes() == exact_matmul(unpack(m.source, m.kind), x).tobytes(), (tokens, rows, units)


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        *((f.name, BLOCKS[Type[f.name]].d_at, b"\x00\x7c") for f in QUANTIZED if f.name != "MXFP4"),
        *((f.name, BLOCKS[Type[f.name]].d_at, b"\x00\xfc") for f in QUANTIZED if f.name != "MXFP4"),
        *(("MXFP4", 0, bytes([exponent])) for exponent in (0, 1, 232, 233, 254, 255)),
    ],
)
def test_scales_at_the_ends_of_their_range(name: str, at: int, value: bytes) -> None:
    """An f16 scale of +-infinity, and scales of MXFP4 around the largest whose product with BASE is finite."""
    rng = np.random.default_rng(11)
    fmt = FORMATS[name]
    m = random_matrix(name, 20, 3, rng)
    source = m.source.view(np.uint8).reshape(20, 3, fmt.source_bytes)
    source[::3, 1, at : at + len(value)] = np.frombuffer(value, np.uint8)
    m = packed(fmt, source.reshape(20, -1))
    x = rng.standard_normal((16, m.columns)).astype(np.float32)
    x[::4] = 0
    with np.errstate(invalid="ignore"):  # infinity times a sub-scale of 0
        expected = exact_matmul(unpack(m.source, m.kind), x)
    assert np.isfinite(expected).all() == (name == "MXFP4")
    for tokens in (1, 2, 16):
        y = multiply(m, x[:tokens])
        assert np.array_equal(np.isnan(y), np.isnan(expected[:tokens]))
        numbers = ~np.isnan(y)
        assert y[numbers].tobytes() == expected[:tokens][numbers].tobytes()


def test_a_block_of_zeros_is_zero_whatever_its_exponent() -> None:
    """Quantizers write any exponent to blocks of MXFP4 whose values are too small for one."""
    rng = np.random.default_rng(12)
    fmt = FORMATS["MXFP4"]
    source = random_matrix("MXFP4", 20, 3, rng).source.view(np.uint8).reshape(20, 3, 17)
    source[:, 1, 1:] = 0
    with_exponent = []
    for exponent in (0, 254):
        source[:, 1, 0] = exponent
        with_exponent.append(packed(fmt, source.reshape(20, -1).copy()))
    x = rng.standard_normal((16, 3 * 32)).astype(np.float32)
    for tokens in (1, 2, 16):
        small, large = (multiply(m, x[:tokens]) for m in with_exponent)
        assert np.isfinite(small).all()
        assert small.tobytes() == large.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_every_odd_size(name: str) -> None:
    rng = np.random.default_rng(5)
    for size in SIZES:
        units = size if FORMATS[name].unit < 256 else -(-size // 8)
        m = random_matrix(name, size, units, rng)
        x = awkward(2, m.columns, rng)
        expected = exact_matmul(unpack(m.source, m.kind), x)
        assert multiply(m, x).tobytes() == expected.tobytes()
        assert multiply(m, x[1:]).tobytes() == expected[1:].tobytes()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    rows=st.integers(1, 70),
    units=st.integers(1, 6),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_batches_and_splits_do_not_matter(name, rows, units, cuts, seed, data) -> None:  # type: ignore[no-untyped-def]
    """Determinism: tokens computed together, in any chunks, with rows split over ranks anywhere."""
    rng = np.random.default_rng(seed)
    m = random_matrix(name, rows, units, rng)
    x = awkward(sum(cuts), m.columns, rng)
    whole = multiply(m, x)
    at = 0
    for n in cuts:
        split = data.draw(st.integers(0, groups_of(rows)))
        assert multiply(m, x[at : at + n], split).tobytes() == whole[at : at + n].tobytes()
        at += n


def test_long_rows_and_many_tokens() -> None:
    """More tokens than one pass over the weights keeps, more blocks than scratch holds."""
    rng = np.random.default_rng(6)
    for name in ("Q4_1", "Q8_0", "Q6_K"):
        m = random_matrix(name, 20, 4608 // FORMATS[name].unit, rng)
        x = awkward(90, m.columns, rng)
        assert multiply(m, x).tobytes() == exact_matmul(unpack(m.source, m.kind), x).tobytes()


@pytest.mark.parametrize("name", [f.name for f in QUANTIZED if not f.scales.minimum])
def test_the_largest_sums(name: str) -> None:
    """Every code the largest, every activation -127: equal to a sum in f64 but for rounding."""
    m = random_matrix(name, 16, 32 // FORMATS[name].unit or 1, np.random.default_rng(9))
    fill_codes(m)
    x = np.full((2, m.columns), -1, np.float32)
    values = layout_unpack(m.stream, m.fmt, 16, m.columns)
    expected = -values.astype(np.float64).sum(axis=1)
    for tokens in (1, 2):
        np.testing.assert_allclose(multiply(m, x[:tokens])[0], expected, rtol=1e-5)


@pytest.mark.parametrize("isa", sorted({*available_isas(), *tile_isas(), "numpy"}))
def test_the_instruction_set_does_not_matter(isa: str, isa_environment: IsaEnvironment) -> None:
    environment = {"NPY_DISABLE_CPU_FEATURES": "AVX512F AVX2 FMA3"} if isa == "numpy" else isa_environment(isa)
    code = "from tests.worker.matrices import digest_of_products as d; print(d())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest_of_products()


def test_whole_bytes_do_not_saturate() -> None:
    """The largest codes of 8 bits, whose pairs of products exceed 16 bits as they are stored."""
    m = random_matrix("Q8_0", 16, 1, np.random.default_rng(8))
    m.stream[:512] = 255  # codes of 127
    m.stream[512:] = np.full(16, 1.0, np.float16).view(np.uint8)
    x = np.ones((1, 32), np.float32)
    scale = np.float32(1) * np.float32(1 / 127)
    expected = np.float32(32 * 127 * 127) * np.float32(1) * scale
    assert multiply(m, x).tolist() == [[float(expected)] * 16]
    assert aligned(64).ctypes.data % 64 == 0
