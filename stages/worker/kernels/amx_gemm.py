"""16 tokens and more times a quantized matrix, 16 tokens at a time by AMX tiles (amx.py).

With more than STREAMED tokens, chunks of two row groups are unpacked and then multiplied, as in gemm.py.  With fewer,
unpacking would be a large part: one row group is multiplied at a time, and with its first 16 tokens the next chunk is
unpacked into the other half of the scratch.

Tokens after the last whole 16 go through dot products, or through a tile some of whose lanes belong to no token: what
these hold is computed and not used.  Every accumulator sees the same operations in the same order either way.
"""

from __future__ import annotations

from numba import njit

from stages.worker.kernels import amx, amx_tiles
from stages.worker.kernels.buffer_sizes import CHUNK_BYTES, CHUNKS_BYTES, PACKED, PRODUCT, SPILL_BYTES
from stages.worker.kernels.entries import INNER, MERGED
from stages.worker.kernels.format_traits import HAS_HALVES, UNIT_BYTES, group_bytes, trait, unit_blocks
from stages.worker.kernels.formats import BLOCK
from stages.worker.kernels.gemm import TOKENS_BYTES, all_tokens, chunk_blocks, next_chunk
from stages.worker.kernels.quantize_activations import RECORD
from stages.worker.kernels.simd import load_f32, store_f32
from stages.worker.kernels.unpack import unpack

# Tokens after the last whole 16 up to which dot products take less time than a tile, by trials in which 16 tokens took
# 18 ns in a tile and 32 ns in dot products of two row groups; those of one row group are computed twice (gemm.py).
DOTTED, DOTTED_ALONE = 8, 4


@njit(**MERGED)
def _is_padded(tokens, gap):
    """Whether so many last tokens, fewer than 16, get a tile; dot products take no single token."""
    return tokens == 1 or tokens > (DOTTED if gap != 0 else DOTTED_ALONE)


@njit(**MERGED)
def _tiles(tokens, gap):
    """Tiles of so many tokens: without dot products for the last ones, one for each 16 begun."""
    whole, rest = tokens // 16, tokens % 16
    return whole + 1 if rest > 0 and _is_padded(rest, gap) else whole


@njit(**MERGED)
def _chunk_blocks(n, unit):
    """As `gemm.chunk_blocks`, but even where that is possible, so that each chunk can begin the next one's products."""
    step = chunk_blocks(n, unit)
    return min(step + step % 2, n) if unit == 1 else step


@njit(**INNER)
def _copy_rows(tokens, source, out, out_stride):
    for t in range(tokens):
        store_f32(out + t * out_stride, load_f32(source + 64 * t))


@njit(**INNER)
def _tokens_by_tiles(
    kind,
    u,
    v,
    n,
    x,
    stride,
    packed,
    packed_stride,
    tokens,
    out,
    out_stride,
    gap,
    begin,
    is_last,
    scratch,
    next_u,
    next_v,
    next_bytes,
    is_begun,
    after_u,
    after_x,
):
    """Every token with one unpacked chunk of n blocks of the row groups at u and v, as `gemm.all_tokens`.

    `packed`: the records at x packed for tiles, `packed_stride` bytes from 16 tokens to the next 16.  `is_last`: the
    chunk ends the row groups; until then the sums of a tile with lanes of no token are in scratch.  `is_begun`,
    `after_u`, `after_x`: as of `amx.quantized_16`, for the first and the last of the tiles, of which there are some.
    """
    spill, padded = scratch + CHUNKS_BYTES, scratch + CHUNKS_BYTES + SPILL_BYTES
    passes = (tokens + 15) // 16
    lines = (next_bytes + 64 * n * passes - 1) // (64 * n * passes)
    flows = amx.begins_next(kind, n)
    if not flows:
        after_x = 0
    for tile in range(_tiles(tokens, gap) - 1, -1, -1):
        is_whole = tokens >= amx.TOKENS
        first, second, row = (out, out + gap, out_stride) if is_whole else (padded, padded + PRODUCT, 64)
        then_u, then_x = (u, packed + packed_stride if flows else 0) if tile > 0 else (after_u, after_x)
        if gap != 0:
            between = packed if flows else 0
            amx.quantized_16(kind, u, n, packed, first, row, begin, spill, next_u, lines, is_begun, v, between)
            amx.quantized_16(kind, v, n, packed, second, row, begin, spill, next_v, lines, flows, then_u, then_x)
        else:
            amx.quantized_16(kind, u, n, packed, first, row, begin, spill, next_u, lines, is_begun, then_u, then_x)
        is_begun = flows
        if not is_whole and is_last:
            _copy_rows(tokens, padded, out, out_stride)
            if gap != 0:
                _copy_rows(tokens, padded + PRODUCT, out + gap, out_stride)
        next_u, next_v, next_bytes = next_u + 64 * n * lines, next_v + 64 * n * lines, next_bytes - 64 * n * lines
        if next_bytes <= 0:
            next_bytes = lines = 0
        tokens, x, out = tokens - amx.TOKENS, x + amx.TOKENS * stride, out + amx.TOKENS * out_stride
        packed += packed_stride
    if tokens > 0:
        all_tokens(kind, u, v, n, x, stride, tokens, out, out_stride, gap, begin, next_u, next_v, next_bytes)


