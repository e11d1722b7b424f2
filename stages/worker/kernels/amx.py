"""Matrix products of 16 tokens x 16 rows by AMX tiles, over the same unpacked chunks as tiles.py.

A product multiplies 16 records by the code vectors of a block, or of half a block in formats of two scales a block, to
16 x 16 exact i32 sums, which are stored and then scaled as in every other path: the same operations in the same order,
so the same bytes.

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
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit

from stages.worker.kernels.amx_tiles import EVEN, ODD
from stages.worker.kernels.block_codegen import emit_half_sum
from stages.worker.kernels.buffer_sizes import CODE_BYTES, PRODUCT, unpacked_bytes
from stages.worker.kernels.dots import BASE_BITS, emit_minus_base, emit_scaled
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.features import TILE_TOKENS
from stages.worker.kernels.format_traits import HAS_HALVES, HAS_MINIMUMS, START, trait
from stages.worker.kernels.quantize_activations import RECORD, SCALE, SSUM
from stages.worker.kernels.simd import (
    INLINE,
    Builder,
    f32_tile,
    f32x16,
    i32x16,
    load_f32,
    prefetch,
    tile_load,
    tile_store,
)
from stages.worker.kernels.simd.arithmetic import math
from stages.worker.kernels.simd.register_tiles import strided, tile_operation
from stages.worker.kernels.simd.vectors import ADDRESS, FLOAT, I32, I64, constant, load, operation, splat
from stages.worker.kernels.tiles import spread

TOKENS = TILE_TOKENS


# ------------------------------------------------------------------ what is done with the sums

_minus_base = operation("minus_base", f32x16, (f32x16,), emit_minus_base, "-BASE * d.")
_SCALING = (ADDRESS, f32x16, f32x16, f32x16, ADDRESS, ADDRESS, ADDRESS)


def _at(builder: Builder, addr: Any, offset: int, lane: ir.Type) -> Any:
    return spread(builder, builder.add(addr, ir.Constant(I64, offset)), lane)


def _scaling(first: int, end: int, minimums: bool, half: int) -> Any:
    """An operation (tile, sums, d, -BASE d, m, x, stride, start): scale the sums of tokens first .. end-1.

    `half` is the half of the block, 0 or 1, whose scaled sum a minimum counts for; -1: it counts for the whole block.
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
        stride: Any,
        start: Any,
    ) -> None:
        for t in range(first, end):
            record = strided(builder, x, stride, t)
            begin = constant(i32x16, BASE_BITS)
            if not minimums:
                begin = spread(builder, builder.add(record, start), I32)
            dots = load(builder, builder.add(sums, ir.Constant(I64, 64 * t)), i32x16.ir)
            product = emit_scaled(builder, builder.add(dots, begin), d, minus_base)
            vectors[t] = fma(builder, product, _at(builder, record, SCALE, FLOAT), vectors[t])
            if minimums and half < 0:
                vectors[t] = fma(builder, m, _at(builder, record, SSUM, FLOAT), vectors[t])
            elif minimums:
                total = splat(builder, emit_half_sum(builder, record, half))
                vectors[t] = fma(builder, m, total, vectors[t])

    return tile_operation(f"scale{first}", _SCALING, emit, "fma(sum * d, token's scale, tile), then the minimums.")


# ------------------------------------------------------------------ 16 tokens x one row group


