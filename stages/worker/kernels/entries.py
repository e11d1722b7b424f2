"""Entries: jitted functions that are called by address, so that each is compiled apart, once.

A large function (a matrix product, attention, the sampler) is an entry: compiled apart (link_once.py), in parallel with
others, stored as object code (stored_code.py), and called through the word of the parameter block that holds its
address.

    run_entry(address, (a, b, c))       an entry of three int64
    call_entry(address, (a, b, c))      one that returns an int64

`INNER` is for the functions of an entry, `MERGED` for those with one or two callers, into which numba inlines them
before it compiles anything.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from stages.worker.kernels.simd import JIT

INNER = {**JIT, "cache": False}
MERGED = {**JIT, "cache": False, "inline": "always"}


def _caller(result: Any) -> Any:
    def implementation(typingctx: Any, address: Any, args: Any) -> Any:
        if not isinstance(args, types.BaseTuple):
            return None
        signature = (types.int64,) * len(args)

        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            convention = context.call_conv
            kind = convention.get_function_type(result, signature)
            function = builder.inttoptr(values[0], kind.as_pointer())
            arguments = [
                context.cast(builder, builder.extract_value(values[1], i), given, types.int64)
                for i, given in enumerate(sig.args[1])
            ]
            value = convention.call_function(builder, function, result, signature, arguments)[1]
            return context.get_dummy_value() if result is types.none else value

        return result(types.int64, args), codegen

    return intrinsic(implementation)


call_entry = _caller(types.int64)
run_entry = _caller(types.none)
