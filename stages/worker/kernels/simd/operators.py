"""Python's operators on vectors: numba compiles `a * b + c` on 16 lanes once this module has been imported."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin

from stages.worker.kernels.simd.vectors import Builder, Vector, f32x16, f64x16, i32x16, mask16

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
