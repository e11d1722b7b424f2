"""Loads and stores by byte address (int64): vectors, scalars, prefetches. All are unaligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from stages.worker.kernels.simd.vectors import (
    ADDRESS,
    DOUBLE,
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    INT,
    LANES,
    Builder,
    Vector,
    call,
    constant,
    f16x16,
    f32x16,
    i32x16,
    load,
    mask16,
    operation,
    pointer,
    splat,
    store,
)


def _loader(vector: Vector, name: str, doc: str) -> Any:
    return operation(name, vector, (ADDRESS,), lambda b, a: load(b, a, vector.ir), doc)


def _storer(vector: Vector, name: str, doc: str) -> Any:
    return operation(name, types.void, (ADDRESS, vector), lambda b, a, v: store(b, v, a), doc)


load_f32 = _loader(f32x16, "load_f32", "16 f32 at an address.")
load_i32 = _loader(i32x16, "load_i32", "16 i32, or 64 bytes, at an address.")
load_f16 = _loader(f16x16, "load_f16", "16 f16 at an address.")
store_f32 = _storer(f32x16, "store_f32", "Store 16 f32 at an address.")
store_i32 = _storer(i32x16, "store_i32", "Store 16 i32, or 64 bytes, at an address.")
store_f16 = _storer(f16x16, "store_f16", "Store 16 f16 at an address.")


def _extending(lane: ir.Type, signed: bool) -> Callable[[Builder, Any], Any]:
    def emit(builder: Builder, addr: Any) -> Any:
        value = load(builder, addr, ir.VectorType(lane, LANES))
        return (builder.sext if signed else builder.zext)(value, i32x16.ir)

    return emit


load_u8 = operation("load_u8", i32x16, (ADDRESS,), _extending(I8, False), "16 u8, widened to i32.")
load_s8 = operation("load_s8", i32x16, (ADDRESS,), _extending(I8, True), "16 s8, widened to i32.")


def _emit_bf16(builder: Builder, addr: Any) -> Any:
    bits = builder.shl(_extending(I16, False)(builder, addr), constant(i32x16, 16))
    return builder.bitcast(bits, f32x16.ir)


def _emit_f16(builder: Builder, addr: Any) -> Any:
    return builder.fpext(load(builder, addr, f16x16.ir), f32x16.ir)


def _emit_store_low(lane: ir.Type) -> Callable[[Builder, Any, Any], None]:
    return lambda builder, addr, value: store(builder, builder.trunc(value, ir.VectorType(lane, LANES)), addr)


load_bf16_as_f32 = operation("load_bf16_as_f32", f32x16, (ADDRESS,), _emit_bf16, "16 bf16, exactly.")
load_f16_as_f32 = operation("load_f16_as_f32", f32x16, (ADDRESS,), _emit_f16, "16 f16, exactly.")
store_low8 = operation(
    "store_low8", types.void, (ADDRESS, i32x16), _emit_store_low(I8), "The low byte of each lane: 16 bytes."
)
store_low16 = operation(
    "store_low16", types.void, (ADDRESS, i32x16), _emit_store_low(I16), "The low 16 bits of each lane: 32 bytes."
)


def _scalar_load(name: str, lane: ir.Type, result: Any, extend: str | None, doc: str) -> Any:
    def emit(builder: Builder, addr: Any) -> Any:
        value = load(builder, addr, lane)
        return getattr(builder, extend)(value, FLOAT if extend == "fpext" else I64) if extend else value

    return operation(name, result, (ADDRESS,), emit, doc)


get_f32 = _scalar_load("get_f32", FLOAT, types.float32, None, "One f32 at an address.")
get_f64 = _scalar_load("get_f64", DOUBLE, types.float64, None, "One f64 at an address.")
get_f16 = _scalar_load("get_f16", HALF, types.float32, "fpext", "One f16 at an address, as f32.")
get_bf16 = operation(
    "get_bf16",
    types.float32,
    (ADDRESS,),
    lambda b, a: b.bitcast(b.shl(b.zext(load(b, a, I16), I32), ir.Constant(I32, 16)), FLOAT),
    "One bf16 at an address, as f32.",
)
get_i32 = _scalar_load("get_i32", I32, types.int64, "sext", "One i32 at an address, as int64.")
get_i64 = _scalar_load("get_i64", I64, types.int64, None, "One i64 at an address.")
get_u16 = _scalar_load("get_u16", I16, types.int64, "zext", "One u16 at an address, as int64.")
get_s8 = _scalar_load("get_s8", I8, types.int64, "sext", "One s8 at an address, as int64.")
get_u8 = _scalar_load("get_u8", I8, types.int64, "zext", "One u8 at an address, as int64.")
put_f32 = operation("put_f32", types.void, (ADDRESS, types.float32), lambda b, a, v: store(b, v, a), "Store one f32.")
put_f64 = operation("put_f64", types.void, (ADDRESS, types.float64), lambda b, a, v: store(b, v, a), "Store one f64.")
put_i32 = operation(
    "put_i32", types.void, (ADDRESS, INT), lambda b, a, v: store(b, b.trunc(v, I32), a), "Store the low 32 bits."
)
put_i64 = operation("put_i64", types.void, (ADDRESS, INT), lambda b, a, v: store(b, v, a), "Store one i64.")
put_16 = operation(
    "put_16", types.void, (ADDRESS, INT), lambda b, a, v: store(b, b.trunc(v, I16), a), "Store the low 16 bits."
)
put_8 = operation(
    "put_8", types.void, (ADDRESS, INT), lambda b, a, v: store(b, b.trunc(v, I8), a), "Store the low 8 bits."
)


def _emit_prefetch(locality: int) -> Callable[[Builder, Any], None]:
    def emit(builder: Builder, addr: Any) -> None:
        flags = [ir.Constant(I32, n) for n in (0, locality, 1)]  # read, into which levels, data
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer(builder, addr, I8), *flags])

    return emit


prefetch = operation("prefetch", types.void, (ADDRESS,), _emit_prefetch(3), "Prefetch a cache line into L1.")
prefetch_l2 = operation("prefetch_l2", types.void, (ADDRESS,), _emit_prefetch(2), "Prefetch a cache line into L2.")


def _emit_first(builder: Builder, count: Any) -> Any:
    numbers = ir.Constant(i32x16.ir, list(range(LANES)))
    return builder.icmp_signed("<", numbers, splat(builder, builder.trunc(count, I32)))


first_lanes = operation("first_lanes", mask16, (INT,), _emit_first, "True in lanes 0 .. count-1.")


def _emit_part_load(builder: Builder, addr: Any, count: Any, otherwise: Any) -> Any:
    arguments = [
        pointer(builder, addr, f32x16.ir),
        ir.Constant(I32, 1),
        _emit_first(builder, count),
        splat(builder, otherwise),
    ]
    return call(builder, "llvm.masked.load.v16f32.p0", f32x16.ir, arguments)


def _emit_part_store(builder: Builder, addr: Any, value: Any, count: Any) -> None:
    arguments = [value, pointer(builder, addr, f32x16.ir), ir.Constant(I32, 1), _emit_first(builder, count)]
    call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments)


load_f32_part = operation(
    "load_f32_part",
    f32x16,
    (ADDRESS, INT, types.float32),
    _emit_part_load,
    "The first `count` f32 at an address; the rest is not touched and reads as the third argument.",
)
store_f32_part = operation(
    "store_f32_part", types.void, (ADDRESS, f32x16, INT), _emit_part_store, "Store the first `count` lanes."
)
