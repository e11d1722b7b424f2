"""No value changes on the way into `.bin`, and no format grows by more than a twentieth."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from stages.worker.checkpoint.layout import matrix_bytes, pack, unpack
from stages.worker.kernels.dequantize_row import dequantize_row
from stages.worker.kernels.formats import FORMATS, QUANTIZED, QuantizedFormat
from tests.worker.matrices import random_matrix

ROWS = (1, 2, 15, 16, 17, 33)


@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_gives_what_gguf_dequantizes(name: str) -> None:
    rng = np.random.default_rng(1)
    for rows in ROWS:
        for units in (1, 2, 3, 7):
            m = random_matrix(name, rows, units, rng)
            assert m.stream.size == matrix_bytes(m.fmt, rows, m.columns)
            expected = gguf.dequantize(m.source, m.kind).astype(np.float32).reshape(rows, -1)
            assert unpack(m.stream, m.fmt, rows, m.columns).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["IQ4_XS", "MXFP4"])
def test_every_scale_and_every_code(name: str) -> None:
    """Bytes of all values at all places: 256 exponents and 64 sub-scales among them, also those no quantizer writes."""
    fmt, kind = FORMATS[name], gguf.GGMLQuantizationType[name]
    raw = np.resize(np.arange(256, dtype=np.uint8), (17 * 64, fmt.source_bytes)).copy()
    raw[:, 0] = np.arange(17 * 64) % 256  # an exponent; of IQ4_XS the low byte of d, which stays finite
    raw[:, 1] = raw[:, 1] & 0x3F if name == "IQ4_XS" else raw[:, 1]
    raw = raw.reshape(17, -1)
    columns = raw.shape[1] // fmt.source_bytes * fmt.unit
    stream = np.concatenate([piece.reshape(-1) for piece in pack(raw, fmt)])
    with np.errstate(over="ignore"):  # the largest exponents
        expected = gguf.dequantize(raw, kind).astype(np.float32)
        assert unpack(stream, fmt, 17, columns).tobytes() == expected.tobytes()
    row = np.empty(columns, np.float32)
    for r in (0, 5, 16):
        dequantize_row(fmt.id, stream.ctypes.data, columns, r, row.ctypes.data)
        assert row.tobytes() == expected[r].tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_found_again(name: str) -> None:
    rng = np.random.default_rng(2)
    m = random_matrix(name, 35, 3, rng)
    expected = gguf.dequantize(m.source, m.kind).astype(np.float32).reshape(35, -1)
    row = np.empty(m.columns, np.float32)
    for r in range(35):
        dequantize_row(m.fmt.id, m.stream.ctypes.data, m.columns, r, row.ctypes.data)
        assert row.tobytes() == expected[r].tobytes(), r


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_streams_hardly_grow(fmt) -> None:  # type: ignore[no-untyped-def]
    assert fmt.unit_bytes <= 1.05 * 16 * fmt.source_bytes
    if not fmt.dense:
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[fmt.name]] == (fmt.unit, fmt.source_bytes)


UNIT_BYTES = {
    "F32": 64,
    "F16": 32,
    "BF16": 32,
    "Q4_0": 288,
    "Q4_1": 320,
    "Q5_0": 352,
    "Q5_1": 384,
    "Q8_0": 544,
    "Q4_K": 2368,
    "Q5_K": 2880,
    "Q6_K": 3360,
}


@pytest.mark.parametrize("name", UNIT_BYTES)
def test_stored_checkpoints_keep_their_size(name: str) -> None:
    """A change here makes checkpoints on disk unreadable: they would have to be ingested again."""
    assert FORMATS[name].unit_bytes == UNIT_BYTES[name]


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda f: f.name)
def test_codes_survive_packing(fmt: QuantizedFormat) -> None:
    """Every stored code, in every row and at every k, comes back from its planes."""
    steps = np.arange(0, fmt.codes.step * 2 ** sum(plane.bits for plane in fmt.codes.planes), fmt.codes.step)
    codes = np.resize(np.random.default_rng(3).permutation(steps), (8, 16, 32)).astype(np.uint8)
    found = fmt.codes.unpack(fmt.codes.pack(codes))
    assert (found == (np.array(fmt.codes.table)[codes] if fmt.codes.table else codes)).all()


def test_one_block_by_hand() -> None:
    """Q4_1: code k of every row is k % 16, so byte b of run j holds 8j + b low and 8j + 4 + b high."""
    block = np.zeros(20, np.uint8)
    block[0:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block[2:4] = np.frombuffer(np.float16(-1.0).tobytes(), np.uint8)
    block[4:20] = [k | k << 4 for k in range(16)]  # GGUF: value k low, value k + 16 high
    (stream,) = pack(np.tile(block, (16, 1)), FORMATS["Q4_1"])
    stream = stream.reshape(-1)
    lane = [0x40, 0x51, 0x62, 0x73], [0xC8, 0xD9, 0xEA, 0xFB]
    for j in range(4):
        assert stream[64 * j : 64 * j + 64].tolist() == list(lane[j % 2]) * 16
    assert stream[256:288].view(np.float16).tolist() == [0.5] * 16
    assert stream[288:320].view(np.float16).tolist() == [-1.0] * 16