@njit(**INNER)
def _streamed(kind, w, columns, first, end, x, stride, packed, tokens, out, out_stride, scratch):
    """16 to STREAMED tokens."""
    n, unit, size = columns // BLOCK, unit_blocks(kind), group_bytes(kind, columns)
    step, packed_stride, spill = _chunk_blocks(n, unit), n * PACKED, scratch + CHUNKS_BYTES
    here, there = scratch, scratch + CHUNK_BYTES
    others = tokens - amx.TOKENS
    unpack(kind, w + first * size, 0, min(step, n), here)
    is_begun = False
    for g in range(first, end):
        target = out + 64 * g
        for at in range(0, n, step):
            part = min(step, n - at)
            following = w + g * size + (at + part) // unit * trait(kind, UNIT_BYTES)
            ahead, begin, tile = min(step, n - at - part), at == 0, packed + at * PACKED
            next_tile = tile + part * PACKED
            if ahead == 0 and g + 1 < end:  # the next row group follows
                ahead, next_tile = min(step, n), packed
            if ahead < amx.LEAST:
                next_tile = 0
            then_u, then_x = (here, tile + packed_stride) if _tiles(others, 0) > 0 else (there, next_tile)
            if ahead < part or not amx.begins_next(kind, part):
                then_x = 0
            amx.streamed_16(
                kind,
                here,
                part,
                tile,
                target,
                out_stride,
                begin,
                spill,
                following,
                ahead,
                there,
                is_begun,
                then_u,
                then_x,
            )
            is_begun = then_x != 0
            if others > 0:
                _tokens_by_tiles(
                    kind,
                    here,
                    here,
                    part,
                    x + amx.TOKENS * stride + at * RECORD,
                    stride,
                    tile + packed_stride,
                    packed_stride,
                    others,
                    target + amx.TOKENS * out_stride,
                    out_stride,
                    0,
                    begin,
                    at + part == n,
                    scratch,
                    following,
                    following,
                    0,
                    is_begun,
                    there,
                    next_tile,
                )
                if _tiles(others, 0) > 0:
                    is_begun = next_tile != 0 and amx.begins_next(kind, part)
            here, there = there, here


@njit(**INNER)
def _in_pairs(kind, w, columns, first, end, x, stride, packed, tokens, out, out_stride, scratch):
    """More than STREAMED tokens: as `gemm.gemm`."""
    n, size = columns // BLOCK, group_bytes(kind, columns)
    step, packed_stride = _chunk_blocks(n, unit_blocks(kind)), n * PACKED
    at_once = max(48, TOKENS_BYTES // stride // 48 * 48)
    for t in range(0, tokens, at_once):
        some = min(at_once, tokens - t)
        for g in range(first, end, 2):
            pair = g + 1 < end
            u = w + g * size
            v, gap, to = (u + size, 64, scratch + CHUNK_BYTES) if pair else (u, 0, scratch)
            for at in range(0, n, step):
                part = min(step, n - at)
                unpack(kind, u, at, part, scratch)
                if pair:
                    unpack(kind, v, at, part, to)
                following, next_u, next_v = next_chunk(kind, u, v, size, at + part, n, g + 2, end)
                _tokens_by_tiles(
                    kind,
                    scratch,
                    to,
                    part,
                    x + t * stride + at * RECORD,
                    stride,
                    packed + t // amx.TOKENS * packed_stride + at * PACKED,
                    packed_stride,
                    some,
                    out + t * out_stride + 64 * g,
                    out_stride,
                    gap,
                    at == 0,
                    at + part == n,
                    scratch,
                    next_u,
                    next_v,
                    following,
                    False,
                    0,
                    0,
                )


@njit(**INNER)
def gemm_by_tiles(kind, w, columns, first, end, x, stride, packed, tokens, out, out_stride, scratch):
    """16 tokens and more of a quantized format; arguments as in matmul.py."""
    if first >= end:
        return
    spill = scratch + CHUNKS_BYTES
    amx_tiles.configure(spill, trait(kind, HAS_HALVES) != 0)
    if tokens <= amx.STREAMED:
        _streamed(kind, w, columns, first, end, x, stride, packed, tokens, out, out_stride, scratch)
    else:
        _in_pairs(kind, w, columns, first, end, x, stride, packed, tokens, out, out_stride, scratch)
    amx_tiles.release(spill)
