"""`python -m tools.bench.phases.steps`: where the time of a step goes, by phase. The last line is JSON.

Microseconds of rank 0 of two, from the cycle counts that the kernels keep; medians of steps of the demo model, of
another file or of a random one.  "wait" is time in barriers.  For attention of single queries a line also has the rate
at which it reads K and V, beside plain loads of as many bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path

import click
import msgspec

from pipeline.config import paths
from shm.pages import KV_TYPES
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.kernels.buffer_sizes import PHASES
from tools.bench.offline.bandwidth import read_bandwidth
from tools.bench.offline.candidate import STEP_TOKENS, Candidate
from tools.bench.offline.command import located
from tools.bench.phases.runner import ALL, phases_us
from tools.tiny_gguf import SHAPES

CACHED, LONG = 160, 2048  # positions before a step
BATCHES = (1, 16, 32)


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """Lines of a table of microseconds by work and phase."""
    width = max(map(len, found)) + 2
    lines = ["phase".ljust(12) + "".join(work.rjust(width) for work in found)]
    for phase in (*PHASES, ALL):
        lines.append(phase.ljust(12) + "".join(f"{us[phase]:,.0f}".rjust(width) for us in found.values()))
    return lines


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model file; default: the demo model.")
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A random model of a shape instead.")
@click.option("--format", "recipe", default="Q4_0", show_default=True, help="Format of the random model.")
@click.option("--cache", "kv_type", type=click.Choice(sorted(KV_TYPES)), default="f16", show_default=True)
@click.option("--repeats", default=120, show_default=True, help="Steps; of prompts a tenth.")
def main(gguf: Path | None, shape: str | None, recipe: str, kv_type: str, repeats: int) -> None:
    """Microseconds of each phase of a step."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    model = msgspec.structs.replace(located(gguf, shape, recipe), kv_type=kv_type)
    index = prepare_checkpoint(model, paths.models_dir())
    found: dict[str, dict[str, float]] = {}
    lines: list[str] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for rows, tokens in ((max(BATCHES), CACHED + 2), (1, LONG + STEP_TOKENS)):
            with Candidate(index, Path(folder), cores, rows, tokens, profile=True, kv_type=kv_type) as candidate:
                candidate.fill_cache()
                candidate.fill_tokens(rows, tokens)
                steps = {f"batch {n}": [(row, CACHED, 1, 1) for row in range(n)] for n in BATCHES}
                if rows == 1:
                    steps = {f"batch 1, {LONG:,} cached": [(0, LONG, 1, 1)]}
                    steps[f"prefill {STEP_TOKENS}"] = [(0, 0, STEP_TOKENS, 1)]
                for work, entries in steps.items():
                    step = partial(candidate.runner.run, entries)
                    step()  # maps what it uses
                    n = -(-repeats // 10) if work.startswith("prefill") else repeats
                    found[work] = phases_us(candidate, step, n)
                    if not work.startswith("prefill"):
                        weights = candidate.runner.model.weight_bytes
                        nbytes = candidate.step_bytes(len(entries), entries[0][1]) - weights
                        read = read_bandwidth(nbytes, cores) / 1e9
                        rate = nbytes / found[work]["attention"] / 1e3
                        found[work] |= {"kv_bytes": nbytes, "kv_gb_s": rate, "read_gb_s": read}
                        lines.append(f"{work}: {nbytes / 1e6:.1f} MB of K and V at {rate:.1f} GB/s, plain {read:.1f}")
    click.echo("\n".join((*table(found), *lines)))
    click.echo(json.dumps({work: {name: round(us, 1) for name, us in one.items()} for work, one in found.items()}))


if __name__ == "__main__":
    main()
