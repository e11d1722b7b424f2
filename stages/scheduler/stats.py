"""Counters, gauges and histograms of one model's scheduling; knows nothing of how they are shown."""

from __future__ import annotations

from bisect import bisect_left

from pipeline.observe.metrics import BATCH, SECONDS


class Histogram:
    """Counts by upper bound (the last place: beyond all), their sum and number."""

    __slots__ = ("bounds", "counts", "number", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.number = 0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.number += 1

    def merge(self, other: Histogram) -> None:
        """Of the same bounds."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
        self.number += other.number

    @property
    def mean(self) -> float:
        return self.total / self.number if self.number else 0.0


class Stats:
    """Of one model, since the start of this process."""

    def __init__(self) -> None:
        self.submitted = 0
        self.refused = 0  # at the door, or put out of the queue
        self.finished: dict[str, int] = {}  # by finish reason
        self.steps = 0
        self.generated = 0  # output tokens
        self.prompt_computed = 0  # prompt positions computed
        self.prompt_cached = 0  # prompt positions that came from the cache
        self.discarded = 0  # samples computed past a stop or a cancel
        self.preemptions = 0
        self.repeated = 0  # steps computed again after the worker's death
        self.convicted = 0  # sequences that killed the worker
        self.drafted = 0  # tokens, of both sources
        self.accepted = 0
        self.model_drafted = 0  # by the draft model
        self.model_accepted = 0
        self.late = 0  # cancels and answers for sequences that are not there any more
        self.batch = Histogram(BATCH)
        self.waited_s = Histogram(SECONDS)  # from arrival to the first step
        self.step_s = Histogram(SECONDS)  # the worker's time
        self.mean_output = 64.0  # output tokens of a sequence, exponential average
        self.mean_fresh = 1.0  # share of a prompt that the cache does not have, exponential average

    def granted(self, prompt: int, cached: int) -> None:
        """A prompt of so many tokens got its pages, `cached` of them computed before."""
        self.prompt_cached += cached
        self.mean_fresh += 0.05 * (1.0 - cached / prompt - self.mean_fresh)

    def ended(self, finish: str, outputs: int) -> None:
        self.finished[finish] = self.finished.get(finish, 0) + 1
        # Of an answer that was cut off it is known that it would have been longer.
        if finish in ("stop", "length") or outputs > self.mean_output:
            self.mean_output += 0.05 * (outputs - self.mean_output)

    def merge(self, other: Stats) -> None:
        """Add what another one has counted."""
        for name, value in vars(other).items():
            if isinstance(value, Histogram):
                getattr(self, name).merge(value)
            elif isinstance(value, dict):
                mine = getattr(self, name)
                for key, count in value.items():
                    mine[key] = mine.get(key, 0) + count
            elif isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
