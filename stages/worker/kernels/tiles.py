"""Register tiles of n tokens x 2 row groups (32 rows): the inner operations of a batch's matrix product.

A tile has 2n vectors; vector 2t + g belongs to token t and row group g.  Tokens are `stride` bytes apart at address
`x`.  A token's 4 bytes (or f32) are read once and broadcast for both groups, so that a block costs n + 2 loads for 2n
dot products.  Each operation is completely unrolled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from stages.worker.kernels.block_codegen import emit_half_sum
from stages.worker.kernels.dots import (
    ONE_INSTRUCTION,
    add_pairs,
    begin_pairs,
    emit_dot4,
    emit_dot4_u8,
    emit_minus_base,
    emit_scaled,
    end_pairs,
)
from stages.worker.kernels.simd import AVX_VNNI, Builder, Tile, f32x16, i32x16
from stages.worker.kernels.simd.arithmetic import math
from stages.worker.kernels.simd.register_tiles import strided, tile_operation
from stages.worker.kernels.simd.vectors import ADDRESS, FLOAT, I32, I64, load, splat

# Vectors of a tile up to which sums go in two chains. With AVX-VNNI the registers hold no second sums beside the first.
SPLIT = 0 if AVX_VNNI else 8


def spread(builder: Builder, addr: Any, lane: ir.Type) -> Any:
    """The value of type `lane` at an address, in all 16 lanes."""
    return splat(builder, load(builder, addr, lane))


def _emit_start(builder: Builder, vectors: list[Any], x: Any, stride: Any) -> None:
    for t in range(len(vectors) // 2):
        vectors[2 * t] = vectors[2 * t + 1] = spread(builder, strided(builder, x, stride, t), I32)


def _emit_dots(dot: Callable[..., Any], runs: range) -> Callable[..., None]:
    def emit(builder: Builder, vectors: list[Any], u0: Any, u1: Any, x: Any, stride: Any) -> None:
        # Small tiles have registers for two chains of sums a vector, which wait less for each other.
        chains = [vectors] + ([[ir.Constant(i32x16.ir, None)] * len(vectors)] if len(vectors) <= SPLIT else [])
        for j in runs:
            offset = ir.Constant(I64, 64 * j)
            codes = [load(builder, builder.add(u, offset), i32x16.ir) for u in (u0, u1)]
            sums = chains[j % len(chains)]
            for t in range(len(vectors) // 2):
                q = spread(builder, strided(builder, x, stride, t, 4 * j), I32)
                for g in range(2):
                    sums[2 * t + g] = dot(builder, sums[2 * t + g], codes[g], q)
        for other in chains[1:]:
            vectors[:] = [builder.add(a, b) for a, b in zip(vectors, other, strict=True)]

    return emit


def _emit_dots_folded(fold: int, runs: range) -> Callable[..., None]:
    """By pairs: sums stay in 16 bits for `fold` steps, which spares widening and adding each of them."""

    def emit(builder: Builder, vectors: list[Any], u0: Any, u1: Any, x: Any, stride: Any) -> None:
        for first in runs[::fold]:
            sums = [begin_pairs() for _ in vectors]
            for j in range(first, first + fold):
                offset = ir.Constant(I64, 64 * j)
                codes = [load(builder, builder.add(u, offset), i32x16.ir) for u in (u0, u1)]
                for t in range(len(vectors) // 2):
                    q = spread(builder, strided(builder, x, stride, t, 4 * j), I32)
                    for g in range(2):
                        sums[2 * t + g] = add_pairs(builder, sums[2 * t + g], codes[g], q)
            vectors[:] = [end_pairs(builder, v, total) for v, total in zip(vectors, sums, strict=True)]

    return emit


def _dots_of(fold: int, runs: range) -> Callable[..., None]:
    return _emit_dots(emit_dot4, runs) if ONE_INSTRUCTION else _emit_dots_folded(fold, runs)


def _emit_scaled(builder: Builder, vectors: list[Any], dots: list[Any], d0: Any, d1: Any, x: Any, stride: Any) -> None:
    factors = [(d, emit_minus_base(builder, d)) for d in (d0, d1)]
    for t in range(len(vectors) // 2):
        scale = spread(builder, strided(builder, x, stride, t), FLOAT)
        for i, (d, minus_base) in enumerate(factors, 2 * t):
            product = emit_scaled(builder, dots[i], d, minus_base)
            vectors[i] = math("fma")(builder, product, scale, vectors[i])


def _emit_fma(builder: Builder, vectors: list[Any], v0: Any, v1: Any, x: Any, stride: Any) -> None:
    for t in range(len(vectors) // 2):
        value = spread(builder, strided(builder, x, stride, t), FLOAT)
        for g, v in enumerate((v0, v1)):
            vectors[2 * t + g] = math("fma")(builder, v, value, vectors[2 * t + g])


def _emit_fma_half_sum(half: int) -> Callable[..., None]:
    def emit(builder: Builder, vectors: list[Any], m0: Any, m1: Any, x: Any, stride: Any) -> None:
        for t in range(len(vectors) // 2):
            total = splat(builder, emit_half_sum(builder, strided(builder, x, stride, t), half))
            for g, m in enumerate((m0, m1)):
                vectors[2 * t + g] = math("fma")(builder, m, total, vectors[2 * t + g])

    return emit


_ROWS = (ADDRESS, ADDRESS)
start = tile_operation("start", _ROWS, _emit_start, "Each token's i32 in all lanes of both groups.")
scaled = tile_operation(
    "scaled",
    (Tile, f32x16, f32x16, *_ROWS),
    _emit_scaled,
    "fma(sum * d of the group, token's f32, tile), for dots that started at BASE_BITS.",
)
fma = tile_operation("fma", (f32x16, f32x16, *_ROWS), _emit_fma, "fma(vector of the group, token's f32, tile).")

_HALF = (f32x16, f32x16, *_ROWS)
fma_first_sum = tile_operation(
    "fma_first_sum",
    _HALF,
    _emit_fma_half_sum(0),
    "fma(vector of the group, scaled sum of the first half, tile).",
)
fma_second_sum = tile_operation(
    "fma_second_sum", _HALF, _emit_fma_half_sum(1), "As `fma_first_sum`, of the second half."
)

_CODES = (ADDRESS, ADDRESS, *_ROWS)
_BOTH, _FIRST, _SECOND = range(8), range(4), range(4, 8)
dots = tile_operation(
    "dots",
    _CODES,
    _dots_of(4, _BOTH),
    "Add a block: code vectors at u0, u1 times 32 bytes at x.",
)
dots_u4 = tile_operation("dots_u4", _CODES, _dots_of(8, _BOTH), "As `dots`, for codes of at most 15.")
dots_u8 = tile_operation("dots_u8", _CODES, _emit_dots(emit_dot4_u8, _BOTH), "As `dots`, for 8-bit codes.")
dots_first = tile_operation(
    "dots_first",
    _CODES,
    _dots_of(2, _FIRST),
    "As `dots`, for the first 16 values of the block.",
)
dots_second = tile_operation(
    "dots_second",
    _CODES,
    _dots_of(2, _SECOND),
    "As `dots`, for the last 16 values of the block.",
)
