"""Making and converting vectors, arithmetic, masks, reductions: IEEE 754 round-half-even, nothing contracted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from stages.worker.kernels.simd.vectors import (
    ADDRESS,
    FLOAT,
    I1,
    I16,
    I32,
    I64,
    INT,
    LANES,
    Builder,
    call,
    f16x16,
    f32x16,
    f64x16,
    i32x16,
    load,
    mask16,
    operation,
    pick,
    splat,
)

splat_f32 = operation("splat_f32", f32x16, (types.float32,), splat, "A scalar f32 in every lane.")
splat_f64 = operation("splat_f64", f64x16, (types.float64,), splat, "A scalar f64 in every lane.")
splat_i32 = operation(
    "splat_i32", i32x16, (INT,), lambda b, v: splat(b, b.trunc(v, I32)), "The low 32 bits in every lane."
)
splat_f32_at = operation(
    "splat_f32_at",
    f32x16,
    (ADDRESS,),
    lambda b, a: splat(b, load(b, a, FLOAT)),
    "One f32 in memory, 16 times.",
)
splat_i32_at = operation(
    "splat_i32_at",
    i32x16,
    (ADDRESS,),
    lambda b, a: splat(b, load(b, a, I32)),
    "4 bytes in memory, 16 times.",
)
to_f32 = operation("to_f32", f32x16, (i32x16,), lambda b, v: b.sitofp(v, f32x16.ir), "i32 to f32, rounded.")
to_i32 = operation(
    "to_i32",
    i32x16,
    (f32x16,),
    lambda b, v: b.fptosi(v, i32x16.ir),
    "f32 to i32, truncated; must be in range.",
)
half_to_f32 = operation("half_to_f32", f32x16, (f16x16,), lambda b, v: b.fpext(v, f32x16.ir), "Exact.")
f32_to_half = operation(
    "f32_to_half",
    f16x16,
    (f32x16,),
    lambda b, v: b.fptrunc(v, f16x16.ir),
    "Half to even; overflow is infinite.",
)
f32_to_f64 = operation("f32_to_f64", f64x16, (f32x16,), lambda b, v: b.fpext(v, f64x16.ir), "Exact.")
bits_of = operation("bits_of", i32x16, (f32x16,), lambda b, v: b.bitcast(v, i32x16.ir), "The bits of f32.")
from_bits = operation("from_bits", f32x16, (i32x16,), lambda b, v: b.bitcast(v, f32x16.ir), "f32 of bits.")


# ------------------------------------------------------------------ arithmetic


def math(name: str) -> Callable[..., Any]:
    """An LLVM intrinsic over f32x16; all arguments are vectors."""
    return lambda builder, *values: call(builder, f"llvm.{name}.v16f32", f32x16.ir, list(values))


def extreme(sign: str) -> Callable[[Builder, Any, Any], Any]:
    """Emits `a < b ? a : b` ("<") or `a > b ? a : b` (">")."""
    return lambda builder, a, b: builder.select(builder.fcmp_ordered(sign, a, b), a, b)


fma = operation("fma", f32x16, (f32x16,) * 3, math("fma"), "a * b + c, rounded once.")
sqrt = operation("sqrt", f32x16, (f32x16,), math("sqrt"), "Correctly rounded.")
round_even = operation("round_even", f32x16, (f32x16,), math("roundeven"), "Nearest integer, half to even.")
absolute = operation("absolute", f32x16, (f32x16,), math("fabs"), "|a|.")
# One instruction each: the second operand is the result where either is NaN, and for zeros of two signs.
minimum = operation("minimum", f32x16, (f32x16,) * 2, extreme("<"), "a < b ? a : b.")
maximum = operation("maximum", f32x16, (f32x16,) * 2, extreme(">"), "a > b ? a : b.")
select = operation(
    "select", f32x16, (mask16, f32x16, f32x16), lambda b, m, x, y: b.select(m, x, y), "x where m, else y."
)
select_i32 = operation(
    "select_i32", i32x16, (mask16, i32x16, i32x16), lambda b, m, x, y: b.select(m, x, y), "x where m, else y."
)


def _emit_bits(builder: Builder, mask: Any) -> Any:
    return builder.zext(builder.bitcast(mask, I16), I64)


lanes_set = operation("lanes_set", types.int64, (mask16,), _emit_bits, "Bit l is lane l of the mask.")
lowest_bit = operation(
    "lowest_bit",
    types.int64,
    (INT,),
    lambda b, v: call(b, "llvm.cttz.i64", I64, [v, ir.Constant(I1, 0)]),
    "The place of the lowest bit that is set; 64 if none is.",
)


def _reduction(combine: Callable[[Builder, Any, Any], Any]) -> Callable[[Builder, Any], Any]:
    def emit(builder: Builder, value: Any) -> Any:
        width = LANES
        while width > 1:
            width //= 2
            low, high = list(range(width)), list(range(width, 2 * width))
            value = combine(builder, pick(builder, value, low), pick(builder, value, high))
        return builder.extract_element(value, ir.Constant(I32, 0))

    return emit


# Halves are combined: lanes 0-7 with 8-15, then 0-3 with 4-7, 0-1 with 2-3, 0 with 1.
reduce_add = operation(
    "reduce_add",
    types.float32,
    (f32x16,),
    _reduction(lambda b, x, y: b.fadd(x, y)),
    "Sum of the lanes, by halves.",
)
reduce_add_f64 = operation(
    "reduce_add_f64",
    types.float64,
    (f64x16,),
    _reduction(lambda b, x, y: b.fadd(x, y)),
    "Sum of the lanes, by halves.",
)
reduce_max = operation(
    "reduce_max", types.float32, (f32x16,), _reduction(extreme(">")), "The largest lane (none is NaN)."
)
reduce_add_i32 = operation(
    "reduce_add_i32",
    types.int64,
    (i32x16,),
    lambda b, v: b.sext(_reduction(lambda b, x, y: b.add(x, y))(b, v), I64),
    "Sum of the lanes, modulo 2^32.",
)
