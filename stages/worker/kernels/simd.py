"""The vector vocabulary of the kernels: numba types for 16 lanes, and operations that emit LLVM IR.

A kernel written on it reads like its arithmetic.  Nothing here allocates, checks bounds or touches
Python; everything works under `nogil` and is inlined.  512-bit values are legalised to two 256-bit
halves where the CPU (or `STARLING_ISA=portable`) has no more; the bytes are the same.

Types       f32x16, i32x16 (also 64 bytes: u8 or s8, four to a lane), f16x16, f64x16, mask16;
            `tile(vector, n)` is a register tile of n vectors
Operators   + - * / & | ^ << >> (logical on i32) < <= > >= == on equal types; unary - and ~
Memory      by byte address (`address(array) + offset`, int64); loads and stores are unaligned
Float       IEEE 754 round-half-even, no fast-math, no contraction (docs/numerics.md)

The caller keeps the array behind an `address` alive for the length of the kernel.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable
from typing import Any

from stages.worker.kernels import features

ISA = features.settle()  # before numba reads its environment

from llvmlite import ir  # noqa: E402
from numba import types  # noqa: E402
from numba.core import cgutils  # noqa: E402
from numba.core.typing.templates import AbstractTemplate, infer_global, signature  # noqa: E402
from numba.extending import intrinsic, lower_builtin, models, register_model  # noqa: E402

LANES = 16
AMX = ISA in ("amx", "tiles")  # `tiles`: the AMX kernels with their tile products done by VNNI
VNNI = AMX or ISA == "vnni"

# One reviewed constant for every jitted function of the project.
JIT = {"nogil": True, "cache": True, "fastmath": False, "error_model": "numpy", "boundscheck": False}

# For small functions that only other jitted functions call; the outer one is what the disk cache keeps.
INLINE = {**JIT, "cache": False, "forceinline": True}

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_HALF, _FLOAT, _DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()


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


f32x16 = Vector("f32x16", _FLOAT, types.float32)
i32x16 = Vector("i32x16", _I32, types.int32)
f64x16 = Vector("f64x16", _DOUBLE, types.float64)
f16x16 = Vector("f16x16", _HALF, None)
mask16 = Vector("mask16", _I1, None)


class _Plain(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, fe_type.ir)


register_model(Vector)(_Plain)
register_model(Tile)(_Plain)

Builder = Any


def _call(builder: Builder, name: str, result: ir.Type, arguments: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def _splat(builder: Builder, value: Any, lanes: int = LANES) -> Any:
    vector = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    vector = builder.insert_element(vector, value, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), zeros)


def _constant(vector: Vector, value: float) -> ir.Constant:
    return ir.Constant(vector.ir, [value] * LANES)


def _pick(builder: Builder, a: Any, lanes: list[int], b: Any = None) -> Any:
    other = ir.Constant(a.type, ir.Undefined) if b is None else b
    return builder.shuffle_vector(a, other, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _at(builder: Builder, addr: Any, pointee: ir.Type) -> Any:
    return builder.inttoptr(addr, pointee.as_pointer())


def _load(builder: Builder, addr: Any, pointee: ir.Type) -> Any:
    return builder.load(_at(builder, addr, pointee), align=1)


def _store(builder: Builder, value: Any, addr: Any) -> None:
    builder.store(value, _at(builder, addr, value.type), align=1)


# ------------------------------------------------------------------ operators

_FLOATS, _INTS = (f32x16, f64x16), (i32x16,)
_FLOAT_OPS = {
    operator.add: "fadd",
    operator.sub: "fsub",
    operator.mul: "fmul",
    operator.truediv: "fdiv",
}
_INT_OPS = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.and_: "and_",
    operator.or_: "or_",
    operator.xor: "xor",
    operator.lshift: "shl",
    operator.rshift: "lshr",
}
_MASK_OPS = {operator.and_: "and_", operator.or_: "or_", operator.xor: "xor"}
_INPLACE = {
    operator.add: operator.iadd,
    operator.sub: operator.isub,
    operator.mul: operator.imul,
    operator.and_: operator.iand,
    operator.or_: operator.ior,
    operator.xor: operator.ixor,
}
_COMPARE = {
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
}
_TABLE: dict[Any, dict[str, tuple[Vector, Callable[[Builder, Any, Any], Any]]]] = {}


def _enter(op: Any, vector: Vector, result: Vector, emit: Callable[[Builder, Any, Any], Any]) -> None:
    _TABLE.setdefault(op, {})[vector.name] = (result, emit)


def _method(name: str) -> Callable[[Builder, Any, Any], Any]:
    return lambda builder, a, b: getattr(builder, name)(a, b)


def _comparison(kind: str, sign: str) -> Callable[[Builder, Any, Any], Any]:
    return lambda builder, a, b: getattr(builder, kind)(sign, a, b)


for _vectors, _ops in ((_FLOATS, _FLOAT_OPS), (_INTS, _INT_OPS), ((mask16,), _MASK_OPS)):
    for _op, _name in _ops.items():
        for _vector in _vectors:
            _enter(_op, _vector, _vector, _method(_name))
            if _op in _INPLACE:
                _enter(_INPLACE[_op], _vector, _vector, _method(_name))
for _op, _sign in _COMPARE.items():
    for _vector in _FLOATS:
        _enter(_op, _vector, mask16, _comparison("fcmp_ordered", _sign))
    _enter(_op, i32x16, mask16, _comparison("icmp_signed", _sign))


def _register_binary(op: Any, cases: dict[str, tuple[Vector, Callable[[Builder, Any, Any], Any]]]) -> None:
    class Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and args[0] is args[1] and isinstance(args[0], Vector) and args[0].name in cases:
                return signature(cases[args[0].name][0], *args)
            return None

    infer_global(op)(Template)

    def lower(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        return cases[sig.args[0].name][1](builder, *args)

    lower_builtin(op, Vector, Vector)(lower)


def _register_unary(op: Any, vectors: tuple[Vector, ...], emit: Callable[[Builder, Any], Any]) -> None:
    class Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            return signature(args[0], *args) if len(args) == 1 and args[0] in vectors else None

    infer_global(op)(Template)

    def lower(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        return emit(builder, args[0])

    lower_builtin(op, Vector)(lower)


for _op, _cases in _TABLE.items():
    _register_binary(_op, _cases)
_register_unary(operator.neg, (f32x16, f64x16), lambda builder, a: builder.fneg(a))
_register_unary(operator.invert, (i32x16, mask16), lambda builder, a: builder.not_(a))


# ------------------------------------------------------------------ intrinsic factories


def _operation(name: str, result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any], doc: str) -> Any:
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

    return _named_intrinsic(name, len(arguments), implementation, doc)


def _named_intrinsic(name: str, arity: int, implementation: Callable[..., Any], doc: str) -> Any:
    """`implementation(typingctx, *args)` with the fixed arity that numba reads from a signature."""
    names = ", ".join(["typingctx", *(f"a{i}" for i in range(arity))])
    function = eval(f"lambda {names}: implementation({names})", {"implementation": implementation})
    function.__name__ = function.__qualname__ = name
    function.__doc__, function.__module__ = doc, __name__
    return intrinsic(function)


_ADDRESS, _INT = types.int64, types.int64


@intrinsic
def address(typingctx: Any, array: Any) -> Any:
    """Byte address (int64) of an array's first element."""
    if not isinstance(array, types.Array):
        return None

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.create_struct_proxy(array)(context, builder, args[0]).data, _I64)

    return types.int64(array), codegen


