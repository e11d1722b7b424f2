"""Measures the ingest of a GGUF file that is in the page cache, beside its SHA-256 and a copy alone.

    python -m tools.bench.ingest --format Q4_K_M --format Q8_0 --megabytes 1000

The files are random (tools/tiny_gguf.py), in a directory of their own, which is removed.  Rates are bytes of the GGUF
per second, of the best of `--runs`; in brackets per second of CPU time, which other load hardly changes: all cores
together could do that many times their number.  `prepare` is what `starling prepare` and a server do with a configured
path.

Every result is compared with what is known of the file: its name is the SHA-256 that `sha256` has found, and the
checkpoint has as many weights as the file's own table of tensors.  Another result ends the benchmark.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click

from pipeline.config.schema import ModelConfig
from shm.checkpoint import Index, load_index
from stages.worker.checkpoint.gguf import GgufFile
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.checkpoint.prepare_source import prepare_source
from stages.worker.checkpoint.requantized import QUANTS
from tools.tiny_gguf import RECIPES, Shape, write_model

_SHAPE = Shape(1, 2048, 16, 16, 128, 8192, 512, context_length=128)


_RECIPES = ("Q4_K_M", "Q4_0", "Q8_0")


class Measured(NamedTuple):
    """Seconds of the best run: elapsed, and of all cores."""

    wall_s: float
    cpu_s: float


def measure(work: Callable[[Path], object], folder: Path, runs: int) -> Measured:
    """Run `work` in fresh directories."""
    found = []
    for number in range(runs):
        own = folder / f"run{number}"
        own.mkdir()
        wall, cpu = time.perf_counter(), time.process_time()
        work(own)
        found.append(Measured(time.perf_counter() - wall, time.process_time() - cpu))
        shutil.rmtree(own)
    return min(found)


def _write(folder: Path, recipe: str, megabytes: int) -> Path:
    one = write_model(folder / "one.gguf", _SHAPE, recipe)
    layers = max(1, round(megabytes * 1e6 / one.stat().st_size))
    one.unlink()
    return write_model(folder / f"{recipe}.gguf", _SHAPE._replace(n_layers=layers), recipe)


def _copy(path: Path, folder: Path) -> None:
    shutil.copyfile(path, folder / "copy")


def _hash(path: Path, folder: Path) -> None:
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")


def _ingest(path: Path, folder: Path, quant: str, digest: str) -> None:
    _check(path, prepare_source(path, folder, quant=quant), "" if quant else digest)


def _prepare(path: Path, folder: Path, digest: str) -> None:
    _check(path, load_index(prepare_checkpoint(ModelConfig(name="m", path=str(path)), folder)), digest)


def _check(path: Path, index: Index, digest: str) -> None:
    tensors = GgufFile(path).tensors
    n_weights = sum(math.prod(info.shape) for info in tensors.values())
    if (digest and index.digest != digest) or index.parameters != n_weights:
        raise click.ClickException(
            f"{path}: the checkpoint has {index.parameters:,} weights and digest {index.digest}, "
            f"expected {n_weights:,} and {digest or 'any'}"
        )


@click.command()
@click.option(
    "--format", "recipes", type=click.Choice(list(RECIPES)), multiple=True, default=("Q4_K_M", "Q4_0", "Q8_0")
)
@click.option(
    "--quant", "quants", type=click.Choice(list(QUANTS)), multiple=True, help="Of an F16 file; default: none."
)
@click.option("--megabytes", default=500, show_default=True, help="Size of each file.")
@click.option("--runs", default=3, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Where to write; default: the usual one.")
def main(recipes: tuple[str, ...], quants: tuple[str, ...], megabytes: int, runs: int, folder: Path | None) -> None:
    """Measure hashing, copying and ingest of random models."""
    cases = [(recipe, "") for recipe in recipes] if not quants else [("F16", quant) for quant in quants]
    click.echo(f"{len(os.sched_getaffinity(0))} cores; MB/s of the file (MB per second of CPU time)")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = Path(name)
        for recipe, quant in cases:
            path = _write(root, recipe, megabytes)
            nbytes = path.stat().st_size
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            works: dict[str, Callable[[Path], object]] = {
                "sha256": partial(_hash, path),
                "copy": partial(_copy, path),
                "ingest": partial(_ingest, path, quant=quant, digest=digest),
            }
            if not quant:
                works["prepare"] = partial(_prepare, path, digest=digest)
            rates = []
            for what, work in works.items():
                took = measure(work, root, runs)
                rates.append(f"{what} {nbytes / took.wall_s / 1e6:,.0f} ({nbytes / took.cpu_s / 1e6:,.0f})")
            click.echo(f"{recipe}{' to ' + quant if quant else ''}, {nbytes / 1e6:,.0f} MB: {', '.join(rates)}")
            path.unlink()


if __name__ == "__main__":
    main()
