"""The bytes of a matrix in `.bin`: 16 rows interleaved, scales beside their codes in one stream.

Rows go in groups of 16 (the last group is padded with zeros); a group is a run of units along K.  One
64-byte load then holds 4 consecutive K values of 16 rows (lane = row, byte = k), and no kernel needs a
horizontal sum.  A unit, byte by byte (per 32 K values unless said otherwise):

    Q4_0  codes 256 | d f16 x 16                                   288 bytes
    Q4_1  codes 256 | d f16 x 16 | m f16 x 16                      320
    Q5_0  codes 256 | bits 64 | d                                  352
    Q5_1  codes 256 | bits 64 | d | m                              384
    Q8_0  bytes 512 (value + 128) | d                              544
    Q4_K  d | dmin, then 8 x (codes 256 | sc u8 x 16 | mn u8 x 16)                 per 256: 2368
    Q5_K  d | dmin, then 8 x (codes 256 | bits 64 | sc | mn)                       per 256: 2880
    Q6_K  d, then 8 x (codes 256 | pairs 128 | sc s8 x 16, k < 16 | sc, k >= 16)   per 256: 3360
    F32, F16, BF16   one value of each of 16 rows                  per 1: 64, 32, 32

codes   4 x 64 bytes: in run j, byte b of lane r has k = 8j + b in its low half and 8j + 4 + b in its high
bits    u32 per lane: fifth bit of k = 4s + b at bit 8b + (s + 4) % 8
pairs   2 x u32 per lane: bits 4-5 of k = 16w + 4j + b in word w at bit 8b + (4, 6, 0, 2)[j]

No value changes: `unpack` gives what `gguf.dequantize` gives.  The 6-bit scales of Q4_K and Q5_K take
8 bits here (2.8 and 2.3 % more), everything else has the size it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

GROUP = 16
BLOCK = 32


class Format(NamedTuple):
    """Sizes of a quantization format; `id` is GGML's type number."""

    id: int
    name: str
    unit: int  # K values of a unit
    source_bytes: int  # of a unit of one row in the GGUF
    unit_bytes: int  # of a unit of 16 rows in `.bin`
    zero: int  # what a code stands for when the value is 0
    dense: bool = False  # float weights, with f32 activations


FORMATS = {
    f.name: f
    for f in (
        Format(0, "F32", 1, 4, 64, 0, True),
        Format(1, "F16", 1, 2, 32, 0, True),
        Format(30, "BF16", 1, 2, 32, 0, True),
        Format(2, "Q4_0", 32, 18, 288, 8),
        Format(3, "Q4_1", 32, 20, 320, 0),
        Format(6, "Q5_0", 32, 22, 352, 16),
        Format(7, "Q5_1", 32, 24, 384, 0),
        Format(8, "Q8_0", 32, 34, 544, 128),
        Format(12, "Q4_K", 256, 144, 2368, 0),
        Format(13, "Q5_K", 256, 176, 2880, 0),
        Format(14, "Q6_K", 256, 210, 3360, 32),
    )
}
BY_ID = {f.id: f for f in FORMATS.values()}


