"""GGUF quantization blocks as integers and f32 scales, straight from the format's definition: one entry per format.

Layouts are those of ggml's `block_*` structures (ggml-common.h): a row of K values is K / 32 blocks, or
K / 256 super-blocks for the K-quants.  No value changes: `scale * code + minimum` is what `gguf.dequantize` gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

DENSE = (Type.F32, Type.F16, Type.BF16)


class Matrix(NamedTuple):
    """A quantized matrix, cut along K into pieces of `width` values that share a scale.

    codes     (pieces, rows, width) i8   zero point taken off where the format has one
    scales    (pieces, rows) f32         two-level scales multiplied out (exact in f32)
    minimums  (pieces, rows) f32 | None  what a block adds for each activation; with its sign
    """

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None

    @property
    def width(self) -> int:
        """16 or 32."""
        return self.codes.shape[2]


class Parts(NamedTuple):
    """Blocks of some rows: codes (rows, blocks, values) integers, scales and minimums (rows, blocks, pieces) f32."""

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None = None


class BlockFormat(NamedTuple):
    """How a format's blocks are read, and how random ones are drawn (tools/tiny_gguf.py).

    read         (rows, blocks, bytes) u8 to `Parts`
    steps        about how many even steps the codes span
    sub_scale    the root mean square of uniformly drawn sub-scales; 1 without them
    d_at, m_at   bytes of a block at which the f16 scale and the f16 minimum are; None without minimums
    narrow       what llama.cpp's quantizer takes instead where K is no multiple of a super-block
    has_exponent the scale is 2^(e - 128), e the byte at `d_at`
    """

    read: Callable[[np.ndarray], Parts]
    steps: int
    sub_scale: float = 1.0
    d_at: int = 0
    m_at: int | None = None
    narrow: Type | None = None
    has_exponent: bool = False


# ------------------------------------------------------------------ fields


def _f16(raw: np.ndarray, at: int) -> np.ndarray:
    """(..., bytes) u8 to (..., 1) f32: the half at byte `at`."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(..., n) u8 to (..., 2 n): all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """(..., 4) u8 to (..., 32) of 0 and 16, bit 0 of byte 0 first."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _scales_and_minimums(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of a Q4_K or Q5_K super-block to eight 6-bit scales and eight minimums, as f32."""
    low, middle, high = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _signed(codes: np.ndarray, zero: int) -> np.ndarray:
    return codes.astype(np.int8) - np.int8(zero)


# ------------------------------------------------------------------ formats of one block for 32 values


def _q4_0(raw: np.ndarray) -> Parts:
    return Parts(_signed(_nibbles(raw[..., 2:18]), 8), _f16(raw, 0))


def _q4_1(raw: np.ndarray) -> Parts:
    return Parts(_nibbles(raw[..., 4:20]), _f16(raw, 0), _f16(raw, 2))


def _q5_0(raw: np.ndarray) -> Parts:
    return Parts(_signed(_nibbles(raw[..., 6:22]) | _fifth_bits(raw[..., 2:6]), 16), _f16(raw, 0))


def _q5_1(raw: np.ndarray) -> Parts:
    return Parts(_nibbles(raw[..., 8:24]) | _fifth_bits(raw[..., 4:8]), _f16(raw, 0), _f16(raw, 2))


_UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _iq4_nl(raw: np.ndarray) -> Parts:
    return Parts(_UNEVEN[_nibbles(raw[..., 2:18])], _f16(raw, 0))


def _mxfp4(raw: np.ndarray) -> Parts:
    return Parts(_TWICE_E2M1[_nibbles(raw[..., 1:17])], np.ldexp(np.float32(1), raw[..., :1].astype(np.int32) - 128))


def _q8_0(raw: np.ndarray) -> Parts:
    return Parts(raw[..., 2:34].view(np.int8), _f16(raw, 0))


# ------------------------------------------------------------------ K-quants: super-blocks of 256 values


def _q2_k(raw: np.ndarray) -> Parts:
    both, shifts = raw[..., :16], np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = (raw[..., 16:80].reshape(*raw.shape[:2], 2, 1, 32) >> shifts & 3).reshape(*raw.shape[:2], 256)
    scales, minimums = (both & 15).astype(np.float32), (both >> 4).astype(np.float32)
    return Parts(codes, _f16(raw, 80) * scales, -(_f16(raw, 82) * minimums))


