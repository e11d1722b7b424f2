"""`python -m tools.bench.phases.mapped_weights`: what huge pages of the mapped weights give.

Each round takes both kinds of pages in random order.  It makes the kernel forget the file and read it again, in calls
that leave pages of 4 KB or through a map that asks for huge ones, and says what it got.  Then, in turns: steps of one
sequence, plain reads of the map, plain reads of as many bytes of anonymous memory.  Each kind has a process of its own,
whose page tables begin empty.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from pipeline.config import paths
from pipeline.files import drop_cached
from shm.checkpoint import Checkpoint
from shm.huge_pages import mapped_in_huge_pages
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.mapped_weights import map_weights
from tools.bench.offline.bandwidth import read_rate
from tools.bench.offline.candidate import Candidate
from tools.bench.offline.command import located

KINDS = ("small", "huge")
POSITIONS = 256  # of the sequence, before the steps that are timed
READ_S = 0.25
CHUNK = 1 << 20


@click.command()
@click.option("--shape", default="llama-1b", show_default=True)
@click.option("--format", "recipe", default="Q4_K_M", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--turns", default=10, show_default=True, help="Of steps and reads, in each process.")
@click.option("--steps", default=8, show_default=True, help="Of each turn.")
@click.option("--kind", type=click.Choice(KINDS), help="Measure one kind once, and print JSON.")
def main(shape: str, recipe: str, rounds: int, turns: int, steps: int, kind: str | None) -> None:
    """Compare pages of 4 KB and huge ones of the mapped weights."""
    if kind is not None:
        click.echo(json.dumps(measure(shape, recipe, kind, turns, steps)))
        return
    found: dict[str, list[dict[str, float]]] = {one: [] for one in KINDS}
    for _ in range(rounds):
        for one in random.sample(KINDS, len(KINDS)):
            options = [
                "--shape",
                shape,
                "--format",
                recipe,
                "--turns",
                str(turns),
                "--steps",
                str(steps),
                "--kind",
                one,
            ]
            command = [sys.executable, "-m", "tools.bench.phases.mapped_weights", *options]
            line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            click.echo(f"{one}: {line}")
            found[one].append(json.loads(line))
    for name in found[KINDS[0]][0]:
        texts = []
        for one in KINDS:
            values = [row[name] for row in found[one]]
            texts.append(f"{one} {statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})")
        click.echo(f"{name:24} {'  '.join(texts)}")


def measure(shape: str, recipe: str, kind: str, turns: int, steps: int) -> dict[str, float]:
    """The figures of one kind of pages; times in ms, rates in GB/s, shares of the rate of anonymous memory."""
    index_path = prepare_checkpoint(located(None, shape, recipe), paths.models_dir())
    cores = sorted(os.sched_getaffinity(0))[:2]
    lay_out(Checkpoint(index_path).path, kind)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        Candidate(index_path, Path(folder), cores, 1, 2 * POSITIONS + turns * steps) as candidate,
    ):
        weights = candidate.runner.model.weights
        begun = time.perf_counter()
        map_weights(weights)
        mapping = time.perf_counter() - begun
        nbytes = candidate.runner.model.weight_bytes
        anonymous, mapped = np.ones(nbytes // 8, np.uint64), weights[: nbytes // 8 * 8].view(np.uint64)
        candidate.fill_cache()
        candidate.decode_at(POSITIONS, steps)
        rates: dict[str, list[float]] = {"step": [], "map": [], "anonymous": []}
        for turn in range(turns):
            rates["step"].append(nbytes * candidate.decode_at(POSITIONS + turn * steps, steps) / 1e9)
            rates["map"].append(read_rate(mapped, cores, READ_S) / 1e9)
            rates["anonymous"].append(read_rate(anonymous, cores, READ_S) / 1e9)
        share = mapped_in_huge_pages(weights) / weights.nbytes
    middle = {name: statistics.median(values) for name, values in rates.items()}
    shares = {
        f"{name} of anonymous": statistics.median(a / b for a, b in zip(rates[name], rates["anonymous"], strict=True))
        for name in ("step", "map")
    }
    return {
        "in huge pages": share,
        "map, ms": 1e3 * mapping,
        **{f"{name}, GB/s": value for name, value in middle.items()},
        **shares,
        "tokens/s": 1e9 * middle["step"] / nbytes,
    }


def lay_out(path: Path, kind: str) -> None:
    """Have the file in memory, in pages of the wanted kind."""
    drop_cached(path)
    if kind == "huge":
        map_weights(Checkpoint(path.with_suffix(".idx")).data)
        return
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # each call reads what it asks for, and no more
        room = mmap.mmap(-1, CHUNK)
        while file.readinto(room):
            pass


if __name__ == "__main__":
    main()