def groups_of(rows: int) -> int:
    return -(-rows // GROUP)


def group_bytes(fmt: Format, columns: int) -> int:
    """Bytes of 16 rows of `columns` values; `columns` is a multiple of the unit."""
    return columns // fmt.unit * fmt.unit_bytes


def matrix_bytes(fmt: Format, rows: int, columns: int) -> int:
    return groups_of(rows) * group_bytes(fmt, columns)


# ------------------------------------------------------------------ packing


def pack(source: np.ndarray, fmt: Format) -> Iterator[np.ndarray]:
    """Rows of GGUF bytes (rows, row_bytes) u8 to pieces of the stream: (groups, bytes) u8 each."""
    step = max(1, (1 << 20) // (source.shape[1] * GROUP)) * GROUP
    for first in range(0, source.shape[0], step):
        rows = source[first : first + step]
        short = -rows.shape[0] % GROUP
        if short:
            rows = np.concatenate([rows, np.zeros((short, rows.shape[1]), np.uint8)])
        units = np.ascontiguousarray(rows).reshape(-1, GROUP, rows.shape[1] // fmt.source_bytes, fmt.source_bytes)
        yield _pack_units(units, fmt).reshape(units.shape[0], -1)


def _pack_units(raw: np.ndarray, fmt: Format) -> np.ndarray:
    """(groups, 16, units, source_bytes) u8 to (groups, units, unit_bytes) u8."""
    name = fmt.name
    by_row = raw.transpose(0, 2, 1, 3)  # (groups, units, 16, bytes)
    if fmt.dense:
        return _flat(by_row)
    if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        head = 4 if name.endswith("1") else 2
        parts = [_flat(by_row[..., :2])] + ([_flat(by_row[..., 2:4])] if head == 4 else [])
        if name.startswith("Q4"):
            return _joined(_nibbles(_halves(by_row[..., head:])), *parts)
        codes = _halves(by_row[..., head + 4 :]) | _bits(by_row[..., head : head + 4]) << 4
        return _joined(_nibbles(codes), _fifth_bits(codes), *parts)
    if name == "Q8_0":
        return _joined(_bytes(by_row[..., 2:] ^ 0x80), _flat(by_row[..., :2]))
    if name == "Q6_K":
        codes = _codes_q6_k(by_row)
        scales = by_row[..., 192:208].reshape(*by_row.shape[:3], 8, 2).transpose(0, 1, 3, 4, 2)
        blocks = _joined(_nibbles(codes), _pairs(codes), scales.reshape(*scales.shape[:3], -1))
        return _joined(_flat(by_row[..., 208:210]), _flat(blocks))
    codes = _codes_q45_k(by_row, name == "Q5_K")
    scales, minimums = _six_bit(by_row[..., 4:16])  # (groups, units, 16, 8)
    parts = [_nibbles(codes)] + ([_fifth_bits(codes)] if name == "Q5_K" else [])
    blocks = _joined(*parts, scales.swapaxes(2, 3), minimums.swapaxes(2, 3))
    return _joined(_flat(by_row[..., :2]), _flat(by_row[..., 2:4]), _flat(blocks))


def _flat(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(*x.shape[:2], -1)


def _joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts, axis=-1)


def _halves(packed: np.ndarray) -> np.ndarray:
    """GGUF order of 4-bit codes: low halves are the first run, high halves the second."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: np.ndarray) -> np.ndarray:
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _six_bit(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes to eight scales and eight minimums (ggml's `get_scale_min_k4`)."""
    low, middle, high = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=-1)
    return scales, minimums


def _blocks_first(codes: np.ndarray) -> np.ndarray:
    """(groups, units, 16, 256) to (groups, units, 8, 16, 32)."""
    return codes.reshape(*codes.shape[:3], 8, BLOCK).swapaxes(2, 3)


def _codes_q45_k(raw: np.ndarray, fifth: bool) -> np.ndarray:
    packed = raw[..., -128:].reshape(*raw.shape[:3], 4, 32)
    codes = _halves(packed).reshape(*raw.shape[:3], 256)
    if fifth:
        planes = np.arange(8, dtype=np.uint8)[:, None]
        codes = codes | ((raw[..., None, 16:48] >> planes & 1) << 4).reshape(codes.shape)
    return _blocks_first(codes)


def _codes_q6_k(raw: np.ndarray) -> np.ndarray:
    shape = raw.shape[:3]
    low = _halves(raw[..., :128].reshape(*shape, 2, 64)).reshape(*shape, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = raw[..., 128:192].reshape(*shape, 2, 1, 32) >> shifts & 3
    return _blocks_first((low | high << 4).reshape(*shape, 256))


# In these four, codes are (..., 16, 32): row, k.


def _nibbles(codes: np.ndarray) -> np.ndarray:
    runs = (codes & 15).reshape(*codes.shape[:-1], 4, 2, 4)
    packed = runs[..., 0, :] | runs[..., 1, :] << 4  # (..., row, run, byte)
    return np.ascontiguousarray(packed.swapaxes(-3, -2)).reshape(*codes.shape[:-2], 256)


def _fifth_bits(codes: np.ndarray) -> np.ndarray:
    places = np.array([(s + 4) % 8 for s in range(8)], np.uint8)[:, None]
    bits = (codes >> 4).reshape(*codes.shape[:-1], 8, 4) << places
    return np.bitwise_or.reduce(bits, axis=-2).reshape(*codes.shape[:-2], 64)


def _pairs(codes: np.ndarray) -> np.ndarray:
    places = np.array([4, 6, 0, 2], np.uint8)[:, None]
    bits = (codes >> 4).reshape(*codes.shape[:-1], 2, 4, 4) << places
    words = np.bitwise_or.reduce(bits, axis=-2)  # (..., row, word, byte)
    return np.ascontiguousarray(words.swapaxes(-3, -2)).reshape(*codes.shape[:-2], 128)


def _bytes(codes: np.ndarray) -> np.ndarray:
    runs = codes.reshape(*codes.shape[:-1], 8, 4).swapaxes(-3, -2)
    return np.ascontiguousarray(runs).reshape(*codes.shape[:-2], 512)


# ------------------------------------------------------------------ reading back


def unpack(stream: np.ndarray, fmt: Format, rows: int, columns: int) -> np.ndarray:
    """The values of a packed matrix, (rows, columns) f32: the definition that kernels are tested by."""
    groups, units = groups_of(rows), columns // fmt.unit
    raw = stream.reshape(groups, units, fmt.unit_bytes)
    values = _unit_values(raw, fmt)  # (groups, units, 16, unit)
    return np.ascontiguousarray(values.swapaxes(1, 2)).reshape(groups * GROUP, columns)[:rows]


def _unit_values(raw: np.ndarray, fmt: Format) -> np.ndarray:
    name, shape = fmt.name, raw.shape[:2]
    if name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)[..., None]
    if fmt.dense:
        return raw.view(np.float32 if name == "F32" else np.float16).astype(np.float32)[..., None]
    if fmt.unit == BLOCK:
        codes, rest = _read_codes(raw, name)
        scales = rest.view(np.float16).astype(np.float32).reshape(*shape, -1, GROUP, 1)
        values = scales[:, :, 0] * (codes.astype(np.float32) - np.float32(fmt.zero))
        return values + scales[:, :, 1] if scales.shape[2] == 2 else values
    head = 32 if name == "Q6_K" else 64
    supers = np.ascontiguousarray(raw[..., :head]).view(np.float16).astype(np.float32).reshape(*shape, -1, 1, GROUP)
    codes, rest = _read_codes(raw[..., head:].reshape(*shape, 8, -1), name)  # (groups, units, 8, 16, 32)
    if name == "Q6_K":
        sub = rest.view(np.int8).reshape(*shape, 8, 2, GROUP).astype(np.float32)
        scales = (supers[:, :, 0, :, None] * sub)[..., None]
        halves = codes.reshape(*shape, 8, GROUP, 2, 16).swapaxes(3, 4).astype(np.float32) - np.float32(32)
        values = (scales * halves).swapaxes(3, 4).reshape(*shape, 8, GROUP, BLOCK)
    else:
        pair = rest.reshape(*shape, 8, 2, GROUP).astype(np.float32)
        scales, minimums = supers[:, :, 0] * pair[..., 0, :], supers[:, :, 1] * pair[..., 1, :]
        values = scales[..., None] * codes.astype(np.float32) - minimums[..., None]
    return values.swapaxes(2, 3).reshape(*shape, GROUP, fmt.unit)


def _read_codes(raw: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(..., bytes) to codes (..., 16, 32) u8 and the bytes after them."""
    lead = raw.shape[:-1]
    if name == "Q8_0":
        runs = raw[..., :512].reshape(*lead, 8, GROUP, 4)
        return runs.swapaxes(-3, -2).reshape(*lead, GROUP, BLOCK), np.ascontiguousarray(raw[..., 512:])
    runs = raw[..., :256].reshape(*lead, 4, GROUP, 4)
    codes = np.stack([runs & 15, runs >> 4], axis=-2)  # (..., run, row, half, byte)
    codes = np.moveaxis(codes, -4, -3).reshape(*lead, GROUP, BLOCK)
    end = 256
    if name.startswith("Q5"):
        end = 320
        places = np.array([(s + 4) % 8 for s in range(8)], np.uint8)[:, None]
        bits = raw[..., 256:end].reshape(*lead, GROUP, 1, 4) >> places & 1
        codes = codes | bits.reshape(codes.shape) << 4
    elif name == "Q6_K":
        end = 384
        words = raw[..., 256:end].reshape(*lead, 2, GROUP, 4).swapaxes(-3, -2)[..., None, :]
        pairs = words >> np.array([4, 6, 0, 2], np.uint8)[:, None] & 3  # (..., row, word, j, byte)
        codes = codes | pairs.reshape(codes.shape) << 4
    return codes, np.ascontiguousarray(raw[..., end:])
