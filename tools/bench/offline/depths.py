"""`python -m tools.bench.offline.depths`: speed with long contexts.

For each depth: a chunk of 512 prompt tokens and single output tokens behind so many positions.  Starling's cache is
filled with random K and V, as their values take no time; llama.cpp computes them, up to `--baseline-to` positions.
The read is that of as many bytes as a step of decoding reads, in the same round.  The last line is one JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from pipeline.config import paths
from pipeline.models import store
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tools.bench.offline.bandwidth import read_bandwidth
from tools.bench.offline.baseline import Baseline
from tools.bench.offline.candidate import STEP_TOKENS, Candidate
from tools.bench.offline.command import located
from tools.bench.offline.results import Rate, machine
from tools.tiny_gguf import SHAPES

N_TOKENS = 24
READ_BYTES = 2 << 30  # most of the plain read, which needs memory of its own


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model file.")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="llama-1b", show_default=True)
@click.option("--format", "recipe", default="Q4_K_M", show_default=True, help="Format of the random model.")
@click.option("--depths", default="8192,32768,130000", show_default=True, help="Comma separated.")
@click.option("--baseline-to", default=8192, show_default=True, help="Largest depth that llama.cpp computes; 0: none.")
@click.option("--rounds", default=3, show_default=True)
def main(gguf: Path | None, shape: str, recipe: str, depths: str, baseline_to: int, rounds: int) -> None:
    """Speed of prompts and output behind long contexts."""
    numbers = sorted(os.sched_getaffinity(0))[:2]
    model = located(gguf, None if gguf else shape, recipe)
    index, source = prepare_checkpoint(model, paths.models_dir()), store.fetch(model, paths.models_dir())
    planned = sorted(int(one) for one in depths.split(","))
    rows = []
    for depth in planned:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            tokens = depth + STEP_TOKENS + N_TOKENS
            candidate = stack.enter_context(Candidate(index, directory, numbers, 1, tokens))
            candidate.fill_cache()
            candidate.decode_at(depth, 2)  # compile and map
            rates: dict[str, list[float]] = {"chunk": [], "decode": [], "read": []}
            theirs: dict[str, list[float]] = {"chunk": [], "decode": []}
            baseline = None
            if depth <= baseline_to and importlib.util.find_spec("llama_cpp"):
                baseline = Baseline(source.path, numbers, 1, tokens + 256)
                stack.callback(baseline.close)
            nbytes = candidate.step_bytes(1, depth + N_TOKENS // 2)
            for _ in range(rounds):
                rates["chunk"].append(candidate.chunk_at(depth))
                rates["decode"].append(candidate.decode_at(depth, N_TOKENS))
                rates["read"].append(read_bandwidth(min(nbytes, READ_BYTES), numbers, 0.3, 1) / 1e9)
                if baseline is not None:
                    for name, rate in zip(theirs, baseline.depth(depth, N_TOKENS), strict=True):
                        theirs[name].append(rate)
            read = statistics.median(rates["read"])
            share = nbytes * statistics.median(rates["decode"]) / 1e9 / read
            arena_mb = candidate.runner.pages.nbytes / 1e6
        row = {
            "depth": depth,
            "chunk": Rate.of(rates["chunk"]),
            "decode": Rate.of(rates["decode"]),
            "of_read": round(share, 2),
            "read_gb_s": round(read, 1),
            "kv_mb": round(arena_mb),
        }
        line = f"{depth:,}: prompt {row['chunk']}, output {row['decode']} tokens/s, {share:.2f} of {read:.1f} GB/s, "
        line += f"KV {arena_mb:,.0f} MB"
        if theirs["chunk"]:
            row["baseline"] = {name: Rate.of(values) for name, values in theirs.items()}
            line += f"; llama.cpp {Rate.of(theirs['chunk'])}, {Rate.of(theirs['decode'])}"
        click.echo(line)
        rows.append(row)
    plain = [{k: _plain(v) for k, v in row.items()} for row in rows]
    click.echo(json.dumps({"model": model.name, "machine": machine(numbers), "depths": plain}))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [value.median, value.low, value.high] if isinstance(value, Rate) else value


if __name__ == "__main__":
    main()
