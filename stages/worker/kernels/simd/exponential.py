"""The exponential of docs/numerics.md on 16 lanes."""

from __future__ import annotations

import struct
from typing import Any

from llvmlite import ir

from stages.worker.kernels.simd.arithmetic import extreme, math
from stages.worker.kernels.simd.register_tiles import tile_operation
from stages.worker.kernels.simd.vectors import (
    I16,
    I32,
    VNNI,
    Builder,
    call,
    constant,
    f32x16,
    i32x16,
    operation,
)

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


def _rounded(value: float) -> ir.Constant:
    """The f32 nearest to a number, in every lane."""
    return constant(f32x16, _f32(value))


def _emit_exp(builder: Builder, x: Any) -> Any:
    low, high, rounder = _rounded(_EXP_LOW), _rounded(_EXP_HIGH), _rounded(_ROUNDER)
    fused = math("fma")
    y = extreme("<")(builder, high, extreme(">")(builder, low, x))  # NaN stays NaN
    shifted = builder.fadd(builder.fmul(y, _rounded(_LOG2E)), rounder)
    k = builder.sub(builder.bitcast(shifted, i32x16.ir), builder.bitcast(rounder, i32x16.ir))
    minus_k = builder.fneg(builder.fsub(shifted, rounder))
    r = fused(builder, minus_k, _rounded(_LN2_HIGH), y)
    r = fused(builder, minus_k, _rounded(_LN2_LOW), r)
    p = _rounded(_EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = fused(builder, p, r, _rounded(coefficient))
    result = builder.fadd(fused(builder, p, builder.fmul(r, r), r), _rounded(1.0))
    half_k = builder.ashr(k, constant(i32x16, 1))
    for part in (half_k, builder.sub(k, half_k)):
        bits = builder.shl(builder.add(part, constant(i32x16, 127)), constant(i32x16, 23))
        result = builder.fmul(result, builder.bitcast(bits, f32x16.ir))
    return builder.select(builder.fcmp_ordered("<", x, low), constant(f32x16, 0.0), result)


exp = operation("exp", f32x16, (f32x16,), _emit_exp, "e^x as docs/numerics.md defines it; 0 below -87.3.")


def _emit_power(builder: Builder, result: Any, shifted: Any, k: Any, x: Any) -> Any:
    """result * 2^k, or 0 where x is below the least argument; `shifted` is k + `_ROUNDER`."""
    low, zero = _rounded(_EXP_LOW), constant(f32x16, 0.0)
    if VNNI:
        kept = builder.bitcast(builder.fcmp_unordered(">=", x, low), I16)
        return call(
            builder,
            "llvm.x86.avx512.mask.scalef.ps.512",
            f32x16.ir,
            [result, k, zero, kept, ir.Constant(I32, 4)],  # 4: rounds as the processor is set to
        )
    # The low 9 bits of `_ROUNDER` are 0, so that the shift leaves k.
    bits = builder.shl(builder.bitcast(shifted, i32x16.ir), constant(i32x16, 23))
    power = builder.bitcast(builder.add(bits, constant(i32x16, 127 << 23)), f32x16.ir)
    return builder.select(builder.fcmp_ordered("<", x, low), zero, builder.fmul(result, power))


def _emit_exp_tile(builder: Builder, vectors: list[Any]) -> None:
    """The same operations as in `_emit_exp`, but for those that change nothing of what is not above 0.

    2^k is at least 2^-126 there, a normal number: one product rounds as two exact halves do.  Every operation is
    written for all vectors before the next one, so that they overlap: each has a latency of 4 cycles, and a processor
    looks ahead no further than to the next vector or two.
    """
    fused, rounder = math("fma"), _rounded(_ROUNDER)
    shifted = [builder.fmul(x, _rounded(_LOG2E)) for x in vectors]
    shifted = [builder.fadd(s, rounder) for s in shifted]
    k = [builder.fsub(s, rounder) for s in shifted]
    minus_k = [builder.fneg(one) for one in k]
    r = [fused(builder, m, _rounded(_LN2_HIGH), x) for m, x in zip(minus_k, vectors, strict=True)]
    r = [fused(builder, m, _rounded(_LN2_LOW), one) for m, one in zip(minus_k, r, strict=True)]
    p = [fused(builder, _rounded(_EXP_POLYNOMIAL[0]), one, _rounded(_EXP_POLYNOMIAL[1])) for one in r]
    for coefficient in _EXP_POLYNOMIAL[2:]:
        p = [fused(builder, q, one, _rounded(coefficient)) for q, one in zip(p, r, strict=True)]
    squares = [builder.fmul(one, one) for one in r]
    p = [fused(builder, q, square, one) for q, square, one in zip(p, squares, r, strict=True)]
    p = [builder.fadd(q, _rounded(1.0)) for q in p]
    vectors[:] = [_emit_power(builder, *values) for values in zip(p, shifted, k, vectors, strict=True)]


tile_exp = tile_operation("tile_exp", (), _emit_exp_tile, "`exp` of every vector of a tile whose lanes are at most 0.")
