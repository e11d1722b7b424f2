"""Matrix products of 16 tokens x 16 rows by AMX tiles, over the same unpacked chunks as tiles.py.

A tile product multiplies 16 records (s8) by 8 code vectors (u8) of a block to 16 x 16 exact i32 sums, which are stored
and then scaled as in every other path: the same operations in the same order, so the same bytes.  The product of a
block is computed two blocks before it is scaled, so that the store has reached the cache when it is read.

`STARLING_ISA=tiles` computes the tile products with VNNI instead: for tests of everything around them on a CPU
without AMX.  The instructions (Intel SDM volume 1, chapter 18) are LLVM's `llvm.x86.tile*`, which name tiles by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from stages.worker.kernels.block_codegen import emit_half_sum
from stages.worker.kernels.buffer_sizes import CODE_BYTES, PRODUCT, UNPACKED_BYTES
from stages.worker.kernels.dots import emit_dot4_u8
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.format_traits import HAS_HALVES, HAS_MINIMUMS, START, UNPACKED, trait
from stages.worker.kernels.quantize_activations import RECORD, SCALE, SSUM, ZERO
from stages.worker.kernels.simd import (
    ISA,
    Builder,
    f32_tile,
    f32x16,
    i32x16,
    load_f32,
    prefetch,
    put_i32,
    tile_load,
    tile_store,
)
from stages.worker.kernels.simd.arithmetic import math
from stages.worker.kernels.simd.register_tiles import strided, tile_operation
from stages.worker.kernels.simd.vectors import ADDRESS, FLOAT, I8, I32, I64, load, splat, store
from stages.worker.kernels.tiles import spread

TOKENS = 16  # of a tile, and rows
EMULATED = ISA == "tiles"


# Tile numbers: each kind of tile twice, so that one product can begin before the last one has been stored.
_SUMS, _WHOLE_A, _WHOLE_B, _HALF_A, _HALF_B = (0, 1), (2, 3), (4, 5), 6, 7
_ROWS = (16, 16, 16, 16, 8, 8, 16, 4)
_ROW_BYTES = (64, 64, 32, 32, 64, 64, 16, 64)


def configuration() -> tuple[int, ...]:
    """The 64 bytes that `ldtilecfg` reads, as 16 i32: palette 1, bytes of a row (u16 each), rows (u8 each)."""
    data = bytearray(64)
    data[0] = 1
    for tile, (rows, row_bytes) in enumerate(zip(_ROWS, _ROW_BYTES, strict=True)):
        data[16 + 2 * tile : 18 + 2 * tile] = row_bytes.to_bytes(2, "little")
        data[48 + tile] = rows
    return tuple(int.from_bytes(data[i : i + 4], "little") for i in range(0, 64, 4))


_CONFIGURATION = configuration()


def _tile_call(builder: Builder, name: str, *arguments: Any) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}"), arguments)


def _number(tile: int) -> Any:
    return ir.Constant(I8, tile)


def _pointer(builder: Builder, addr: Any) -> Any:
    return builder.inttoptr(addr, I8.as_pointer())


def _emit_tiles(sums: int, a: int, b: int, vectors: int) -> Callable[..., None]:
    def emit(builder: Builder, x: Any, stride: Any, u: Any, to: Any) -> None:
        line = ir.Constant(I64, 64)
        _tile_call(builder, "tilezero", _number(sums))
        _tile_call(builder, "tileloadd64", _number(a), _pointer(builder, x), stride)
        _tile_call(builder, "tileloadd64", _number(b), _pointer(builder, u), line)
        _tile_call(builder, "tdpbsud", _number(sums), _number(a), _number(b))
        _tile_call(builder, "tilestored64", _number(sums), _pointer(builder, to), line)

    return emit


def _emit_vnni(sums: int, a: int, b: int, vectors: int) -> Callable[..., None]:
    def emit(builder: Builder, x: Any, stride: Any, u: Any, to: Any) -> None:
        line = ir.Constant(I64, 64)
        codes = [load(builder, strided(builder, u, line, j), i32x16.ir) for j in range(vectors)]
        for t in range(TOKENS):
            total = ir.Constant(i32x16.ir, None)
            for j, code in enumerate(codes):
                total = emit_dot4_u8(builder, total, code, spread(builder, strided(builder, x, stride, t, 4 * j), I32))
            store(builder, total, strided(builder, to, line, t))

    return emit


def _product(sums: int, a: int, b: int, vectors: int) -> Any:
    """An intrinsic (x, stride, u, to): 16 records' values at x by `vectors` code vectors at u, stored at to."""
    emit = (_emit_vnni if EMULATED else _emit_tiles)(sums, a, b, vectors)

    def product(typingctx: Any, x: Any, stride: Any, u: Any, to: Any) -> Any:
        def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
            emit(builder, *values)
            return context.get_dummy_value()

        return types.void(ADDRESS, ADDRESS, ADDRESS, ADDRESS), codegen

    return intrinsic(product)


