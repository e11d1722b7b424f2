"""Weights times activations: y[t, r] = sum over k of W[r, k] x[t, k], as docs/numerics.md orders it.

    matmul(format_id, w, columns, first, end, x, x_stride, tokens, out, out_stride, scratch)

computes row groups first .. end-1 (16 rows each) of the matrix at address `w` (stages/worker/checkpoint/layout.py) for
`tokens` rows of activations, and writes 16 f32 for each group and token at `out + token * out_stride + 64 *
group`.  `x` holds int8 records (activations.py), or f32 for F32, F16 and BF16 weights.  `scratch` is the
address of `SCRATCH_BYTES` of the caller's own, 64-byte aligned.  Addresses and strides are int64, in bytes.

One token: weights go from memory through registers.  More: a chunk of a row group is unpacked once into
scratch (in L1), then multiplied with tiles of tokens whose accumulators stay in registers (tiles.py; amx.py for
16 tokens at a time where the CPU has such tiles).  Every accumulator sees the same operations in the same
order either way, so all batches give equal bytes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.worker.checkpoint.layout import FORMATS
from stages.worker.kernels import amx, tiles
from stages.worker.kernels.entries import INNER, MERGED
from stages.worker.kernels.quantize_activations import (
    BLOCK,
    RECORD,
    SCALE,
    SSUM,
    START4,
    START5,
    START6,
    START8,
    ZERO,
)
from stages.worker.kernels.simd import (
    AMX,
    INLINE,
    JIT,
    VNNI,
    f32_tile,
    float_of_bits,
    fma,
    get_f16,
    get_f32,
    get_s8,
    get_u8,
    get_u16,
    i32_tile,
    load_bf16_as_f32,
    load_f16_as_f32,
    load_f32,
    load_s8,
    load_u8,
    prefetch,
    put_f32,
    splat_f32,
    splat_f32_at,
    splat_i32,
    splat_i32_at,
    store_f32,
    store_i32,
    to_f32,
)
from stages.worker.kernels.unpack_weights import (
    byte_dot,
    byte_pair,
    five_dot,
    five_pair,
    nibble_dot,
    nibble_pair,
    six_dot,
    six_pair,
)

F32, F16, BF16 = (FORMATS[name].id for name in ("F32", "F16", "BF16"))
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = (
    FORMATS[name].id for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)

_KINDS = tuple(f.id for f in FORMATS.values())
_UNIT_BYTES = tuple(f.unit_bytes for f in FORMATS.values())

AHEAD = 2560  # bytes that prefetches run before loads
CHUNK = 18  # most blocks of a row group unpacked at a time: 11 KB of scratch
UNPACKED = 640  # bytes of an unpacked block: 8 code vectors, two vectors of scales or minimums
DENSE_CHUNK = 160  # K values of a dense row group unpacked at a time
CHUNKS_BYTES = 2 * CHUNK * UNPACKED  # two row groups
SCRATCH_BYTES = CHUNKS_BYTES + amx.SPILL_BYTES
TOKENS_BYTES = 640 << 10  # activations that a pass over the weights keeps in the second-level cache


@njit(**JIT)
def group_unit(kind):
    """K values of a unit of the format."""
    if kind == Q4_K or kind == Q5_K or kind == Q6_K:
        return 256
    return 1 if kind == F32 or kind == F16 or kind == BF16 else 32


@njit(**JIT)
def group_unit_bytes(kind):
    """Bytes of a unit of 16 rows."""
    for i in range(len(_KINDS)):
        if _KINDS[i] == kind:
            return _UNIT_BYTES[i]
    return 0


@njit(**MERGED)
def _start_of(kind):
    """Where a record holds what the integer sums of a format start at."""
    if kind == Q4_0:
        return START4
    if kind == Q5_0:
        return START5
    if kind == Q8_0:
        return START8
    return START6 if kind == Q6_K else ZERO


@njit(**MERGED)
def _has_minimums(kind):
    return kind == Q4_1 or kind == Q5_1 or kind == Q4_K or kind == Q5_K


@njit(**MERGED)
def _has_nibbles(kind):
    return kind == Q4_0 or kind == Q4_1 or kind == Q4_K


@njit(**INLINE)
def _zero():
    return splat_f32(np.float32(0))


@njit(**INLINE)
def _ask(w, n):
    """Prefetch the n bytes that lie AHEAD of w."""
    for line in range(0, n, 64):
        prefetch(w + AHEAD + line)


# ------------------------------------------------------------------ one token: a row group each


@njit(**INLINE)
def _row_q4_0(w, x, blocks):
    acc = _zero()
    for _ in range(blocks):
        _ask(w, 288)
        dot = nibble_dot(w, x, splat_i32_at(x + START4))
        acc = fma(to_f32(dot) * load_f16_as_f32(w + 256), splat_f32_at(x + SCALE), acc)
        w, x = w + 288, x + RECORD
    return acc


@njit(**INLINE)
def _row_q4_1(w, x, blocks):
    acc = _zero()
    for _ in range(blocks):
        _ask(w, 320)
        dot = nibble_dot(w, x, splat_i32(0))
        acc = fma(to_f32(dot) * load_f16_as_f32(w + 256), splat_f32_at(x + SCALE), acc)
        acc = fma(load_f16_as_f32(w + 288), splat_f32_at(x + SSUM), acc)
        w, x = w + 320, x + RECORD
    return acc


@njit(**INLINE)
def _row_q5_0(w, x, blocks):
    acc = _zero()
    for _ in range(blocks):
        _ask(w, 352)
        dot = five_dot(w, x, splat_i32_at(x + START5))
        acc = fma(to_f32(dot) * load_f16_as_f32(w + 320), splat_f32_at(x + SCALE), acc)
        w, x = w + 352, x + RECORD
    return acc


@njit(**INLINE)
def _row_q5_1(w, x, blocks):
    acc = _zero()
    for _ in range(blocks):
        _ask(w, 384)
        dot = five_dot(w, x, splat_i32(0))
        acc = fma(to_f32(dot) * load_f16_as_f32(w + 320), splat_f32_at(x + SCALE), acc)
        acc = fma(load_f16_as_f32(w + 352), splat_f32_at(x + SSUM), acc)
        w, x = w + 384, x + RECORD
    return acc


@njit(**INLINE)
def _row_q8_0(w, x, blocks):
    acc = _zero()
    for _ in range(blocks):
        _ask(w, 544)
        dot = byte_dot(w, x, splat_i32_at(x + START8))
        acc = fma(to_f32(dot) * load_f16_as_f32(w + 512), splat_f32_at(x + SCALE), acc)
        w, x = w + 544, x + RECORD
    return acc


@njit(**INLINE)
def _row_q4_k(w, x, blocks):
    acc = _zero()
    for _ in range(blocks // 8):
        d, dmin = load_f16_as_f32(w), -load_f16_as_f32(w + 32)
        w += 64
        for _ in range(8):
            _ask(w, 288)
            dot = nibble_dot(w, x, splat_i32(0))
            scale, least = d * to_f32(load_u8(w + 256)), dmin * to_f32(load_u8(w + 272))
            acc = fma(to_f32(dot) * scale, splat_f32_at(x + SCALE), acc)
            acc = fma(least, splat_f32_at(x + SSUM), acc)
            w, x = w + 288, x + RECORD
    return acc


@njit(**INLINE)
def _row_q5_k(w, x, blocks):
    acc = _zero()
    for _ in range(blocks // 8):
        d, dmin = load_f16_as_f32(w), -load_f16_as_f32(w + 32)
        w += 64
        for _ in range(8):
            _ask(w, 352)
            dot = five_dot(w, x, splat_i32(0))
            scale, least = d * to_f32(load_u8(w + 320)), dmin * to_f32(load_u8(w + 336))
            acc = fma(to_f32(dot) * scale, splat_f32_at(x + SCALE), acc)
            acc = fma(least, splat_f32_at(x + SSUM), acc)
            w, x = w + 352, x + RECORD
    return acc


@njit(**INLINE)
def _row_q6_k(w, x, blocks):
    acc = _zero()
    for _ in range(blocks // 8):
        d = load_f16_as_f32(w)
        w += 32
        for _ in range(8):
            _ask(w, 416)
            scale = splat_f32_at(x + SCALE)
            dot = six_dot(w, x, splat_i32_at(x + START6), 0)
            acc = fma(to_f32(dot) * (d * to_f32(load_s8(w + 384))), scale, acc)
            dot = six_dot(w, x, splat_i32_at(x + START6 + 4), 1)
            acc = fma(to_f32(dot) * (d * to_f32(load_s8(w + 400))), scale, acc)
            w, x = w + 416, x + RECORD
    return acc


def _dense_vector(load, size):
    """A loop over dense row groups, two at a time: one chain of fmas alone would wait for itself.

    `load(w)` gives 16 weights as f32, `size` is their bytes.
    """

    @njit(**INNER)
    def vector(w, columns, first, end, x, out):
        for g in range(first, end, 2):
            u = w + g * columns * size
            v = u + columns * size if g + 1 < end else u
            low, high = _zero(), _zero()
            for k in range(columns):
                prefetch(u + AHEAD)
                prefetch(v + AHEAD)
                value = splat_f32_at(x + 4 * k)
                low, high = fma(load(u), value, low), fma(load(v), value, high)
                u, v = u + size, v + size
            store_f32(out + 64 * g, low)
            if g + 1 < end:
                store_f32(out + 64 * g + 64, high)

    return vector


def _one_token(row, unit, unit_bytes):
    """A loop over row groups; `row(w, x, blocks)` gives 16 rows."""

    @njit(**INNER)
    def vector(w, columns, first, end, x, out):
        size = columns // unit * unit_bytes
        for g in range(first, end):
            store_f32(out + 64 * g, row(w + g * size, x, columns // BLOCK))

    return vector


_vector_f32 = _dense_vector(load_f32, 64)
_vector_f16 = _dense_vector(load_f16_as_f32, 32)
_vector_bf16 = _dense_vector(load_bf16_as_f32, 32)
_vector_q4_0 = _one_token(_row_q4_0, 32, 288)
_vector_q4_1 = _one_token(_row_q4_1, 32, 320)
_vector_q5_0 = _one_token(_row_q5_0, 32, 352)
_vector_q5_1 = _one_token(_row_q5_1, 32, 384)
_vector_q8_0 = _one_token(_row_q8_0, 32, 544)
_vector_q4_k = _one_token(_row_q4_k, 256, 2368)
_vector_q5_k = _one_token(_row_q5_k, 256, 2880)
_vector_q6_k = _one_token(_row_q6_k, 256, 3360)


@njit(**MERGED)
def _vector(kind, w, columns, first, end, x, out):
    if kind == Q4_1:
        _vector_q4_1(w, columns, first, end, x, out)
    elif kind == Q8_0:
        _vector_q8_0(w, columns, first, end, x, out)
    elif kind == Q4_K:
        _vector_q4_k(w, columns, first, end, x, out)
    elif kind == Q6_K:
        _vector_q6_k(w, columns, first, end, x, out)
    elif kind == Q5_K:
        _vector_q5_k(w, columns, first, end, x, out)
    elif kind == Q4_0:
        _vector_q4_0(w, columns, first, end, x, out)
    elif kind == Q5_0:
        _vector_q5_0(w, columns, first, end, x, out)
    elif kind == Q5_1:
        _vector_q5_1(w, columns, first, end, x, out)
    elif kind == F16:
        _vector_f16(w, columns, first, end, x, out)
    elif kind == BF16:
        _vector_bf16(w, columns, first, end, x, out)
    else:
        _vector_f32(w, columns, first, end, x, out)


# ------------------------------------------------------------------ unpacking a chunk into scratch


def _codes(pair):
    @njit(**INLINE)
    def unpack(w, to):
        for j in range(4):
            low, high = pair(w, j)
            store_i32(to + 128 * j, low)
            store_i32(to + 128 * j + 64, high)

    return unpack


_unpack_nibbles = _codes(nibble_pair)
_unpack_fives = _codes(five_pair)
_unpack_sixes = _codes(six_pair)
_unpack_bytes = _codes(byte_pair)


def _small(codes, scale_at, with_minimum, size):
    """Unpacker of formats of 32: codes, then f16 scales, then f16 minimums."""

    @njit(**INNER)
    def unpack(w, blocks, to):
        for _ in range(blocks):
            _ask(w, size)
            codes(w, to)
            store_f32(to + 512, load_f16_as_f32(w + scale_at))
            if with_minimum:
                store_f32(to + 576, load_f16_as_f32(w + scale_at + 32))
            w, to = w + size, to + UNPACKED

    return unpack


_unpack_q4_0 = _small(_unpack_nibbles, 256, False, 288)
_unpack_q4_1 = _small(_unpack_nibbles, 256, True, 320)
_unpack_q5_0 = _small(_unpack_fives, 320, False, 352)
_unpack_q5_1 = _small(_unpack_fives, 320, True, 384)
_unpack_q8_0 = _small(_unpack_bytes, 512, False, 544)


def _super(codes, scale_at, size):
    """Unpacker of Q4_K and Q5_K: minimums get their sign here."""

    @njit(**INNER)
    def unpack(w, blocks, to):
        for _ in range(blocks // 8):
            d, dmin = load_f16_as_f32(w), -load_f16_as_f32(w + 32)
            w += 64
            for _ in range(8):
                _ask(w, size)
                codes(w, to)
                store_f32(to + 512, d * to_f32(load_u8(w + scale_at)))
                store_f32(to + 576, dmin * to_f32(load_u8(w + scale_at + 16)))
                w, to = w + size, to + UNPACKED

    return unpack


_unpack_q4_k = _super(_unpack_nibbles, 256, 288)
_unpack_q5_k = _super(_unpack_fives, 320, 352)


@njit(**INNER)
def _unpack_q6_k(w, blocks, to):
    for _ in range(blocks // 8):
        d = load_f16_as_f32(w)
        w += 32
        for _ in range(8):
            _ask(w, 416)
            _unpack_sixes(w, to)
            store_f32(to + 512, d * to_f32(load_s8(w + 384)))
            store_f32(to + 576, d * to_f32(load_s8(w + 400)))
            w, to = w + 416, to + UNPACKED


@njit(**MERGED)
def _unpack(kind, group, block, blocks, to):
    """Blocks block .. block + blocks - 1 of the row group at `group`; K-quants in whole super-blocks."""
    if kind == Q4_1:
        _unpack_q4_1(group + block * 320, blocks, to)
    elif kind == Q8_0:
        _unpack_q8_0(group + block * 544, blocks, to)
    elif kind == Q4_K:
        _unpack_q4_k(group + block // 8 * 2368, blocks, to)
    elif kind == Q6_K:
        _unpack_q6_k(group + block // 8 * 3360, blocks, to)
    elif kind == Q5_K:
        _unpack_q5_k(group + block // 8 * 2880, blocks, to)
    elif kind == Q4_0:
        _unpack_q4_0(group + block * 288, blocks, to)
    elif kind == Q5_0:
        _unpack_q5_0(group + block * 352, blocks, to)
    else:
        _unpack_q5_1(group + block * 384, blocks, to)


@njit(**MERGED)
def _unpack_dense(kind, group, k, n, to):
    """K values k .. k+n-1 of a dense row group as f32."""
    for i in range(k, k + n):
        if kind == F32:
            prefetch(group + 64 * i + AHEAD)
            store_f32(to, load_f32(group + 64 * i))
        elif kind == F16:
            prefetch(group + 32 * i + AHEAD)
            store_f32(to, load_f16_as_f32(group + 32 * i))
        else:
            prefetch(group + 32 * i + AHEAD)
            store_f32(to, load_bf16_as_f32(group + 32 * i))
        to += 64


# ------------------------------------------------------------------ tiles of tokens


def _tiles(n):
    """Kernels of n tokens x 2 row groups over an unpacked chunk: (`quantized`, `dense`).

    `u` and `v` are the groups' chunks, `gap` what lies between their outputs (0 when both are one group: it
    is then computed twice and stored twice, the same).  Accumulators start at zero when `begin` is set,
    else at what the last chunk left in `out`.  With each block, `lines` lines at `ask_u` and at `ask_v` are
    asked for: of the packed chunks that come next, so that fetching and computing overlap.
    """
    vectors = 2 * n

    @njit(**INNER)
    def quantized(kind, u, v, blocks, x, stride, out, out_stride, gap, begin, ask_u, ask_v, lines):
        start = _start_of(kind)
        halves, least = kind == Q6_K, _has_minimums(kind)
        acc = f32_tile(vectors)
        if not begin:
            acc = tiles.load(acc, out, out_stride, gap)
        for _ in range(blocks):
            for _ in range(lines):
                prefetch(ask_u)
                prefetch(ask_v)
                ask_u, ask_v = ask_u + 64, ask_v + 64
            dots = tiles.start(i32_tile(vectors), x + start, stride)
            if halves:
                dots = tiles.dots_first(dots, u, v, x, stride)
                acc = tiles.scaled(acc, dots, load_f32(u + 512), load_f32(v + 512), x + SCALE, stride)
                dots = tiles.start(i32_tile(vectors), x + START6 + 4, stride)
                dots = tiles.dots_second(dots, u, v, x, stride)
                acc = tiles.scaled(acc, dots, load_f32(u + 576), load_f32(v + 576), x + SCALE, stride)
            else:
                if VNNI:
                    dots = tiles.dots(dots, u, v, x, stride)
                elif kind == Q8_0:
                    dots = tiles.dots_u8(dots, u, v, x, stride)
                elif _has_nibbles(kind):
                    dots = tiles.dots_u4(dots, u, v, x, stride)
                else:
                    dots = tiles.dots(dots, u, v, x, stride)
                acc = tiles.scaled(acc, dots, load_f32(u + 512), load_f32(v + 512), x + SCALE, stride)
                if least:
                    acc = tiles.fma(acc, load_f32(u + 576), load_f32(v + 576), x + SSUM, stride)
            u, v, x = u + UNPACKED, v + UNPACKED, x + RECORD
        tiles.store(acc, out, out_stride, gap)

    @njit(**INNER)
    def dense(u, v, values, x, stride, out, out_stride, gap, begin):
        acc = f32_tile(vectors)
        if not begin:
            acc = tiles.load(acc, out, out_stride, gap)
        for k in range(values):
            acc = tiles.fma(acc, load_f32(u + 64 * k), load_f32(v + 64 * k), x + 4 * k, stride)
        tiles.store(acc, out, out_stride, gap)

    return quantized, dense


_quantized_6, _dense_6 = _tiles(6)
_quantized_4, _dense_4 = _tiles(4)
_quantized_3, _dense_3 = _tiles(3)
_quantized_2, _dense_2 = _tiles(2)


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
def _all_tokens(kind, u, v, n, x, stride, tokens, out, out_stride, gap, begin, spill, ask_u, ask_v, bytes_ahead):
    """Every token with one unpacked chunk; asks for `bytes_ahead` of each of the next two meanwhile."""
    passes = (tokens + 15) // 16 if AMX else (tokens + 5) // 6
    lines = (bytes_ahead + 64 * n * passes - 1) // (64 * n * passes)
    if AMX:
        start, halves, least = _start_of(kind), kind == Q6_K, _has_minimums(kind)
        while tokens >= amx.TOKENS and tokens != amx.TOKENS + 1:  # the other tiles take no single token
            amx.quantized_16(start, halves, least, u, n, x, stride, out, out_stride, begin, spill, ask_u, lines)
            if gap != 0:
                to = out + gap
                amx.quantized_16(start, halves, least, v, n, x, stride, to, out_stride, begin, spill, ask_v, lines)
            ask_u, ask_v, bytes_ahead = ask_u + 64 * n * lines, ask_v + 64 * n * lines, bytes_ahead - 64 * n * lines
            if bytes_ahead <= 0:
                lines = 0
            tokens, x, out = tokens - amx.TOKENS, x + amx.TOKENS * stride, out + amx.TOKENS * out_stride
    while tokens > 0:
        size = _tile_of(tokens)
        if size == 6:
            _quantized_6(kind, u, v, n, x, stride, out, out_stride, gap, begin, ask_u, ask_v, lines)
        elif size == 4:
            _quantized_4(kind, u, v, n, x, stride, out, out_stride, gap, begin, ask_u, ask_v, lines)
        elif size == 3:
            _quantized_3(kind, u, v, n, x, stride, out, out_stride, gap, begin, ask_u, ask_v, lines)
        else:
            _quantized_2(kind, u, v, n, x, stride, out, out_stride, gap, begin, ask_u, ask_v, lines)
        tokens, x, out = tokens - size, x + size * stride, out + size * out_stride
        ask_u, ask_v, bytes_ahead = ask_u + 64 * n * lines, ask_v + 64 * n * lines, bytes_ahead - 64 * n * lines
        if bytes_ahead <= 0:
            lines = 0


@njit(**MERGED)
def _all_tokens_dense(u, v, n, x, stride, tokens, out, out_stride, gap, begin):
    """As `_all_tokens`, for unpacked floats."""
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


@njit(**MERGED)
def _chunk(n, unit):
    """Blocks to unpack at a time of n: as even parts as whole units of blocks allow."""
    parts = (n + CHUNK - 1) // CHUNK
    return min(CHUNK // unit * unit, ((n + parts - 1) // parts + unit - 1) // unit * unit)


@njit(**INNER)
def _ahead(kind, u, v, size, block, n, group, end):
    """Bytes of each packed chunk that comes next and their two addresses: from `block` on of the row groups at u
    and v, or the first of row group `group` when that was all of `n` blocks."""
    if block >= n:
        if group >= end:
            return 0, u, v
        block, u = 0, u + 2 * size
        v = u + size if group + 1 < end else u
    unit = group_unit(kind) // BLOCK
    at = block // unit * group_unit_bytes(kind)
    return min(_chunk(n, unit), n - block) // unit * group_unit_bytes(kind), u + at, v + at


@njit(**MERGED)
def _many(kind, w, columns, first, end, x, stride, tokens, out, out_stride, scratch):
    dense = kind == F32 or kind == F16 or kind == BF16
    size = columns * group_unit_bytes(kind) // group_unit(kind)
    n = columns if dense else columns // BLOCK
    step = DENSE_CHUNK if dense else _chunk(n, group_unit(kind) // BLOCK)
    # Tokens go in passes over the weights, as many at a time as the second-level cache holds.
    at_once = max(48, TOKENS_BYTES // stride // 48 * 48) if AMX else max(24, TOKENS_BYTES // stride // 6 * 6)
    spill = scratch + CHUNKS_BYTES
    by_tiles = AMX and not dense and tokens >= amx.TOKENS
    if by_tiles:
        amx.configure(spill)
    t = 0
    while t < tokens:
        some = tokens - t
        if some > at_once:
            some = at_once if some > at_once + 1 else at_once - 6  # a last one is never alone
        for g in range(first, end, 2):
            pair = g + 1 < end
            u = w + g * size
            v, gap, to = (u + size, 64, scratch + CHUNKS_BYTES // 2) if pair else (u, 0, scratch)
            target = out + t * out_stride + 64 * g
            for at in range(0, n, step):
                part = min(step, n - at)
                if dense:
                    _unpack_dense(kind, u, at, part, scratch)
                    if pair:
                        _unpack_dense(kind, v, at, part, to)
                    here = x + t * stride + at * 4
                    _all_tokens_dense(scratch, to, part, here, stride, some, target, out_stride, gap, at == 0)
                else:
                    _unpack(kind, u, at, part, scratch)
                    if pair:
                        _unpack(kind, v, at, part, to)
                    here = x + t * stride + at * RECORD
                    ahead, ask_u, ask_v = _ahead(kind, u, v, size, at + part, n, g + 2, end)
                    _all_tokens(
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
                        spill,
                        ask_u,
                        ask_v,
                        ahead,
                    )
        t += some
    if by_tiles:
        amx.release()


@njit(**JIT)
def matmul(kind, w, columns, first, end, x, x_stride, tokens, out, out_stride, scratch):
    """See the top of the file. `kind` is GGML's type number; returns nothing."""
    if tokens == 1:
        _vector(kind, w, columns, first, end, x, out)
    elif tokens > 1:
        _many(kind, w, columns, first, end, x, x_stride, tokens, out, out_stride, scratch)