# ------------------------------------------------------------------ memory


def _loader(vector: Vector, name: str, doc: str) -> Any:
    return _operation(name, vector, (_ADDRESS,), lambda b, a: _load(b, a, vector.ir), doc)


def _storer(vector: Vector, name: str, doc: str) -> Any:
    return _operation(name, types.void, (_ADDRESS, vector), lambda b, a, v: _store(b, v, a), doc)


load_f32 = _loader(f32x16, "load_f32", "16 f32 at an address.")
load_i32 = _loader(i32x16, "load_i32", "16 i32, or 64 bytes, at an address.")
load_f16 = _loader(f16x16, "load_f16", "16 f16 at an address.")
store_f32 = _storer(f32x16, "store_f32", "Put 16 f32 at an address.")
store_i32 = _storer(i32x16, "store_i32", "Put 16 i32, or 64 bytes, at an address.")
store_f16 = _storer(f16x16, "store_f16", "Put 16 f16 at an address.")


def _extending(lane: ir.Type, signed: bool) -> Callable[[Builder, Any], Any]:
    def emit(builder: Builder, addr: Any) -> Any:
        value = _load(builder, addr, ir.VectorType(lane, LANES))
        return (builder.sext if signed else builder.zext)(value, i32x16.ir)

    return emit


load_u8 = _operation("load_u8", i32x16, (_ADDRESS,), _extending(_I8, False), "16 u8, widened to i32.")
load_s8 = _operation("load_s8", i32x16, (_ADDRESS,), _extending(_I8, True), "16 s8, widened to i32.")


