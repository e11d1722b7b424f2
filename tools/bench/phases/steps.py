"""`python -m tools.bench.phases.steps`: where the time of a step goes, by phase. The last line is JSON.

Microseconds of rank 0 of two, from the cycle counts that the kernels keep; medians of steps of the demo model or of
another file.  "wait" is time in barriers.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path

import click

from pipeline.config import paths
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tools.bench.offline.candidate import STEP_TOKENS, Candidate
from tools.bench.offline.command import located
from tools.bench.phases.runner import phases_us

CACHED, LONG = 160, 2048  # positions before a step
BATCHES = (1, 16, 32)


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """Lines of a table of microseconds by work and phase."""
    width = max(map(len, found)) + 2
    lines = ["phase".ljust(12) + "".join(work.rjust(width) for work in found)]
    for phase in next(iter(found.values())):
        lines.append(phase.ljust(12) + "".join(f"{us[phase]:,.0f}".rjust(width) for us in found.values()))
    return lines


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model file; default: the demo model.")
@click.option("--repeats", default=120, show_default=True, help="Steps; of prompts a tenth.")
def main(gguf: Path | None, repeats: int) -> None:
    """Microseconds of each phase of a step."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    index = prepare_checkpoint(located(gguf, None, ""), paths.models_dir())
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for rows, tokens in ((max(BATCHES), CACHED + 2), (1, LONG + STEP_TOKENS)):
            with Candidate(index, Path(folder), cores, rows, tokens, profile=True) as candidate:
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
    click.echo("\n".join(table(found)))
    click.echo(json.dumps({work: {name: round(us, 1) for name, us in one.items()} for work, one in found.items()}))


if __name__ == "__main__":
    main()
