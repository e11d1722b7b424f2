"""What a quantization format is: the description that packing, unpacking and kernels are generated from.

A matrix in `.bin` has its rows in groups of 16 (the last group is padded with zero rows), and a group is a run of
*units* along K.  A unit of a quantized format covers one or eight *blocks* of 32 K values of 16 rows:

    super-block formats: d f16 x 16 | dmin f16 x 16 (with minimums)       the head, once a unit
    each block:          codes | scales | minimums (with minimums)

Lane = row everywhere: one 64-byte load holds 4 consecutive K values of 16 rows, and no kernel needs a horizontal sum.
Values are `D * (code - zero)`, or `D * code + M` with minimums; `Scales` says what D and M are.  A dense format's unit
is one K value of 16 rows.

Knows nothing of numba: what reads these descriptions are checkpoint/layout.py (NumPy) and kernels/block_codegen.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

GROUP = 16  # rows whose values are interleaved
BLOCK = 32  # K values of a block: what one activation record covers
RUNS = 8  # runs of 4 K values in a block
LINE = 64  # bytes of 4 values of 16 rows


@dataclass(frozen=True)
class Plane:
    """Bits `at` .. `at + bits - 1` of every code of a block: `bits` words of 64 bytes.

    `bits` is 1, 2, 4 or 8.  Lane r of a word has bytes of row r; byte b holds codes k = 4 s + b of `8 / bits` runs s.
    Run s is in word `s * bits // 8`, from bit `(bits * s + at // bits * bits) % 8` of the byte on, which for most runs
    lets a mask and no shift take it to its place in the code.
    """

    bits: int
    at: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the plane for a block of 16 rows."""
        return LINE * self.bits

    @property
    def mask(self) -> int:
        """Of a code: the bits that this plane holds."""
        return ((1 << self.bits) - 1) << self.at

    def word(self, run: int) -> int:
        """Which word of the plane holds run 0 .. 7."""
        return run * self.bits // 8

    def shift(self, run: int) -> int:
        """Bits from the stored place of a run up to its place in the code; negative: down."""
        return self.at - (self.bits * run + self.at // self.bits * self.bits) % 8

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """(..., 16, 32) u8 codes to (..., nbytes) u8."""
        per_byte = 8 // self.bits
        down = np.array([self.shift(s) for s in range(per_byte)], np.int8)[:, None]
        runs = (codes & self.mask).reshape(*codes.shape[:-1], self.bits, per_byte, 4).astype(np.uint16)
        stored = np.where(down > 0, runs >> np.maximum(down, 0), runs << np.maximum(-down, 0))
        words = np.bitwise_or.reduce(stored, axis=-2).astype(np.uint8)  # (..., 16, word, 4)
        return np.ascontiguousarray(words.swapaxes(-3, -2)).reshape(*codes.shape[:-2], self.nbytes)

    def unpack(self, raw: np.ndarray) -> np.ndarray:
        """The reverse of `pack`; the codes' other bits are 0."""
        up = np.array([self.shift(s) for s in range(8 // self.bits)], np.int8)[:, None]
        words = raw.reshape(*raw.shape[:-1], self.bits, GROUP, 1, 4).swapaxes(-4, -3).astype(np.uint16)
        runs = np.where(up > 0, words << np.maximum(up, 0), words >> np.maximum(-up, 0)) & self.mask
        return runs.astype(np.uint8).reshape(*raw.shape[:-1], GROUP, BLOCK)


NIBBLES = (Plane(4),)
FIVE_BITS = (Plane(4), Plane(1, at=4))
SIX_BITS = (Plane(4), Plane(2, at=4))
BYTES = (Plane(8),)


@dataclass(frozen=True)
class Codes:
    """The codes of a block: unsigned, in bit planes.

    zero    the code that stands for the value 0; 0, 8, 16 or 128, or 0 or 32 with two scales a block: an activation
            record holds what integer sums start at for each of them (quantize_activations.py)
    step    codes are stored `step` (a power of two) times as large as they are; D counts for as much less
    table   16 codes of 4 bits to codes of 8 bits, where they are no even steps
    """

    planes: tuple[Plane, ...]
    zero: int = 0
    step: int = 1
    table: tuple[int, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        """Of a block of 16 rows."""
        return sum(plane.nbytes for plane in self.planes)

    @cached_property
    def largest(self) -> int:
        """The largest code."""
        return max(self.table) if self.table else sum(plane.mask for plane in self.planes)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """(..., 16, 32) u8 codes, times `step`, before the table, to (..., nbytes) u8."""
        return np.concatenate([plane.pack(codes) for plane in self.planes], axis=-1)

    def unpack(self, raw: np.ndarray) -> np.ndarray:
        """(..., nbytes) u8 to (..., 16, 32) u8 codes, times `step`, after the table."""
        codes, at = np.zeros((*raw.shape[:-1], GROUP, BLOCK), np.uint8), 0
        for plane in self.planes:
            codes |= plane.unpack(raw[..., at : at + plane.nbytes])
            at += plane.nbytes
        return np.array(self.table, np.uint8)[codes] if self.table else codes


@dataclass(frozen=True)
class Scales:
    """D and M of a block, and how they are stored.

    sub       "": D = d and M = m, f16 of the block itself, after its codes;
              "u8", "s8", "u4": D = d * scale and M = -(dmin * minimum), d and dmin f16 in the unit's head, scale and
              minimum integers of the block: u8 or s8 x 16 rows each, first all scales, then all minimums; "u4": in one
              byte, the scale low;
              "e8m0": D = 2^(e - 128), e a u8 of the block itself, after its codes
    minimum   whether there is an M
    halves    whether each half of 16 values has a D (and M) of its own
    """

    sub: str = ""
    minimum: bool = False
    halves: bool = False

    @property
    def parts(self) -> int:
        """Scales of a block."""
        return 2 if self.halves else 1

    @property
    def head_bytes(self) -> int:
        """Bytes of d and dmin at the head of a unit of 16 rows; 0 without sub-scales."""
        return 2 * GROUP * (1 + self.minimum) if self.is_sub else 0

    @property
    def is_sub(self) -> bool:
        """Whether D is a product of a number of the unit and one of the block."""
        return self.sub in ("u8", "s8", "u4")

    @property
    def nbytes(self) -> int:
        """Of a block."""
        if self.sub == "e8m0":
            return GROUP
        if not self.sub:
            return 2 * GROUP * (1 + self.minimum)
        return GROUP * self.parts * (1 + (self.minimum and self.sub != "u4"))


class GgufFields(NamedTuple):
    """The fields of GGUF blocks: (..., n) u8 each.

    codes          n = values of a unit; times `Codes.step`
    d, m           n = 2: f16 (n = 1: an exponent); m None without minimums (d and dmin of a super-block)
    sub_scales     n = scales of a unit, by ascending k; None unless `Scales.is_sub`
    sub_minimums   the same
    """

    codes: np.ndarray
    d: np.ndarray
    m: np.ndarray | None = None
    sub_scales: np.ndarray | None = None
    sub_minimums: np.ndarray | None = None


@dataclass(frozen=True)
class Format:
    """What every format has: GGML's type number and name, K values of a unit, bytes of one row's unit in the GGUF."""

    id: int
    name: str
    unit: int
    source_bytes: int

    @property
    def dense(self) -> bool:
        """Float weights, multiplied with f32 activations."""
        raise NotImplementedError

    @property
    def unit_bytes(self) -> int:
        """Of a unit of 16 rows in `.bin`."""
        raise NotImplementedError


@dataclass(frozen=True)
class DenseFormat(Format):
    """One value of each of 16 rows follows the other, as in the GGUF. `element`: "f32", "f16" or "bf16"."""

    element: str

    @property
    def dense(self) -> bool:
        """Always true."""
        return True

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of 16 rows in `.bin`."""
        return GROUP * self.source_bytes

    def values(self, raw: np.ndarray) -> np.ndarray:
        """(..., bytes) u8 to (..., values) f32."""
        if self.element == "bf16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return raw.view(np.float32 if self.element == "f32" else np.float16).astype(np.float32)


@dataclass(frozen=True)
class QuantizedFormat(Format):
    """`gguf`: (..., source_bytes) u8 to `GgufFields`."""

    codes: Codes
    scales: Scales
    gguf: Callable[[np.ndarray], GgufFields]

    @property
    def dense(self) -> bool:
        """Always false."""
        return False

    @property
    def blocks(self) -> int:
        """Of a unit."""
        return self.unit // BLOCK

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 16 rows: codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of 16 rows in `.bin`."""
        return self.scales.head_bytes + self.blocks * self.block_bytes