def _emit_bf16(builder: Builder, addr: Any) -> Any:
    bits = builder.shl(_extending(_I16, False)(builder, addr), _constant(i32x16, 16))
    return builder.bitcast(bits, f32x16.ir)


def _emit_f16(builder: Builder, addr: Any) -> Any:
    return builder.fpext(_load(builder, addr, f16x16.ir), f32x16.ir)


def _emit_store_low(lane: ir.Type) -> Callable[[Builder, Any, Any], None]:
    return lambda builder, addr, value: _store(builder, builder.trunc(value, ir.VectorType(lane, LANES)), addr)


load_bf16_as_f32 = _operation("load_bf16_as_f32", f32x16, (_ADDRESS,), _emit_bf16, "16 bf16, exactly.")
load_f16_as_f32 = _operation("load_f16_as_f32", f32x16, (_ADDRESS,), _emit_f16, "16 f16, exactly.")
store_low8 = _operation(
    "store_low8", types.void, (_ADDRESS, i32x16), _emit_store_low(_I8), "The low byte of each lane: 16 bytes."
)


def _scalar_load(name: str, lane: ir.Type, result: Any, extend: str | None, doc: str) -> Any:
    def emit(builder: Builder, addr: Any) -> Any:
        value = _load(builder, addr, lane)
        return getattr(builder, extend)(value, _FLOAT if extend == "fpext" else _I64) if extend else value

    return _operation(name, result, (_ADDRESS,), emit, doc)


get_f32 = _scalar_load("get_f32", _FLOAT, types.float32, None, "One f32 at an address.")
get_f64 = _scalar_load("get_f64", _DOUBLE, types.float64, None, "One f64 at an address.")
get_f16 = _scalar_load("get_f16", _HALF, types.float32, "fpext", "One f16 at an address, as f32.")
float_of_bits = _operation(
    "float_of_bits",
    types.float32,
    (_INT,),
    lambda b, v: b.bitcast(b.trunc(v, _I32), _FLOAT),
    "f32 of 32 bits.",
)
get_i32 = _scalar_load("get_i32", _I32, types.int64, "sext", "One i32 at an address, as int64.")
get_i64 = _scalar_load("get_i64", _I64, types.int64, None, "One i64 at an address.")
get_u16 = _scalar_load("get_u16", _I16, types.int64, "zext", "One u16 at an address, as int64.")
get_s8 = _scalar_load("get_s8", _I8, types.int64, "sext", "One s8 at an address, as int64.")
get_u8 = _scalar_load("get_u8", _I8, types.int64, "zext", "One u8 at an address, as int64.")
put_f32 = _operation("put_f32", types.void, (_ADDRESS, types.float32), lambda b, a, v: _store(b, v, a), "Put one f32.")
put_i32 = _operation(
    "put_i32", types.void, (_ADDRESS, _INT), lambda b, a, v: _store(b, b.trunc(v, _I32), a), "Put one i32."
)
put_i64 = _operation("put_i64", types.void, (_ADDRESS, _INT), lambda b, a, v: _store(b, v, a), "Put one i64.")
put_16 = _operation(
    "put_16", types.void, (_ADDRESS, _INT), lambda b, a, v: _store(b, b.trunc(v, _I16), a), "Put 16 bits."
)
put_8 = _operation("put_8", types.void, (_ADDRESS, _INT), lambda b, a, v: _store(b, b.trunc(v, _I8), a), "Put 8 bits.")


