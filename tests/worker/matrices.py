"""Random matrices of every format, packed for the kernels, and a plain way to call `matmul`."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import gguf
import numpy as np

from stages.worker.checkpoint import layout
from stages.worker.checkpoint.layout import groups_of
from stages.worker.kernels import compiled
from stages.worker.kernels.buffer_sizes import MATMUL_BYTES, packed_bytes, row_bytes
from stages.worker.kernels.features import TILE_TOKENS
from stages.worker.kernels.formats import FORMATS, GROUP, Format, QuantizedFormat
from stages.worker.kernels.packed_activations import pack_rows
from stages.worker.kernels.quantize_activations import quantize_rows
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
    return packed(fmt, np.ascontiguousarray(random_tensor(Type[name], rows, columns, rng, 1.0)))


def packed(fmt: Format, source: np.ndarray) -> Packed:
    """A matrix as GGUF holds it, packed; its rows are those of `source`."""
    rows = source.shape[0]
    raw = source.view(np.uint8).reshape(rows, -1)
    columns = raw.shape[1] // fmt.source_bytes * fmt.unit
    pieces = np.concatenate([piece.reshape(-1) for piece in layout.pack(raw, fmt)])
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


def pack(records: np.ndarray, stride: int, columns: int, tokens: int) -> np.ndarray:
    """Records of `activations` packed for AMX; what no token has is noise."""
    packed = aligned(packed_bytes(tokens, columns))
    packed[:] = 0xA5
    pack_rows(records.ctypes.data, stride, columns, packed.ctypes.data, tokens)
    return packed


def multiply(
    matrix: Packed, x: np.ndarray, split: int = 0, scratch: np.ndarray | None = None, by_tiles: bool = True
) -> np.ndarray:
    """y (tokens, rows) f32, by the kernels, in two calls: row groups before `split`, and from it on.

    by_tiles: give the kernels packed records of 16 tokens and more, too, with which those of AMX use tiles.
    Raises `AssertionError` if rows behind the last token are written.
    """
    tokens, groups = x.shape[0], groups_of(matrix.rows)
    given, stride = activations(x, matrix.fmt)
    is_packed = by_tiles and tokens >= TILE_TOKENS and not matrix.fmt.dense
    by_16 = pack(given, stride, matrix.columns, tokens) if is_packed else np.empty(0, np.uint8)
    out = np.full((tokens + 16, groups * GROUP), np.nan, np.float32)
    scratch = aligned(MATMUL_BYTES) if scratch is None else scratch
    compiled.load_extra("matmul", lambda name, done, of: None)
    for first, end in ((0, split), (split, groups)):
        compiled.matmul(
            matrix.fmt.id,
            matrix.stream.ctypes.data,
            matrix.columns,
            first,
            end,
            given.ctypes.data,
            stride,
            by_16.ctypes.data if by_16.size else 0,
            tokens,
            out.ctypes.data,
            groups * GROUP * 4,
            scratch.ctypes.data,
        )
    assert np.isnan(out[tokens:]).all()
    return out[:tokens, : matrix.rows]


def awkward(tokens: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Values over many magnitudes, with blocks of zeros, below the cut-off, and with ties in rounding."""
    x = rng.standard_normal((tokens, columns)) * np.exp2(rng.integers(-12, 12, (tokens, columns)))
    x = x.astype(np.float32)
    x[rng.random((tokens, columns)) < 0.1] = 0
    for t in range(tokens):
        block = 32 * int(rng.integers(0, max(1, columns // 32)))
        x[t, block : block + 32] = (0.0, 2.0**-110, 1.0)[t % 3]
        if t % 3 == 2:
            x[t, block + 1 : block + 32] = np.float32(0.5 / 127) * np.arange(1, x[t, block + 1 : block + 32].size + 1)
    return x


def fill_codes(m: Packed) -> None:
    """Give every value the largest stored code: where 16-bit sums would saturate. Sub-scales become all ones, too."""
    fmt = m.fmt
    assert isinstance(fmt, QuantizedFormat)
    blocks = m.stream.reshape(-1, fmt.unit_bytes)[:, fmt.scales.head_bytes :]
    for block in range(fmt.blocks):
        at = block * fmt.block_bytes
        blocks[:, at : at + (fmt.block_bytes if fmt.scales.is_sub else fmt.codes.nbytes)] = 255


def digest_of_products() -> str:
    h = hashlib.sha256()
    for name, fmt in FORMATS.items():
        rng = np.random.default_rng(7)
        m = random_matrix(name, 37, {1: 100, 32: 19, 256: 3}[fmt.unit], rng)
        # One extreme byte everywhere: what a saturating product would get wrong.
        x = np.full((5, m.columns), -1.0, np.float32)
        x[1:] = awkward(4, m.columns, rng)
        for tokens in (1, 2, 5):
            h.update(multiply(m, x[:tokens]).tobytes())
        more = awkward(50, m.columns, rng)
        for tokens in (15, 16, 17, 31, 33, 50):
            h.update(multiply(m, more[:tokens]).tobytes())
        if fmt.unit == 32:  # fewer blocks than products that AMX has on their way
            for units in (1, 2, 3, 4, 5):
                few = random_matrix(name, 17, units, rng)
                h.update(multiply(few, awkward(16, few.columns, rng)).tobytes())
        if not fmt.dense:
            fill_codes(m)
            h.update(multiply(m, x).tobytes())
            h.update(multiply(m, np.repeat(x[:1], 16, axis=0)).tobytes())
    return h.hexdigest()
