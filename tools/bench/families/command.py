"""`python -m tools.bench.families speed|memory`. The last line of each is one JSON object."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from pipeline.config import paths
from tools.bench.families import memory as memory_of
from tools.bench.families.models import file_of
from tools.bench.families.shapes import BASE, FAMILIES, LAYERS, base_of, shape_of, weights_of_layers
from tools.bench.families.speed import WORKS, measure

_NAMES = click.argument("families", nargs=-1, type=click.Choice(list(FAMILIES)))
_RECIPE = click.option("--format", "recipe", default="Q4_0", show_default=True)
_LAYERS = click.option("--layers", default=LAYERS, show_default=True, help="Fewer are quicker, and less exact.")
_CORES = click.option("--cores", default="", help="Comma separated; default: two of those allowed.")


def _numbers(cores: str) -> list[int]:
    return [int(c) for c in cores.split(",")] if cores else sorted(os.sched_getaffinity(0))[:2]


@click.group()
def main() -> None:
    """Speed and memory of every architecture, on random models of the same size."""


@main.command()
@_NAMES
@_RECIPE
@click.option("--rounds", default=7, show_default=True)
@_LAYERS
@_CORES
@click.option("--phases", is_flag=True, help="Show the share of each phase of a step, too.")
def speed(families: tuple[str, ...], recipe: str, rounds: int, layers: int, cores: str, phases: bool) -> None:
    """Speed of FAMILIES (default: all) relative to the llama graph of the same size."""
    rows = []
    click.echo(f"| family | beside | weights of layers, M | {' | '.join(WORKS)} |\n|---|---|---|{'---|' * len(WORKS)}")
    for family in families or [name for name in FAMILIES if name != BASE]:
        rates, shares = measure(family, recipe, layers, rounds, _numbers(cores), phases)
        size = weights_of_layers(shape_of(family, layers)) / 1e6
        click.echo(f"| {family} | {base_of(family)} | {size:.1f} | " + " | ".join(one.cell() for one in rates) + " |")
        for name, share in shares.items():
            click.echo(f"  {name}: " + ", ".join(f"{phase} {part:.3f}" for phase, part in share.items() if part))
        ratios = {one.work: [round(ratio, 3) for ratio in one.ratios] for one in rates}
        rows.append({"family": family, "beside": base_of(family), "weights_m": round(size, 1), **ratios})
    click.echo(json.dumps({"families": rows, "load": os.getloadavg()[0]}))


@main.command()
@_NAMES
@click.option(
    "--gguf", "files", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Another file."
)
@_RECIPE
@_LAYERS
@_CORES
@click.option("--kv-cache-mb", default=64, show_default=True, help="It is filled: more takes longer.")
def memory(
    families: tuple[str, ...], files: tuple[Path, ...], recipe: str, layers: int, cores: str, kv_cache_mb: int
) -> None:
    """Memory and speed of FAMILIES, or of model files, beside what `starling models --plan` predicts."""
    chosen = {name: file_of(name, recipe, layers) for name in families} | {file.stem: file.resolve() for file in files}
    if not chosen:
        raise click.UsageError("name families, or files by --gguf")
    rows = []
    for name, path in chosen.items():
        model: dict[str, object] = {"name": name, "path": str(path), "kv_cache_mb": kv_cache_mb}
        model["max_sequence_length"] = memory_of.CONTEXT
        rows.append(memory_of.measure(model, paths.models_dir(), _numbers(cores)))
        click.echo(rows[-1].line(), err=True)
    click.echo("\n".join((*memory_of.HEAD, *(row.line() for row in rows))))
    click.echo(json.dumps({"memory": [row._asdict() for row in rows], "load": os.getloadavg()[0]}))