def _emit_prefetch(builder: Builder, addr: Any) -> None:
    flags = [ir.Constant(_I32, n) for n in (0, 3, 1)]  # read, into all levels, data
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [_at(builder, addr, _I8), *flags])


prefetch = _operation("prefetch", types.void, (_ADDRESS,), _emit_prefetch, "Ask for a line into L1.")


# ------------------------------------------------------------------ making and converting

splat_f32 = _operation("splat_f32", f32x16, (types.float32,), _splat, "A scalar f32 in every lane.")
splat_f64 = _operation("splat_f64", f64x16, (types.float64,), _splat, "A scalar f64 in every lane.")
splat_i32 = _operation(
    "splat_i32", i32x16, (_INT,), lambda b, v: _splat(b, b.trunc(v, _I32)), "The low 32 bits in every lane."
)
splat_f32_at = _operation(
    "splat_f32_at",
    f32x16,
    (_ADDRESS,),
    lambda b, a: _splat(b, _load(b, a, _FLOAT)),
    "One f32 in memory, 16 times.",
)
splat_i32_at = _operation(
    "splat_i32_at",
    i32x16,
    (_ADDRESS,),
    lambda b, a: _splat(b, _load(b, a, _I32)),
    "4 bytes in memory, 16 times.",
)
to_f32 = _operation("to_f32", f32x16, (i32x16,), lambda b, v: b.sitofp(v, f32x16.ir), "i32 to f32, rounded.")
to_i32 = _operation(
    "to_i32",
    i32x16,
    (f32x16,),
    lambda b, v: b.fptosi(v, i32x16.ir),
    "f32 to i32, truncated; must be in range.",
)
half_to_f32 = _operation("half_to_f32", f32x16, (f16x16,), lambda b, v: b.fpext(v, f32x16.ir), "Exact.")
f32_to_half = _operation(
    "f32_to_half",
    f16x16,
    (f32x16,),
    lambda b, v: b.fptrunc(v, f16x16.ir),
    "Half to even; overflow is infinite.",
)
f32_to_f64 = _operation("f32_to_f64", f64x16, (f32x16,), lambda b, v: b.fpext(v, f64x16.ir), "Exact.")
bits_of = _operation("bits_of", i32x16, (f32x16,), lambda b, v: b.bitcast(v, i32x16.ir), "The bits of f32.")
from_bits = _operation("from_bits", f32x16, (i32x16,), lambda b, v: b.bitcast(v, f32x16.ir), "f32 of bits.")


# ------------------------------------------------------------------ arithmetic


def _math(name: str) -> Callable[..., Any]:
    """An LLVM intrinsic over f32x16; all arguments are vectors."""
    return lambda builder, *values: _call(builder, f"llvm.{name}.v16f32", f32x16.ir, list(values))


def _emit_extreme(sign: str) -> Callable[[Builder, Any, Any], Any]:
    return lambda builder, a, b: builder.select(builder.fcmp_ordered(sign, a, b), a, b)


