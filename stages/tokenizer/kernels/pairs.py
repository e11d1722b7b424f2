"""A table of pairs of numbers (`pipeline/models/key_table.py`), read by jitted functions. Nothing is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from stages.tokenizer.kernels.compiled import MIX, MIX_2

OPTIONS = {"nogil": True, "fastmath": False, "error_model": "numpy", "boundscheck": False}
INLINE = {**OPTIONS, "forceinline": True}
_U64 = np.uint64


def _pointer(kind: Any) -> Any:
    """A function from an address to a pointer to numbers of a kind."""

    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.int64), codegen

    return pointer


i32, i64, u64 = _pointer(types.int32), _pointer(types.int64), _pointer(types.uint64)
f32, f64 = _pointer(types.float32), _pointer(types.float64)


@njit(**INLINE)
def find(left, right, keys, slots, n_slots, seed):
    """The entry of a pair, -1: none."""
    if left < 0 or right < 0 or n_slots == 0:
        return -1
    key = _U64(left) << _U64(32) | _U64(right)
    mixed = (key ^ _U64(seed)) * _U64(MIX)
    mixed = (mixed ^ (mixed >> _U64(32))) * _U64(MIX_2)
    entry = slots[np.int64((mixed >> _U64(32)) * _U64(n_slots) >> _U64(32))]
    if entry >= 0 and keys[entry] == key:
        return np.int64(entry)
    mixed = mixed * _U64(MIX)
    entry = slots[np.int64((mixed >> _U64(32)) * _U64(n_slots) >> _U64(32))]
    if entry >= 0 and keys[entry] == key:
        return np.int64(entry)
    return -1
