"""`python -m tools.bench.phases.attention`: attention alone, beside what the core can do. The last line is JSON.

For each head size, number of query heads that share K and V, and length of the context: a chunk of 512 tokens of a
prompt, in multiplications and additions per second beside a loop of FMAs on registers, and single queries, in time of
a layer and in bytes of K and V per second beside a plain read of as many.  One core.  The phase `attention` counts,
which also writes the K and V of single queries.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import click
import numba
import numpy as np

from stages.worker.kernels.simd import JIT, VNNI, fma, splat_f32, store_f32
from tools.bench.offline.bandwidth import read_bandwidth
from tools.bench.offline.candidate import Candidate
from tools.bench.phases.runner import candidate_of, phase_us
from tools.tiny_gguf import Shape

LANES = 16
CHUNK = 512
KV_HEADS = 2
BYTES = {"f16": 2.0, "f32": 4.0, "int8": 1 + 2 / 32}  # of a value of K or V; int8 has a scale for 32 of them
LAYERS = 2  # the last one attends for the one token of a chunk that is sampled


@numba.njit(**JIT)
def _five(at, turns):
    """5 independent chains of FMAs of 16 lanes, each in two registers of AVX2; each turn has 5."""
    x, y = splat_f32(np.float32(1.0000001)), splat_f32(np.float32(1e-9))
    a = b = c = d = e = splat_f32(np.float32(0.0))
    for _ in range(turns):
        a, b, c, d, e = fma(a, x, y), fma(b, x, y), fma(c, x, y), fma(d, x, y), fma(e, x, y)
    for k, v in enumerate((a, b, c, d, e)):
        store_f32(at + 64 * k, v)


@numba.njit(**JIT)
def _ten(at, turns):
    """10 independent chains of FMAs of 16 lanes; each turn has 10. Of AVX2 they would need 20 of 16 registers."""
    x, y = splat_f32(np.float32(1.0000001)), splat_f32(np.float32(1e-9))
    a = b = c = d = e = f = g = h = i = j = splat_f32(np.float32(0.0))
    for _ in range(turns):
        a, b, c, d, e = fma(a, x, y), fma(b, x, y), fma(c, x, y), fma(d, x, y), fma(e, x, y)
        f, g, h, i, j = fma(f, x, y), fma(g, x, y), fma(h, x, y), fma(i, x, y), fma(j, x, y)
    for k, v in enumerate((a, b, c, d, e, f, g, h, i, j)):
        store_f32(at + 64 * k, v)


def peak_gmac_s(turns: int = 2_000_000, rounds: int = 5) -> float:
    """Median speed of FMAs on registers, 10^9 per second and core."""
    fmas, chains = (_ten, 10) if VNNI else (_five, 5)
    out = np.zeros(chains * LANES, np.float32)
    fmas(out.ctypes.data, 10)
    rates = []
    for _ in range(rounds):
        begun = time.thread_time()
        fmas(out.ctypes.data, turns)
        rates.append(chains * LANES * turns / (time.thread_time() - begun) / 1e9)
    return statistics.median(rates)


def _speeds(candidate: Candidate, length: int, repeats: int, width: int, position_bytes: int) -> dict[str, float]:
    """Of a chunk of a prompt and of a single query behind `length` positions; `width`: of all heads of a token.

    What the core can do is measured before and after the chunk: some machines change its speed within seconds.
    """

    def chunk() -> None:
        candidate.runner.run([(0, length, CHUNK, 1)])

    def query() -> None:
        candidate.runner.run([(0, length - 1, 1, 1)])

    candidate.fill_tokens(1, length + CHUNK)
    peak = peak_gmac_s()
    chunk_us = phase_us(candidate, "attention", chunk, repeats)
    peak = max(peak, peak_gmac_s())
    query_us = phase_us(candidate, "attention", query, 8 * repeats) / LAYERS
    attended = (LAYERS - 1) * sum(range(length + 1, length + CHUNK + 1)) + length + CHUNK
    gmac_s = 2 * width * attended / chunk_us / 1e3
    return {
        "gmac_s": round(gmac_s, 1),
        "of_peak": round(gmac_s / peak, 2),
        "query_us": round(query_us, 1),
        "gb_s": round(position_bytes * length / query_us / 1e3, 1),
    }


@click.command()
@click.option("--contexts", default="110,512,2048,4096", show_default=True)
@click.option("--heads", "sizes", default="64,128", show_default=True, help="Head sizes.")
@click.option("--groups", default="1,3,4,8", show_default=True, help="Query heads that share K and V.")
@click.option("--cache", "kv_type", default="f16", show_default=True, type=click.Choice(list(BYTES)), help="Its type.")
@click.option("--repeats", default=15, show_default=True)
def main(contexts: str, sizes: str, groups: str, kv_type: Literal["f16", "f32", "int8"], repeats: int) -> None:
    """Speed of attention on one core."""
    cores = sorted(os.sched_getaffinity(0))[:1]
    peak, rows = peak_gmac_s(), []
    click.echo(f"FMAs on registers: {peak:.1f} GMAC/s")
    lengths = [int(one) for one in contexts.split(",")]
    for size in (int(one) for one in sizes.split(",")):
        for group in (int(one) for one in groups.split(",")):
            heads = group * KV_HEADS
            shape = Shape(LAYERS, heads * size, heads, KV_HEADS, size, 96, 300, context_length=2 * CHUNK + max(lengths))
            with (
                tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
                candidate_of(shape, Path(folder), cores, 1, CHUNK + max(lengths) + 1, kv_type) as candidate,
            ):
                candidate.fill_cache()
                position_bytes = round(2 * BYTES[kv_type] * KV_HEADS * size)
                for length in lengths:
                    row: dict[str, float] = {"head": size, "group": group, "context": length}
                    row |= _speeds(candidate, length, repeats, heads * size, position_bytes)
                    nbytes = position_bytes * length * LAYERS
                    row["read_gb_s"] = round(read_bandwidth(nbytes, cores, 0.05, 3) / 1e9, 1)
                    click.echo(", ".join(f"{name} {value}" for name, value in row.items()))
                    rows.append(row)
    click.echo(json.dumps({"peak_gmac_s": round(peak, 1), "rows": rows}))


if __name__ == "__main__":
    main()
