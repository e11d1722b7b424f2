"""One random model whose step's phases are timed, by the cycle counts that the kernels keep."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pipeline.config.schema import ModelConfig
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.kernels.buffer_sizes import PHASES
from tools.bench.offline.candidate import Candidate
from tools.tiny_gguf import Shape, write_model

ALL = "all"  # of a step
LONG_NS = 2_000_000  # of a step; what Python adds to it is small then


def candidate_of(
    shape: Shape,
    directory: Path,
    cores: list[int],
    rows: int,
    tokens: int,
    kv_type: Literal["f16", "f32", "int8"] = "f16",
) -> Candidate:
    """A worker group of a random model, whose phases are counted. `directory`: for its files, on tmpfs."""
    path = write_model(directory / "model.gguf", shape, "Q4_0")
    index = prepare_checkpoint(ModelConfig(name="random", path=str(path), kv_type=kv_type), directory / "models")
    return Candidate(index, directory, cores, rows, tokens, profile=True, kv_type=kv_type)


def phase_us(candidate: Candidate, phase: str, step: Callable[[], object], repeats: int) -> float:
    """Median microseconds that rank 0 spends in a phase during one call of `step`, which computes one step."""
    return phases_us(candidate, step, repeats)[phase]


def phases_us(candidate: Candidate, step: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median microseconds of rank 0 in each phase during one call of `step`, which computes one step, and "all".

    With one rank, which is this thread, a long step is timed by the processor's time: other programs change it less.
    A phase of it is as long as by the clock, or its share of the step if others ran for long during the phase itself.
    """
    runner = candidate.runner
    counts, found = runner.group.tables[0].phases, []
    for _ in range(repeats):
        counts[:] = 0
        begun = time.thread_time_ns()
        step()
        used_ns = time.thread_time_ns() - begun
        _, first, last, _ = runner.steps.timing[runner.step % len(runner.steps.timing)]
        shares, clock_ns = counts / counts.sum(), float(last - first)
        whole_ns = min(clock_ns, used_ns) if used_ns > LONG_NS else clock_ns
        phases = [share * (clock_ns if share * clock_ns <= whole_ns else whole_ns) / 1000 for share in shares.tolist()]
        found.append([*phases, whole_ns / 1000])
    return dict(zip((*PHASES, ALL), map(statistics.median, zip(*found, strict=True)), strict=True))
