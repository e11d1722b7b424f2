"""Vector types of 16 lanes for numba, and the factories of operations that emit LLVM IR for them.

Importing this module settles the instruction set (`features.settle`), which numba reads once: import it before numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stages.worker.kernels import features

ISA = features.settle()  # before numba reads its environment

from llvmlite import ir  # noqa: E402
from numba import types  # noqa: E402
from numba.core import cgutils  # noqa: E402
from numba.extending import intrinsic, models, register_model  # noqa: E402

LANES = 16
AMX = ISA in ("amx", "tiles")  # `tiles`: the AMX kernels with emulated tiles
VNNI = AMX or ISA == "vnni"
AVX_VNNI = ISA in ("avx-vnni", "dots")  # `dots`: the kernels of AVX-VNNI with emulated dot products

# One reviewed constant for every jitted function of the project.
JIT = {"nogil": True, "cache": True, "fastmath": False, "error_model": "numpy", "boundscheck": False}

# For small functions that only other jitted functions call; the outer one is what the disk cache keeps.
INLINE = {**JIT, "cache": False, "forceinline": True}

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()


# ------------------------------------------------------------------ types


class Vector(types.Type):
    """16 lanes of one element type."""

    def __init__(self, name: str, element: ir.Type, scalar: types.Type | None) -> None:
        self.element, self.scalar = element, scalar
        self.ir = ir.VectorType(element, LANES)
        super().__init__(name)


class Tile(types.Type):
    """`n` vectors that live in registers: accumulators of a blocked kernel."""

    def __init__(self, vector: Vector, n: int) -> None:
        self.vector, self.n = vector, n
        self.ir = ir.ArrayType(vector.ir, n)
        super().__init__(f"tile({vector.name}, {n})")


f32x16 = Vector("f32x16", FLOAT, types.float32)
i32x16 = Vector("i32x16", I32, types.int32)
f64x16 = Vector("f64x16", DOUBLE, types.float64)
f16x16 = Vector("f16x16", HALF, None)
mask16 = Vector("mask16", I1, None)


class _Plain(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, fe_type.ir)


register_model(Vector)(_Plain)
register_model(Tile)(_Plain)

Builder = Any


# ------------------------------------------------------------------ LLVM values, for those who emit IR


def call(builder: Builder, name: str, result: ir.Type, arguments: list[Any]) -> Any:
    """Call the LLVM intrinsic `name`."""
    function_type = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def splat(builder: Builder, value: Any, lanes: int = LANES) -> Any:
    """A scalar in every lane."""
    vector = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    vector = builder.insert_element(vector, value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), zeros)


def constant(vector: Vector, value: float) -> ir.Constant:
    """One number in every lane."""
    return ir.Constant(vector.ir, [value] * LANES)


def pick(builder: Builder, a: Any, lanes: list[int], b: Any = None) -> Any:
    """Lanes of `a` by number; numbers from the length of `a` on are lanes of `b`."""
    other = ir.Constant(a.type, ir.Undefined) if b is None else b
    return builder.shuffle_vector(a, other, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def pointer(builder: Builder, addr: Any, pointee: ir.Type) -> Any:
    """A pointer to `pointee` of a byte address (i64)."""
    return builder.inttoptr(addr, pointee.as_pointer())


def load(builder: Builder, addr: Any, pointee: ir.Type) -> Any:
    """Load from a byte address, unaligned."""
    return builder.load(pointer(builder, addr, pointee), align=1)


def store(builder: Builder, value: Any, addr: Any) -> None:
    """Store to a byte address, unaligned."""
    builder.store(value, pointer(builder, addr, value.type), align=1)


# ------------------------------------------------------------------ intrinsic factories


def operation(name: str, result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any], doc: str) -> Any:
    """An intrinsic `name` over exactly these argument types (ints are cast to int64, floats as given)."""

    def implementation(typingctx: Any, *args: Any) -> Any:
        if len(args) != len(arguments):
            return None
        for given, expected in zip(args, arguments, strict=True):
            vectors = isinstance(given, Vector | Tile) or isinstance(expected, Vector | Tile)
            if vectors and given is not expected:
                return None

        def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if result is types.void else value

        return result(*arguments), codegen

    return named_intrinsic(name, len(arguments), implementation, doc)


def named_intrinsic(name: str, arity: int, implementation: Callable[..., Any], doc: str) -> Any:
    """`implementation(typingctx, *args)` with the fixed arity that numba reads from a signature."""
    names = ", ".join(["typingctx", *(f"a{i}" for i in range(arity))])
    function = eval(f"lambda {names}: implementation({names})", {"implementation": implementation})
    function.__name__ = function.__qualname__ = name
    function.__doc__, function.__module__ = doc, __name__
    return intrinsic(function)


ADDRESS, INT = types.int64, types.int64  # arguments: a byte address; an integer


@intrinsic
def address(typingctx: Any, array: Any) -> Any:
    """Byte address (int64) of an array's first element."""
    if not isinstance(array, types.Array):
        return None

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.create_struct_proxy(array)(context, builder, args[0]).data, I64)

    return types.int64(array), codegen