def _step(parity: int, halves: bool, minimums: bool, last: bool) -> Any:
    """Step i of an even or an odd product, whose block begins at u and at x; `left` products are left with this one.

    With `last` any number may be left, else four and more: then the step is without branches, between which LLVM would
    move the scaling.
    """
    own, other = (EVEN, ODD) if parity == 0 else (ODD, EVEN)
    multiply, load_tiles, store_tile = own.multiply, other.load, other.store
    half = parity if halves else -1
    low, high = (_scaling(t, t + TOKENS // 2, minimums, half) for t in (0, TOKENS // 2))
    slot = PRODUCT * parity
    factor = CODE_BYTES + (64 * parity if halves else 0)
    minimum = factor + (128 if halves else 64)

    @njit(**INLINE)
    def step(acc, spill, u, x, stride, start, next_u, next_x, left):
        d = load_f32(u + factor)
        m = load_f32(u + minimum) if minimums else d
        minus_base = _minus_base(d)
        if not last or left > 2:
            multiply(spill)
        if not last or left > 3:
            load_tiles(spill, next_x, stride, next_u)
        acc = low(acc, spill + slot, d, minus_base, m, x, stride, start)
        if not last or left > 1:
            store_tile(spill)
        return high(acc, spill + slot, d, minus_base, m, x, stride, start)

    return step


def _group(halves: bool, minimums: bool) -> Any:
    """A kernel for formats of one scale a block, or of two (`halves`), without or with minimums."""
    even, odd = (_step(parity, halves, minimums, False) for parity in (0, 1))
    last_even, last_odd = (_step(parity, halves, minimums, True) for parity in (0, 1))
    load_even, multiply_even, store_even = EVEN
    load_odd, multiply_odd, _ = ODD
    size = unpacked_bytes(2 if halves else 1, minimums)
    # From the operands of an even product to those of the odd one, and to those of the next even one.
    u_odd, x_odd = (CODE_BYTES // 2, RECORD // 4) if halves else (size, RECORD)
    u_pair, x_pair = (size, RECORD) if halves else (2 * size, 2 * RECORD)
    # From the block of an even product to that of the odd one, and from its start in a record.
    block_u, block_x, start_odd = (0, 0, 4) if halves else (size, RECORD, 0)

    @njit(**INNER)
    def group(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines):
        acc = f32_tile(TOKENS)
        if not begin:
            acc = tile_load(acc, out, out_stride, 0, 1)
        left = 2 * blocks if halves else blocks
        load_even(spill, x, stride, u)
        multiply_even(spill)
        if left > 1:
            load_odd(spill, x + x_odd, stride, u + u_odd)
            multiply_odd(spill)
        store_even(spill)
        if left > 2:
            load_even(spill, x + x_pair, stride, u + u_pair)
        while left > 4:
            for _ in range(lines if halves else 2 * lines):
                prefetch(following)
                following += 64
            after_u, after_x = u + u_pair, x + x_pair
            acc = even(acc, spill, u, x, stride, start, after_u + u_odd, after_x + x_odd, left)
            odd_u, odd_x = u + block_u, x + block_x
            acc = odd(acc, spill, odd_u, odd_x, stride, start + start_odd, after_u + u_pair, after_x + x_pair, left)
            u, x, left = after_u, after_x, left - 2
        while left > 0:
            for _ in range(lines if halves or left == 1 else 2 * lines):
                prefetch(following)
                following += 64
            after_u, after_x = u + u_pair, x + x_pair
            acc = last_even(acc, spill, u, x, stride, start, after_u + u_odd, after_x + x_odd, left)
            if left > 1:
                odd_u, odd_x = u + block_u, x + block_x
                next_u, next_x = after_u + u_pair, after_x + x_pair
                acc = last_odd(acc, spill, odd_u, odd_x, stride, start + start_odd, next_u, next_x, left - 1)
            u, x, left = after_u, after_x, left - 2
        tile_store(acc, out, out_stride, 0, 1)

    return group


_whole_of_starts = _group(False, False)
_whole_of_minimums = _group(False, True)
_half_of_starts = _group(True, False)
_half_of_minimums = _group(True, True)


@njit(**INNER)
def quantized_16(kind, u, blocks, x, stride, out, out_stride, begin, spill, following, lines):
    """16 tokens at x times the unpacked chunk at u, to 16 f32 at out + token * out_stride; arguments as in gemm.py.

    With each block, `lines` cache lines at `following` are prefetched.  `configure(spill, HAS_HALVES)` comes before.
    """
    start = trait(kind, START)
    if trait(kind, HAS_HALVES):
        if trait(kind, HAS_MINIMUMS):
            _half_of_minimums(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines)
        else:
            _half_of_starts(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines)
    elif trait(kind, HAS_MINIMUMS):
        _whole_of_minimums(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines)
    else:
        _whole_of_starts(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines)