def _q3_k(raw: np.ndarray) -> Parts:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    # In each half of 128: four runs of 32. The high bit of run i of all eight is bit i of the same 32 bytes.
    low = raw[..., 32:96].reshape(*raw.shape[:2], 2, 1, 32) >> shifts & 3
    high = raw[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = low.reshape(*raw.shape[:2], 256) | high.reshape(*raw.shape[:2], 256) << 2
    top = raw[..., None, 104:108] >> shifts & 3
    scales = _nibbles(raw[..., 96:104]) | top.reshape(*raw.shape[:2], 16) << 4
    return Parts(_signed(codes, 4), _f16(raw, 108) * _signed(scales, 32).astype(np.float32))


def _q45_k(raw: np.ndarray, fifth: np.ndarray | int) -> Parts:
    scales, minimums = _scales_and_minimums(raw[..., 4:16])
    codes = _nibbles(raw[..., -128:].reshape(*raw.shape[:2], 4, 32)).reshape(*raw.shape[:2], 256) | fifth
    return Parts(codes, _f16(raw, 0) * scales, -(_f16(raw, 2) * minimums))


def _q4_k(raw: np.ndarray) -> Parts:
    return _q45_k(raw, 0)


def _q5_k(raw: np.ndarray) -> Parts:
    planes = np.arange(8, dtype=np.uint8)[:, None]
    return _q45_k(raw, ((raw[..., None, 16:48] >> planes & 1) << 4).reshape(*raw.shape[:2], 256))


def _q6_k(raw: np.ndarray) -> Parts:
    rows, n = raw.shape[:2]
    low, high = raw[..., :128].reshape(rows, n, 2, 64), raw[..., 128:192].reshape(rows, n, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    # In each half of 128: four runs of 32, whose upper two bits are the bit pairs of the same 32 bytes.
    codes = _nibbles(low).reshape(rows, n, 2, 4, 32) | (high >> shifts & 3) << 4
    scales = _f16(raw, 208) * raw[..., 192:208].view(np.int8).astype(np.float32)
    return Parts(_signed(codes, 32).reshape(rows, n, 256), scales)


def _iq4_xs(raw: np.ndarray) -> Parts:
    """The scale of run i of 32 is 6 bits: nibble i of 4 bytes, and above it bit pair i of a u16."""
    blocks = raw.shape[:2]
    low = np.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], axis=-1).reshape(*blocks, 8)
    pairs = np.ascontiguousarray(raw[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = _signed(low | pairs.astype(np.uint8) << 4, 32).astype(np.float32)
    return Parts(
        _UNEVEN[_nibbles(raw[..., 8:136].reshape(*blocks, 8, 16))].reshape(*blocks, 256), _f16(raw, 0) * scales
    )


BLOCKS: dict[Type, BlockFormat] = {
    Type.Q4_0: BlockFormat(_q4_0, 16),
    Type.Q4_1: BlockFormat(_q4_1, 16, m_at=2),
    Type.Q5_0: BlockFormat(_q5_0, 32),
    Type.Q5_1: BlockFormat(_q5_1, 32, m_at=2),
    Type.Q8_0: BlockFormat(_q8_0, 256),
    Type.IQ4_NL: BlockFormat(_iq4_nl, 256),
    Type.MXFP4: BlockFormat(_mxfp4, 20, has_exponent=True),
    Type.IQ4_XS: BlockFormat(_iq4_xs, 256, 32 / math.sqrt(3), narrow=Type.IQ4_NL),
    Type.Q2_K: BlockFormat(_q2_k, 4, 15 / math.sqrt(3), d_at=80, m_at=82, narrow=Type.IQ4_NL),
    Type.Q3_K: BlockFormat(_q3_k, 8, 32 / math.sqrt(3), d_at=108, narrow=Type.IQ4_NL),
    Type.Q4_K: BlockFormat(_q4_k, 16, 63 / math.sqrt(3), m_at=2, narrow=Type.Q5_0),
    Type.Q5_K: BlockFormat(_q5_k, 32, 63 / math.sqrt(3), m_at=2, narrow=Type.Q5_1),
    Type.Q6_K: BlockFormat(_q6_k, 64, 127 / math.sqrt(3), d_at=208, narrow=Type.Q8_0),
}


def unpack(data: np.ndarray, kind: Type) -> Matrix | np.ndarray:
    """A tensor's bytes (rows, bytes of a row) to a `Matrix`, or to (rows, K) f32 for F32, F16 and BF16.

    Raises `ValueError` for a format that is not supported.
    """
    if kind in DENSE:
        return gguf.dequantize(np.asarray(data), kind).astype(np.float32)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    if kind not in BLOCKS:
        raise ValueError(f"format {kind.name} ({values} values in {size} bytes) is not supported")
    rows = data.shape[0]
    parts = BLOCKS[kind].read(np.ascontiguousarray(data).view(np.uint8).reshape(rows, -1, size))
    scales = parts.scales.reshape(rows, -1)
    codes = parts.codes.astype(np.int8).reshape(rows, scales.shape[1], -1).transpose(1, 0, 2)
    minimums = None if parts.minimums is None else np.ascontiguousarray(parts.minimums.reshape(rows, -1).T)
    return Matrix(np.ascontiguousarray(codes), np.ascontiguousarray(scales.T), minimums)


def multiply_out(matrix: Matrix) -> np.ndarray:
    """The values of a matrix, (rows, K) f32: what `gguf.dequantize` gives."""
    values = matrix.scales[..., None] * matrix.codes.astype(np.float32)
    if matrix.minimums is not None:
        values = values + matrix.minimums[..., None]
    return values.transpose(1, 0, 2).reshape(matrix.codes.shape[1], -1)
