"""Several tokens times a matrix: chunks of two row groups are unpacked, then multiplied with all tokens.

A chunk is unpacked once into scratch (in L1), then multiplied with tiles of tokens whose accumulators stay in registers
(tiles.py).  While a chunk is multiplied, the packed bytes of the next one are prefetched.  Formats, and numbers of
tokens, for which AMX is faster on this CPU go through amx_gemm.py.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from stages.worker.kernels import tiles
from stages.worker.kernels.buffer_sizes import CHUNK, CHUNK_BYTES, CODE_BYTES, DENSE_CHUNK
from stages.worker.kernels.dots import ONE_INSTRUCTION
from stages.worker.kernels.entries import INNER, MERGED
from stages.worker.kernels.format_traits import (
    HAS_HALVES,
    HAS_MINIMUMS,
    IS_DENSE,
    LARGEST,
    START,
    UNIT_BYTES,
    UNPACKED,
    group_bytes,
    trait,
    unit_blocks,
)
from stages.worker.kernels.formats import BLOCK
from stages.worker.kernels.quantize_activations import RECORD, SCALE, SSUM, ZERO
from stages.worker.kernels.simd import (
    VNNI,
    f32_tile,
    i32_tile,
    load_f32,
    prefetch,
    tile_load,
    tile_store,
)
from stages.worker.kernels.unpack import unpack

# Without AVX-512 the 16 registers hold the integer sums of a block; the f32 sums are in `out` between blocks.
IN_REGISTERS = VNNI
TOKENS_BYTES = 640 << 10  # activations that a pass over the weights keeps in the second-level cache


# ------------------------------------------------------------------ tiles of tokens


def _token_tiles(n: int) -> tuple[Any, Any]:
    """Kernels of n tokens x 2 row groups over an unpacked chunk: (`quantized`, `dense`).

    `u` and `v` are the groups' chunks; their outputs are `gap` bytes apart, 0 when both are one group, which is then
    computed twice and stored twice, the same.  Accumulators start at zero when `begin` is set, else at what the last
    chunk left in `out`.  With each block, `lines` cache lines at `next_u` and at `next_v` are prefetched: parts of the
    packed chunks that come next, so that fetching and computing overlap.
    """
    vectors = 2 * n

    @njit(**INNER)
    def quantized(kind, u, v, blocks, x, stride, out, out_stride, gap, begin, next_u, next_v, lines):
        start, size = trait(kind, START), trait(kind, UNPACKED)
        halves, minimums, largest = trait(kind, HAS_HALVES), trait(kind, HAS_MINIMUMS), trait(kind, LARGEST)
        second = start + 4 if start != ZERO else start
        acc = f32_tile(vectors)
        if IN_REGISTERS and not begin:
            acc = tile_load(acc, out, out_stride, gap, 2)
        if begin and not IN_REGISTERS:
            tile_store(acc, out, out_stride, gap, 2)
        for _ in range(blocks):
            for _ in range(lines):
                prefetch(next_u)
                prefetch(next_v)
                next_u, next_v = next_u + 64, next_v + 64
            dots = tiles.start(i32_tile(vectors), x + start, stride)
            # Scales are loaded after the dot products, which need all registers.
            if halves:
                dots = tiles.dots_first(dots, u, v, x, stride)
                if not IN_REGISTERS:
                    acc = tile_load(acc, out, out_stride, gap, 2)
                d_u, d_v = load_f32(u + CODE_BYTES), load_f32(v + CODE_BYTES)
                acc = tiles.scaled(acc, dots, d_u, d_v, x + SCALE, stride)
                if minimums:
                    m_u, m_v = load_f32(u + CODE_BYTES + 128), load_f32(v + CODE_BYTES + 128)
                    acc = tiles.fma_first_sum(acc, m_u, m_v, x, stride)
                dots = tiles.start(i32_tile(vectors), x + second, stride)
                dots = tiles.dots_second(dots, u, v, x, stride)
                d_u, d_v = load_f32(u + CODE_BYTES + 64), load_f32(v + CODE_BYTES + 64)
                acc = tiles.scaled(acc, dots, d_u, d_v, x + SCALE, stride)
                if minimums:
                    m_u, m_v = load_f32(u + CODE_BYTES + 192), load_f32(v + CODE_BYTES + 192)
                    acc = tiles.fma_second_sum(acc, m_u, m_v, x, stride)
            else:
                if ONE_INSTRUCTION:
                    dots = tiles.dots(dots, u, v, x, stride)
                elif largest > 127:
                    dots = tiles.dots_u8(dots, u, v, x, stride)
                elif largest <= 15:
                    dots = tiles.dots_u4(dots, u, v, x, stride)
                else:
                    dots = tiles.dots(dots, u, v, x, stride)
                if not IN_REGISTERS:
                    acc = tile_load(acc, out, out_stride, gap, 2)
                d_u, d_v = load_f32(u + CODE_BYTES), load_f32(v + CODE_BYTES)
                acc = tiles.scaled(acc, dots, d_u, d_v, x + SCALE, stride)
                if minimums:
                    m_u, m_v = load_f32(u + CODE_BYTES + 64), load_f32(v + CODE_BYTES + 64)
                    acc = tiles.fma(acc, m_u, m_v, x + SSUM, stride)
            if not IN_REGISTERS:
                tile_store(acc, out, out_stride, gap, 2)
            u, v, x = u + size, v + size, x + RECORD
        if IN_REGISTERS:
            tile_store(acc, out, out_stride, gap, 2)

    @njit(**INNER)
    def dense(u, v, values, x, stride, out, out_stride, gap, begin):
        acc = f32_tile(vectors)
        if not begin:
            acc = tile_load(acc, out, out_stride, gap, 2)
        for k in range(values):
            acc = tiles.fma(acc, load_f32(u + 64 * k), load_f32(v + 64 * k), x + 4 * k, stride)
        tile_store(acc, out, out_stride, gap, 2)

    return quantized, dense


_quantized_6, _dense_6 = _token_tiles(6)
_quantized_4, _dense_4 = _token_tiles(4)
_quantized_3, _dense_3 = _token_tiles(3)
_quantized_2, _dense_2 = _token_tiles(2)


@njit(**MERGED)
def _tile_of(tokens):
    """Tokens of the next tile, so that every count from 2 up is a sum of 6, 4, 3 and 2."""
    if not VNNI:
        return 3 if tokens == 3 else 2  # 16 registers of 256 bits hold no more
    if tokens == 7 or tokens == 8 or tokens == 4:
        return 4
    if tokens == 5 or tokens == 3:
        return 3
    return 6 if tokens >= 6 else 2


@njit(**MERGED)
def all_tokens(kind, u, v, n, x, stride, tokens, out, out_stride, gap, begin, next_u, next_v, next_bytes):
    """Every token with one unpacked chunk of n blocks; prefetches `next_bytes` at next_u and at next_v meanwhile.

    There are two tokens or more.
    """
    passes = (tokens + 5) // 6
    lines = (next_bytes + 64 * n * passes - 1) // (64 * n * passes)
    while tokens > 0:
        size = _tile_of(tokens)
        if size == 6:
            _quantized_6(kind, u, v, n, x, stride, out, out_stride, gap, begin, next_u, next_v, lines)
        elif size == 4:
            _quantized_4(kind, u, v, n, x, stride, out, out_stride, gap, begin, next_u, next_v, lines)
        elif size == 3:
            _quantized_3(kind, u, v, n, x, stride, out, out_stride, gap, begin, next_u, next_v, lines)
        else:
            _quantized_2(kind, u, v, n, x, stride, out, out_stride, gap, begin, next_u, next_v, lines)
        tokens, x, out = tokens - size, x + size * stride, out + size * out_stride
        next_u, next_v, next_bytes = next_u + 64 * n * lines, next_v + 64 * n * lines, next_bytes - 64 * n * lines
        if next_bytes <= 0:
            lines = 0


@njit(**MERGED)
def _all_tokens_dense(u, v, n, x, stride, tokens, out, out_stride, gap, begin):
    """As `all_tokens`, for n K values as unpacked floats."""
    while tokens > 0:
        size = _tile_of(tokens)
        if size == 6:
            _dense_6(u, v, n, x, stride, out, out_stride, gap, begin)
        elif size == 4:
            _dense_4(u, v, n, x, stride, out, out_stride, gap, begin)
        elif size == 3:
            _dense_3(u, v, n, x, stride, out, out_stride, gap, begin)
        else:
            _dense_2(u, v, n, x, stride, out, out_stride, gap, begin)
        tokens, x, out = tokens - size, x + size * stride, out + size * out_stride


# ------------------------------------------------------------------ chunks and passes


@njit(**MERGED)
def chunk_blocks(n, unit):
    """Blocks to unpack at a time of n: as even parts as whole units of blocks allow."""
    parts = (n + CHUNK - 1) // CHUNK
    return min(CHUNK // unit * unit, ((n + parts - 1) // parts + unit - 1) // unit * unit)


@njit(**INNER)
def next_chunk(kind, u, v, size, block, n, group, end):
    """Bytes of each packed chunk that comes next and their two addresses.

    They begin at `block` of the row groups at u and v, or are the first chunks of row group `group` when the row
    groups' n blocks are done; 0 bytes when that was the last.
    """
    if block >= n:
        if group >= end:
            return 0, u, v
        block, u = 0, u + 2 * size
        v = u + size if group + 1 < end else u
    unit = unit_blocks(kind)
    at = block // unit * trait(kind, UNIT_BYTES)
    return min(chunk_blocks(n, unit), n - block) // unit * trait(kind, UNIT_BYTES), u + at, v + at


@njit(**INNER)
def gemm(kind, w, columns, first, end, x, stride, tokens, out, out_stride, scratch):
    """Two tokens and more; arguments as in matmul.py."""
    dense = trait(kind, IS_DENSE) != 0
    size = group_bytes(kind, columns)
    n = columns if dense else columns // BLOCK
    step = DENSE_CHUNK if dense else chunk_blocks(n, unit_blocks(kind))
    # Tokens go in passes over the weights, as many at a time as the second-level cache holds.
    at_once = max(24, TOKENS_BYTES // stride // 6 * 6)
    t = 0
    while t < tokens:
        some = tokens - t
        if some > at_once:
            some = at_once if some > at_once + 1 else at_once - 6  # a last one is never alone
        for g in range(first, end, 2):
            pair = g + 1 < end
            u = w + g * size
            v, gap, to = (u + size, 64, scratch + CHUNK_BYTES) if pair else (u, 0, scratch)
            target = out + t * out_stride + 64 * g
            for at in range(0, n, step):
                part = min(step, n - at)
                unpack(kind, u, at, part, scratch)
                if pair:
                    unpack(kind, v, at, part, to)
                if dense:
                    here = x + t * stride + at * 4
                    _all_tokens_dense(scratch, to, part, here, stride, some, target, out_stride, gap, at == 0)
                else:
                    here = x + t * stride + at * RECORD
                    following, next_u, next_v = next_chunk(kind, u, v, size, at + part, n, g + 2, end)
                    all_tokens(
                        kind,
                        scratch,
                        to,
                        part,
                        here,
                        stride,
                        some,
                        target,
                        out_stride,
                        gap,
                        at == 0,
                        next_u,
                        next_v,
                        following,
                    )
        t += some
