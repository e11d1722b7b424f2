"""One token times a matrix: weights go from memory through registers, a row group at a time."""

from __future__ import annotations

from typing import Any

from numba import njit

from stages.worker.kernels.block_codegen import AHEAD, block_operations
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.format_traits import by_format
from stages.worker.kernels.formats import DENSE, QUANTIZED, DenseFormat, QuantizedFormat
from stages.worker.kernels.quantize_activations import RECORD
from stages.worker.kernels.simd import (
    f32_tile,
    fma,
    load_bf16_as_f32,
    load_f16_as_f32,
    load_f32,
    prefetch,
    splat_f32_at,
    store_f32,
    tile_get,
)

LOAD_ELEMENT = {"f32": load_f32, "f16": load_f16_as_f32, "bf16": load_bf16_as_f32}


def _quantized(fmt: QuantizedFormat) -> Any:
    load_head, add_block, _, _, prefetch_block = block_operations(fmt)
    unit, unit_bytes, blocks = fmt.unit, fmt.unit_bytes, fmt.blocks
    head_bytes, block_bytes = fmt.scales.head_bytes, fmt.block_bytes

    @njit(**INNER)
    def gemv(w, columns, first, end, x, out):
        units = columns // unit
        for g in range(first, end):
            at, record = w + g * units * unit_bytes, x
            acc = tile_get(f32_tile(1), 0)
            for _ in range(units):
                head = load_head(at)
                at += head_bytes
                for _ in range(blocks):
                    prefetch_block(at)
                    acc = add_block(acc, at, head, record)
                    at, record = at + block_bytes, record + RECORD
            store_f32(out + 64 * g, acc)

    return gemv


def _dense(fmt: DenseFormat) -> Any:
    """Two row groups at a time: one chain of fmas alone would wait for itself."""
    load, size = LOAD_ELEMENT[fmt.element], fmt.unit_bytes

    @njit(**INNER)
    def gemv(w, columns, first, end, x, out):
        for g in range(first, end, 2):
            u = w + g * columns * size
            v = u + columns * size if g + 1 < end else u
            low = high = tile_get(f32_tile(1), 0)
            for k in range(columns):
                prefetch(u + AHEAD)
                prefetch(v + AHEAD)
                value = splat_f32_at(x + 4 * k)
                low, high = fma(load(u), value, low), fma(load(v), value, high)
                u, v = u + size, v + size
            store_f32(out + 64 * g, low)
            if g + 1 < end:
                store_f32(out + 64 * g + 64, high)

    return gemv


# (kind, w, columns, first, end, x, out): see matmul.py
gemv = by_format({fmt.id: _quantized(fmt) for fmt in QUANTIZED} | {fmt.id: _dense(fmt) for fmt in DENSE}, 6)
