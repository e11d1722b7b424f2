"""Matrix products of 16 tokens x 16 rows by AMX tiles, over the same unpacked chunks as tiles.py.

A tile product takes a block of 16 records (s8) and of 8 code vectors (u8) to 16 x 16 exact i32 sums, which are
stored and then scaled as in every other path: the same operations in the same order, so the same bytes.  The
tile of a block is computed two blocks before it is scaled, so that the store has reached the cache when it is read.

`STARLING_ISA=tiles` computes the tile products with VNNI instead: for tests of everything around them on a CPU
without AMX.  The instructions (Intel SDM volume 1, chapter 18) are LLVM's `llvm.x86.tile*`, which name tiles by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from stages.worker.kernels import simd
from stages.worker.kernels.dots import emit_dot4_u8
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.quantize_activations import RECORD, SCALE, SSUM, START6
from stages.worker.kernels.simd import Builder, Tile, f32_tile, f32x16, i32x16, load_f32, prefetch, put_i32
from stages.worker.kernels.tiles import _at, _operation, _spread

TOKENS = 16  # of a tile, and rows
UNPACKED = 640  # bytes of an unpacked block, as in matmul.py
PRODUCT = 1024  # bytes of stored sums
SPILL_BYTES = 4 * PRODUCT + 64  # four products on their way, and the tile configuration
EMULATED = simd.ISA == "tiles"

_I64, _I32, _I8, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType()
_ADDRESS = types.int64

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
    builder.call(simd.cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}"), arguments)


def _number(tile: int) -> Any:
    return ir.Constant(_I8, tile)


def _pointer(builder: Builder, addr: Any) -> Any:
    return builder.inttoptr(addr, _I8.as_pointer())


def _emit_tiles(sums: int, a: int, b: int, vectors: int) -> Callable[..., None]:
    def emit(builder: Builder, x: Any, stride: Any, u: Any, to: Any) -> None:
        line = ir.Constant(_I64, 64)
        _tile_call(builder, "tilezero", _number(sums))
        _tile_call(builder, "tileloadd64", _number(a), _pointer(builder, x), stride)
        _tile_call(builder, "tileloadd64", _number(b), _pointer(builder, u), line)
        _tile_call(builder, "tdpbsud", _number(sums), _number(a), _number(b))
        _tile_call(builder, "tilestored64", _number(sums), _pointer(builder, to), line)

    return emit


def _emit_vnni(sums: int, a: int, b: int, vectors: int) -> Callable[..., None]:
    def emit(builder: Builder, x: Any, stride: Any, u: Any, to: Any) -> None:
        line = ir.Constant(_I64, 64)
        codes = [simd._load(builder, _at(builder, u, line, j), i32x16.ir) for j in range(vectors)]
        for t in range(TOKENS):
            total = ir.Constant(i32x16.ir, None)
            for j, code in enumerate(codes):
                total = emit_dot4_u8(builder, total, code, _spread(builder, _at(builder, x, stride, t, 4 * j), _I32))
            simd._store(builder, total, _at(builder, to, line, t))

    return emit


def _product(sums: int, a: int, b: int, vectors: int) -> Any:
    """An intrinsic (x, stride, u, to): 16 records' values at x by `vectors` code vectors at u, stored at to."""
    emit = (_emit_vnni if EMULATED else _emit_tiles)(sums, a, b, vectors)

    def product(typingctx: Any, x: Any, stride: Any, u: Any, to: Any) -> Any:
        def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
            emit(builder, *values)
            return context.get_dummy_value()

        return types.void(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS), codegen

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

    return types.void(_ADDRESS), codegen


@intrinsic
def release(typingctx: Any) -> Any:
    """Give the tiles up: a thread that holds none is cheaper to switch."""

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


def _emit_load(builder: Builder, vectors: list[Any], out: Any, stride: Any) -> None:
    for t in range(len(vectors)):
        vectors[t] = simd._load(builder, _at(builder, out, stride, t), f32x16.ir)


def _emit_scaled(builder: Builder, vectors: list[Any], sums: Any, d: Any, x: Any, stride: Any, at: Any = None) -> None:
    line = ir.Constant(_I64, 64)
    for t in range(len(vectors)):
        dots = simd._load(builder, _at(builder, sums, line, t), i32x16.ir)
        record = _at(builder, x, stride, t)
        if at is not None:
            dots = builder.add(dots, _spread(builder, builder.add(record, at), _I32))
        product = builder.fmul(builder.sitofp(dots, f32x16.ir), d)
        scale = _spread(builder, builder.add(record, ir.Constant(_I64, SCALE)), _FLOAT)
        vectors[t] = simd._math("fma")(builder, product, scale, vectors[t])


def _emit_fma(builder: Builder, vectors: list[Any], v: Any, x: Any, stride: Any) -> None:
    for t in range(len(vectors)):
        value = _spread(builder, _at(builder, x, stride, t), _FLOAT)
        vectors[t] = simd._math("fma")(builder, v, value, vectors[t])


