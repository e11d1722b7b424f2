"""`python -m tools.bench.phases.shared_prefix`: attention where the sequences of a batch share the pages of a prefix.

For each number of sequences and of shared positions, microseconds of one layer's attention on one core, in turns:

    apart      single queries of sequences with pages of their own
    shared     single queries of sequences with the same pages, which attend to them together (shared_prefixes.py)
    block      as many queries of one sequence, behind as many positions: what sharing could reach at best
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

import click

from tools.bench.offline.candidate import Candidate
from tools.bench.phases.runner import candidate_of, phase_us
from tools.tiny_gguf import Shape

LAYERS = 2
PAGE_TOKENS = 32  # of the step runner
WAYS = ("apart", "shared", "block")


def times_us(candidate: Candidate, rows: int, shared: int, repeats: int, rounds: int) -> dict[str, list[float]]:
    """By way: median, lowest and highest microseconds of a layer's attention over the rounds."""
    tables, pages = candidate.runner.steps.tables, shared // PAGE_TOKENS
    own = tables.copy()
    candidate.fill_tokens(rows, shared + rows + 1)
    singles = [(row, shared, 1, 1) for row in range(rows)]
    chunk = [(0, shared, rows, rows)]  # every token is sampled, so that both layers attend for all
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            tables[:] = own
            if way == "shared":
                tables[:, :pages] = own[0, :pages]
            step = partial(candidate.runner.run, chunk if way == "block" else singles)
            step()
            found[way].append(phase_us(candidate, "attention", step, repeats) / LAYERS)
    tables[:] = own
    return {way: [round(f(us), 1) for f in (statistics.median, min, max)] for way, us in found.items()}


@click.command()
@click.option("--rows", "batches", default="4,8,16,32", show_default=True, help="Sequences.")
@click.option("--shared", "lengths", default="256,512,2048", show_default=True, help="Positions, in whole pages.")
@click.option("--heads", default="3x3x64,8x4x64,4x4x128", show_default=True, help="KV heads x group x head size.")
@click.option("--repeats", default=10, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(batches: str, lengths: str, heads: str, repeats: int, rounds: int) -> None:
    """Attention of a batch behind a shared prefix, on one core."""
    cores = sorted(os.sched_getaffinity(0))[:1]
    sizes, shared = ([int(one) for one in text.split(",")] for text in (batches, lengths))
    found = []
    for text in heads.split(","):
        kv_heads, group, size = (int(one) for one in text.split("x"))
        n_heads = kv_heads * group
        shape = Shape(LAYERS, 576, n_heads, kv_heads, size, 96, 300, context_length=max(shared) + 2 * max(sizes))
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
            candidate_of(shape, Path(folder), cores, max(sizes), max(shared) + max(sizes) + 1) as candidate,
        ):
            candidate.fill_cache()
            for length in shared:
                for rows in sizes:
                    row = {"heads": text, "shared": length, "rows": rows}
                    row |= times_us(candidate, rows, length, repeats, rounds)
                    click.echo(", ".join(f"{name} {value}" for name, value in row.items()))
                    found.append(row)
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