fma = _operation("fma", f32x16, (f32x16,) * 3, _math("fma"), "a * b + c, rounded once.")
sqrt = _operation("sqrt", f32x16, (f32x16,), _math("sqrt"), "Correctly rounded.")
round_even = _operation("round_even", f32x16, (f32x16,), _math("roundeven"), "Nearest integer, half to even.")
absolute = _operation("absolute", f32x16, (f32x16,), _math("fabs"), "|a|.")
# One instruction each: the second operand is the result where either is NaN, and for zeros of two signs.
minimum = _operation("minimum", f32x16, (f32x16,) * 2, _emit_extreme("<"), "a < b ? a : b.")
maximum = _operation("maximum", f32x16, (f32x16,) * 2, _emit_extreme(">"), "a > b ? a : b.")
select = _operation(
    "select", f32x16, (mask16, f32x16, f32x16), lambda b, m, x, y: b.select(m, x, y), "x where m, else y."
)
select_i32 = _operation(
    "select_i32", i32x16, (mask16, i32x16, i32x16), lambda b, m, x, y: b.select(m, x, y), "x where m, else y."
)


def _emit_first(builder: Builder, count: Any) -> Any:
    numbers = ir.Constant(i32x16.ir, list(range(LANES)))
    return builder.icmp_signed("<", numbers, _splat(builder, builder.trunc(count, _I32)))


def _emit_bits(builder: Builder, mask: Any) -> Any:
    return builder.zext(builder.bitcast(mask, _I16), _I64)


first_lanes = _operation("first_lanes", mask16, (_INT,), _emit_first, "True in lanes 0 .. count-1.")
lanes_set = _operation("lanes_set", types.int64, (mask16,), _emit_bits, "Bit l is lane l of the mask.")


def _emit_part_load(builder: Builder, addr: Any, count: Any, otherwise: Any) -> Any:
    arguments = [
        _at(builder, addr, f32x16.ir),
        ir.Constant(_I32, 1),
        _emit_first(builder, count),
        _splat(builder, otherwise),
    ]
    return _call(builder, "llvm.masked.load.v16f32.p0", f32x16.ir, arguments)


def _emit_part_store(builder: Builder, addr: Any, value: Any, count: Any) -> None:
    arguments = [value, _at(builder, addr, f32x16.ir), ir.Constant(_I32, 1), _emit_first(builder, count)]
    _call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments)


load_f32_part = _operation(
    "load_f32_part",
    f32x16,
    (_ADDRESS, _INT, types.float32),
    _emit_part_load,
    "The first `count` f32 at an address; the rest is not touched and reads as the third argument.",
)
store_f32_part = _operation(
    "store_f32_part", types.void, (_ADDRESS, f32x16, _INT), _emit_part_store, "Put the first `count` lanes."
)


def _reduction(combine: Callable[[Builder, Any, Any], Any]) -> Callable[[Builder, Any], Any]:
    def emit(builder: Builder, value: Any) -> Any:
        width = LANES
        while width > 1:
            width //= 2
            low, high = list(range(width)), list(range(width, 2 * width))
            value = combine(builder, _pick(builder, value, low), _pick(builder, value, high))
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return emit


# Halves are combined: lanes 0-7 with 8-15, then 0-3 with 4-7, 0-1 with 2-3, 0 with 1.
reduce_add = _operation(
    "reduce_add",
    types.float32,
    (f32x16,),
    _reduction(lambda b, x, y: b.fadd(x, y)),
    "Sum of the lanes, by halves.",
)
reduce_add_f64 = _operation(
    "reduce_add_f64",
    types.float64,
    (f64x16,),
    _reduction(lambda b, x, y: b.fadd(x, y)),
    "Sum of the lanes, by halves.",
)
reduce_max = _operation(
    "reduce_max", types.float32, (f32x16,), _reduction(_emit_extreme(">")), "The largest lane (none is NaN)."
)
reduce_add_i32 = _operation(
    "reduce_add_i32",
    types.int64,
    (i32x16,),
    lambda b, v: b.sext(_reduction(lambda b, x, y: b.add(x, y))(b, v), _I64),
    "Sum of the lanes, modulo 2^32.",
)


# ------------------------------------------------------------------ exponential

_LOG2E = float.fromhex("0x1.715476p+0")  # f32 nearest to 1 / ln 2
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP_LOW, _EXP_HIGH = -87.3, 88.7
_EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_ROUNDER = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, half to even, and shows its bits


