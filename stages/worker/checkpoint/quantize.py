"""Quantizes rows of f32 to GGUF blocks. The bytes of the simple types are those of the `gguf` package's `quants`.

A block of 32 values x has a scale d (and a minimum m where the type has one), both f16, and codes q:

    Q4_0, Q5_0    d = the value of the largest magnitude / -8 (-16); q = x / d + 8 (16), rounded down from + 0.5
    Q4_1, Q5_1    m = the least value, d = (greatest - least) / 15 (31); q = (x - m) / d, likewise
    Q8_0          d = the largest magnitude / 127; q = x / d, rounded half away from zero

Divisions are multiplications with the f32 reciprocal of the unrounded f32 scale.  quantize_k.py has the K-quants.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stages.worker.checkpoint.quantize_k import PLAIN, SUPER, Fits, quantize_q4_k, quantize_q6_k

BLOCK = 32
_HALF = np.float32(0.5)


class NotFinite(ValueError):
    """A weight is not a number, or is beyond the range of f16."""


def quantize(values: np.ndarray, format_name: str, fits: Fits = PLAIN) -> np.ndarray:
    """(rows, columns) f32 to (rows, bytes of a row) u8; columns are a multiple of the type's block.

    fits: how sub-blocks of K-quants are fitted.  Raises `NotFinite`.
    """
    rows = values.shape[0]
    if not np.isfinite(values).all():
        raise NotFinite("a value that is not finite")
    if format_name == "F32":
        return values.view(np.uint8).reshape(rows, -1)
    if format_name == "F16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if not np.isfinite(halves).all():
            raise NotFinite(f"{float(np.abs(values).max()):g}, beyond F16's range of 65504")
        return halves.view(np.uint8).reshape(rows, -1)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if format_name in _SUPER_BLOCKS:
            return _super_blocks(values.reshape(-1, SUPER), format_name, fits).reshape(rows, -1)
        return _QUANTIZERS[format_name](values.reshape(-1, BLOCK)).reshape(rows, -1)


def _super_blocks(values: np.ndarray, format_name: str, fits: Fits) -> np.ndarray:
    quantizer, most = _SUPER_BLOCKS[format_name]
    greatest = float(np.abs(values).max(initial=0.0))
    if greatest > most:
        raise NotFinite(f"{greatest:g}, beyond {format_name}'s range of {most:g}")
    return quantizer(values, fits)


def _reciprocal(d: np.ndarray) -> np.ndarray:
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def _halves(x: np.ndarray) -> np.ndarray:
    """Scales or minimums, (blocks, 1) f32, as (blocks, 2) u8 of f16. Raises `NotFinite`."""
    halves = x.astype(np.float16)
    if not np.isfinite(halves).all():
        raise NotFinite(f"a block needs the number {float(np.abs(x).max()):g}, beyond F16's range of 65504")
    return halves.view(np.uint8)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[:, :16] & 15 | codes[:, 16:] << 4


def _fifth_bits(codes: np.ndarray) -> np.ndarray:
    return np.packbits(codes >> 4, axis=-1, bitorder="little")


def _signed(x: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and codes of types without a minimum."""
    at = np.abs(x).argmax(axis=-1, keepdims=True)
    d = np.take_along_axis(x, at, axis=-1) / np.float32(-steps)
    codes = np.trunc(x * _reciprocal(d) + np.float32(steps + 0.5))
    return d, np.minimum(codes.astype(np.uint8), 2 * steps - 1)


def _with_minimum(x: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    least = x.min(axis=-1, keepdims=True)
    d = (x.max(axis=-1, keepdims=True) - least) / np.float32(steps)
    codes = np.trunc((x - least) * _reciprocal(d) + _HALF)
    return d, least, np.minimum(codes.astype(np.uint8), steps)


def _q4_0(x: np.ndarray) -> np.ndarray:
    d, codes = _signed(x, 8)
    return np.concatenate([_halves(d), _nibbles(codes)], axis=-1)


def _q4_1(x: np.ndarray) -> np.ndarray:
    d, m, codes = _with_minimum(x, 15)
    return np.concatenate([_halves(d), _halves(m), _nibbles(codes)], axis=-1)


def _q5_0(x: np.ndarray) -> np.ndarray:
    d, codes = _signed(x, 16)
    return np.concatenate([_halves(d), _fifth_bits(codes), _nibbles(codes)], axis=-1)


def _q5_1(x: np.ndarray) -> np.ndarray:
    d, m, codes = _with_minimum(x, 31)
    return np.concatenate([_halves(d), _halves(m), _fifth_bits(codes), _nibbles(codes)], axis=-1)


def _q8_0(x: np.ndarray) -> np.ndarray:
    d = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = x * _reciprocal(d)
    whole = np.trunc(scaled)
    codes = whole + np.trunc(np.float32(2) * (scaled - whole))
    return np.concatenate([_halves(d), codes.astype(np.int8).view(np.uint8)], axis=-1)


_QUANTIZERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
# With the greatest value whose scales f16 holds, whatever the others are, and whose squares f32 holds.
_SUPER_BLOCKS: dict[str, tuple[Callable[[np.ndarray, Fits], np.ndarray], float]] = {
    "Q4_K": (quantize_q4_k, 1e6),
    "Q6_K": (quantize_q6_k, 1e6),
}
