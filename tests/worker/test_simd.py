"""The vector operations against NumPy and the exact reference's arithmetic."""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.worker.kernels import simd
from stages.worker.kernels.dots import STARTS_BIASED, dot4, dot4_u8
from stages.worker.kernels.simd import (
    absolute,
    address,
    exp,
    f32_tile,
    f32_to_half,
    fma,
    get_f32,
    half_to_f32,
    load_f16,
    load_f32,
    load_f32_part,
    load_i32,
    put_f32,
    reduce_add,
    reduce_max,
    round_even,
    splat_i32,
    sqrt,
    store_f16,
    store_f32,
    store_f32_part,
    store_i32,
    store_low8,
    tile_exp,
    tile_load,
    tile_store,
    to_i32,
)
from tools.reference import arithmetic
from tools.reference.fma import fma as exact_fma

JIT = {**simd.JIT, "cache": False}


@njit(**JIT)
def unary(x, y, n):
    """exp, sqrt of |x|, rounding and a trip through half, of n rows of 16."""
    a, o = address(x), address(y)
    for i in range(n):
        v = load_f32(a + 64 * i)
        store_f32(o + 64 * i, exp(v))
        store_f32(o + 64 * (n + i), sqrt(absolute(v)))
        store_f32(o + 64 * (2 * n + i), round_even(v))
        store_f16(o + 64 * (3 * n + i), f32_to_half(v))
        store_f32(o + 64 * (3 * n + i), half_to_f32(load_f16(o + 64 * (3 * n + i))))


def test_unary_operations() -> None:
    rng = np.random.default_rng(0)
    edges = [0, -0.0, 0.5, 1.5, 2.5, -0.5, -87.3, -87.30001, 88.7, 100, -100, 1e-40, 65504, 65520, 1e9, 3e-8]
    x = np.concatenate([np.array(edges), rng.uniform(-90, 90, 4000 - 16)]).astype(np.float32)
    n = x.size // 16
    y = np.empty((4, x.size), np.float32)
    unary(x, y, n)
    assert y[0].tobytes() == arithmetic.exp(x).tobytes()
    assert y[1].tobytes() == np.sqrt(np.abs(x)).tobytes()
    assert y[2].tobytes() == np.rint(x).tobytes()
    with np.errstate(over="ignore"):
        assert y[3].tobytes() == x.astype(np.float16).astype(np.float32).tobytes()


@njit(**JIT)
def exps_of_tiles(x, y, n):
    for i in range(0, 64 * n, 192):
        tile = tile_load(f32_tile(3), address(x) + i, 0, 64, 3)
        tile_store(tile_exp(tile), address(y) + i, 0, 64, 3)


def test_the_exponential_of_tiles_is_that_of_vectors_below_0() -> None:
    """Also where 2^k is the least normal number, and the result is subnormal or 0."""
    rng = np.random.default_rng(3)
    low = np.float32(-87.3)
    near = [np.nextafter(low, np.float32(-100)), low, np.nextafter(low, np.float32(0)), -87.0, -86.9, -86.5, -1e-40]
    special = np.array([0, -0.0, np.nan, -np.inf, -3e38, *near], np.float32)
    x = np.concatenate([special, rng.uniform(-90, 0, 4800 - special.size)]).astype(np.float32)
    y, numbers = np.empty_like(x), ~np.isnan(x)
    exps_of_tiles(x, y, x.size // 16)
    assert y[numbers].tobytes() == arithmetic.exp(x[numbers]).tobytes()
    assert np.isnan(y[~numbers]).all()


@njit(**JIT)
def sums(x, out):
    v = load_f32(address(x))
    put_f32(address(out), reduce_add(v))
    put_f32(address(out) + 4, reduce_max(v))
    put_f32(address(out) + 8, get_f32(address(x) + 20))


def test_reductions_add_halves() -> None:
    rng = np.random.default_rng(1)
    out = np.empty(3, np.float32)
    for _ in range(50):
        x = (rng.standard_normal(16) * np.exp2(rng.integers(-20, 20, 16))).astype(np.float32)
        sums(x, out)
        assert out.tobytes() == np.array([arithmetic.reduce_lanes(x), x.max(), x[5]], np.float32).tobytes()


@njit(**JIT)
def fused(a, b, c, out, n):
    for i in range(n):
        at = 64 * i
        value = fma(load_f32(address(a) + at), load_f32(address(b) + at), load_f32(address(c) + at))
        store_f32(address(out) + at, value)
        # Written apart, so that a contraction would show.
        apart = load_f32(address(a) + at) * load_f32(address(b) + at) + load_f32(address(c) + at)
        store_f32(address(out) + 64 * n + at, apart)


def test_fma_rounds_once_and_nothing_else_is_fused() -> None:
    rng = np.random.default_rng(2)
    a, b, c = (rng.standard_normal(3200).astype(np.float32) for _ in range(3))
    c[::2] = -(a[::2] * b[::2])  # nothing but the rounding error is left
    out = np.empty((2, 3200), np.float32)
    fused(a, b, c, out, 200)
    assert out[0].tobytes() == exact_fma(a, b, c).tobytes()
    assert out[1].tobytes() == (a * b + c).tobytes()
    assert (out[0] != out[1]).any()


@njit(**JIT)
def dots(codes, values, start, out):
    s, v = load_i32(address(start)), load_i32(address(values))
    store_i32(address(out), dot4_u8(s, load_i32(address(codes)), v))
    store_i32(address(out) + 64, dot4(s, load_i32(address(codes)) & splat_i32(0x7F7F7F7F), v))


def test_dot_products_are_exact_at_the_extremes() -> None:
    rng = np.random.default_rng(3)
    for case in range(40):
        codes = rng.integers(0, 256, 64).astype(np.uint8)
        values = rng.integers(-127, 128, 64).astype(np.int8)
        codes[: 16 * (case % 4)] = 255
        values[: 8 * (case % 8)] = -127 if case % 2 else 127
        start = rng.integers(-(2**20), 2**20, 16).astype(np.int32)
        out = np.empty((2, 16), np.int32)
        dots(codes, values, start, out)
        bias = 0 if STARTS_BIASED else 128
        for row, used in zip(out, (codes.astype(np.int32) - bias, codes & 127), strict=True):
            products = used.astype(np.int32) * values
            assert row.tolist() == (start + products.reshape(16, 4).sum(axis=1)).tolist()


@njit(**JIT)
def parts(x, out, n):
    store_f32_part(address(out), load_f32_part(address(x), n, np.float32(-1)), n + 1)
    store_low8(address(out) + 128, to_i32(load_f32(address(out))))


def test_parts_touch_nothing_else() -> None:
    x = np.arange(16, dtype=np.float32)
    for n in range(16):
        out = np.full(40, 99, np.float32)
        parts(x, out, n)
        assert out[: n + 1].tolist() == [*range(n), -1]
        assert (out[n + 1 : 32] == 99).all()
        assert out[32:36].view(np.int8).tolist() == [*range(n), -1, *[99] * (15 - n)]


def test_wide_registers_are_used_where_they_are() -> None:
    (assembly,) = unary.inspect_asm().values()
    assert ("zmm" in assembly) == simd.VNNI
