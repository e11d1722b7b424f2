"""Register tiles of n tokens x 2 row groups (32 rows): the inner operations of a batch's matrix product.

A tile has 2n vectors; vector 2t + g belongs to token t and row group g.  Tokens are `stride` bytes apart at
address `x`.  A token's 4 bytes (or f32) are read once and spread over the lanes for both groups, so that a
block costs n + 2 loads for 2n dot products.  Each operation unrolls completely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stages.worker.kernels import simd
from stages.worker.kernels.dots import add_pairs, begin_pairs, emit_dot4, emit_dot4_u8, end_pairs
from stages.worker.kernels.simd import Builder, Tile, f32x16, i32x16

_I64, _I32, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_ADDRESS = types.int64
SPLIT = 8  # vectors of a tile up to which sums go in two chains


def _at(builder: Builder, base: Any, stride: Any, n: int, more: int = 0) -> Any:
    """base + n * stride + more."""
    moved = builder.add(base, builder.mul(stride, ir.Constant(_I64, n)))
    return builder.add(moved, ir.Constant(_I64, more)) if more else moved


def _spread(builder: Builder, addr: Any, lane: ir.Type) -> Any:
    return simd._splat(builder, simd._load(builder, addr, lane))


def _operation(name: str, arguments: tuple[Any, ...], emit: Callable[..., Any], doc: str) -> Any:
    """An intrinsic `name(tile, *arguments) -> tile`; `emit(builder, vectors, *values)` changes `vectors`.

    `Tile` among the arguments is a second tile of the same size, given to `emit` as a list.
    """

    def implementation(typingctx: Any, tile: Any, *args: Any) -> Any:
        if not isinstance(tile, Tile):
            return None
        tiles = [a for a, e in zip(args, arguments, strict=True) if e is Tile]
        if not all(isinstance(a, Tile) and a.n == tile.n for a in tiles):
            return None

        def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
            def unpacked(value: Any) -> list[Any]:
                return [builder.extract_value(value, i) for i in range(tile.n)]

            vectors = unpacked(values[0])
            rest = [unpacked(v) if e is Tile else v for v, e in zip(values[1:], arguments, strict=True)]
            emit(builder, vectors, *rest)
            result = ir.Constant(tile.ir, ir.Undefined)
            for i, vector in enumerate(vectors):
                result = builder.insert_value(result, vector, i)
            return result

        typed = [a if e is Tile else e for a, e in zip(args, arguments, strict=True)]
        return tile(tile, *typed), codegen

    return simd._named_intrinsic(name, 1 + len(arguments), implementation, doc)


def _emit_start(builder: Builder, vectors: list[Any], x: Any, stride: Any) -> None:
    for t in range(len(vectors) // 2):
        vectors[2 * t] = vectors[2 * t + 1] = _spread(builder, _at(builder, x, stride, t), _I32)


def _emit_dots(dot: Callable[..., Any], runs: range) -> Callable[..., None]:
    def emit(builder: Builder, vectors: list[Any], u0: Any, u1: Any, x: Any, stride: Any) -> None:
        # Small tiles have registers for two chains of sums a vector, which wait less for each other.
        chains = [vectors] + ([[ir.Constant(i32x16.ir, None)] * len(vectors)] if len(vectors) <= SPLIT else [])
        for j in runs:
            offset = ir.Constant(_I64, 64 * j)
            codes = [simd._load(builder, builder.add(u, offset), i32x16.ir) for u in (u0, u1)]
            sums = chains[j % len(chains)]
            for t in range(len(vectors) // 2):
                q = _spread(builder, _at(builder, x, stride, t, 4 * j), _I32)
                for g in range(2):
                    sums[2 * t + g] = dot(builder, sums[2 * t + g], codes[g], q)
        for other in chains[1:]:
            vectors[:] = [builder.add(a, b) for a, b in zip(vectors, other, strict=True)]

    return emit


def _emit_dots_folded(fold: int, runs: range) -> Callable[..., None]:
    """Without VNNI: sums stay in 16 bits for `fold` steps, which spares widening and adding each of them."""

    def emit(builder: Builder, vectors: list[Any], u0: Any, u1: Any, x: Any, stride: Any) -> None:
        for first in runs[::fold]:
            sums = [begin_pairs() for _ in vectors]
            for j in range(first, first + fold):
                offset = ir.Constant(_I64, 64 * j)
                codes = [simd._load(builder, builder.add(u, offset), i32x16.ir) for u in (u0, u1)]
                for t in range(len(vectors) // 2):
                    q = _spread(builder, _at(builder, x, stride, t, 4 * j), _I32)
                    for g in range(2):
                        sums[2 * t + g] = add_pairs(builder, sums[2 * t + g], codes[g], q)
            vectors[:] = [end_pairs(builder, v, total) for v, total in zip(vectors, sums, strict=True)]

    return emit


def _dots_of(fold: int, runs: range) -> Callable[..., None]:
    return _emit_dots(emit_dot4, runs) if simd.VNNI else _emit_dots_folded(fold, runs)


def _emit_scaled(builder: Builder, vectors: list[Any], dots: list[Any], d0: Any, d1: Any, x: Any, stride: Any) -> None:
    for t in range(len(vectors) // 2):
        scale = _spread(builder, _at(builder, x, stride, t), _FLOAT)
        for g, d in enumerate((d0, d1)):
            i = 2 * t + g
            product = builder.fmul(builder.sitofp(dots[i], f32x16.ir), d)
            vectors[i] = simd._math("fma")(builder, product, scale, vectors[i])


def _emit_fma(builder: Builder, vectors: list[Any], v0: Any, v1: Any, x: Any, stride: Any) -> None:
    for t in range(len(vectors) // 2):
        value = _spread(builder, _at(builder, x, stride, t), _FLOAT)
        for g, v in enumerate((v0, v1)):
            vectors[2 * t + g] = simd._math("fma")(builder, v, value, vectors[2 * t + g])


def _emit_load(builder: Builder, vectors: list[Any], out: Any, stride: Any, gap: Any) -> None:
    for i in range(len(vectors)):
        addr = _at(builder, out, stride, i // 2)
        vectors[i] = simd._load(builder, builder.add(addr, gap) if i % 2 else addr, f32x16.ir)


_ROWS = (_ADDRESS, _ADDRESS)
start = _operation("start", _ROWS, _emit_start, "Each token's i32 in all lanes of both groups.")
scaled = _operation(
    "scaled",
    (Tile, f32x16, f32x16, *_ROWS),
    _emit_scaled,
    "fma(f32(dots) * d of the group, token's f32, tile).",
)
fma = _operation("fma", (f32x16, f32x16, *_ROWS), _emit_fma, "fma(vector of the group, token's f32, tile).")
load = _operation("load", (*_ROWS, _ADDRESS), _emit_load, "f32 at out + t * stride + g * gap.")

_CODES = (_ADDRESS, _ADDRESS, *_ROWS)
_BOTH, _FIRST, _SECOND = range(8), range(4), range(4, 8)
dots = _operation(
    "dots",
    _CODES,
    _dots_of(4, _BOTH),
    "Add a block: code vectors at u0, u1 times 32 bytes at x.",
)
dots_u4 = _operation("dots_u4", _CODES, _dots_of(8, _BOTH), "As `dots`, for codes of at most 15.")
dots_u8 = _operation("dots_u8", _CODES, _emit_dots(emit_dot4_u8, _BOTH), "As `dots`, for 8-bit codes.")
dots_first = _operation(
    "dots_first",
    _CODES,
    _dots_of(2, _FIRST),
    "As `dots`, for the first 16 values of the block.",
)
dots_second = _operation(
    "dots_second",
    _CODES,
    _dots_of(2, _SECOND),
    "As `dots`, for the last 16 values of the block.",
)


@intrinsic
def store(typingctx: Any, tile: Any, out: Any, stride: Any, gap: Any) -> Any:
    """Put the tile to out + t * stride + g * gap."""
    if not isinstance(tile, Tile):
        return None

    def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
        for i in range(tile.n):
            addr = _at(builder, values[1], values[2], i // 2)
            simd._store(builder, builder.extract_value(values[0], i), builder.add(addr, values[3]) if i % 2 else addr)
        return context.get_dummy_value()

    return types.void(tile, _ADDRESS, _ADDRESS, _ADDRESS), codegen
