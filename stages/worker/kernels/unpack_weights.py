"""Weights of 16 rows to vectors, for each quantized format; `stages/worker/checkpoint/layout.py` draws the bytes.

Of one block of 32 K values at address w, `*_pair(w, j)` gives the u8 codes of k = 8j .. 8j+3 and of
k = 8j+4 .. 8j+7 (16 rows, 4 bytes to a lane).  `*_dot(w, x, start)` multiplies a block with the activation
record at x.  The loops over j are short and constant: LLVM unrolls them and the shifts become constants.
"""

from __future__ import annotations

from numba import njit

from stages.worker.kernels.dots import dot4, dot4_u8
from stages.worker.kernels.simd import (
    INLINE,
    load_i32,
    splat_i32,
    splat_i32_at,
)


@njit(**INLINE)
def nibble_pair(w, j):
    """4-bit codes."""
    packed, low = load_i32(w + 64 * j), splat_i32(0x0F0F0F0F)
    return packed & low, (packed >> splat_i32(4)) & low


@njit(**INLINE)
def five_pair(w, j):
    """5-bit codes: nibbles, then the plane of fifth bits."""
    low, high = nibble_pair(w, j)
    bits, fifth = load_i32(w + 256), splat_i32(0x10101010)
    if j < 2:
        return low | ((bits >> splat_i32(2 * j)) & fifth), high | ((bits >> splat_i32(2 * j + 1)) & fifth)
    return low | ((bits << splat_i32(8 - 2 * j)) & fifth), high | ((bits << splat_i32(7 - 2 * j)) & fifth)


@njit(**INLINE)
def six_pair(w, j):
    """6-bit codes: nibbles, then two words of bit pairs."""
    low, high = nibble_pair(w, j)
    pairs, top = load_i32(w + 256 + 64 * (j // 2)), splat_i32(0x30303030)
    if j % 2 == 0:
        return low | (pairs & top), high | ((pairs >> splat_i32(2)) & top)
    return low | ((pairs << splat_i32(4)) & top), high | ((pairs << splat_i32(2)) & top)


@njit(**INLINE)
def byte_pair(w, j):
    """8-bit codes (value + 128)."""
    return load_i32(w + 128 * j), load_i32(w + 128 * j + 64)


@njit(**INLINE)
def nibble_dot(w, x, start):
    """start + sum of codes * q over a block."""
    for j in range(4):
        low, high = nibble_pair(w, j)
        start = dot4(start, low, splat_i32_at(x + 8 * j))
        start = dot4(start, high, splat_i32_at(x + 8 * j + 4))
    return start


@njit(**INLINE)
def five_dot(w, x, start):
    """As `nibble_dot`, for 5-bit codes."""
    for j in range(4):
        low, high = five_pair(w, j)
        start = dot4(start, low, splat_i32_at(x + 8 * j))
        start = dot4(start, high, splat_i32_at(x + 8 * j + 4))
    return start


@njit(**INLINE)
def six_dot(w, x, start, half):
    """As `nibble_dot`, for 6-bit codes, over half 0 or 1 of a block."""
    for j in range(2 * half, 2 * half + 2):
        low, high = six_pair(w, j)
        start = dot4(start, low, splat_i32_at(x + 8 * j))
        start = dot4(start, high, splat_i32_at(x + 8 * j + 4))
    return start


@njit(**INLINE)
def byte_dot(w, x, start):
    """As `nibble_dot`, for 8-bit codes."""
    for j in range(4):
        low, high = byte_pair(w, j)
        start = dot4_u8(start, low, splat_i32_at(x + 8 * j))
        start = dot4_u8(start, high, splat_i32_at(x + 8 * j + 4))
    return start
