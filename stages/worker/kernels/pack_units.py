"""Packs rows of GGUF bytes by moving bits, as `checkpoint/bit_program.py` does, which makes the moves.

A program is a table of i64:

    parts
    of each part: width, offsets, words, moves
                  offsets x byte of a row's unit at which 16 words are read, one of each row
                  words x (byte of the packed unit, value that the word begins with)
                  moves x (byte in `scratch` of the word made, of the word read, left, right, mask)

Words are as wide as the part says (4, 2 or 1 bytes) in the rows and in the unit, and 4 bytes in `scratch`, where 16 of
them, of the rows of a group, are one vector.  Nothing here is used by a forward pass.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    JIT,
    get_i32,
    get_i64,
    get_u8,
    get_u16,
    load_i32,
    put_i32,
    splat_i32,
    store_i32,
    store_low8,
    store_low16,
)

ENTRY_ARGUMENTS = 8
_ROWS = 16


@njit(**INNER)
def _read(source, row_bytes, width, to):
    """The words of 16 rows at one byte of their units."""
    if width == 4:
        for row in range(_ROWS):
            put_i32(to + 4 * row, get_i32(source + row * row_bytes))
    elif width == 2:
        for row in range(_ROWS):
            put_i32(to + 4 * row, get_u16(source + row * row_bytes))
    else:
        for row in range(_ROWS):
            put_i32(to + 4 * row, get_u8(source + row * row_bytes))


@njit(**INNER)
def _write(unit, width, words):
    if width == 4:
        store_i32(unit, words)
    elif width == 2:
        store_low16(unit, words)
    else:
        store_low8(unit, words)


@njit(**INNER)
def _pack_unit(program, source, row_bytes, unit, scratch):
    parts, at = get_i64(program), program + 8
    for _ in range(parts):
        width, offsets, words, moves = get_i64(at), get_i64(at + 8), get_i64(at + 16), get_i64(at + 24)
        at += 32
        for i in range(offsets):
            _read(source + get_i64(at + 8 * i), row_bytes, width, scratch + 64 * i)
        at += 8 * offsets
        made = scratch + 64 * offsets
        for i in range(words):
            store_i32(made + 64 * i, splat_i32(np.int32(get_i64(at + 16 * i + 8))))
        for i in range(moves):
            move = at + 16 * words + 40 * i
            to = scratch + get_i64(move)
            moved = load_i32(scratch + get_i64(move + 8))
            moved = moved << splat_i32(np.int32(get_i64(move + 16))) >> splat_i32(np.int32(get_i64(move + 24)))
            store_i32(to, load_i32(to) ^ (moved & splat_i32(np.int32(get_i64(move + 32)))))
        for i in range(words):
            _write(unit + get_i64(at + 16 * i), width, load_i32(made + 64 * i))
        at += 16 * words + 40 * moves


@njit(**JIT)
def pack_units(program, source, groups, units, source_bytes, out, unit_bytes, scratch):
    """Pack `groups` x 16 rows of `units` each.

    source: address of (16 groups, units, source_bytes) u8, with 4 readable bytes before it and behind it.
    out: address of (groups, units, unit_bytes) u8.
    scratch: as many vectors of 64 bytes as a part has offsets and words.
    """
    row_bytes = units * source_bytes
    for group in range(groups):
        rows = source + group * _ROWS * row_bytes
        for unit in range(units):
            _pack_unit(
                program, rows + unit * source_bytes, row_bytes, out + (group * units + unit) * unit_bytes, scratch
            )
