"""What depends on the format while kernels run: numbers by GGML's type number, and calls of one function per format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from stages.worker.kernels.block_codegen import start_offset
from stages.worker.kernels.buffer_sizes import unpacked_bytes_of
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.formats import BLOCK, BY_ID, Format, QuantizedFormat
from stages.worker.kernels.simd import INLINE
from stages.worker.kernels.simd.vectors import I64, named_intrinsic

# Columns of the table
(
    UNIT,  # K values of a unit
    UNIT_BYTES,  # of 16 rows
    IS_DENSE,  # 1: float weights, f32 activations
    START,  # where a record holds what integer sums start at
    HAS_HALVES,  # 1: two scales a block
    HAS_MINIMUMS,  # 1: D and M, not D alone
    LARGEST,  # the largest code
    UNPACKED,  # bytes of an unpacked block
) = range(8)


def _row(fmt: Format) -> list[int]:
    if not isinstance(fmt, QuantizedFormat):
        return [fmt.unit, fmt.unit_bytes, 1, 0, 0, 0, 0, 0]
    scales = fmt.scales
    if scales.minimum == (fmt.codes.zero != 0) and (scales.minimum or scales.halves):
        raise ValueError(f"{fmt.name}: amx.py needs zero 0 with minimums, another one with halves alone")
    numbers = [start_offset(fmt), scales.halves, scales.minimum, fmt.codes.largest, unpacked_bytes_of(fmt)]
    return [fmt.unit, fmt.unit_bytes, 0, *map(int, numbers)]


_TABLE = np.zeros((1 + max(BY_ID), 8), np.int64)
for _id, _format in BY_ID.items():
    _TABLE[_id] = _row(_format)


@njit(**INLINE)
def trait(kind, column):
    """A number of the format of GGML's type `kind`."""
    return _TABLE[np.uint64(kind), np.uint64(column)]


@njit(**INNER)
def unit_blocks(kind):
    """Blocks of a unit of a quantized format."""
    return trait(kind, UNIT) // BLOCK


@njit(**INNER)
def group_bytes(kind, columns):
    """Bytes of a row group of `columns` values."""
    return columns * trait(kind, UNIT_BYTES) // trait(kind, UNIT)


def by_format(functions: Mapping[int, Any], arguments: int) -> Any:
    """An operation (kind, *arguments) -> None that calls the jitted function of GGML's type `kind`.

    All take `arguments` int64 and return nothing.  A kind without a function does nothing: ingest admits none.
    """
    signature = (types.int64,) * arguments

    def implementation(typingctx: Any, kind: Any, *args: Any) -> Any:
        callees = []
        for number, function in functions.items():
            callee = typingctx.resolve_value_type(function)
            callees.append((number, callee, callee.get_call_type(typingctx, signature, {})))

        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            end = builder.append_basic_block("end")
            switch = builder.switch(values[0], end)
            for number, callee, callee_signature in callees:
                block = builder.append_basic_block(f"format{number}")
                switch.add_case(ir.Constant(I64, number), block)
                builder.position_at_end(block)
                context.get_function(callee, callee_signature)(builder, values[1:])
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(types.int64, *signature), codegen

    return named_intrinsic("by_format", 1 + arguments, implementation, "One function per format.")
