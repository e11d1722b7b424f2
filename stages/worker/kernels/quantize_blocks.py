"""Quantizes blocks of 32 weights to the simple types, with the bytes of `checkpoint/quantize.py`, which defines them.

A vector holds half a block.  A block whose bytes depend on more than that module says (a number that is not finite, a
scale beyond f16 or so small that its reciprocal is infinite, zeros of both signs as the least value) ends the call: the
definition decides there.  Nothing here is used by a forward pass.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    JIT,
    absolute,
    bits_of,
    f32_to_half,
    get_u16,
    lanes_set,
    load_bf16_as_f32,
    load_f16_as_f32,
    load_f32,
    maximum,
    put_i32,
    reduce_max,
    select_i32,
    splat_f32,
    splat_i32,
    store_f16,
    store_low8,
    to_f32,
    to_i32,
)

ENTRY_ARGUMENTS = 6
Q8_0, SIGNED, WITH_MINIMUM = 0, 1, 2
F32, F16, BF16 = 0, 1, 2
_BLOCK, _ALL = 32, 0xFFFF
_INFINITE_HALF = 0x7C00
_ZERO, _ONE, _HALF, _TWO, _INFINITE = (np.float32(n) for n in (0, 1, 0.5, 2, np.inf))
_Q8_STEPS = np.float32(127)


@njit(**INNER)
def _load(source, dense):
    if dense == F16:
        return load_f16_as_f32(source)
    if dense == BF16:
        return load_bf16_as_f32(source)
    return load_f32(source)


@njit(**INNER)
def _put_half(to, value):
    """Store a scale as f16, and 30 bytes behind it that are overwritten. Whether it is finite."""
    store_f16(to, f32_to_half(splat_f32(value)))
    return get_u16(to) & _INFINITE_HALF != _INFINITE_HALF


@njit(**INNER)
def _at_most(codes, most):
    most = splat_i32(np.int32(most))
    return select_i32(codes < most, codes, most)


@njit(**INNER)
def _put_codes(to, low, high, bits):
    """16 bytes of nibbles; before them, with 5 bits, 4 bytes of fifth bits."""
    if bits == 5:
        sixteen = splat_i32(np.int32(16))
        fifth = lanes_set(low & sixteen == sixteen) | lanes_set(high & sixteen == sixteen) << 16
        put_i32(to, fifth)
        to += 4
    fifteen = splat_i32(np.int32(15))
    store_low8(to, low & fifteen | high << splat_i32(np.int32(4)))


@njit(**INNER)
def _q8_codes(x, inverse):
    scaled = x * inverse
    whole = to_i32(scaled)
    return whole + to_i32(splat_f32(_TWO) * (scaled - to_f32(whole)))


@njit(**INNER)
def _inverse(d):
    return _ZERO if d == _ZERO else _ONE / d


@njit(**INNER)
def _quantize_q8_0(low, high, greatest, to):
    d = greatest / _Q8_STEPS
    inverse = _inverse(d)
    if not inverse < _INFINITE or not _put_half(to, d):
        return False
    store_low8(to + 2, _q8_codes(low, splat_f32(inverse)))
    store_low8(to + 18, _q8_codes(high, splat_f32(inverse)))
    return True


@njit(**INNER)
def _quantize_signed(low, high, greatest, bits, to):
    steps = 1 << (bits - 1)
    of_greatest = splat_f32(greatest)
    at = lanes_set(absolute(low) == of_greatest) | lanes_set(absolute(high) == of_greatest) << 16
    none = splat_i32(np.int32(0))
    negative = lanes_set(bits_of(low) < none) | lanes_set(bits_of(high) < none) << 16
    extreme = -greatest if at & -at & negative else greatest  # of the first, if several have this magnitude
    d = extreme / np.float32(-steps)
    inverse = _inverse(d)
    if not abs(inverse) < _INFINITE or not _put_half(to, d):
        return False
    factor, offset = splat_f32(inverse), splat_f32(np.float32(steps) + _HALF)
    most = 2 * steps - 1
    _put_codes(
        to + 2,
        _at_most(to_i32(low * factor + offset), most),
        _at_most(to_i32(high * factor + offset), most),
        bits,
    )
    return True


@njit(**INNER)
def _quantize_with_minimum(low, high, bits, to):
    steps = (1 << bits) - 1
    none = splat_i32(np.int32(0))
    least = -reduce_max(maximum(-low, -high))
    if least == _ZERO:
        if lanes_set(bits_of(low) < none) | lanes_set(bits_of(high) < none):
            return False
        least = _ZERO
    d = (reduce_max(maximum(low, high)) - least) / np.float32(steps)
    inverse = _inverse(d)
    if not inverse < _INFINITE or not _put_half(to, d) or not _put_half(to + 2, least):
        return False
    factor, half, minimum = splat_f32(inverse), splat_f32(_HALF), splat_f32(least)
    _put_codes(
        to + 4,
        _at_most(to_i32((low - minimum) * factor + half), steps),
        _at_most(to_i32((high - minimum) * factor + half), steps),
        bits,
    )
    return True


@njit(**JIT)
def quantize_blocks(kind, bits, dense, source, blocks, out):
    """Quantize `blocks` x 32 values of a dense type to Q8_0, Q4_0 and Q5_0 (SIGNED), or Q4_1 and Q5_1 (WITH_MINIMUM).

    source: address of the values.  out: address of the blocks, with room for 32 bytes behind them.

    Returns the number of blocks that were quantized: fewer than `blocks` if the definition must decide about the next.
    """
    value_bytes = 4 if dense == F32 else 2
    block_bytes = 34 if kind == Q8_0 else 2 * kind + (20 if bits == 5 else 16)
    infinite = splat_f32(_INFINITE)
    for i in range(blocks):
        at, to = source + i * _BLOCK * value_bytes, out + i * block_bytes
        low, high = _load(at, dense), _load(at + 16 * value_bytes, dense)
        large, small = absolute(high), absolute(low)
        if lanes_set((large < infinite) & (small < infinite)) != _ALL:
            return i
        greatest = reduce_max(maximum(large, small))
        if kind == Q8_0:
            is_done = _quantize_q8_0(low, high, greatest, to)
        elif kind == SIGNED:
            is_done = _quantize_signed(low, high, greatest, bits, to)
        else:
            is_done = _quantize_with_minimum(low, high, bits, to)
        if not is_done:
            return i
    return blocks