whole_even = _product(_SUMS[0], _WHOLE_A[0], _WHOLE_B[0], 8)
whole_odd = _product(_SUMS[1], _WHOLE_A[1], _WHOLE_B[1], 8)
half_first = _product(_SUMS[0], _HALF_A, _HALF_B, 4)
half_second = _product(_SUMS[1], _HALF_A, _HALF_B, 4)


@intrinsic
def _load_configuration(typingctx: Any, at: Any) -> Any:
    def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
        if not EMULATED:
            _tile_call(builder, "ldtilecfg", _pointer(builder, values[0]))
        return context.get_dummy_value()

    return types.void(ADDRESS), codegen


@intrinsic
def release(typingctx: Any) -> Any:
    """Release the tiles: a thread without tiles is cheaper to switch."""

    def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
        if not EMULATED:
            _tile_call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@njit(**INNER)
def configure(spill):
    """Shape the tiles of this thread; `spill` is the address of SPILL_BYTES of its own, 64-byte aligned."""
    at = spill + 4 * PRODUCT
    for i in range(16):
        put_i32(at + 4 * i, _CONFIGURATION[i])
    _load_configuration(at)


# ------------------------------------------------------------------ what is done with the sums


def _emit_scaled(builder: Builder, vectors: list[Any], sums: Any, d: Any, x: Any, stride: Any, at: Any = None) -> None:
    line = ir.Constant(I64, 64)
    for t in range(len(vectors)):
        dots = load(builder, strided(builder, sums, line, t), i32x16.ir)
        record = strided(builder, x, stride, t)
        if at is not None:
            dots = builder.add(dots, spread(builder, builder.add(record, at), I32))
        product = builder.fmul(builder.sitofp(dots, f32x16.ir), d)
        scale = spread(builder, builder.add(record, ir.Constant(I64, SCALE)), FLOAT)
        vectors[t] = math("fma")(builder, product, scale, vectors[t])


def _emit_fma(builder: Builder, vectors: list[Any], v: Any, x: Any, stride: Any) -> None:
    for t in range(len(vectors)):
        value = spread(builder, strided(builder, x, stride, t), FLOAT)
        vectors[t] = math("fma")(builder, v, value, vectors[t])


def _half_sum(half: int) -> Any:
    def emit(builder: Builder, vectors: list[Any], m: Any, x: Any, stride: Any) -> None:
        for t in range(len(vectors)):
            total = splat(builder, emit_half_sum(builder, strided(builder, x, stride, t), half))
            vectors[t] = math("fma")(builder, m, total, vectors[t])

    doc = "fma(vector, scaled sum of a half of the token's record, tile)."
    return tile_operation(f"half_sum16_{half}", (f32x16, ADDRESS, ADDRESS), emit, doc)


_SCALED = (ADDRESS, f32x16, ADDRESS, ADDRESS)
_started = tile_operation(
    "started16", (*_SCALED, ADDRESS), _emit_scaled, "fma(f32(sums at + token's i32 at) * d, token's scale, tile)."
)
_scaled = tile_operation("scaled16", _SCALED, _emit_scaled, "As `started16` for sums that start at 0.")
_fma = tile_operation("fma16", (f32x16, ADDRESS, ADDRESS), _emit_fma, "fma(vector, token's f32, tile).")


# ------------------------------------------------------------------ 16 tokens x one row group