# ------------------------------------------------------------------ a row's values (embedding)


@njit(**JIT)
def embed_row(kind, w, columns, row, out):
    """The values of one row of a matrix in f32, exactly as dequantized, to address `out`."""
    size = columns * group_unit_bytes(kind) // group_unit(kind)
    group, lane = w + row // 16 * size, row % 16
    if kind == F32:
        for k in range(columns):
            put_f32(out + 4 * k, get_f32(group + 64 * k + 4 * lane))
    elif kind == F16:
        for k in range(columns):
            put_f32(out + 4 * k, get_f16(group + 32 * k + 2 * lane))
    elif kind == BF16:
        for k in range(columns):
            put_f32(out + 4 * k, float_of_bits(get_u16(group + 32 * k + 2 * lane) << 16))
    elif kind == Q4_K or kind == Q5_K or kind == Q6_K:
        _embed_super(kind, group, lane, columns, out)
    else:
        _embed_small(kind, group, lane, columns, out)


@njit(**INNER)
def _code(kind, block, lane, k):
    """The code of value k (0..31) of a block."""
    s, b = k // 4, k % 4
    if kind == Q8_0:
        return get_u8(block + 64 * s + 4 * lane + b)
    code = get_u8(block + 64 * (s // 2) + 4 * lane + b)
    code = (code >> 4) if s % 2 else (code & 15)
    if kind == Q5_0 or kind == Q5_1 or kind == Q5_K:
        code |= ((get_u8(block + 256 + 4 * lane + b) >> ((s + 4) % 8)) & 1) << 4
    elif kind == Q6_K:
        j = s % 4
        place = 4 if j == 0 else 6 if j == 1 else 0 if j == 2 else 2
        code |= ((get_u8(block + 256 + 64 * (s // 4) + 4 * lane + b) >> place) & 3) << 4
    return code


@njit(**INNER)
def _embed_small(kind, group, lane, columns, out):
    size = group_unit_bytes(kind)
    with_minimum = kind == Q4_1 or kind == Q5_1
    scales = size - 64 if with_minimum else size - 32
    zero = 8 if kind == Q4_0 else 16 if kind == Q5_0 else 128 if kind == Q8_0 else 0
    for b in range(columns // BLOCK):
        block = group + b * size
        d = get_f16(block + scales + 2 * lane)
        least = get_f16(block + scales + 32 + 2 * lane) if with_minimum else np.float32(0)
        for k in range(BLOCK):
            value = d * np.float32(_code(kind, block, lane, k) - zero)
            # The product is exact, so this is the one rounding of an fma; adding +0 would lose a sign.
            put_f32(out + 4 * (b * BLOCK + k), value + least if with_minimum else value)


@njit(**INNER)
def _embed_super(kind, group, lane, columns, out):
    unit = group_unit_bytes(kind)
    head = 32 if kind == Q6_K else 64
    size = (unit - head) // 8
    for b in range(columns // BLOCK):
        start = group + b // 8 * unit
        block = start + head + b % 8 * size
        d = get_f16(start + 2 * lane)
        for k in range(BLOCK):
            code = _code(kind, block, lane, k)
            if kind == Q6_K:
                value = (d * np.float32(get_s8(block + 384 + 16 * (k // 16) + lane))) * np.float32(code - 32)
            else:
                scale = d * np.float32(get_u8(block + size - 32 + lane))
                least = get_f16(start + 32 + 2 * lane) * np.float32(get_u8(block + size - 16 + lane))
                value = scale * np.float32(code) - least
            put_f32(out + 4 * (b * BLOCK + k), value)