_SCALED = (_ADDRESS, f32x16, _ADDRESS, _ADDRESS)
_load = _operation("load16", (_ADDRESS, _ADDRESS), _emit_load, "f32 at out + t * stride.")
_started = _operation(
    "started16", (*_SCALED, _ADDRESS), _emit_scaled, "fma(f32(sums at + token's i32 at) * d, token's scale, tile)."
)
_scaled = _operation("scaled16", _SCALED, _emit_scaled, "As `started16` for sums that start at 0.")
_fma = _operation("fma16", (f32x16, _ADDRESS, _ADDRESS), _emit_fma, "fma(vector, token's f32, tile).")


@intrinsic
def _store(typingctx: Any, tile: Any, out: Any, stride: Any) -> Any:
    if not isinstance(tile, Tile):
        return None

    def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
        for t in range(tile.n):
            simd._store(builder, builder.extract_value(values[0], t), _at(builder, values[1], values[2], t))
        return context.get_dummy_value()

    return types.void(tile, _ADDRESS, _ADDRESS), codegen


# ------------------------------------------------------------------ 16 tokens x one row group


def _group(with_minimum: bool) -> Any:
    """A kernel for formats of whole blocks; integer sums start at `start` of a record, or at 0 with minimums."""

    @njit(**{**INNER, "forceinline": True})
    def scale(acc, sums, u, x, stride, start):
        if with_minimum:
            acc = _scaled(acc, sums, load_f32(u + 512), x, stride)
            return _fma(acc, load_f32(u + 576), x + SSUM, stride)
        return _started(acc, sums, load_f32(u + 512), x, stride, start)

    @njit(**INNER)
    def group(u, blocks, x, stride, start, out, out_stride, begin, spill, ask, lines):
        acc = f32_tile(TOKENS)
        if not begin:
            acc = _load(acc, out, out_stride)
        whole_even(x, stride, u, spill)
        if blocks > 1:
            whole_odd(x + RECORD, stride, u + UNPACKED, spill + PRODUCT)
        here, ahead = spill, spill + 2 * PRODUCT
        b = 0
        while b + 1 < blocks:
            for _ in range(2 * lines):
                prefetch(ask)
                ask += 64
            if b + 2 < blocks:
                whole_even(x + 2 * RECORD, stride, u + 2 * UNPACKED, ahead)
            acc = scale(acc, here, u, x, stride, start)
            if b + 3 < blocks:
                whole_odd(x + 3 * RECORD, stride, u + 3 * UNPACKED, ahead + PRODUCT)
            acc = scale(acc, here + PRODUCT, u + UNPACKED, x + RECORD, stride, start)
            here, ahead = ahead, here
            b, u, x = b + 2, u + 2 * UNPACKED, x + 2 * RECORD
        if b < blocks:
            for _ in range(lines):
                prefetch(ask)
                ask += 64
            acc = scale(acc, here, u, x, stride, start)
        _store(acc, out, out_stride)

    return group


@njit(**INNER)
def _group_of_halves(u, blocks, x, stride, out, out_stride, begin, spill, ask, lines):
    """Q6_K: two scales to a block, each with the sums of 16 values."""
    acc = f32_tile(TOKENS)
    if not begin:
        acc = _load(acc, out, out_stride)
    half_first(x, stride, u, spill)
    half_second(x + 16, stride, u + 256, spill + PRODUCT)
    here, ahead = spill, spill + 2 * PRODUCT
    for b in range(blocks):
        for _ in range(lines):
            prefetch(ask)
            ask += 64
        more = b + 1 < blocks
        if more:
            half_first(x + RECORD, stride, u + UNPACKED, ahead)
        acc = _started(acc, here, load_f32(u + 512), x, stride, START6)
        if more:
            half_second(x + RECORD + 16, stride, u + UNPACKED + 256, ahead + PRODUCT)
        acc = _started(acc, here + PRODUCT, load_f32(u + 576), x, stride, START6 + 4)
        here, ahead = ahead, here
        u, x = u + UNPACKED, x + RECORD
    _store(acc, out, out_stride)


_group_of_starts = _group(False)
_group_of_minimums = _group(True)


@njit(**INNER)
def quantized_16(start, halves, least, u, blocks, x, stride, out, out_stride, begin, spill, ask, lines):
    """16 tokens at x times the unpacked chunk at u, to 16 f32 at out + token * out_stride; arguments as in matmul.py.

    `start` is where a record holds what integer sums start at; `halves` and `least` say whether a block has two
    scales, or minimums. With each block, `lines` lines at `ask` are asked for. `configure(spill)` comes before.
    """
    if halves:
        _group_of_halves(u, blocks, x, stride, out, out_stride, begin, spill, ask, lines)
    elif least:
        _group_of_minimums(u, blocks, x, stride, start, out, out_stride, begin, spill, ask, lines)
    else:
        _group_of_starts(u, blocks, x, stride, start, out, out_stride, begin, spill, ask, lines)
