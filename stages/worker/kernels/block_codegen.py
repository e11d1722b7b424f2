"""The code of a format's blocks, generated from its description (formats/description.py): LLVM IR as numba intrinsics.

For a `QuantizedFormat`, `block_operations` gives four operations over addresses (int64) of `.bin` bytes:

    load_head(w) -> tile            the head of a unit: d, -dmin, f32x16 each; zeros where there is none
    add_block(acc, w, head, x)      f32x16: acc + block at w times the activation record at x, by docs/numerics.md
    unpack_block(w, head, to)       the block as the matrix product reads it (below), to address `to`
    row_values(unit, w, lane, out)  the block's 32 values in f32 of one row of the group, to address `out`

An unpacked block: 8 vectors of codes (u8, one a run of 4 K values) | D of each part f32x16 | M of each part f32x16.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from llvmlite import ir
from numba import types

from stages.worker.kernels.buffer_sizes import CODE_BYTES
from stages.worker.kernels.dots import BASE_BITS, emit_dot4, emit_dot4_u8, emit_minus_base, emit_scaled
from stages.worker.kernels.formats import QuantizedFormat
from stages.worker.kernels.formats.description import BLOCK, GROUP, LINE, RUNS, Codes
from stages.worker.kernels.quantize_activations import SCALE, SSUM, START4, START5, START6, START8, ZERO
from stages.worker.kernels.simd import VNNI, Builder, f32x16, i32x16
from stages.worker.kernels.simd.arithmetic import math
from stages.worker.kernels.simd.register_tiles import tile_of
from stages.worker.kernels.simd.vectors import (
    ADDRESS,
    FLOAT,
    HALF,
    I8,
    I32,
    I64,
    INT,
    call,
    load,
    operation,
    pick,
    pointer,
    splat,
    store,
)

AHEAD = 2560  # bytes that prefetches run before loads

# Where a record holds what the integer sum of a part starts at, by the code that stands for 0.
_STARTS = {0: ZERO, 8: START4, 16: START5, 128: START8}
_HALF_STARTS = {0: ZERO, 32: START6}


def start_offset(fmt: QuantizedFormat) -> int:
    """Where a record holds what integer sums start at; with halves, the second is 4 bytes further (but for zero 0)."""
    starts = _HALF_STARTS if fmt.scales.halves else _STARTS
    if fmt.codes.zero not in starts:
        raise ValueError(f"{fmt.name}: zero is {fmt.codes.zero}, activation records have starts for {sorted(starts)}")
    return starts[fmt.codes.zero]


# ------------------------------------------------------------------ reading all rows, or one


class _Rows(Protocol):
    """Loads from a group's interleaved fields: values of the type that the arithmetic is done in."""

    word_type: ir.Type
    float_type: ir.Type

    def word(self, builder: Builder, addr: Any) -> Any:
        """A word of a plane, `word_type`."""

    def f16(self, builder: Builder, addr: Any) -> Any:
        """An f16 as `float_type`."""

    def integer(self, builder: Builder, addr: Any, signed: bool) -> Any:
        """A u8 or s8 as i32."""

    def table(self, builder: Builder, table: tuple[int, ...], codes: Any) -> Any:
        """Entries of a table of 16 bytes, by the codes in a word."""


def _table_constant(table: tuple[int, ...], times: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(I8, 16 * times), [code - 256 if code > 127 else code for code in table] * times)


class _AllRows:
    """16 rows: a lane each."""

    word_type, float_type = i32x16.ir, f32x16.ir

    def word(self, builder: Builder, addr: Any) -> Any:
        return load(builder, addr, i32x16.ir)

    def f16(self, builder: Builder, addr: Any) -> Any:
        return builder.fpext(load(builder, addr, ir.VectorType(HALF, GROUP)), f32x16.ir)

    def integer(self, builder: Builder, addr: Any, signed: bool) -> Any:
        value = load(builder, addr, ir.VectorType(I8, GROUP))
        return (builder.sext if signed else builder.zext)(value, i32x16.ir)

    def table(self, builder: Builder, table: tuple[int, ...], codes: Any) -> Any:
        if VNNI:
            wide = _table_constant(table, 4)
            indices = builder.bitcast(codes, wide.type)
            found = call(builder, "llvm.x86.avx512.pshuf.b.512", wide.type, [wide, indices])
            return builder.bitcast(found, i32x16.ir)
        narrow, halves = _table_constant(table, 2), []
        for first in (0, 8):
            indices = builder.bitcast(pick(builder, codes, list(range(first, first + 8))), narrow.type)
            found = call(builder, "llvm.x86.avx2.pshuf.b", narrow.type, [narrow, indices])
            halves.append(builder.bitcast(found, ir.VectorType(I32, 8)))
        return pick(builder, halves[0], list(range(16)), halves[1])


