"""Prefill and decode of an architecture beside a llama graph of the same size, in alternating rounds.

Rounds are short: each measures the llama graph, the family, and the llama graph again, so that other work on the
machine disturbs both alike.  A figure is the family's rate divided by the mean of the two rates beside it.  On one core
rates are tokens per second of the thread's CPU time, which leaves out the time that other processes had the core.

Both do as much work.  Positions of an encoder's input attend to all of it, those of a prompt to the ones before them,
half as many: beside an encoder the llama graph computes its prompt behind half as many cached positions, and each
position attends to as many as the encoder's on average.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tools.bench.families.models import file_of, index_of
from tools.bench.families.shapes import ENCODERS, base_of
from tools.bench.offline.candidate import Candidate

PROMPT, CACHED, TOKENS, BATCH = 256, 64, 24, 8
PREFILL, DECODE, DECODE_BATCH = WORKS = ("prefill", "decode", f"decode, batch {BATCH}")
Phases = dict[str, dict[str, float]]
Run = Callable[[Candidate], float]


class Rates(NamedTuple):
    """Rates of a family relative to those of the llama graph, one for each round."""

    work: str
    ratios: list[float]
    rates: list[float]  # tokens/s

    def cell(self) -> str:
        """The median and the range."""
        return f"{statistics.median(self.ratios):.2f} ({min(self.ratios):.2f}-{max(self.ratios):.2f})"


def rate(candidate: Candidate, work: str) -> float:
    """Tokens per second of one unit of work."""
    if work == PREFILL:
        return candidate.prefill(PROMPT)
    return candidate.decode(BATCH if work == DECODE_BATCH else 1, CACHED, TOKENS)


def encode_rate(candidate: Candidate) -> float:
    """Tokens per second of one input of a model that generates no text."""
    runner = candidate.runner
    runner.write_row(0, [3 + i % 250 for i in range(PROMPT)])
    begun = candidate.clock()
    runner.pool([(0, 0, PROMPT, 0, PROMPT)])
    return PROMPT / (candidate.clock() - begun)


def _runs(family: str) -> list[tuple[str, Run, Run]]:
    """Each unit of work: its name, how the llama graph does it, how the family does."""
    found: list[tuple[str, Run, Run]] = []
    if family in ENCODERS:
        return [(PREFILL, lambda candidate: candidate.prefill(PROMPT, PROMPT // 2), encode_rate)]
    for work in WORKS:

        def of_text(candidate: Candidate, work: str = work) -> float:
            return rate(candidate, work)

        found.append((work, of_text, of_text))
    return found


def measure(
    family: str, recipe: str, layers: int, rounds: int, cores: list[int], profile: bool = False
) -> tuple[list[Rates], Phases]:
    """Rates of each unit of work; with `profile`, also the shares of the phases, by work, of both."""
    runs = _runs(family)
    found = {work: Rates(work, [], []) for work, _, _ in runs}
    phases: Phases = {}
    with ExitStack() as stack:

        def opened(name: str) -> Candidate:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            index = index_of(file_of(name, recipe, layers))
            clock = time.thread_time if len(cores) == 1 else time.perf_counter
            tokens = PROMPT + max(PROMPT // 2, CACHED + TOKENS)
            return stack.enter_context(Candidate(index, folder, cores, BATCH, tokens, profile, clock))

        name_of_base = base_of(family)
        base, other = opened(name_of_base), opened(family)
        for number in range(rounds + 1):  # the first one warms up
            for work, of_base, of_other in runs:
                before, own, after = of_base(base), of_other(other), of_base(base)
                if number:
                    found[work].ratios.append(2 * own / (before + after))
                    found[work].rates.append(own)
        for work, of_base, of_other in runs if profile else ():
            for name, candidate, run in ((name_of_base, base, of_base), (family, other, of_other)):
                phases[f"{name}, {work}"] = candidate.phases(lambda run=run, c=candidate: run(c))
    return list(found.values()), phases
