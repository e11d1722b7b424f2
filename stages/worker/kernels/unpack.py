"""A chunk of a row group unpacked into scratch, so that many tokens can be multiplied with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numba import njit

from stages.worker.kernels.block_codegen import AHEAD, block_operations
from stages.worker.kernels.buffer_sizes import unpacked_bytes_of
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.format_traits import by_format
from stages.worker.kernels.formats import DENSE, QUANTIZED, DenseFormat, QuantizedFormat
from stages.worker.kernels.gemv import LOAD_ELEMENT
from stages.worker.kernels.simd import prefetch, store_f32


def _quantized(fmt: QuantizedFormat) -> Any:
    load_head, _, unpack_block, _, prefetch_block = block_operations(fmt)
    unit_bytes, unit_blocks, unpacked = fmt.unit_bytes, fmt.blocks, unpacked_bytes_of(fmt)
    head_bytes, block_bytes = fmt.scales.head_bytes, fmt.block_bytes

    @njit(**INNER)
    def unpack(group, block, blocks, to):
        at = group + block // unit_blocks * unit_bytes
        for _ in range(blocks // unit_blocks):
            head = load_head(at)
            at += head_bytes
            for _ in range(unit_blocks):
                prefetch_block(at)
                unpack_block(at, head, to)
                at, to = at + block_bytes, to + unpacked

    return unpack


def block_unpacker(fmt: QuantizedFormat, options: Mapping[str, Any]) -> Any:
    """A function (units, block, to): unpack block number `block` of the units at `units` to its place behind `to`.

    For one block at a time, between other work: it reads the head of the block's unit each time.  `options`: of numba.
    """
    load_head, _, unpack_block, _, prefetch_block = block_operations(fmt)
    unit_bytes, unit_blocks, unpacked = fmt.unit_bytes, fmt.blocks, unpacked_bytes_of(fmt)
    head_bytes, block_bytes = fmt.scales.head_bytes, fmt.block_bytes
    shift = unit_blocks.bit_length() - 1
    if unit_blocks != 1 << shift:
        raise ValueError(f"{fmt.name}: a unit has {unit_blocks} blocks, expected a power of two")

    @njit(**options)
    def unpack_one(units, block, to):
        unit = units + (block >> shift) * unit_bytes
        at = unit + head_bytes + (block & (unit_blocks - 1)) * block_bytes
        prefetch_block(at)
        unpack_block(at, load_head(unit), to + block * unpacked)

    return unpack_one


def _dense(fmt: DenseFormat) -> Any:
    load, size = LOAD_ELEMENT[fmt.element], fmt.unit_bytes

    @njit(**INNER)
    def unpack(group, k, n, to):
        at = group + k * size
        for _ in range(n):
            prefetch(at + AHEAD)
            store_f32(to, load(at))
            at, to = at + size, to + 64

    return unpack


# (kind, group, block, blocks, to): blocks block .. block + blocks - 1 of the row group at `group` (of formats of
# super-blocks whole units; of dense formats K values) to the unpacked blocks of block_codegen.py (16 f32 a K value)
unpack = by_format({fmt.id: _quantized(fmt) for fmt in QUANTIZED} | {fmt.id: _dense(fmt) for fmt in DENSE}, 4)
