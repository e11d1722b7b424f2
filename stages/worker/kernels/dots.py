"""The integer dot product of bytes: four products to a lane, added to i32; exact on every CPU.

Codes are unsigned (weights), values signed (activations, -127 .. 127).  With VNNI and with AVX-VNNI this is one
instruction, `vpdpbusd` (Intel SDM volume 2), of 512 bits or of 256.  Without it, `vpmaddubsw` adds two products in 16
bits, which saturates for codes above 127: codes of 8 bits (value + 128) are therefore multiplied as signed values.
`STARLING_ISA=dots` emulates the instruction of 256 bits, for tests on a CPU without it.

A sum starts at BASE_BITS, the bits of the f32 BASE = 1.5 * 2^23, plus the start of its format: as long as it is below
2^22 (the largest is 32 * 128 * 127), its bits are then the f32 `BASE + sum`, and one fma converts and scales it
(docs/numerics.md).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from stages.worker.kernels.simd import AVX_VNNI, ISA, VNNI, Builder, f32x16, i32x16
from stages.worker.kernels.simd.arithmetic import math
from stages.worker.kernels.simd.vectors import call, constant, operation, pick

BASE_BITS, BASE = 0x4B400000, 12582912.0
ONE_INSTRUCTION = VNNI or AVX_VNNI  # a dot product is one

_BYTES, _WORDS, _LONGS = (ir.VectorType(ir.IntType(bits), n) for bits, n in ((8, 32), (16, 16), (32, 8)))


def _vnni(builder: Builder, acc: Any, codes: Any, values: Any) -> Any:
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", i32x16.ir, [acc, codes, values])


def _emulated(builder: Builder, acc: Any, codes: Any, values: Any) -> Any:
    """What `vpdpbusd` of 256 bits gives."""
    bytes_, products = ir.VectorType(ir.IntType(8), 32), ir.VectorType(ir.IntType(32), 32)
    unsigned, signed = (builder.bitcast(operand, bytes_) for operand in (codes, values))
    found = builder.mul(builder.zext(unsigned, products), builder.sext(signed, products))
    for i in range(4):
        acc = builder.add(acc, pick(builder, found, list(range(i, 32, 4))))
    return acc


def _avx_vnni(builder: Builder, acc: Any, codes: Any, values: Any) -> Any:
    sums = []
    for first in (0, 8):
        operands = [pick(builder, operand, list(range(first, first + 8))) for operand in (acc, codes, values)]
        if ISA == "dots":
            sums.append(_emulated(builder, *operands))
        else:
            sums.append(call(builder, "llvm.x86.avx512.vpdpbusd.256", _LONGS, operands))
    return pick(builder, sums[0], list(range(16)), sums[1])


def _halves(builder: Builder, value: Any) -> list[Any]:
    """The 32 low and the 32 high bytes."""
    return [builder.bitcast(pick(builder, value, list(range(n, n + 8))), _BYTES) for n in (0, 8)]


def _sum_of_pairs(builder: Builder, codes: Any, values: Any) -> Any:
    """Eight sums of four products u8 x s8, where no two products exceed 16 bits."""
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", _WORDS, [codes, values])
    return call(builder, "llvm.x86.avx2.pmadd.wd", _LONGS, [pairs, ir.Constant(_WORDS, [1] * 16)])


def _joined(builder: Builder, acc: Any, sums: list[Any]) -> Any:
    return builder.add(acc, pick(builder, sums[0], list(range(16)), sums[1]))


def begin_pairs() -> list[Any]:
    """Zero sums for `add_pairs`."""
    return [ir.Constant(_WORDS, None)] * 2


def add_pairs(builder: Builder, sums: list[Any], codes: Any, values: Any) -> list[Any]:
    """Add products in pairs to 16-bit sums: 8 times for codes of at most 15, 4 for 31, twice for 63.

    8 * 2 * 15 * 127 = 30480, 4 * 2 * 31 * 127 = 31496 and 2 * 2 * 63 * 127 = 32004 fit.
    """
    halves = zip(sums, _halves(builder, codes), _halves(builder, values), strict=True)
    return [builder.add(total, call(builder, "llvm.x86.avx2.pmadd.ub.sw", _WORDS, [c, v])) for total, c, v in halves]


def end_pairs(builder: Builder, acc: Any, sums: list[Any]) -> Any:
    """The i32 sums of 16-bit pairs, added to `acc`."""
    ones = ir.Constant(_WORDS, [1] * 16)
    return _joined(builder, acc, [call(builder, "llvm.x86.avx2.pmadd.wd", _LONGS, [s, ones]) for s in sums])


def _narrow(builder: Builder, acc: Any, codes: Any, values: Any) -> Any:
    """Codes of at most 127: a pair is at most 2 * 127 * 127."""
    halves = zip(_halves(builder, codes), _halves(builder, values), strict=True)
    return _joined(builder, acc, [_sum_of_pairs(builder, c, v) for c, v in halves])


def _signed(builder: Builder, acc: Any, codes: Any, values: Any) -> Any:
    """Codes less 128, by |w| * (sign of w * v): a pair is at most 2 * 128 * 127."""
    sums = []
    for code, value in zip(_halves(builder, codes), _halves(builder, values), strict=True):
        w = builder.xor(code, ir.Constant(_BYTES, [-128] * 32))
        no_poison = ir.Constant(ir.IntType(1), 0)
        size = call(builder, "llvm.abs.v32i8", _BYTES, [w, no_poison])
        sums.append(_sum_of_pairs(builder, size, call(builder, "llvm.x86.avx2.psign.b", _BYTES, [value, w])))
    return _joined(builder, acc, sums)


def emit_minus_base(builder: Builder, d: Any) -> Any:
    """-BASE * d, for `emit_scaled`."""
    return builder.fmul(d, constant(f32x16, -BASE))


def emit_scaled(builder: Builder, bits: Any, d: Any, minus_base: Any) -> Any:
    """f32(sum) * d, rounded once, of a sum that started at BASE_BITS."""
    return math("fma")(builder, builder.bitcast(bits, f32x16.ir), d, minus_base)


# Emitters for unrolled code. With `STARTS_BIASED`, sums of 8-bit codes start at -128 times the sum of the values;
# without it they start at 0 and the dot product subtracts the bias.
STARTS_BIASED = ONE_INSTRUCTION
_one = _vnni if VNNI else _avx_vnni
emit_dot4 = _one if ONE_INSTRUCTION else _narrow
emit_dot4_u8 = _one if ONE_INSTRUCTION else _signed

_TYPES = (i32x16, i32x16, i32x16)
dot4 = operation("dot4", i32x16, _TYPES, emit_dot4, "acc + 4 products of codes (second, up to 127) and values.")
dot4_u8 = operation(
    "dot4_u8", i32x16, _TYPES, emit_dot4_u8, "As `dot4` for 8-bit codes, with the bias as `STARTS_BIASED` says."
)
