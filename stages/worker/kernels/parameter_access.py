"""Reads words of the parameter block (parameter_block.py) in jitted code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def param(typingctx: Any, block: Any, i: Any) -> Any:
    """Word i (int64) of a parameter block, a layer's row or an entry's plan at an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, 8)))
        return builder.load(builder.inttoptr(at, args[1].type.as_pointer()))

    return types.int64(types.int64, types.int64), codegen
