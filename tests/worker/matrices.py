"""Random matrices of every format, packed for the kernels, and a plain way to call `matmul`."""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np

from stages.worker.checkpoint.layout import FORMATS, GROUP, Format, groups_of, pack
from stages.worker.kernels.matmul import SCRATCH_BYTES, matmul
from stages.worker.kernels.quantize_activations import quantize_rows, row_bytes
from tools.tiny_gguf import random_tensor

Type = gguf.GGMLQuantizationType


def aligned(nbytes: int) -> np.ndarray:
    """Zero bytes that start at a cache line."""
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


class Packed(NamedTuple):
    """A matrix: `source` as GGUF holds it, `stream` as the kernels read it."""

    fmt: Format
    rows: int
    columns: int
    source: np.ndarray
    stream: np.ndarray

    @property
    def kind(self) -> Type:
        return Type[self.fmt.name]


def random_matrix(name: str, rows: int, units: int, rng: np.random.Generator) -> Packed:
    fmt = FORMATS[name]
    columns = units * fmt.unit
    source = np.ascontiguousarray(random_tensor(Type[name], rows, columns, rng, 1.0))
    raw = source.view(np.uint8).reshape(rows, units * fmt.source_bytes)
    pieces = np.concatenate([piece.reshape(-1) for piece in pack(raw, fmt)])
    stream = aligned(pieces.size)
    stream[:] = pieces
    return Packed(fmt, rows, columns, source, stream)


def activations(x: np.ndarray, fmt: Format) -> tuple[np.ndarray, int]:
    """What `matmul` wants for x (tokens, K) f32: the buffer and its row stride in bytes."""
    tokens, columns = x.shape
    if fmt.dense:
        return np.ascontiguousarray(x), columns * 4
    stride = row_bytes(columns)
    records = aligned(tokens * stride)
    quantize_rows(x.ctypes.data, columns * 4, columns, records.ctypes.data, stride, 0, tokens)
    return records, stride


def multiply(matrix: Packed, x: np.ndarray, split: int = 0) -> np.ndarray:
    """y (tokens, rows) f32, by the kernels, in two calls that meet at row group `split`."""
    tokens, groups = x.shape[0], groups_of(matrix.rows)
    given, stride = activations(x, matrix.fmt)
    out = np.full((tokens, groups * GROUP), np.nan, np.float32)
    scratch = aligned(SCRATCH_BYTES)
    for first, end in ((0, split), (split, groups)):
        matmul(
            matrix.fmt.id,
            matrix.stream.ctypes.data,
            matrix.columns,
            first,
            end,
            given.ctypes.data,
            stride,
            tokens,
            out.ctypes.data,
            groups * GROUP * 4,
            scratch.ctypes.data,
        )
    return out[:, : matrix.rows]
