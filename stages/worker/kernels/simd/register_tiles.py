"""Register tiles: n vectors that LLVM keeps in registers, the accumulators of a blocked kernel."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stages.worker.kernels.simd.vectors import (
    ADDRESS,
    I64,
    INT,
    Builder,
    Tile,
    Vector,
    f32x16,
    i32x16,
    load,
    named_intrinsic,
    store,
)


@functools.cache
def tile_of(vector: Vector, n: int) -> Tile:
    """The type of a tile of n vectors."""
    return Tile(vector, n)


def _literals(*values: Any) -> bool:
    return all(isinstance(v, types.IntegerLiteral) for v in values)


def _zeros(name: str, vector: Vector) -> Any:
    def implementation(typingctx: Any, n: Any) -> Any:
        if not _literals(n):
            return None
        kind = tile_of(vector, n.literal_value)
        return kind(n), lambda context, builder, sig, args: ir.Constant(kind.ir, None)

    implementation.__name__ = name
    implementation.__doc__ = f"n (a literal) vectors {vector.name} of zeros."
    return intrinsic(prefer_literal=True)(implementation)


f32_tile = _zeros("f32_tile", f32x16)
i32_tile = _zeros("i32_tile", i32x16)


@intrinsic(prefer_literal=True)
def tile_put(typingctx: Any, tile: Any, i: Any, value: Any) -> Any:
    """The tile with vector i (a literal) replaced."""
    if not (isinstance(tile, Tile) and _literals(i) and value is tile.vector):
        return None
    index = i.literal_value
    return tile(tile, i, value), lambda context, builder, sig, args: builder.insert_value(args[0], args[2], index)


@intrinsic(prefer_literal=True)
def tile_get(typingctx: Any, tile: Any, i: Any) -> Any:
    """Vector i (a literal) of a tile."""
    if not (isinstance(tile, Tile) and _literals(i)):
        return None
    index = i.literal_value
    return tile.vector(tile, i), lambda context, builder, sig, args: builder.extract_value(args[0], index)


def strided(builder: Builder, base: Any, stride: Any, n: int, offset: int = 0) -> Any:
    """The address base + n * stride + offset."""
    moved = builder.add(base, builder.mul(stride, ir.Constant(I64, n)))
    return builder.add(moved, ir.Constant(I64, offset)) if offset else moved


def _place(builder: Builder, values: Any, columns: int, i: int) -> Any:
    """Address of vector i; `values` are (tile, addr, row_stride, column_stride, columns)."""
    row = strided(builder, values[1], values[2], i // columns)
    return strided(builder, row, values[3], i % columns) if i % columns else row


@intrinsic(prefer_literal=True)
def tile_load(typingctx: Any, tile: Any, addr: Any, row_stride: Any, column_stride: Any, columns: Any) -> Any:
    """A tile of the same size: vector m * columns + n from addr + m * row_stride + n * column_stride (bytes).

    `columns` is a literal: how many vectors make a row of the tile.
    """
    if not (isinstance(tile, Tile) and _literals(columns)):
        return None

    def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
        result = ir.Constant(tile.ir, ir.Undefined)
        for i in range(tile.n):
            vector = load(builder, _place(builder, values, columns.literal_value, i), tile.vector.ir)
            result = builder.insert_value(result, vector, i)
        return result

    return tile(tile, ADDRESS, INT, INT, columns), codegen


@intrinsic(prefer_literal=True)
def tile_store(typingctx: Any, tile: Any, addr: Any, row_stride: Any, column_stride: Any, columns: Any) -> Any:
    """Store vector m * columns + n of a tile to addr + m * row_stride + n * column_stride; see `tile_load`."""
    if not (isinstance(tile, Tile) and _literals(columns)):
        return None

    def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
        for i in range(tile.n):
            vector = builder.extract_value(values[0], i)
            store(builder, vector, _place(builder, values, columns.literal_value, i))
        return context.get_dummy_value()

    return types.void(tile, ADDRESS, INT, INT, columns), codegen


def tile_operation(name: str, arguments: tuple[Any, ...], emit: Any, doc: str) -> Any:
    """An intrinsic `name(tile, *arguments) -> tile`; `emit(builder, vectors, *values)` changes the list `vectors`.

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

    return named_intrinsic(name, 1 + len(arguments), implementation, doc)


def fold(name: str, combine: Any, doc: str) -> Any:
    """An intrinsic `name(tile, start) -> vector`: `combine(builder, vector, so far)` of one vector after the other."""

    def implementation(typingctx: Any, tile: Any, start: Any) -> Any:
        if not (isinstance(tile, Tile) and start is tile.vector):
            return None

        def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
            so_far = values[1]
            for i in range(tile.n):
                so_far = combine(builder, builder.extract_value(values[0], i), so_far)
            return so_far

        return tile.vector(tile, start), codegen

    return named_intrinsic(name, 2, implementation, doc)
