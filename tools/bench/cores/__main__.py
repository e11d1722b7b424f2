"""`python -m tools.bench.cores`: predicts the time of steps on 1 to 128 cores. The last line is JSON.

It measures single steps with one rank, what memory gives to one core and to all, a barrier of two ranks, and how much
cores slow each other down; model.py makes a prediction of these.  "Check" compares it with all cores of this machine,
which the model has not seen.  Of another machine, `--bandwidth` and `--sockets` are what it has; cores are assumed to
be as fast as here, all sockets to read copies of their own.  Each step is predicted twice: with what memory gives to
each core here, for any number of cores, and with at most the bandwidth of the sockets that the cores are on.

Two worker groups of a model, one on each socket, compute half the sequences each on half the cores, beside each other:
batch 64 takes them as long as one group of half the cores takes for batch 32.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL, ModelConfig
from shm.checkpoint import Checkpoint
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tools.bench.cores import measure
from tools.bench.cores.model import Machine, Step, phases, predict, socket_barriers
from tools.bench.cores.model import bandwidth as given
from tools.bench.offline.bandwidth import read_bandwidth
from tools.bench.offline.candidate import Candidate

STEPS = (
    Step("batch 1", 1, 1, 128),
    Step("batch 1, 2,048 cached", 1, 1, 2048),
    Step("batch 8", 8, 1, 128),
    Step("batch 16", 16, 1, 128),
    Step("batch 32", 32, 1, 128),
    Step("batch 64", 64, 1, 128),
    Step("prefill 512", 1, 512, 0),
)
CORES = (1, 2, 4, 8, 16, 32, 64, 128)
ROWS, TOKENS = 64, 2240
REMOTE = 3.0  # a line from another socket takes so many times as long
SOCKET_GB_S = 164.0  # 0.8 of the peak of 8 channels of DDR4-3200: an estimate


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model; default: the demo model.")
@click.option("--bandwidth", type=float, help="GB/s of all sockets at most; default: 164 for each.")
@click.option(
    "--sockets", default=2, show_default=True, help="Of the machine with 128 cores; cores are shared equally."
)
@click.option("--repeats", default=15, show_default=True)
def main(gguf: Path | None, bandwidth: float | None, sockets: int, repeats: int) -> None:
    """Predict the time of a step on more cores."""
    model = ModelConfig(name=DEMO_MODEL) if gguf is None else ModelConfig(name=gguf.stem, path=str(gguf))
    index = prepare_checkpoint(model, paths.models_dir())
    checkpoint = Checkpoint(index)
    hyper, tensors = checkpoint.index.hyper, checkpoint.index.tensors
    cores = sorted(os.sched_getaffinity(0))
    one, together = {}, {}
    with ExitStack() as stack:
        first, second = (Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))) for _ in range(2))
        alone = stack.enter_context(Candidate(index, first, cores[:1], ROWS, TOKENS, profile=True))
        group = stack.enter_context(Candidate(index, second, cores, ROWS, TOKENS, profile=True))
        for candidate in (alone, group):
            candidate.fill_cache()
        for step in STEPS:  # one after the other, because the speed of a machine changes
            one[step] = measure.measure_step(alone, step, repeats)
            together[step] = measure.measure_step(group, step, repeats)
    size = checkpoint.index.decode_bytes
    one_core, all_cores = (read_bandwidth(size, some) for some in (cores[:1], cores))
    slow, pair_s = (measure.slow(cores), measure.barrier_s(cores)) if len(cores) > 1 else (1.0, 0.0)
    here = Machine(one_core, all_cores, slow, pair_s, pair_s / 2, REMOTE * pair_s / 2, len(cores))
    click.echo(
        f"one core reads {one_core / 1e9:.1f} GB/s, {len(cores)} read {all_cores / 1e9:.1f}; a core computes "
        f"{slow:.2f} times as long beside the others; a barrier of two ranks takes {1e6 * pair_s:.2f} us"
    )
    per_core = all_cores / len(cores)
    socket_cores = max(1, max(CORES) // sockets)
    per_socket = 1e9 * (bandwidth / sockets if bandwidth else SOCKET_GB_S)
    rows: list[dict[str, Any]] = []
    for step in STEPS:
        made_of, barriers = phases(step, hyper, tensors), together[step].barriers
        nearby = socket_barriers(step, hyper)
        us: dict[float, dict[int, float]] = {math.inf: {}, per_socket: {}}
        for most, found in us.items():
            for n in CORES:
                there = here._replace(bandwidth=given(n, per_core, most, socket_cores), socket_cores=socket_cores)
                found[n] = round(1e6 * predict(one[step].phases, made_of, barriers, there, n, nearby), 1)
        expected, seen = predict(one[step].phases, made_of, barriers, here, len(cores)), together[step].step_s
        check = {"cores": len(cores), "predicted_us": round(1e6 * expected, 1), "measured_us": round(1e6 * seen, 1)}
        free, bound = us.values()
        rows.append({"step": step.name, "barriers": barriers, "us": free, "bound_us": bound, "check": check})
        click.echo(
            f"{step.name}: {_shown(free)}; at most {per_socket / 1e9:.0f} GB/s a socket: {_shown(bound)}; {barriers} "
            f"barriers; check with {len(cores)} cores: {1e6 * expected:,.0f} us predicted, {1e6 * seen:,.0f} measured"
        )
    machine = {"core_gb_s": one_core / 1e9, "gb_s": all_cores / 1e9, "slow": slow, "barrier_us": 1e6 * pair_s}
    there_gb_s = sockets * per_socket / 1e9
    click.echo(json.dumps({"machine": machine, "sockets": sockets, "bandwidth_gb_s": there_gb_s, "steps": rows}))


def _shown(us: dict[int, float]) -> str:
    return ", ".join(f"{n} cores {value:,.0f} us" for n, value in us.items())


if __name__ == "__main__":
    main()
