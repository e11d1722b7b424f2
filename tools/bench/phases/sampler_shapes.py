"""`python -m tools.bench.phases.sampler_shapes`: time of top-p by shape of the logits. The last line is JSON.

The sampler alone, called from Python (about 3 us), for logits of which it must keep few, many, or many after an
outlier, and for shares p close to 1, where f64 sums are rounded.  Each call has another seed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import click
import numpy as np

from shm import step_ring
from stages.worker.kernels import sampler
from stages.worker.kernels.buffer_sizes import sampler_bytes

Random = np.random.Generator
LARGEST_P = float(np.float32(1) - np.float32(2**-24))  # below 1


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


def call_us(logits: np.ndarray, p: float, repeats: int) -> list[float]:
    """Microseconds of processor time of each call, ascending."""
    n = len(logits)
    ints, floats = np.zeros(step_ring.ROW_INTS, np.int64), np.zeros(step_ring.ROW_FLOATS, np.float32)
    ints[step_ring.ORDER] = step_ring.pack_order(())
    floats[step_ring.TEMPERATURE], floats[step_ring.TOP_P], floats[step_ring.REPETITION] = 1.0, p, 1.0
    bias, tokens, scratch = np.zeros(1, np.float32), np.zeros(1, np.int32), np.zeros(sampler_bytes(n, 1), np.uint8)
    at = logits.ctypes.data
    row = [a.ctypes.data for a in (ints, floats, tokens, tokens, bias)]
    found = []
    for seed in range(repeats + 3):
        ints[step_ring.SEED] = seed
        begun = time.thread_time_ns()
        sampler.sample(at, n, tokens.ctypes.data, 1, 1, *row, 0, 0, scratch.ctypes.data)
        found.append((time.thread_time_ns() - begun) / 1000)
    return sorted(found[3:])


@click.command()
@click.option("--vocabulary", default=128_256, show_default=True)
@click.option("--repeats", default=100, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(SHAPES)), help="A shape; others are left out.")
@click.option("-p", "shares", multiple=True, type=float, default=(0.9, 0.99, 0.9999, LARGEST_P))
def main(vocabulary: int, repeats: int, only: tuple[str, ...], shares: tuple[float, ...]) -> None:
    """Microseconds of the sampler for one row: median and 95th percentile."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in only or SHAPES:
        logits = SHAPES[name](np.random.default_rng(1), vocabulary).astype(np.float32)
        for p in shares:
            us = call_us(logits, p, repeats)
            found.setdefault(name, {})[f"{p:.8g}"] = [
                round(statistics.median(us), 1),
                round(us[len(us) * 95 // 100], 1),
            ]
        click.echo(f"{name}: " + ", ".join(f"p {p} {a:.0f} ({b:.0f})" for p, (a, b) in found[name].items()))
    click.echo(json.dumps({"vocabulary": vocabulary, "us": found}))


if __name__ == "__main__":
    main()