def _whole_blocks(with_minimum: bool) -> Any:
    """A kernel for formats of one scale a block; sums start at `start` of a record, or at 0 with minimums."""

    @njit(**{**INNER, "forceinline": True})
    def scale(acc, sums, u, x, stride, start):
        if with_minimum:
            acc = _scaled(acc, sums, load_f32(u + CODE_BYTES), x, stride)
            return _fma(acc, load_f32(u + CODE_BYTES + 64), x + SSUM, stride)
        return _started(acc, sums, load_f32(u + CODE_BYTES), x, stride, start)

    @njit(**INNER)
    def group(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines):
        acc = f32_tile(TOKENS)
        if not begin:
            acc = tile_load(acc, out, out_stride, 0, 1)
        whole_even(x, stride, u, spill)
        if blocks > 1:
            whole_odd(x + RECORD, stride, u + UNPACKED_BYTES, spill + PRODUCT)
        here, ahead = spill, spill + 2 * PRODUCT
        b = 0
        while b + 1 < blocks:
            for _ in range(2 * lines):
                prefetch(following)
                following += 64
            if b + 2 < blocks:
                whole_even(x + 2 * RECORD, stride, u + 2 * UNPACKED_BYTES, ahead)
            acc = scale(acc, here, u, x, stride, start)
            if b + 3 < blocks:
                whole_odd(x + 3 * RECORD, stride, u + 3 * UNPACKED_BYTES, ahead + PRODUCT)
            acc = scale(acc, here + PRODUCT, u + UNPACKED_BYTES, x + RECORD, stride, start)
            here, ahead = ahead, here
            b, u, x = b + 2, u + 2 * UNPACKED_BYTES, x + 2 * RECORD
        if b < blocks:
            for _ in range(lines):
                prefetch(following)
                following += 64
            acc = scale(acc, here, u, x, stride, start)
        tile_store(acc, out, out_stride, 0, 1)

    return group


def _half_blocks(with_minimum: bool) -> Any:
    """A kernel for formats of two scales a block, each with the sums of 16 values; `size` bytes an unpacked block."""
    first_sum, second_sum = (_half_sum(half) for half in (0, 1))

    @njit(**INNER)
    def group(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines, size):
        second = start + 4 if start != ZERO else start
        acc = f32_tile(TOKENS)
        if not begin:
            acc = tile_load(acc, out, out_stride, 0, 1)
        half_first(x, stride, u, spill)
        half_second(x + 16, stride, u + CODE_BYTES // 2, spill + PRODUCT)
        here, ahead = spill, spill + 2 * PRODUCT
        for b in range(blocks):
            for _ in range(lines):
                prefetch(following)
                following += 64
            more = b + 1 < blocks
            if more:
                half_first(x + RECORD, stride, u + size, ahead)
            acc = _started(acc, here, load_f32(u + CODE_BYTES), x, stride, start)
            if with_minimum:
                acc = first_sum(acc, load_f32(u + CODE_BYTES + 128), x, stride)
            if more:
                half_second(x + RECORD + 16, stride, u + size + CODE_BYTES // 2, ahead + PRODUCT)
            acc = _started(acc, here + PRODUCT, load_f32(u + CODE_BYTES + 64), x, stride, second)
            if with_minimum:
                acc = second_sum(acc, load_f32(u + CODE_BYTES + 192), x, stride)
            here, ahead = ahead, here
            u, x = u + size, x + RECORD
        tile_store(acc, out, out_stride, 0, 1)

    return group


_whole_of_starts = _whole_blocks(False)
_whole_of_minimums = _whole_blocks(True)
_half_of_starts = _half_blocks(False)
_half_of_minimums = _half_blocks(True)


@njit(**INNER)
def quantized_16(kind, u, blocks, x, stride, out, out_stride, begin, spill, following, lines):
    """16 tokens at x times the unpacked chunk at u, to 16 f32 at out + token * out_stride; arguments as in gemm.py.

    With each block, `lines` cache lines at `following` are prefetched.  `configure(spill)` comes before.
    """
    start, size = trait(kind, START), trait(kind, UNPACKED)
    if trait(kind, HAS_HALVES):
        if trait(kind, HAS_MINIMUMS):
            _half_of_minimums(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines, size)
        else:
            _half_of_starts(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines, size)
    elif trait(kind, HAS_MINIMUMS):
        _whole_of_minimums(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines)
    else:
        _whole_of_starts(u, blocks, x, stride, start, out, out_stride, begin, spill, following, lines)
