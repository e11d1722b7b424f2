"""`python -m tools.bench.phases.sampler_shapes`: time of steps that select, by shape of the logits. Last line: JSON.

The sampler alone, called from Python (about 3 us), for logits of which it must keep few, many, or many after an
outlier, and for shares p close to 1, where f64 sums are rounded.  Each call has another seed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import click
import numpy as np

from shm import step_ring
from stages.worker.kernels import sampler
from stages.worker.kernels.buffer_sizes import sampler_bytes

Random = np.random.Generator
LARGEST_P = float(np.float32(1) - np.float32(2**-24))  # below 1


class Case(NamedTuple):
    """Steps that are timed together."""

    share: str | None  # the field that takes the shares in turn
    floats: dict[int, float]  # others, by their column
    ints: dict[int, int]
    order: tuple[str, ...] = ()


PENALTIES = {step_ring.FREQUENCY: 0.2, step_ring.PRESENCE: 0.2}
XTC = {step_ring.XTC_PROBABILITY: 1.0, step_ring.XTC_THRESHOLD: 1e-6}
LATE_TEMPERATURE = ("mask", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
COLUMNS = {"top_p": step_ring.TOP_P, "typical_p": step_ring.TYPICAL_P}
N_OUTPUT = 100  # tokens, which penalties look at
CASES: dict[str, Case] = {
    "top-p": Case("top_p", {}, {}),
    "top-p, penalties": Case("top_p", PENALTIES, {}),
    "top-p, XTC": Case("top_p", XTC, {}),
    "top-p, temperature": Case("top_p", {step_ring.TEMPERATURE: 0.7}, {}, LATE_TEMPERATURE),
    "typical-p": Case("typical_p", {}, {}),
    "typical-p, top-p": Case("typical_p", {step_ring.TOP_P: 0.9}, {}),
    "typical-p, penalties": Case("typical_p", PENALTIES, {}),
    "XTC": Case(None, XTC, {}),
    "top-n-sigma": Case(None, {step_ring.TOP_N_SIGMA: 1.0}, {}),
    "top-k 1,000": Case(None, {}, {step_ring.TOP_K: 1000}),
    "top-k 3,000": Case(None, {}, {step_ring.TOP_K: 3000}),
    "top-k 100,000": Case(None, {}, {step_ring.TOP_K: 100_000}),
}


def _outlier(values: np.ndarray, above: float) -> np.ndarray:
    values[len(values) // 3] = above
    return values


SHAPES: dict[str, Callable[[Random, int], np.ndarray]] = {
    "equal": lambda r, n: np.zeros(n),
    "flat": lambda r, n: r.standard_normal(n) * 0.1,
    "flat but for an outlier 5 above": lambda r, n: _outlier(r.standard_normal(n) * 0.1, 5.0),
    "nearly equal but for an outlier 10 above": lambda r, n: _outlier(r.standard_normal(n) * 1e-4, 10.0),
    "two close levels, 8 apart": lambda r, n: r.integers(0, 2, n) * 8.0 + r.standard_normal(n) * 1e-4,
    "20 different values": lambda r, n: r.integers(0, 20, n) * 0.25,
    "normal, deviation 1": lambda r, n: r.standard_normal(n),
    "normal, deviation 2": lambda r, n: r.standard_normal(n) * 2,
    "normal, deviation 3": lambda r, n: r.standard_normal(n) * 3,
    "power law": lambda r, n: -1.1 * np.log(1 + r.permutation(n)),
    "exponential": lambda r, n: -r.exponential(8, n),
    "peaked": lambda r, n: _outlier(r.standard_normal(n), 20.0),
    "an outlier at each scale": lambda r, n: r.permutation(
        np.r_[4.0 ** -np.arange(20), 1e-7 * r.standard_normal(n - 20)]
    ),
}


def call_us(logits: np.ndarray, case: Case, p: float | None, repeats: int) -> list[float]:
    """Microseconds of processor time of each call, ascending."""
    n = len(logits)
    ints, floats = np.zeros(step_ring.ROW_INTS, np.int64), np.zeros(step_ring.ROW_FLOATS, np.float32)
    ints[step_ring.ORDER] = step_ring.pack_order(case.order)
    for column in (step_ring.TEMPERATURE, step_ring.TOP_P, step_ring.TYPICAL_P, step_ring.REPETITION):
        floats[column] = 1.0
    for column, value in case.floats.items():
        floats[column] = value
    for column, number in case.ints.items():
        ints[column] = number
    if case.share is not None:
        floats[COLUMNS[case.share]] = p
    tokens = np.random.default_rng(2).integers(0, n, N_OUTPUT).astype(np.int32)
    bias, scratch = np.zeros(1, np.float32), np.zeros(sampler_bytes(n, N_OUTPUT), np.uint8)
    at = logits.ctypes.data
    row = [a.ctypes.data for a in (ints, floats, tokens, tokens, bias)]
    found = []
    for seed in range(repeats + 3):
        ints[step_ring.SEED] = seed
        begun = time.thread_time_ns()
        sampler.sample(at, n, tokens.ctypes.data, N_OUTPUT, 0, *row, 0, 0, scratch.ctypes.data)
        found.append((time.thread_time_ns() - begun) / 1000)
    return sorted(found[3:])


@click.command()
@click.option("--vocabulary", default=128_256, show_default=True)
@click.option("--repeats", default=100, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(SHAPES)), help="A shape; others are left out.")
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)), help="Steps; others are left out.")
@click.option("-p", "shares", multiple=True, type=float, default=(0.9, 0.99, 0.9999, LARGEST_P))
def main(
    vocabulary: int, repeats: int, only: tuple[str, ...], cases: tuple[str, ...], shares: tuple[float, ...]
) -> None:
    """Microseconds of the sampler for one row: median and 95th percentile."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for title in cases or CASES:
        case, of_case = CASES[title], found.setdefault(title, {})
        click.echo(f"{title}:")
        for name in only or SHAPES:
            logits = SHAPES[name](np.random.default_rng(1), vocabulary).astype(np.float32)
            for p in shares if case.share else (None,):
                us = call_us(logits, case, p, repeats)
                key = "us" if p is None else f"p {p:.8g}"
                of_case.setdefault(name, {})[key] = [
                    round(statistics.median(us), 1),
                    round(us[len(us) * 95 // 100], 1),
                ]
            click.echo(f"  {name}: " + ", ".join(f"{key} {a:.0f} ({b:.0f})" for key, (a, b) in of_case[name].items()))
    click.echo(json.dumps({"vocabulary": vocabulary, "us": found}))


if __name__ == "__main__":
    main()
