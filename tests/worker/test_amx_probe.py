"""The AMX probe: what it compares, and that it admits AMX for exactly the products that it makes faster."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stages.worker.kernels import amx_probe, amx_verdict
from stages.worker.kernels.amx_probe import COLUMNS, Product
from stages.worker.kernels.amx_verdict import PROBED_TOKENS, Verdict, faster_from
from stages.worker.kernels.buffer_sizes import CHUNKS_BYTES, MATMUL_BYTES
from stages.worker.kernels.features import ALL_FORMATS, ALL_TILES, TILE_TOKENS, Thresholds
from stages.worker.kernels.formats import QUANTIZED, QuantizedFormat
from tests import amx_machine as emulation
from tests.amx_machine import Machine
from tests.worker.conftest import IsaEnvironment
from tests.worker.instruction_sets import tile_isas

ROWS = 32
HALF_BLOCKS = {"Q2_K", "Q3_K", "Q6_K"}  # two products and two scalings a block
Seconds = Callable[[QuantizedFormat, int], float]  # of a product of a format with so many tokens


class TimedProducts:
    """Products that take a time of a clock of their own and store zeros."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def taking(self, seconds: Seconds) -> amx_probe.Products:
        def product(p: Product, times: int) -> None:
            ctypes.memset(p.out, 0, p.tokens * 4 * p.rows)
            self.now += seconds(p.fmt, p.tokens) * times

        return product


def verdict_for(tiles: Seconds) -> Thresholds:
    """What uses AMX when its products take `tiles` seconds and those of VNNI one."""
    timed = TimedProducts()
    dots = timed.taking(lambda fmt, tokens: 1.0)
    same, speedups = amx_probe.compare(3, ROWS, timed.taking(tiles), dots, timed.clock)
    assert same
    return Verdict(speedups, "").thresholds


def from_tokens(tokens: int, formats: set[str]) -> Thresholds:
    return tuple((name, tokens) for name in sorted(formats))


def test_a_slower_path_is_rejected_and_a_faster_one_admitted() -> None:
    assert verdict_for(lambda fmt, tokens: 1.1) == ()
    assert verdict_for(lambda fmt, tokens: 1.0) == ()
    assert verdict_for(lambda fmt, tokens: 0.9) == ALL_TILES


def test_the_verdict_is_by_format() -> None:
    others = set(ALL_FORMATS - HALF_BLOCKS)
    assert verdict_for(lambda fmt, tokens: 1.1 if fmt.name in HALF_BLOCKS else 0.7) == from_tokens(16, others)
    with_minimums = {f.name for f in QUANTIZED if f.scales.minimum}
    assert verdict_for(lambda fmt, tokens: 0.9 if fmt.scales.minimum else 1.2) == from_tokens(16, with_minimums)


@pytest.mark.parametrize("least", PROBED_TOKENS)
def test_the_verdict_is_by_number_of_tokens(least: int) -> None:
    """A path that is known to be slower for fewer than `least` tokens, with half blocks for all but the most."""

    def tiles(fmt: QuantizedFormat, tokens: int) -> float:
        return 0.8 if tokens >= (PROBED_TOKENS[-1] if fmt.name in HALF_BLOCKS else least) else 1.2

    others = set(ALL_FORMATS - HALF_BLOCKS)
    expected = (*from_tokens(least, others), *from_tokens(PROBED_TOKENS[-1], HALF_BLOCKS))
    assert verdict_for(tiles) == tuple(sorted(expected))


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ((1.2, 1.2, 1.2, 1.2), PROBED_TOKENS[0]),
        ((0.9, 1.2, 1.2, 1.2), PROBED_TOKENS[1]),
        ((1.2, 0.9, 1.2, 1.2), PROBED_TOKENS[2]),  # one threshold: faster from there on
        ((1.2, 1.2, 1.0, 1.2), PROBED_TOKENS[3]),
        ((1.2, 1.2, 1.2, 0.9), 0),
        ((0.9, 0.9, 0.9, float("nan")), 0),
    ],
)
def test_tiles_are_used_from_where_they_stay_faster(speedups: tuple[float, ...], expected: int) -> None:
    assert faster_from(speedups) == expected
    assert PROBED_TOKENS[0] == TILE_TOKENS
    assert list(PROBED_TOKENS) == sorted(set(PROBED_TOKENS))


def test_a_disturbed_round_does_not_decide() -> None:
    """The machine halves its speed from a round in the middle on: both sides of a round slow down together."""
    timed = TimedProducts()
    slowdown = iter([1, 1, 1, 1, 5, 1, 2, 2, 2, 2])  # tiles, dots, tiles, dots, ...

    def run(seconds: float) -> Callable[[], None]:
        def step() -> None:
            timed.now += seconds * next(slowdown)

        return step

    assert amx_probe.speedup(run(0.8), run(1.0), 5, timed.clock) == pytest.approx(1.25)


