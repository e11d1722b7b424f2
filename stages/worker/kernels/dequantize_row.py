"""The values of one row of a matrix: the embedding of a token."""

from __future__ import annotations

from typing import Any

from numba import njit

from stages.worker.kernels.block_codegen import block_operations
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.format_traits import by_format, group_bytes
from stages.worker.kernels.formats import DENSE, GROUP, QUANTIZED, DenseFormat, QuantizedFormat
from stages.worker.kernels.simd import JIT, get_bf16, get_f16, get_f32, put_f32

_GET_ELEMENT = {"f32": get_f32, "f16": get_f16, "bf16": get_bf16}


def _quantized(fmt: QuantizedFormat) -> Any:
    row_values = block_operations(fmt).row_values
    unit, unit_bytes, blocks = fmt.unit, fmt.unit_bytes, fmt.blocks
    head_bytes, block_bytes = fmt.scales.head_bytes, fmt.block_bytes

    @njit(**INNER)
    def dequantize(group, lane, columns, out):
        for at in range(group, group + columns // unit * unit_bytes, unit_bytes):
            for b in range(blocks):
                row_values(at, at + head_bytes + b * block_bytes, lane, out)
                out += 128

    return dequantize


def _dense(fmt: DenseFormat) -> Any:
    get, size = _GET_ELEMENT[fmt.element], fmt.source_bytes

    @njit(**INNER)
    def dequantize(group, lane, columns, out):
        for k in range(columns):
            put_f32(out + 4 * k, get(group + size * (GROUP * k + lane)))

    return dequantize


_dequantize = by_format({fmt.id: _quantized(fmt) for fmt in QUANTIZED} | {fmt.id: _dense(fmt) for fmt in DENSE}, 4)


@njit(**JIT)
def dequantize_row(kind, w, columns, row, out):
    """Entry: row `row` of the matrix at `w` (GGML type `kind`, rows of `columns`) to f32 at address `out`.

    The values are exactly those of the GGUF's reference dequantization.
    """
    _dequantize(kind, w + row // GROUP * group_bytes(kind, columns), row % GROUP, columns, out)


ENTRY_ARGUMENTS = 5
