"""What the model takes from this machine: phases of steps with one rank, memory, barriers, and cores beside others."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numba
import numpy as np

from shm import words
from shm.barrier import wait
from stages.worker.activations_arena import BARRIER
from stages.worker.kernels.buffer_sizes import PHASES
from tools.bench.cores.model import Step
from tools.bench.offline.candidate import Candidate
from tools.bench.phases.attention import peak_gmac_s

LINE_WORDS = 8
BARRIERS = 20_000


class Measured(NamedTuple):
    """Of one step."""

    phases: dict[str, float]  # seconds, the wait excluded
    step_s: float
    barriers: int


def measure_step(candidate: Candidate, step: Step, repeats: int) -> Measured:
    """Medians of `repeats` runs of a step."""
    runner = candidate.runner
    candidate.fill_tokens(step.batch, step.cached + step.tokens)
    control = runner.activations.view(0, (LINE_WORDS,), np.int64)
    counts, found, spans, barriers = runner.group.tables[0].phases, [], [], 0
    entries = [(row, step.cached, step.tokens, 1) for row in range(step.batch)]
    runner.run(entries)
    for _ in range(repeats):
        counts[:] = 0
        begun = words.load(control, BARRIER)
        runner.run(entries)
        barriers = words.load(control, BARRIER) - begun
        _, first, last, _ = runner.steps.timing[runner.step % len(runner.steps.timing)]
        spans.append(float(last - first) / 1e9)
        found.append(counts / counts.sum() * spans[-1])
    medians = np.median(found, axis=0)
    phases = {name: float(s) for name, s in zip(PHASES, medians, strict=True) if name != "wait"}
    return Measured(phases, statistics.median(spans), int(barriers))


def _together(cores: list[int], work: Callable[[int], None]) -> None:
    """Run `work(i)` in a thread on each core."""

    def run(i: int) -> None:
        os.sched_setaffinity(0, {cores[i]})  # of this thread only
        work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(cores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def slow(cores: list[int]) -> float:
    """How much longer a core takes for the same instructions while all compute, than alone."""
    rates: list[float] = [0.0] * len(cores)

    def work(i: int) -> None:
        rates[i] = peak_gmac_s(rounds=3)

    found = []
    for _ in range(3):
        _together(cores[:1], work)
        alone = rates[0]
        _together(cores, work)
        found.append(alone / statistics.mean(rates))
    return max(1.0, statistics.median(found))


@numba.njit(nogil=True, cache=False)
def _barriers(barrier, lines, rank, ranks, turns):
    for _ in range(turns):
        wait(barrier, lines, rank, ranks)


def barrier_s(cores: list[int], rounds: int = 5) -> float:
    """Seconds of a barrier of two ranks on two cores."""
    memory = np.zeros(LINE_WORDS * 4, np.int64)
    at = -(-memory.ctypes.data // 64) * 64
    _barriers(at, at + 64, 0, 1, 1)
    found = []
    for _ in range(rounds):
        memory[:] = 0
        begun = time.perf_counter()
        _together(cores[:2], lambda rank: _barriers(at, at + 64, rank, 2, BARRIERS))
        found.append((time.perf_counter() - begun) / BARRIERS)
    return statistics.median(found)