@pytest.mark.parametrize(("slower", "rounds"), [((), 5), (range(5), 5), ((0,), 25), ((4,), 25), (range(1, 5), 25)])
def test_rounds_that_agree_are_enough(slower: Sequence[int], rounds: int) -> None:
    """Tiles take 0.9 of the time of dot products, in some of the first rounds 1.1."""
    timed, n = TimedProducts(), 0

    def tiles() -> None:
        nonlocal n
        timed.now += 1.1 if n in slower else 0.9
        n += 1

    def dots() -> None:
        timed.now += 1

    found = amx_probe.speedup(tiles, dots, 25, timed.clock)
    assert found == pytest.approx(1 / 1.1 if len(slower) == 5 else 1 / 0.9)
    assert n == rounds


def test_other_bytes_are_reported() -> None:
    timed = TimedProducts()
    zeros = timed.taking(lambda fmt, tokens: 1.0)

    def other(p: Product, times: int) -> None:
        zeros(p, times)
        if p.fmt.name == "Q6_K" and p.tokens == 32:
            ctypes.memset(p.out + p.tokens * 4 * p.rows - 1, 1, 1)

    assert not amx_probe.compare(1, ROWS, other, zeros, timed.clock)[0]


def test_a_product_that_stores_nothing_is_reported() -> None:
    clock = iter(range(10**6))
    assert not amx_probe.compare(1, ROWS, lambda p, times: None, lambda p, times: None, lambda: float(next(clock)))[0]


TILE_ISAS = tile_isas()


def run_with(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def products_by_tiles() -> str:
    """Whether the probe's two products store sums of tiles in scratch: each has to compute as it says."""
    found = []
    for product in (amx_probe.by_tiles, amx_probe.by_dots):
        by_tiles: set[bool] = set()

        def watched(p: Product, times: int, product: amx_probe.Products = product, found: set[bool] = by_tiles) -> None:
            ctypes.memset(p.scratch, 0, MATMUL_BYTES)
            product(p, 1)
            found.add(any(ctypes.string_at(p.scratch + CHUNKS_BYTES, MATMUL_BYTES - CHUNKS_BYTES)))

        assert amx_probe.compare(1, ROWS, watched, amx_probe.by_dots)[0]
        found.append(by_tiles)
    return str(found)


@pytest.mark.slow
@pytest.mark.parametrize("isa", TILE_ISAS)
def test_the_probe_compares_tiles_with_dot_products(isa: str, isa_environment: IsaEnvironment) -> None:
    code = "from tests.worker import test_amx_probe as t; print(t.products_by_tiles())"
    assert run_with(isa_environment(isa), "-c", code) == "[{True}, {False}]"
    assert COLUMNS % 256 == 0  # whole units of every format


@pytest.mark.slow
@pytest.mark.parametrize("isa", TILE_ISAS)
def test_the_probe_compares_bytes_and_prints_speedups_for_each_format(
    isa: str, isa_environment: IsaEnvironment
) -> None:
    command = ("-m", "stages.worker.kernels.amx_probe", "1", str(ROWS))
    verdict = Verdict(**json.loads(run_with(isa_environment(isa), *command)))
    assert verdict.against == ""
    assert verdict.speedups.keys() == ALL_FORMATS
    for speedups in verdict.speedups.values():
        assert len(speedups) == len(PROBED_TOKENS)
        assert all(speedup > 0 for speedup in speedups)


@pytest.mark.slow
@pytest.mark.skipif(not emulation.is_possible(), reason="needs AVX-512 VNNI, and no AMX")
def test_a_machine_whose_tiles_are_slow_uses_vnni(
    amx_machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole choice, with real tile instructions in a short probe: equal bytes, and a trap for each instruction.

    Another process may take the core from the product of dot products, and give it back later than all traps take:
    that is one of the rounds, of which the median counts.
    """
    amx_machine.clear()
    for name, value in amx_machine.environment.items():  # of the probe
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STARLING_ISA", "native")
    monkeypatch.delenv("STARLING_AMX_FORMATS", raising=False)
    monkeypatch.delenv(amx_verdict.PASSED_ON, raising=False)
    monkeypatch.setattr(amx_verdict, "isa", lambda: "amx")
    monkeypatch.setattr(amx_verdict, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(amx_verdict, "PROBE", [*amx_verdict.PROBE, str(amx_probe.AGREEING), str(ROWS)])
    monkeypatch.setattr(amx_verdict, "PROBE_S", 3000)  # it runs on what other tests leave of the cores
    assert amx_verdict.needs_probe()
    verdict, unkept = amx_verdict.find_verdict()
    assert [path.name for path in tmp_path.glob("*.json")] == ["amx-speedups.json"]
    assert not amx_verdict.needs_probe()
    assert amx_verdict.tile_thresholds() == ()
    assert unkept == ""
    assert verdict is not None
    assert verdict.against == ""
    assert verdict.thresholds == ()
    assert verdict.speedups.keys() == ALL_FORMATS
    assert all(speedup < 0.5 for found in verdict.speedups.values() for speedup in found)
    [probe] = amx_machine.threads()
    assert not probe.reason
    # 16 rows x 16 tokens x 32 values; each format twice, and once more where products of few tokens are repeated.
    least = ROWS // 16 * COLUMNS // 32 * sum(PROBED_TOKENS) // 16 * 2
    assert probe.instructions["tdpbsud"] >= least * len(ALL_FORMATS)
    assert probe.instructions["ldtilecfg"] == probe.instructions["tilerelease"]
