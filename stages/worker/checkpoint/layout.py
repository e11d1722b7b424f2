"""The bytes of a matrix in `.bin`: packing rows of GGUF bytes, and reading the values back, for every format.

kernels/formats/description.py draws the layout; this module carries it out in NumPy.  No value changes: `unpack` gives
what `gguf.dequantize` gives.  A format whose scales take 8 bits here and fewer in the GGUF grows by a few percent (Q4_K
2.8, Q5_K 2.3), all others have the size they had.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stages.worker.kernels.formats.description import BLOCK, GROUP, DenseFormat, Format, QuantizedFormat

_PIECE_BYTES = 1 << 20  # of GGUF rows that are packed at once


def groups_of(rows: int) -> int:
    """Row groups of a matrix."""
    return -(-rows // GROUP)


def group_bytes(fmt: Format, columns: int) -> int:
    """Bytes of 16 rows of `columns` values; `columns` is a multiple of the unit."""
    return columns // fmt.unit * fmt.unit_bytes


def matrix_bytes(fmt: Format, rows: int, columns: int) -> int:
    """Bytes of a matrix in `.bin`."""
    return groups_of(rows) * group_bytes(fmt, columns)


# ------------------------------------------------------------------ packing


def pack(source: np.ndarray, fmt: Format) -> Iterator[np.ndarray]:
    """Rows of GGUF bytes (rows, row_bytes) u8 to pieces of the stream: (groups, bytes) u8 each."""
    step = max(1, _PIECE_BYTES // (source.shape[1] * GROUP)) * GROUP
    for first in range(0, source.shape[0], step):
        rows = source[first : first + step]
        short = -rows.shape[0] % GROUP
        if short:
            rows = np.concatenate([rows, np.zeros((short, rows.shape[1]), np.uint8)])
        units = np.ascontiguousarray(rows).reshape(-1, GROUP, rows.shape[1] // fmt.source_bytes, fmt.source_bytes)
        by_row = units.transpose(0, 2, 1, 3)  # (groups, units, 16, bytes)
        packed = _pack_quantized(by_row, fmt) if isinstance(fmt, QuantizedFormat) else _flat(by_row)
        yield packed.reshape(units.shape[0], -1)


def _pack_quantized(by_row: np.ndarray, fmt: QuantizedFormat) -> np.ndarray:
    """(groups, units, 16, source_bytes) u8 to (groups, units, unit_bytes) u8."""
    fields = fmt.gguf(by_row)
    codes = fields.codes.reshape(*by_row.shape[:3], fmt.blocks, BLOCK).swapaxes(2, 3)
    f16 = [_flat(part) for part in (fields.d, fields.m) if part is not None]
    packed = fmt.codes.pack(codes)  # (groups, units, blocks, bytes)
    if not fmt.scales.is_sub:
        return np.concatenate([packed[:, :, 0], *f16], axis=-1)
    sub = [_by_block(part, fmt) for part in (fields.sub_scales, fields.sub_minimums) if part is not None]
    if fmt.scales.sub == "u4":
        sub = [sub[0] | sub[1] << 4]
    return np.concatenate([*f16, _flat(np.concatenate([packed, *sub], axis=-1))], axis=-1)


def _by_block(sub: np.ndarray, fmt: QuantizedFormat) -> np.ndarray:
    """(groups, units, 16, scales of a unit) to (groups, units, blocks, parts * 16)."""
    parts = sub.reshape(*sub.shape[:3], fmt.blocks, fmt.scales.parts).transpose(0, 1, 3, 4, 2)
    return np.ascontiguousarray(parts).reshape(*sub.shape[:2], fmt.blocks, -1)


def _flat(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(*x.shape[:2], -1)


# ------------------------------------------------------------------ reading back


def unpack(stream: np.ndarray, fmt: Format, rows: int, columns: int) -> np.ndarray:
    """The values of a packed matrix, (rows, columns) f32: the definition that kernels are tested by."""
    groups, units = groups_of(rows), columns // fmt.unit
    raw = stream.reshape(groups, units, fmt.unit_bytes)
    if isinstance(fmt, QuantizedFormat):
        values = _quantized_values(raw, fmt)
    else:
        assert isinstance(fmt, DenseFormat)
        values = fmt.values(raw)[..., None]
    # (groups, units, 16, unit)
    return np.ascontiguousarray(values.swapaxes(1, 2)).reshape(groups * GROUP, columns)[:rows]


def _quantized_values(raw: np.ndarray, fmt: QuantizedFormat) -> np.ndarray:
    shape, scales = raw.shape[:2], fmt.scales
    head = np.ascontiguousarray(raw[..., : scales.head_bytes])
    blocks = raw[..., scales.head_bytes :].reshape(*shape, fmt.blocks, fmt.block_bytes)
    codes = fmt.codes.unpack(blocks[..., : fmt.codes.nbytes])  # (groups, units, blocks, 16, 32)
    d, m = _scales(head, np.ascontiguousarray(blocks[..., fmt.codes.nbytes :]), fmt)
    numbers = (codes.astype(np.float32) - np.float32(fmt.codes.zero)) / np.float32(fmt.codes.step)
    numbers = numbers.reshape(*codes.shape[:-1], scales.parts, -1)
    values = d.swapaxes(-1, -2)[..., None] * numbers
    if m is not None:
        values = values + m.swapaxes(-1, -2)[..., None]
    return values.reshape(codes.shape).swapaxes(2, 3).reshape(*shape, GROUP, fmt.unit)


def _scales(head: np.ndarray, stored: np.ndarray, fmt: QuantizedFormat) -> tuple[np.ndarray, np.ndarray | None]:
    """D and M of all blocks: (groups, units, blocks, parts, 16) f32 each."""
    scales = fmt.scales
    shape = (*stored.shape[:-1], -1, GROUP)
    if scales.sub == "e8m0":
        e = stored.astype(np.uint32)
        bits = np.where(e < 2, np.uint32(1 << 21) << e, (e - np.uint32(1)) << np.uint32(23))
        return bits.view(np.float32).reshape(shape), None
    if not scales.sub:
        f16 = stored.view(np.float16).astype(np.float32).reshape(shape)
        return f16[..., :1, :], f16[..., 1:, :] if scales.minimum else None
    f16 = head.view(np.float16).astype(np.float32).reshape(*head.shape[:2], 1, -1, GROUP)
    if scales.sub == "u4":
        both = np.concatenate([stored & 15, stored >> 4], axis=-1).astype(np.float32).reshape(shape)
    else:
        both = stored.view(np.int8 if scales.sub == "s8" else np.uint8).astype(np.float32).reshape(shape)
    d = f16[..., :1, :] * both[..., : scales.parts, :]
    return d, -f16[..., 1:, :] * both[..., scales.parts :, :] if scales.minimum else None
