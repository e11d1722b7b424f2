"""The AMX probe: what it compares, and that it admits AMX for exactly the formats that it makes faster."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from numba import njit, types

from stages.worker.kernels import amx_probe, gemm
from stages.worker.kernels.features import ALL_FORMATS, Verdict
from stages.worker.kernels.formats import BY_ID, QUANTIZED, QuantizedFormat
from stages.worker.kernels.quantize_activations import RECORD
from stages.worker.kernels.simd import VNNI
from tests.worker.instruction_sets import available_isas

HALF_BLOCKS = {"Q2_K", "Q3_K", "Q6_K"}  # two products and two scalings a block


class TimedProducts:
    """Products that take a time of a clock of their own and store zeros."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def taking(self, seconds: Callable[[QuantizedFormat], float]) -> amx_probe.Products:
        def products(kind: int, u: int, v: int, x: int, out: int, spill: int, times: int) -> None:
            fmt = BY_ID[kind]
            assert isinstance(fmt, QuantizedFormat)
            assert u != v
            self.now += seconds(fmt) * times

        return products


def verdict_for(tiles: Callable[[QuantizedFormat], float]) -> frozenset[str]:
    """The formats that use AMX when its products take `tiles` seconds and those of VNNI one."""
    timed = TimedProducts()
    same, speedups = amx_probe.compare(3, timed.taking(tiles), timed.taking(lambda fmt: 1.0), timed.clock)
    assert same
    return Verdict(speedups, "").formats


def test_a_slower_path_is_rejected_and_a_faster_one_admitted() -> None:
    assert verdict_for(lambda fmt: 1.1) == frozenset()
    assert verdict_for(lambda fmt: 1.0) == frozenset()
    assert verdict_for(lambda fmt: 0.9) == ALL_FORMATS


def test_the_verdict_is_by_format() -> None:
    assert verdict_for(lambda fmt: 1.1 if fmt.name in HALF_BLOCKS else 0.7) == ALL_FORMATS - HALF_BLOCKS
    with_minimums = {f.name for f in QUANTIZED if f.scales.minimum}
    assert verdict_for(lambda fmt: 0.9 if fmt.scales.minimum else 1.2) == with_minimums


def test_a_disturbed_round_does_not_decide() -> None:
    """The machine halves its speed from a round in the middle on: both sides of a round slow down together."""
    timed = TimedProducts()
    slowdown = iter([1, 1, 1, 1, 5, 1, 2, 2, 2, 2])  # tiles, dots, tiles, dots, ...

    def run(seconds: float) -> Callable[[], None]:
        def step() -> None:
            timed.now += seconds * next(slowdown)

        return step

    assert amx_probe.speedup(run(0.8), run(1.0), 5, timed.clock) == pytest.approx(1.25)


def test_other_bytes_are_reported() -> None:
    def other(kind: int, u: int, v: int, x: int, out: int, spill: int, times: int) -> None:
        if BY_ID[kind].name == "Q6_K":
            ctypes.memset(out, 1, 1)

    timed = TimedProducts()
    dots = timed.taking(lambda fmt: 1.0)
    clock = iter(range(10**6))
    assert not amx_probe.compare(1, other, dots, lambda: float(next(clock)))[0]


def dot_products(function: Callable[..., None]) -> int:
    """VNNI dot products in the compiled code of a function of seven int64."""
    compiled = njit(nogil=True, error_model="numpy")(function)
    compiled.compile((types.int64,) * 7)
    return int(compiled.inspect_asm(compiled.signatures[0]).count("vpdpbusd"))


@pytest.mark.slow
@pytest.mark.skipif(not VNNI, reason="counts VNNI instructions")
def test_the_dot_products_of_both_chunks_are_computed() -> None:
    """With one chunk in place of two, LLVM merges the dot products of both row groups and half of them remain."""

    def one_chunk(kind, u, v, x, out, spill, times):  # type: ignore[no-untyped-def]
        stride = amx_probe.BLOCKS * RECORD
        for t in range(0, amx_probe.TOKENS, 6):
            gemm._quantized_6(kind, u, u, amx_probe.BLOCKS, x + t * stride, stride, out + t * 64, 64, 0, True, u, u, 0)

    tokens, groups, vectors, kernels = 6, 2, 8, 2  # kernels: for whole and for half blocks
    assert dot_products(amx_probe.by_dots.py_func) == tokens * groups * vectors * kernels
    assert dot_products(one_chunk) == tokens * vectors * kernels


@pytest.mark.slow
@pytest.mark.parametrize("isa", [isa for isa in available_isas() if isa in ("amx", "tiles")])
def test_the_probe_compares_bytes_and_prints_a_speedup_for_each_format(isa: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "stages.worker.kernels.amx_probe"]
    done = subprocess.run(command, env=os.environ | {"STARLING_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    verdict = Verdict(**json.loads(done.stdout))
    assert verdict.against == ""
    assert verdict.speedups.keys() == ALL_FORMATS
    assert all(speedup > 0 for speedup in verdict.speedups.values())