def _f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def _emit_exp(builder: Builder, x: Any) -> Any:
    def constant(value: float) -> ir.Constant:
        return _constant(f32x16, _f32(value))

    low, high, rounder = constant(_EXP_LOW), constant(_EXP_HIGH), constant(_ROUNDER)
    fused = _math("fma")
    y = _emit_extreme("<")(builder, high, _emit_extreme(">")(builder, low, x))  # NaN stays NaN
    shifted = builder.fadd(builder.fmul(y, constant(_LOG2E)), rounder)
    k = builder.sub(builder.bitcast(shifted, i32x16.ir), builder.bitcast(rounder, i32x16.ir))
    minus_k = builder.fneg(builder.fsub(shifted, rounder))
    r = fused(builder, minus_k, constant(_LN2_HIGH), y)
    r = fused(builder, minus_k, constant(_LN2_LOW), r)
    p = constant(_EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = fused(builder, p, r, constant(coefficient))
    result = builder.fadd(fused(builder, p, builder.fmul(r, r), r), constant(1.0))
    half_k = builder.ashr(k, _constant(i32x16, 1))
    for part in (half_k, builder.sub(k, half_k)):
        bits = builder.shl(builder.add(part, _constant(i32x16, 127)), _constant(i32x16, 23))
        result = builder.fmul(result, builder.bitcast(bits, f32x16.ir))
    return builder.select(builder.fcmp_ordered("<", x, low), _constant(f32x16, 0.0), result)


exp = _operation("exp", f32x16, (f32x16,), _emit_exp, "e^x as docs/numerics.md defines it; 0 below -87.3.")


# ------------------------------------------------------------------ register tiles


@functools.cache
def tile_type(vector: Vector, n: int) -> Tile:
    return Tile(vector, n)


def _literals(*values: Any) -> bool:
    return all(isinstance(v, types.IntegerLiteral) for v in values)


def _zeros(name: str, vector: Vector) -> Any:
    def implementation(typingctx: Any, n: Any) -> Any:
        if not _literals(n):
            return None
        kind = tile_type(vector, n.literal_value)
        return kind(n), lambda context, builder, sig, args: ir.Constant(kind.ir, None)

    implementation.__name__ = name
    implementation.__doc__ = f"n (a literal) vectors {vector.name} of zeros."
    return intrinsic(prefer_literal=True)(implementation)


f32_tile = _zeros("f32_tile", f32x16)
i32_tile = _zeros("i32_tile", i32x16)


@intrinsic(prefer_literal=True)
def tile_put(typingctx: Any, tile: Any, i: Any, value: Any) -> Any:
    """The tile with vector i (a literal) replaced."""
    if not (isinstance(tile, Tile) and _literals(i) and value is tile.vector):
        return None
    index = i.literal_value
    return tile(tile, i, value), lambda context, builder, sig, args: builder.insert_value(args[0], args[2], index)


def _row(builder: Builder, base: Any, stride: Any, i: int) -> Any:
    return builder.add(base, builder.mul(stride, ir.Constant(_I64, i)))


@intrinsic
def tile_load(typingctx: Any, tile: Any, addr: Any, stride: Any) -> Any:
    """A tile of the same size with vector i from addr + i * stride."""
    if not isinstance(tile, Tile):
        return None

    def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
        result = values[0]
        for i in range(tile.n):
            vector = _load(builder, _row(builder, values[1], values[2], i), tile.vector.ir)
            result = builder.insert_value(result, vector, i)
        return result

    return tile(tile, _ADDRESS, _INT), codegen


@intrinsic
def tile_store(typingctx: Any, tile: Any, addr: Any, stride: Any) -> Any:
    """Put vector i to addr + i * stride."""
    if not isinstance(tile, Tile):
        return None

    def codegen(context: Any, builder: Builder, sig: Any, values: Any) -> Any:
        for i in range(tile.n):
            _store(builder, builder.extract_value(values[0], i), _row(builder, values[1], values[2], i))
        return context.get_dummy_value()

    return types.void(tile, _ADDRESS, _INT), codegen
