"""Activation records packed for AMX tiles: those of 16 tokens for the same 32 K values together.

A product of 16 tokens so reads 640 contiguous bytes of a block (values, scales, and one kind of starts or sums) where
it would read 16 cache lines of 16 rows.  PACKED bytes, 64-byte aligned, hold of 16 tokens and a block what their
records (quantize_activations.py) hold, field by field; lane t is token t modulo 16:

    0       values        32 s8 of each token: a tile without gaps
    16 o    field at o    i32 or f32 of each token: `scale`, `ssum`, `start4`, ... `start6`, in the order of a record

T tokens of K values are ceil(T / 16) groups of ceil(K / 32) blocks.  Lanes of no token hold anything: what a tile
computes from them is not used.

The packed form is written beside the records, by the rank that quantizes a token, in steps with so many tokens that
the products of some format use tiles.  Kernels without AMX have neither the code nor the buffers.
"""

from __future__ import annotations

from numba import njit

from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels.buffer_sizes import PACKED, RECORD
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.features import TILE_TOKENS
from stages.worker.kernels.formats import BLOCK
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.quantize_activations import SCALE, ZERO
from stages.worker.kernels.simd import AMX, JIT, get_i32, get_i64, put_i32, put_i64


@njit(**INNER)
def _from(params, kind, tokens):
    """Whether `tokens` reaches a number of the group's table (activations_arena.py), which is 0 where nothing does."""
    least = param(param(params, pb.TILES_FROM), kind)
    return least != 0 and tokens >= least


@njit(**INNER)
def uses_tiles(params, kind, tokens):
    """Whether a product of so many tokens with a matrix of this format goes by tiles."""
    return AMX and _from(params, kind, tokens)


@njit(**INNER)
def packed(params, word, tokens):
    """Address of so many tokens' packed form in the buffer at a word of the parameter block; 0: there is none."""
    return param(params, word) if AMX and _from(params, pb.ANY_FORMAT, tokens) else 0


@njit(**INNER)
def packed_row(columns):
    """Bytes of 16 tokens of so many values."""
    return (columns + BLOCK - 1) // BLOCK * PACKED


@njit(**INNER)
def pack_row(records, first, end, columns, to, token):
    """Records first .. end-1 of a row of `columns` values into the packed form at `to`, in which it is row `token`."""
    lane = token % TILE_TOKENS
    to += token // TILE_TOKENS * packed_row(columns) + first * PACKED
    for b in range(first, end):
        record = records + b * RECORD
        for i in range(0, SCALE, 8):
            put_i64(to + SCALE * lane + i, get_i64(record + i))
        for field in range(SCALE, ZERO, 4):
            put_i32(to + TILE_TOKENS * field + 4 * lane, get_i32(record + field))
        to += PACKED


@njit(**JIT)
def pack_rows(records, stride, columns, to, tokens):
    """`pack_row` of whole rows, for tokens 0 .. tokens-1; `stride`: bytes from one's records to the next one's."""
    for t in range(tokens):
        pack_row(records + t * stride, 0, (columns + BLOCK - 1) // BLOCK, columns, to, t)