class _OneRow:
    """The row of lane `lane` (i64): its 4 bytes of a word are the first lane of <4 x i32>."""

    word_type, float_type = ir.VectorType(I32, 4), FLOAT

    def __init__(self, lane: Any) -> None:
        self._lane = lane

    def _load(self, builder: Builder, addr: Any, size: int, pointee: ir.Type) -> Any:
        return load(builder, builder.add(addr, builder.mul(self._lane, ir.Constant(I64, size))), pointee)

    def word(self, builder: Builder, addr: Any) -> Any:
        value = self._load(builder, addr, 4, I32)
        return builder.insert_element(ir.Constant(self.word_type, None), value, ir.Constant(I32, 0))

    def f16(self, builder: Builder, addr: Any) -> Any:
        return builder.fpext(self._load(builder, addr, 2, HALF), FLOAT)

    def integer(self, builder: Builder, addr: Any, signed: bool) -> Any:
        return (builder.sext if signed else builder.zext)(self._load(builder, addr, 1, I8), I32)

    def table(self, builder: Builder, table: tuple[int, ...], codes: Any) -> Any:
        entries = _table_constant(table, 1)
        found = call(
            builder, "llvm.x86.ssse3.pshuf.b.128", entries.type, [entries, builder.bitcast(codes, entries.type)]
        )
        return builder.bitcast(found, self.word_type)


_ALL = _AllRows()


def _offset(builder: Builder, addr: Any, n: int) -> Any:
    return builder.add(addr, ir.Constant(I64, n)) if n else addr


class _CodeReader:
    """The codes of one block, run by run; each word of a plane is loaded at its first use and then kept."""

    def __init__(self, builder: Builder, rows: _Rows, codes: Codes, w: Any) -> None:
        self._builder, self._rows, self._codes, self._w = builder, rows, codes, w
        self._words: dict[int, Any] = {}

    def _word(self, at: int) -> Any:
        if at not in self._words:
            self._words[at] = self._rows.word(self._builder, _offset(self._builder, self._w, at))
        return self._words[at]

    def run(self, s: int) -> Any:
        """Codes k = 4 s .. 4 s + 3 of each row, u8."""
        builder, kind = self._builder, self._rows.word_type
        at, total = 0, None
        for plane in self._codes.planes:
            bits, shift = self._word(at + LINE * plane.word(s)), plane.shift(s)
            if shift:
                move = builder.shl if shift > 0 else builder.lshr
                bits = move(bits, ir.Constant(kind, [abs(shift)] * kind.count))
            if plane.mask != 0xFF:
                bits = builder.and_(bits, ir.Constant(kind, [plane.mask * 0x01010101] * kind.count))
            total = bits if total is None else builder.or_(total, bits)
            at += plane.nbytes
        return self._rows.table(builder, self._codes.table, total) if self._codes.table else total


def _emit_head(builder: Builder, rows: _Rows, fmt: QuantizedFormat, unit: Any) -> list[Any]:
    """d (less the step of codes) and -dmin of a unit."""
    if not fmt.scales.is_sub:
        return []
    head = [rows.f16(builder, unit)]
    if fmt.codes.step != 1:
        head[0] = builder.fmul(head[0], _number(rows.float_type, 1 / fmt.codes.step))
    if fmt.scales.minimum:
        head.append(builder.fneg(rows.f16(builder, _offset(builder, unit, 2 * GROUP))))
    return head


