"""Counters, averages and histograms of one model's scheduling. How they are exported is in metrics.py."""

from __future__ import annotations

from bisect import bisect_left

from pipeline.observe.metric_families import ACCEPTED, BATCH, SECONDS, STEP_TOKENS
from stages.scheduler.policy.output_lengths import OutputLengths


class Histogram:
    """Counts by upper bound (the last count: above all bounds), the sum and the number of values."""

    __slots__ = ("bounds", "counts", "number", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.number = 0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.number += 1

    def merge(self, other: Histogram) -> None:
        """Add the values of another histogram with the same bounds."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
        self.number += other.number

    @property
    def mean(self) -> float:
        """Mean of all values, 0.0 without any."""
        return self.total / self.number if self.number else 0.0


# Of a step: it computes positions of prompts, and outputs beside them; outputs alone; draft tokens of a draft model.
STEP_PHASES = ("prefill", "decode", "draft")


class Stats:
    """Figures of one model since the start of this process."""

    def __init__(self) -> None:
        self.submitted = 0
        self.refused = 0  # refused, or removed from the queue
        self.finished: dict[str, int] = {}  # by finish reason
        self.steps = 0
        self.generated = 0  # output tokens
        self.endless = 0  # those of requests whose output does not stop by itself (`ignore_eos`)
        self.prompt_computed = 0  # prompt positions computed
        self.prompt_cached = 0  # prompt positions that came from the cache
        self.discarded = 0  # samples computed past a stop or a cancel
        self.preemptions = 0
        self.repeated = 0  # steps computed again after the worker's death
        self.culprits = 0  # sequences that ended because they killed the worker
        self.drafted = 0  # draft tokens that were verified, of both sources
        self.accepted = 0
        # Verifications by the number of draft tokens that they accepted: a list, because a step may have many of them.
        self.verified = [0] * (len(ACCEPTED) + 1)
        self.model_drafted = 0  # of the draft model only
        self.model_accepted = 0
        self.late = 0  # cancels and answers of kv for sequences that have ended
        self.batch = Histogram(BATCH)
        self.step_tokens = Histogram(STEP_TOKENS)  # positions of a step of requests
        self.waited_s = Histogram(SECONDS)  # from arrival to the first step, without a load
        self.step_s = {phase: Histogram(SECONDS) for phase in STEP_PHASES}  # the worker's time
        self.mean_output = 64.0  # output tokens of a sequence, exponential average
        self.output_lengths = OutputLengths()
        self.mean_fresh = 1.0  # share of a prompt that the cache does not have, exponential average

    @property
    def worker_s(self) -> float:
        """Time of all steps on the worker, s."""
        return sum(histogram.total for histogram in self.step_s.values())

    def record_cached(self, prompt: int, cached: int) -> None:
        """`cached` of `prompt` prompt tokens came from the prefix cache."""
        self.prompt_cached += cached
        self.mean_fresh += 0.05 * (1.0 - cached / prompt - self.mean_fresh)

    def record_finish(self, finish: str, outputs: int, can_stop: bool = True) -> None:
        """A sequence ended with finish reason `finish` after `outputs` tokens; `can_stop`: not with `ignore_eos`."""
        self.finished[finish] = self.finished.get(finish, 0) + 1
        if outputs and can_stop:
            self.output_lengths.record_end(self.generated - self.endless, finish == "stop")
        # An output that was cut off would have been longer: it counts only if it raises the mean.
        if finish in ("stop", "length") or outputs > self.mean_output:
            self.mean_output += 0.05 * (outputs - self.mean_output)

    def record_pooled(self) -> None:
        """A sequence ended with its vector. It says nothing about the lengths of outputs."""
        self.finished["pooled"] = self.finished.get("pooled", 0) + 1

    @property
    def expected_output(self) -> float:
        """Output tokens after which a sequence is expected to stop by itself."""
        return self.output_lengths.mean(self.generated - self.endless)

    def merge(self, other: Stats) -> None:
        """Add the counters and histograms of `other`."""
        for name, value in vars(other).items():
            if isinstance(value, Histogram):
                getattr(self, name).merge(value)
            elif isinstance(value, list):
                setattr(self, name, [mine + its for mine, its in zip(getattr(self, name), value, strict=True)])
            elif isinstance(value, dict):
                mine = getattr(self, name)
                for key, count in value.items():
                    if isinstance(count, Histogram):
                        mine[key].merge(count)
                    else:
                        mine[key] = mine.get(key, 0) + count
            elif isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
