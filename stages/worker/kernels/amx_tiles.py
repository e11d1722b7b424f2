"""The AMX tiles that amx.py uses: their shapes, their instructions, and the emulation of both.

There are two sets of three tiles, of even and of odd products: so one product can be computed while the one before it
is stored and the operands of the next one are loaded.

    load(spill, x, u)           A: the values (s8) of 16 packed records at x; B: the code vectors (u8) at u
    multiply(spill)             sums = A times B: 16 tokens x 16 rows of exact i32
    store(spill)                the sums to the set's slot of `spill`, a line of 64 bytes for each token

`spill` is the address of SPILL_BYTES of the thread's own, 64-byte aligned:

    two slots of PRODUCT bytes | the configuration, 64 bytes | two vectors of amx.py's, 64 bytes each
    | under `STARLING_ISA=tiles` the tiles, PRODUCT bytes each

`STARLING_ISA=tiles` emulates the instructions, for tests of everything around them on a CPU without AMX.  An emulated
tile is memory that keeps its content, of the shape that the configuration in memory gives it, so that an instruction
in the wrong order, of the wrong set or of the wrong shape gives wrong products.  The instructions (Intel SDM volume 1,
chapter 18) are LLVM's `llvm.x86.tile*`, which name tiles by number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit, types

from stages.worker.kernels.buffer_sizes import PRODUCT, TOTALS
from stages.worker.kernels.dots import dot4_u8
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    ISA,
    Builder,
    get_i32,
    get_u8,
    get_u16,
    load_i32,
    put_i32,
    splat_i32,
    splat_i32_at,
    store_i32,
)
from stages.worker.kernels.simd.vectors import ADDRESS, I8, I64, call, named_intrinsic, operation, pointer

EMULATED = ISA == "tiles"
SUMS, A, B = (0, 1), (2, 3), (4, 5)  # tiles of the even and the odd set
_CONFIGURATION = 2 * PRODUCT  # offsets in `spill`
_TILES = TOTALS + 128


def configuration(halves: bool) -> tuple[int, ...]:
    """The 64 bytes that `ldtilecfg` reads, as 16 i32: palette 1, bytes of a row (u16 each), rows (u8 each).

    `halves`: a product is of 16 K values, not of 32.
    """
    runs = 4 if halves else 8  # of 4 K values
    shapes = {SUMS: (16, 64), A: (16, 4 * runs), B: (runs, 64)}
    data = bytearray(64)
    data[0] = 1
    for tiles, (rows, row_bytes) in shapes.items():
        for tile in tiles:
            data[16 + 2 * tile : 18 + 2 * tile] = row_bytes.to_bytes(2, "little")
            data[48 + tile] = rows
    return tuple(int.from_bytes(data[i : i + 4], "little") for i in range(0, 64, 4))


class TileSet(NamedTuple):
    """The operations on the tiles of one set; see the top of the file."""

    load: Any
    multiply: Any
    store: Any


# ------------------------------------------------------------------ instructions


def _instruction(builder: Builder, name: str, *arguments: Any) -> None:
    call(builder, f"llvm.x86.{name}", ir.VoidType(), list(arguments))


def _number(tile: int) -> Any:
    return ir.Constant(I8, tile)


_LINE = ir.Constant(I64, 64)
_VALUES = 32  # bytes from a token's values to the next one's (packed_activations.py)


def _instructions(parity: int) -> TileSet:
    sums, a, b = _number(SUMS[parity]), _number(A[parity]), _number(B[parity])

    def load(builder: Builder, spill: Any, x: Any, u: Any) -> None:
        _instruction(builder, "tileloadd64", a, pointer(builder, x, I8), ir.Constant(I64, _VALUES))
        _instruction(builder, "tileloadd64", b, pointer(builder, u, I8), _LINE)

    def multiply(builder: Builder, spill: Any) -> None:
        _instruction(builder, "tilezero", sums)
        _instruction(builder, "tdpbsud", sums, a, b)

    def store(builder: Builder, spill: Any) -> None:
        slot = builder.add(spill, ir.Constant(I64, PRODUCT * parity))
        _instruction(builder, "tilestored64", sums, pointer(builder, slot, I8), _LINE)

    return TileSet(
        operation("load_tiles", types.void, (ADDRESS,) * 3, load, "Load A and B."),
        operation("multiply_tiles", types.void, (ADDRESS,), multiply, "Sums = A times B."),
        operation("store_tile", types.void, (ADDRESS,), store, "Store the sums."),
    )


_ldtilecfg = operation(
    "ldtilecfg",
    types.void,
    (ADDRESS,),
    lambda builder, at: _instruction(builder, "ldtilecfg", pointer(builder, at, I8)),
    "Shape this thread's tiles.",
)
_tilerelease = operation(
    "tilerelease", types.void, (), lambda builder: _instruction(builder, "tilerelease"), "Release this thread's tiles."
)


# ------------------------------------------------------------------ emulation


@njit(**INNER)
def _tile(spill, tile):
    """Address of an emulated tile, its rows and the bytes of a row; rows are 64 bytes apart."""
    shape = spill + _CONFIGURATION
    return spill + _TILES + PRODUCT * tile, get_u8(shape + 48 + tile), get_u16(shape + 16 + 2 * tile)


@njit(**INNER)
def _copy_rows(rows, row_bytes, at, stride, to, to_stride):
    for r in range(rows):
        if row_bytes == 64:
            store_i32(to + to_stride * r, load_i32(at + stride * r))
        else:
            for i in range(0, row_bytes, 4):
                put_i32(to + to_stride * r + i, get_i32(at + stride * r + i))


@njit(**INNER)
def _tileload(spill, tile, at, stride):
    to, rows, row_bytes = _tile(spill, tile)
    _tilezero(spill, tile)
    _copy_rows(rows, row_bytes, at, stride, to, 64)


@njit(**INNER)
def _tilestore(spill, tile, to):
    at, rows, row_bytes = _tile(spill, tile)
    _copy_rows(rows, row_bytes, at, 64, to, 64)


@njit(**INNER)
def _tilezero(spill, tile):
    at, _, _ = _tile(spill, tile)
    for i in range(0, PRODUCT, 64):
        store_i32(at + i, splat_i32(0))


@njit(**INNER)
def _tdpbsud(spill, sums, a, b):
    total, rows, _ = _tile(spill, sums)
    values, _, value_bytes = _tile(spill, a)
    codes, _, _ = _tile(spill, b)
    for r in range(rows):
        line = load_i32(total + 64 * r)
        for i in range(0, value_bytes, 4):
            line = dot4_u8(line, load_i32(codes + 16 * i), splat_i32_at(values + 64 * r + i))
        store_i32(total + 64 * r, line)


def apart(function: Any) -> Any:
    """An operation that calls a jitted function, which LLVM does not inline: compiled once for all its callers."""
    name, arguments = function.py_func.__name__, function.py_func.__code__.co_argcount

    def implementation(typingctx: Any, *args: Any) -> Any:
        callee = typingctx.resolve_value_type(function)
        signature = callee.get_call_type(typingctx, args, {})

        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            block = builder.block
            result = context.get_function(callee, signature)(builder, values)
            [*_, found] = (line for line in block.instructions if isinstance(line, ir.CallInstr))
            found.attributes.add("noinline")
            return result

        return signature.return_type(*signature.args), codegen

    return named_intrinsic(name, arguments, implementation, "A call.")


def _emulation(parity: int) -> TileSet:
    sums, a, b = SUMS[parity], A[parity], B[parity]

    @njit(**INNER)
    def load(spill, x, u):
        _tileload(spill, a, x, _VALUES)
        _tileload(spill, b, u, 64)

    @njit(**INNER)
    def multiply(spill):
        _tilezero(spill, sums)
        _tdpbsud(spill, sums, a, b)

    @njit(**INNER)
    def store(spill):
        _tilestore(spill, sums, spill + PRODUCT * parity)

    return TileSet(apart(load), apart(multiply), apart(store))


# ------------------------------------------------------------------ what amx.py uses

EVEN, ODD = (_emulation(parity) if EMULATED else _instructions(parity) for parity in (0, 1))
_WHOLE, _HALVES = configuration(False), configuration(True)


@njit(**INNER)
def configure(spill, halves):
    """Shape the tiles of this thread for products of 32 K values, or of 16 (`halves`)."""
    at = spill + _CONFIGURATION
    for i in range(16):
        put_i32(at + 4 * i, _HALVES[i] if halves else _WHOLE[i])
    if not EMULATED:
        _ldtilecfg(at)


@njit(**INNER)
def release(spill):
    """Release the tiles: a thread without tiles is cheaper to switch."""
    if EMULATED:
        for i in range(16):
            put_i32(spill + _CONFIGURATION + 4 * i, 0)
    else:
        _tilerelease()