def _number(kind: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _emit_power(builder: Builder, rows: _Rows, e: Any) -> Any:
    """2^(e - 128) of i32 from 0 to 255: the exponent of an f32; 2^-128 and 2^-127 have none of their own."""
    tiny = builder.shl(_number(e.type, 1 << 21), e)
    normal = builder.shl(builder.sub(e, _number(e.type, 1)), _number(e.type, 23))
    is_tiny = builder.icmp_signed("<", e, _number(e.type, 2))
    return builder.bitcast(builder.select(is_tiny, tiny, normal), rows.float_type)


def _emit_scales(builder: Builder, rows: _Rows, fmt: QuantizedFormat, w: Any, head: list[Any]) -> tuple[list[Any], ...]:
    """D of each part of the block at w, and M of each part (none without minimums)."""
    scales, at = fmt.scales, fmt.codes.nbytes
    if scales.sub == "e8m0":
        e = rows.integer(builder, _offset(builder, w, at), False)
        if rows is _ALL:  # for a product, where BASE * D has to be finite (docs/numerics.md)
            largest = _number(e.type, 232)
            e = builder.select(builder.icmp_unsigned("<", e, largest), e, largest)
        return [_emit_power(builder, rows, e)], []
    if not scales.sub:
        f16 = [rows.f16(builder, _offset(builder, w, at + 2 * GROUP * i)) for i in range(1 + scales.minimum)]
        return f16[:1], f16[1:]

    def multiplied(factor: Any, integer: Any) -> Any:
        return builder.fmul(factor, builder.sitofp(integer, rows.float_type))

    signed = scales.sub == "s8"
    fields = scales.nbytes // GROUP
    stored = [rows.integer(builder, _offset(builder, w, at + GROUP * i), signed) for i in range(fields)]
    if scales.sub == "u4":
        kind = stored[0].type
        low, four = _number(kind, 15), _number(kind, 4)
        stored = [builder.and_(v, low) for v in stored] + [builder.lshr(v, four) for v in stored]
    d = [multiplied(head[0], v) for v in stored[: scales.parts]]
    return d, [multiplied(head[1], v) for v in stored[scales.parts :]] if scales.minimum else []


# ------------------------------------------------------------------ the operations


def _splat_at(builder: Builder, x: Any, at: int, lane: ir.Type) -> Any:
    return splat(builder, load(builder, _offset(builder, x, at), lane))


def emit_half_sum(builder: Builder, x: Any, half: int) -> Any:
    """scale * (sum of the codes of half 0 or 1 of the record at x), f32: rounded once, from START6."""
    return _emit_half_sums(builder, x, half, 1, I32, FLOAT)


def emit_half_sums(builder: Builder, x: Any, half: int, tokens: int) -> Any:
    """The same of the packed records of so many tokens (packed_activations.py), a lane each."""
    return _emit_half_sums(builder, x, half, tokens, ir.VectorType(I32, tokens), ir.VectorType(FLOAT, tokens))


def _emit_half_sums(builder: Builder, x: Any, half: int, spacing: int, integer: Any, number: Any) -> Any:
    """`spacing`: times as far from x as in a record its fields are."""
    start = load(builder, _offset(builder, x, spacing * (START6 + 4 * half)), integer)
    total = builder.sitofp(builder.sub(_number(integer, BASE_BITS), start), number)  # 32 * sum
    exact = builder.fmul(total, _number(number, 1 / 32))
    return builder.fmul(load(builder, _offset(builder, x, spacing * SCALE), number), exact)


def _add_block(fmt: QuantizedFormat) -> Any:
    dot = emit_dot4_u8 if fmt.codes.largest > 127 else emit_dot4
    starts = start_offset(fmt)
    runs = RUNS // fmt.scales.parts

    def emit(builder: Builder, acc: Any, w: Any, head: Any, x: Any) -> Any:
        heads = [builder.extract_value(head, i) for i in range(len(head.type))]
        reader = _CodeReader(builder, _ALL, fmt.codes, w)
        d, m = _emit_scales(builder, _ALL, fmt, w, heads)
        scale = _splat_at(builder, x, SCALE, FLOAT)
        for part in range(fmt.scales.parts):
            total = _number(i32x16.ir, BASE_BITS)
            if fmt.codes.zero:
                total = _splat_at(builder, x, starts + 4 * part, I32)
            for s in range(runs * part, runs * (part + 1)):
                total = dot(builder, total, reader.run(s), _splat_at(builder, x, 4 * s, I32))
            product = emit_scaled(builder, total, d[part], emit_minus_base(builder, d[part]))
            acc = math("fma")(builder, product, scale, acc)
            if m:
                if fmt.scales.halves:
                    total = splat(builder, emit_half_sum(builder, x, part))
                else:
                    total = _splat_at(builder, x, SSUM, FLOAT)
                acc = math("fma")(builder, m[part], total, acc)
        return acc

    arguments = (f32x16, ADDRESS, _head_type(fmt), ADDRESS)
    return operation(f"add_block_{fmt.name}", f32x16, arguments, emit, "acc + block times record.")


def _head_type(fmt: QuantizedFormat) -> Any:
    return tile_of(f32x16, max(1, fmt.scales.head_bytes // (2 * GROUP)))


def _load_head(fmt: QuantizedFormat) -> Any:
    kind = _head_type(fmt)

    def emit(builder: Builder, unit: Any) -> Any:
        result = ir.Constant(kind.ir, None)
        for i, value in enumerate(_emit_head(builder, _ALL, fmt, unit)):
            result = builder.insert_value(result, value, i)
        return result

    return operation(f"load_head_{fmt.name}", kind, (ADDRESS,), emit, "d and -dmin of a unit.")


def _unpack_block(fmt: QuantizedFormat) -> Any:
    def emit(builder: Builder, w: Any, head: Any, to: Any) -> None:
        heads = [builder.extract_value(head, i) for i in range(len(head.type))]
        reader = _CodeReader(builder, _ALL, fmt.codes, w)
        for s in range(RUNS):
            store(builder, reader.run(s), _offset(builder, to, LINE * s))
        d, m = _emit_scales(builder, _ALL, fmt, w, heads)
        for i, value in enumerate((*d, *m)):
            store(builder, value, _offset(builder, to, CODE_BYTES + LINE * i))

    arguments = (ADDRESS, _head_type(fmt), ADDRESS)
    return operation(f"unpack_block_{fmt.name}", types.void, arguments, emit, "A block to codes and f32 scales.")


def _row_values(fmt: QuantizedFormat) -> Any:
    integers, floats = ir.VectorType(I32, 4), ir.VectorType(FLOAT, 4)
    runs = RUNS // fmt.scales.parts

    def emit(builder: Builder, unit: Any, w: Any, lane: Any, out: Any) -> None:
        rows = _OneRow(lane)
        reader = _CodeReader(builder, rows, fmt.codes, w)
        d, m = _emit_scales(builder, rows, fmt, w, _emit_head(builder, rows, fmt, unit))
        for s in range(RUNS):
            bytes_ = builder.bitcast(builder.extract_element(reader.run(s), ir.Constant(I32, 0)), ir.VectorType(I8, 4))
            numbers = builder.zext(bytes_, integers)
            if fmt.codes.zero:
                numbers = builder.sub(numbers, _number(integers, fmt.codes.zero))
            part = s // runs
            # The product is exact, so with a minimum there is one rounding; adding +0 would lose a sign.
            values = builder.fmul(splat(builder, d[part], 4), builder.sitofp(numbers, floats))
            if m:
                values = builder.fadd(values, splat(builder, m[part], 4))
            store(builder, values, _offset(builder, out, 16 * s))

    arguments = (ADDRESS, ADDRESS, INT, ADDRESS)
    return operation(f"row_values_{fmt.name}", types.void, arguments, emit, "32 values of one row.")


def _prefetch_block(fmt: QuantizedFormat) -> Any:
    def emit(builder: Builder, w: Any) -> None:
        flags = [ir.Constant(I32, n) for n in (0, 3, 1)]
        for line in range(0, fmt.block_bytes, LINE):
            at = pointer(builder, _offset(builder, w, AHEAD + line), I8)
            call(builder, "llvm.prefetch.p0", ir.VoidType(), [at, *flags])

    return operation(f"prefetch_block_{fmt.name}", types.void, (ADDRESS,), emit, "The block AHEAD bytes after w.")


class BlockOperations(NamedTuple):
    """See the top of the file; `prefetch_block(w)` prefetches the block that lies AHEAD bytes after w."""

    load_head: Any
    add_block: Any
    unpack_block: Any
    row_values: Any
    prefetch_block: Any


def block_operations(fmt: QuantizedFormat) -> BlockOperations:
    """Raises `ValueError` for a zero point that activation records have no start for."""
    return BlockOperations(_load_head(fmt), _add_block(fmt), _unpack_block(fmt), _row_values(fmt), _prefetch_block(fmt))


assert BLOCK == 4 * RUNS
