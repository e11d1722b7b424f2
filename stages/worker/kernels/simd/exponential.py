"""The exponential of docs/numerics.md on 16 lanes."""

from __future__ import annotations

import struct
from typing import Any

from llvmlite import ir

from stages.worker.kernels.simd.arithmetic import extreme, math
from stages.worker.kernels.simd.vectors import (
    Builder,
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


def _emit_exp(builder: Builder, x: Any) -> Any:
    def rounded(value: float) -> ir.Constant:
        return constant(f32x16, _f32(value))

    low, high, rounder = rounded(_EXP_LOW), rounded(_EXP_HIGH), rounded(_ROUNDER)
    fused = math("fma")
    y = extreme("<")(builder, high, extreme(">")(builder, low, x))  # NaN stays NaN
    shifted = builder.fadd(builder.fmul(y, rounded(_LOG2E)), rounder)
    k = builder.sub(builder.bitcast(shifted, i32x16.ir), builder.bitcast(rounder, i32x16.ir))
    minus_k = builder.fneg(builder.fsub(shifted, rounder))
    r = fused(builder, minus_k, rounded(_LN2_HIGH), y)
    r = fused(builder, minus_k, rounded(_LN2_LOW), r)
    p = rounded(_EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = fused(builder, p, r, rounded(coefficient))
    result = builder.fadd(fused(builder, p, builder.fmul(r, r), r), rounded(1.0))
    half_k = builder.ashr(k, constant(i32x16, 1))
    for part in (half_k, builder.sub(k, half_k)):
        bits = builder.shl(builder.add(part, constant(i32x16, 127)), constant(i32x16, 23))
        result = builder.fmul(result, builder.bitcast(bits, f32x16.ir))
    return builder.select(builder.fcmp_ordered("<", x, low), constant(f32x16, 0.0), result)


exp = operation("exp", f32x16, (f32x16,), _emit_exp, "e^x as docs/numerics.md defines it; 0 below -87.3.")
