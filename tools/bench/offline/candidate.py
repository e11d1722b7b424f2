"""The candidate: Starling's worker group in this process, timed step by step.

A step is the one that the server computes (arenas, plan, all ranks, sampling).  Ranks are threads here, one pinned to
each core, and this module composes the steps.  Prompts are random tokens, sampling is greedy.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from shm.pages import KvGeometry
from stages.scheduler.policy.pacing import PacingPolicy
from stages.worker.kernels.buffer_sizes import PHASES
from stages.worker.kernels.features import isa
from tools.step_runner import StepRunner

STEP_TOKENS = 512
FILL_BYTES = 1 << 26  # of random values, repeated


class Candidate:
    """A step runner for `rows` sequences of `tokens` positions. A context manager."""

    def __init__(
        self,
        index_path: Path,
        directory: Path,
        cores: list[int],
        rows: int,
        tokens: int,
        profile: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        samples: int = 0,
        kv_type: str = "f16",
    ) -> None:
        """`clock`: s, of rates; this thread is rank 0. `samples`: most of a step, 0: one of each row."""
        self.clock = clock
        before = set(threading.enumerate())
        self._affinity = os.sched_getaffinity(0)
        os.sched_setaffinity(0, set(cores))
        self.runner = StepRunner(
            index_path,
            directory,
            ranks=len(cores),
            max_rows=rows,
            max_tokens=tokens,
            step_tokens=STEP_TOKENS,
            max_samples=samples or rows,
            profile=profile,
            kv_type=kv_type,
        )
        self._kv_type = kv_type
        followers = [t for t in threading.enumerate() if t not in before]
        os.sched_setaffinity(0, {cores[0]})  # of this thread only: it is rank 0
        for thread, core in zip(followers, cores[1:], strict=True):
            os.sched_setaffinity(thread.native_id or 0, {core})
        self._rng = np.random.default_rng(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.runner.close()
        os.sched_setaffinity(0, self._affinity)

    def fill_tokens(self, rows: int, tokens: int) -> None:
        """Random prompts for rows."""
        vocab = self.runner.model.hyper.vocab_size
        for row in range(rows):
            self.runner.write_row(row, self._rng.integers(3, vocab, tokens), temperature=0.0)

    def _compute_prompt(self, row: int, tokens: int, start: int = 0) -> None:
        for at in range(start, tokens, STEP_TOKENS):
            count = min(STEP_TOKENS, tokens - at)
            self.runner.run([(row, at, count, int(at + count == tokens))])

    def prefill(self, tokens: int, cached: int = 0) -> float:
        """Tokens per second from a prompt to its first output token, behind `cached` other ones."""
        self.fill_tokens(1, cached + tokens)
        if cached:
            self._compute_prompt(0, cached)
        begun = self.clock()
        self._compute_prompt(0, cached + tokens, cached)
        return tokens / (self.clock() - begun)

    def decode(self, batch: int, cached: int, n_tokens: int) -> float:
        """Tokens per second of `batch` sequences together, `n_tokens` each after `cached` ones.

        Short steps are published several at a time, as the scheduler does.
        """
        self.fill_tokens(batch, cached)
        for row in range(batch):
            self._compute_prompt(row, cached)
        steps = [[(row, cached + i, 1, 1) for row in range(batch)] for i in range(n_tokens)]
        begun = self.clock()
        self.runner.run(steps[0])
        each_s, at_once = self.clock() - begun, 1
        while PacingPolicy().may_follow(at_once, at_once * each_s, batch):
            at_once += 1
        for i in range(1, n_tokens, at_once):
            self.runner.run_all(steps[i : i + at_once])
        return batch * n_tokens / (self.clock() - begun)

    def fill_cache(self) -> None:
        """Give all pages random K and V, as if all positions had been computed: which values, takes no time.

        Random f16, which are finite; an int8 cache takes their bytes as values, and pairs of them as its f16 scales.
        """
        pages = self.runner.pages.reshape(-1)
        block = self._rng.standard_normal(FILL_BYTES // 2, np.float32).astype(np.float16).view(np.uint8)
        for at in range(0, pages.size, FILL_BYTES):
            part = pages[at : at + FILL_BYTES]
            part[:] = block[: part.size]

    def chunk_at(self, depth: int, tokens: int = STEP_TOKENS) -> float:
        """Tokens per second of one chunk of a prompt behind `depth` positions that the cache holds."""
        self.fill_tokens(1, depth + tokens)
        begun = self.clock()
        self.runner.run([(0, depth, tokens, 1)])
        return tokens / (self.clock() - begun)

    def decode_at(self, depth: int, n_tokens: int) -> float:
        """Tokens per second of one sequence, `n_tokens` of them behind `depth` positions that the cache holds."""
        self.fill_tokens(1, depth)
        begun = self.clock()
        for i in range(n_tokens):
            self.runner.run([(0, depth + i, 1, 1)])
        return n_tokens / (self.clock() - begun)

    def overhead_us(self, n_tokens: int = 200) -> float:
        """Median time of a step of one sequence that is not spent between its first and last kernel."""
        self.fill_tokens(1, 16)
        self._compute_prompt(0, 16)
        runner, spans = self.runner, []
        for i in range(n_tokens):
            begun = time.perf_counter_ns()
            step = runner.publish([(0, 16 + i, 1, 1)])
            runner.compute()
            runner.tokens(1)
            wall = time.perf_counter_ns() - begun
            _, first, last, _ = runner.steps.timing[step % len(runner.steps.timing)]
            spans.append((wall - int(last - first)) / 1000)
        return statistics.median(spans)

    def phases(self, work: Any) -> dict[str, float]:
        """Share of rank 0's cycles in each phase of a step while `work()` runs; needs `profile`."""
        counts = self.runner.group.tables[0].phases
        counts[:] = 0
        work()
        return {name: round(float(n / counts.sum()), 3) for name, n in zip(PHASES, counts, strict=True)}

    def step_bytes(self, batch: int, cached: int) -> int:
        """Bytes that a decode step reads: the weights once, and each sequence's K and V."""
        h = self.runner.model.hyper
        of_head = KvGeometry.of(h, 32, self._kv_type).head_bytes / 32
        return self.runner.model.weight_bytes + round(batch * cached * h.n_layers * h.n_kv_heads * of_head)


def load_ms(index_path: Path, directory: Path, cores: list[int], repeats: int = 5) -> float:
    """Median time from nothing mapped to the first token of a short prompt; kernels and pages are warm."""
    spans = []
    for _ in range(repeats):
        begun = time.perf_counter()
        with Candidate(index_path, directory, cores, rows=1, tokens=64) as candidate:
            candidate.prefill(8)
            spans.append(1000 * (time.perf_counter() - begun))
    return statistics.median(spans)


def resident_mb(name: str) -> float:
    """Memory of maps of files whose path contains `name`, in 10^6 bytes, each page counted once."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            inside = name in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total / 1e6


def about() -> dict[str, Any]:
    """What the kernels are compiled for."""
    return {"isa": isa()}
