"""GGUF quantization blocks as integers and f32 scales, straight from the format's definition.

Layouts are those of ggml's `block_*` structures (ggml-common.h): a row of K values is K / 32 blocks, or
K / 256 super-blocks for the K-quants.  No value changes: `scale * code + minimum` is what
`gguf.dequantize` gives.
"""

from __future__ import annotations

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
        """16 (Q6_K) or 32."""
        return self.codes.shape[2]


def _f16(raw: np.ndarray, at: int) -> np.ndarray:
    """(..., bytes) u8 to (...) f32: the half at byte `at`."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(..., n) u8 to (..., 2 n): all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: np.ndarray) -> np.ndarray:
    """(..., 4) u8 to (..., 32) of 0 and 1, bit 0 of byte 0 first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _scales_and_minimums(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of a Q4_K or Q5_K super-block to eight 6-bit scales and eight minimums, as f32."""
    low, middle, high = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _matrix(codes: np.ndarray, scales: np.ndarray, minimums: np.ndarray | None = None) -> Matrix:
    """codes (rows, pieces, width), scales and minimums (rows, pieces): pieces go first."""
    return Matrix(
        np.ascontiguousarray(codes.astype(np.int8).transpose(1, 0, 2)),
        np.ascontiguousarray(scales.T),
        None if minimums is None else np.ascontiguousarray(minimums.T),
    )


def _small(raw: np.ndarray, kind: Type) -> Matrix:
    """Formats of one block for 32 values; raw (rows, blocks, bytes)."""
    d = _f16(raw, 0)
    if kind == Type.Q8_0:
        return _matrix(raw[..., 2:34].view(np.int8), d)
    if kind == Type.Q4_0:
        return _matrix(_nibbles(raw[..., 2:18]).astype(np.int8) - 8, d)
    if kind == Type.Q4_1:
        return _matrix(_nibbles(raw[..., 4:20]), d, _f16(raw, 2))
    if kind == Type.Q5_0:
        codes = _nibbles(raw[..., 6:22]) | _bits(raw[..., 2:6]) << 4
        return _matrix(codes.astype(np.int8) - 16, d)
    codes = _nibbles(raw[..., 8:24]) | _bits(raw[..., 4:8]) << 4  # Q5_1
    return _matrix(codes, d, _f16(raw, 2))


def _super(raw: np.ndarray, kind: Type) -> Matrix:
    """K-quants: super-blocks of 256; raw (rows, super-blocks, bytes)."""
    rows, n = raw.shape[:2]
    if kind == Type.Q6_K:
        low, high = raw[..., :128].reshape(rows, n, 2, 64), raw[..., 128:192].reshape(rows, n, 2, 1, 32)
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
        # In each half of 128: four runs of 32, whose upper two bits are the bit pairs of the same 32 bytes.
        codes = _nibbles(low).reshape(rows, n, 2, 4, 32) | (high >> shifts & 3) << 4
        scales = _f16(raw, 208)[..., None] * raw[..., 192:208].view(np.int8).astype(np.float32)
        return _matrix((codes.astype(np.int8) - 32).reshape(rows, n * 16, 16), scales.reshape(rows, n * 16))
    sub_scales, sub_minimums = _scales_and_minimums(raw[..., 4:16])
    codes = _nibbles(raw[..., -128:].reshape(rows, n, 4, 32)).reshape(rows, n, 8, 32)
    if kind == Type.Q5_K:
        planes = np.arange(8, dtype=np.uint8)[:, None]
        codes = codes | (raw[..., 16:48].reshape(rows, n, 1, 32) >> planes & 1) << 4
    scales = _f16(raw, 0)[..., None] * sub_scales
    minimums = -(_f16(raw, 2)[..., None] * sub_minimums)
    return _matrix(codes.reshape(rows, n * 8, 32), scales.reshape(rows, n * 8), minimums.reshape(rows, n * 8))


def unpack(data: np.ndarray, kind: Type) -> Matrix | np.ndarray:
    """A tensor's bytes (rows, bytes of a row) to a `Matrix`, or to (rows, K) f32 for F32, F16 and BF16.

    Raises `ValueError` for a format that is not supported.
    """
    if kind in DENSE:
        return gguf.dequantize(np.asarray(data), kind).astype(np.float32)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(data.shape[0], -1, size)
    if kind in (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0):
        return _small(raw, kind)
    if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
        return _super(raw, kind)
    raise ValueError(f"format {kind.name} ({values} values in {size} bytes) is not supported")


def multiply_out(matrix: Matrix) -> np.ndarray:
    """The values of a matrix, (rows, K) f32: what `gguf.dequantize` gives."""
    values = matrix.scales[..., None] * matrix.codes.astype(np.float32)
    if matrix.minimums is not None:
        values = values + matrix.minimums[..., None]
    return values.transpose(1, 0, 2).reshape(matrix.codes.shape[1], -1)
