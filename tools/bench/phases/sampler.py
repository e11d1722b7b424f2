"""`python -m tools.bench.phases.sampler`: time of the sampler for one row of logits. The last line is JSON.

A random model with a vocabulary of 128,256 tokens, as Llama 3 has, and hardly any layers: its logits are those of the
reference, and only the phase `sample` counts.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click

from tools.bench.phases.runner import candidate_of, phase_us
from tools.tiny_gguf import Shape

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-k 40": {"temperature": 1.0, "top_k": 40},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-p 0.9 of a flat distribution": {"temperature": 50.0, "top_p": 0.9},
    "top-k 40, top-p 0.9, penalties": {
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.9,
        "repetition": 1.1,
        "frequency": 0.2,
        "presence": 0.2,
    },
    "top-p 0.9 of a flat distribution, penalties": {
        "temperature": 50.0,
        "top_p": 0.9,
        "frequency": 0.2,
        "presence": 0.2,
    },
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "typical-p 0.9": {"temperature": 1.0, "typical_p": 0.9},
    "typical-p 0.9 of a flat distribution": {"temperature": 50.0, "typical_p": 0.9},
}


@click.command()
@click.option("--vocabulary", default=128_256, show_default=True)
@click.option("--repeats", default=200, show_default=True)
def main(vocabulary: int, repeats: int) -> None:
    """Microseconds of the sampler for one row."""
    cores = sorted(os.sched_getaffinity(0))[:1]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shape = Shape(1, 64, 2, 1, 32, 96, vocabulary)
        with candidate_of(shape, Path(folder), cores, 1, 64) as candidate:
            for name, parameters in CASES.items():
                candidate.runner.write_row(0, [5, 6, 7, 8], **parameters)
                candidate.runner.run([(0, 0, 4, 1)])
                found[name] = phase_us(candidate, "sample", lambda: candidate.runner.run([(0, 3, 1, 1)]), repeats)
                click.echo(f"{name}: {found[name]:.0f} us")
    click.echo(json.dumps({"vocabulary": vocabulary, "us": {name: round(us, 1) for name, us in found.items()}}))


if __name__ == "__main__":
    main()
