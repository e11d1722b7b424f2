"""Matrix products of 16 tokens x 16 rows by AMX tiles, over the same unpacked chunks as tiles.py.

A product multiplies 16 packed records (packed_activations.py) by the code vectors of a block, or of half a block in
formats of two scales a block, to 16 x 16 exact i32 sums, which are stored and then scaled as in every other path: the
same operations in the same order, so the same bytes.

A tile instruction takes far longer to end than to begin, and its result is far from where it is needed next: from
memory to a tile, from a tile to memory, from there to a register.  So three products are on their way while one is
scaled.  Step i, of product i:

    multiply product i + 2, whose operands are loaded
    load the operands of product i + 3
    scale the sums of product i for tokens 0 to 7
    store product i + 1, which was multiplied in step i - 1
    scale the sums of product i for tokens 8 to 15

Even and odd products use one set of tiles each, and one slot each for the stored sums (amx_tiles.py).  The accumulators
of all 16 tokens stay in registers.

The last steps of a kernel begin the products of the call that follows it, where the caller names one and the number of
products is even: else each call waits for its first product while nothing is scaled.

For few tokens, unpacking a chunk takes about as long as multiplying it.  It needs none of what the steps wait for, so
`streamed_16` unpacks a block of the next chunk before each step of a block, or before both steps of one with halves.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit

from stages.worker.kernels.amx_tiles import EMULATED, EVEN, ODD, apart
from stages.worker.kernels.block_codegen import emit_half_sums, start_offset
from stages.worker.kernels.buffer_sizes import CODE_BYTES, PACKED, PRODUCT, TOTALS, unpacked_bytes
from stages.worker.kernels.dots import BASE_BITS, emit_minus_base, emit_scaled
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.features import TILE_TOKENS
from stages.worker.kernels.format_traits import HAS_HALVES, HAS_MINIMUMS, START, by_format, trait
from stages.worker.kernels.formats import QUANTIZED, QuantizedFormat
from stages.worker.kernels.quantize_activations import SCALE, SSUM
from stages.worker.kernels.simd import (
    INLINE,
    Builder,
    f32_tile,
    f32x16,
    i32x16,
    load_f32,
    prefetch,
    store_f32,
    tile_load,
    tile_store,
)
from stages.worker.kernels.simd.arithmetic import math
from stages.worker.kernels.simd.register_tiles import tile_operation
from stages.worker.kernels.simd.vectors import ADDRESS, FLOAT, I32, I64, constant, load, operation
from stages.worker.kernels.tiles import spread
from stages.worker.kernels.unpack import block_unpacker

TOKENS = TILE_TOKENS
STREAMED = 64  # tokens of a product up to which chunks are unpacked between its steps
LEAST = 4  # products of a call that begins those of the next one, or whose own were begun: their operands all exist


# ------------------------------------------------------------------ what is done with the sums

_minus_base = operation("minus_base", f32x16, (f32x16,), emit_minus_base, "-BASE * d.")
_SCALING = (ADDRESS, f32x16, f32x16, f32x16, ADDRESS, ADDRESS, ADDRESS)


def _at(builder: Builder, addr: Any, offset: int, lane: ir.Type) -> Any:
    return spread(builder, builder.add(addr, ir.Constant(I64, offset)), lane)


def _half_sums(half: int) -> Any:
    """An operation (x) -> the scaled sums of half 0 or 1 of a block, of all 16 tokens."""

    def emit(builder: Builder, x: Any) -> Any:
        return emit_half_sums(builder, x, half, TOKENS)

    return operation(f"half_sums{half}", f32x16, (ADDRESS,), emit, "scale * (sum of the codes of half a block).")


def _scaling(first: int, end: int, minimums: bool) -> Any:
    """An operation (tile, sums, d, -BASE d, m, x, start, totals): scale the sums of tokens first .. end-1.

    `start`: from x to what the integer sums start at.
    `totals`: address of the f32 of each token that minimums are multiplied by.
    """
    fma = math("fma")

    def emit(
        builder: Builder,
        vectors: list[Any],
        sums: Any,
        d: Any,
        minus_base: Any,
        m: Any,
        x: Any,
        start: Any,
        totals: Any,
    ) -> None:
        for t in range(first, end):
            record = builder.add(x, ir.Constant(I64, 4 * t))
            begin = constant(i32x16, BASE_BITS)
            if not minimums:
                begin = spread(builder, builder.add(record, start), I32)
            dots = load(builder, builder.add(sums, ir.Constant(I64, 64 * t)), i32x16.ir)
            product = emit_scaled(builder, builder.add(dots, begin), d, minus_base)
            vectors[t] = fma(builder, product, _at(builder, record, TOKENS * SCALE, FLOAT), vectors[t])
            if minimums:
                vectors[t] = fma(builder, m, _at(builder, totals, 4 * t, FLOAT), vectors[t])

    return tile_operation(f"scale{first}", _SCALING, emit, "fma(sum * d, token's scale, tile), then the minimums.")


# ------------------------------------------------------------------ 16 tokens x one row group

# Parts of several kernels are inlined into each of them; where tiles are emulated they are called, and compiled once.
_PART = INNER if EMULATED else INLINE


def _part(function: Any) -> Any:
    return apart(function) if EMULATED else function


@functools.cache
def _step(parity: int, halves: bool, minimums: bool, last: bool) -> Any:
    """Step i of an even or an odd product, whose block begins at u and at x; `left` products are left with this one.

    With `last` any number may be left, else as many follow, in this call or the next one, that all is done: then the
    step is without branches, between which LLVM would move the scaling.
    """
    own, other = (EVEN, ODD) if parity == 0 else (ODD, EVEN)
    multiply, load_tiles, store_tile = own.multiply, other.load, other.store
    half_totals = halves and minimums
    half_sums = _half_sums(parity)
    low, high = (_scaling(t, t + TOKENS // 2, minimums) for t in (0, TOKENS // 2))
    slot, totals_slot = PRODUCT * parity, TOTALS + 64 * parity
    factor = CODE_BYTES + (64 * parity if halves else 0)
    minimum = factor + (128 if halves else 64)

    @njit(**_PART)
    def step(acc, spill, u, x, start, next_u, next_x, left):
        d = load_f32(u + factor)
        m = load_f32(u + minimum) if minimums else d
        minus_base = _minus_base(d)
        totals = x + TOKENS * SSUM
        if half_totals:  # computed for all tokens at once; LLVM takes them from memory, as tiles come in between
            totals = spill + totals_slot
            store_f32(totals, half_sums(x))
        if not last or left > 2:
            multiply(spill)
        if not last or left > 3:
            load_tiles(spill, next_x, next_u)
        acc = low(acc, spill + slot, d, minus_base, m, x, start, totals)
        if not last or left > 1:
            store_tile(spill)
        return high(acc, spill + slot, d, minus_base, m, x, start, totals)

    return _part(step)


class _Distances(NamedTuple):
    """Bytes between the operands of products, of formats of one scale a block, or of two."""

    u_odd: int  # from the operands of an even product to those of the odd one
    x_odd: int
    u_pair: int  # to those of the next even one
    x_pair: int
    block_u: int  # from the block of an even product to that of the odd one
    block_x: int
    start_odd: int  # and from its starts


def _distances(halves: bool, minimums: bool) -> _Distances:
    size = unpacked_bytes(2 if halves else 1, minimums)
    if halves:
        return _Distances(CODE_BYTES // 2, 16, size, PACKED, 0, 0, 4 * TOKENS)
    return _Distances(size, PACKED, 2 * size, 2 * PACKED, size, PACKED, 0)


@functools.cache
def _first_products(distances: _Distances) -> Any:
    """Begin the pipeline: multiply products 0 and 1, store the first, load the operands of product 2."""
    load_even, multiply_even, store_even = EVEN
    load_odd, multiply_odd, _ = ODD
    u_odd, x_odd, u_pair, x_pair, *_ = distances

    @njit(**_PART)
    def begin_products(u, x, spill, left):
        load_even(spill, x, u)
        multiply_even(spill)
        if left > 1:
            load_odd(spill, x + x_odd, u + u_odd)
            multiply_odd(spill)
        store_even(spill)
        if left > 2:
            load_even(spill, x + x_pair, u + u_pair)

    return _part(begin_products)


def _group(halves: bool, minimums: bool) -> Any:
    """A kernel for formats of one scale a block, or of two (`halves`), without or with minimums."""
    even, odd = (_step(parity, halves, minimums, False) for parity in (0, 1))
    last_even, last_odd = (_step(parity, halves, minimums, True) for parity in (0, 1))
    distances = _distances(halves, minimums)
    begin_products = _first_products(distances)
    u_odd, x_odd, u_pair, x_pair, block_u, block_x, start_odd = distances

    @njit(**INNER)
    def group(u, blocks, x, start, out, out_stride, begin, spill, following, lines, is_begun, next_u, next_x):
        acc = f32_tile(TOKENS)
        if not begin:
            acc = tile_load(acc, out, out_stride, 0, 1)
        left = 2 * blocks if halves else blocks
        if not is_begun:
            begin_products(u, x, spill, left)
        least = 4 if next_x == 0 else 0
        while left > least:
            for _ in range(lines if halves else 2 * lines):
                prefetch(following)
                following += 64
            after_u, after_x = (u + u_pair, x + x_pair) if left != 2 else (next_u, next_x)
            acc = even(acc, spill, u, x, start, after_u + u_odd, after_x + x_odd, left)
            odd_u, odd_x = u + block_u, x + block_x
            after_u, after_x = (after_u + u_pair, after_x + x_pair) if left != 4 else (next_u, next_x)
            acc = odd(acc, spill, odd_u, odd_x, start + start_odd, after_u, after_x, left)
            u, x, left = u + u_pair, x + x_pair, left - 2
        while left > 0:
            for _ in range(lines if halves or left == 1 else 2 * lines):
                prefetch(following)
                following += 64
            after_u, after_x = u + u_pair, x + x_pair
            acc = last_even(acc, spill, u, x, start, after_u + u_odd, after_x + x_odd, left)
            if left > 1:
                odd_u, odd_x = u + block_u, x + block_x
                next_u, next_x = after_u + u_pair, after_x + x_pair
                acc = last_odd(acc, spill, odd_u, odd_x, start + start_odd, next_u, next_x, left - 1)
            u, x, left = after_u, after_x, left - 2
        tile_store(acc, out, out_stride, 0, 1)

    return group


_whole_of_starts = _group(False, False)
_whole_of_minimums = _group(False, True)
_half_of_starts = _group(True, False)
_half_of_minimums = _group(True, True)


@njit(**INNER)
def begins_next(kind, blocks):
    """Whether a call for so many blocks can begin the products of the next one."""
    products = 2 * blocks if trait(kind, HAS_HALVES) else blocks
    return products % 2 == 0 and products >= LEAST


@njit(**INNER)
def quantized_16(kind, u, blocks, x, out, out_stride, begin, spill, following, lines, is_begun, next_u, next_x):
    """16 packed tokens at x times the unpacked chunk at u, to 16 f32 at out + token * out_stride; see gemm.py.

    With each block, `lines` cache lines at `following` are prefetched.  `configure(spill, HAS_HALVES)` comes before.
    `next_u`, `next_x`: the chunk and the tokens of the next call, of LEAST products or more, which this one begins, so
    that the next call `is_begun`.  `next_x` is 0 where none follows, or `begins_next` is false.
    """
    start = TOKENS * trait(kind, START)
    if trait(kind, HAS_HALVES):
        if trait(kind, HAS_MINIMUMS):
            _half_of_minimums(
                u, blocks, x, start, out, out_stride, begin, spill, following, lines, is_begun, next_u, next_x
            )
        else:
            _half_of_starts(
                u, blocks, x, start, out, out_stride, begin, spill, following, lines, is_begun, next_u, next_x
            )
    elif trait(kind, HAS_MINIMUMS):
        _whole_of_minimums(
            u, blocks, x, start, out, out_stride, begin, spill, following, lines, is_begun, next_u, next_x
        )
    else:
        _whole_of_starts(u, blocks, x, start, out, out_stride, begin, spill, following, lines, is_begun, next_u, next_x)


# ------------------------------------------------------------------ the same, unpacking the next chunk


def _streaming(fmt: QuantizedFormat) -> Any:
    """A kernel of one format; the main loop has no branches (`_step`)."""
    halves, minimums = bool(fmt.scales.halves), bool(fmt.scales.minimum)
    even, odd = (_step(parity, halves, minimums, False) for parity in (0, 1))
    last_even, last_odd = (_step(parity, halves, minimums, True) for parity in (0, 1))
    distances = _distances(halves, minimums)
    begin_products, unpack_one = _first_products(distances), _part(block_unpacker(fmt, _PART))
    u_odd, x_odd, u_pair, x_pair, block_u, block_x, start_odd = distances
    pair_blocks, start = (1 if halves else 2), TOKENS * start_offset(fmt)

    @njit(**INNER)
    def streaming(u, blocks, x, out, out_stride, begin, spill, following, ahead, to, is_begun, next_u, next_x):
        acc = f32_tile(TOKENS)
        if not begin:
            acc = tile_load(acc, out, out_stride, 0, 1)
        left = 2 * blocks if halves else blocks
        if not is_begun:
            begin_products(u, x, spill, left)
        done = 0
        for _ in range(min((left - 3 if next_x == 0 else left) // 2, ahead // pair_blocks)):
            unpack_one(following, done, to)
            after_u, after_x = (u + u_pair, x + x_pair) if left != 2 else (next_u, next_x)
            acc = even(acc, spill, u, x, start, after_u + u_odd, after_x + x_odd, left)
            if not halves:
                unpack_one(following, done + 1, to)
            odd_u, odd_x = u + block_u, x + block_x
            after_u, after_x = (after_u + u_pair, after_x + x_pair) if left != 4 else (next_u, next_x)
            acc = odd(acc, spill, odd_u, odd_x, start + start_odd, after_u, after_x, left)
            u, x, left, done = u + u_pair, x + x_pair, left - 2, done + pair_blocks
        while left > 0:
            after_u, after_x = u + u_pair, x + x_pair
            if done < ahead:
                unpack_one(following, done, to)
                done += 1
            acc = last_even(acc, spill, u, x, start, after_u + u_odd, after_x + x_odd, left)
            if left > 1:
                if not halves and done < ahead:
                    unpack_one(following, done, to)
                    done += 1
                odd_u, odd_x = u + block_u, x + block_x
                next_u, next_x = after_u + u_pair, after_x + x_pair
                acc = last_odd(acc, spill, odd_u, odd_x, start + start_odd, next_u, next_x, left - 1)
            u, x, left = after_u, after_x, left - 2
        tile_store(acc, out, out_stride, 0, 1)
        while done < ahead:
            unpack_one(following, done, to)
            done += 1

    return streaming


# (kind, u, blocks, x, out, out_stride, begin, spill, following, ahead, to, is_begun, next_u, next_x): as
# `quantized_16`; the first `ahead` blocks of the units at `following` are unpacked to `to`.  `next_x` is 0 where these
# are fewer than `blocks`.
streamed_16 = by_format({fmt.id: _streaming(fmt) for fmt in QUANTIZED}, 13)
