"""`python -m tools.bench.metrics_cost`: what counting costs the scheduler for each step. The last line is JSON.

Counts what a step of 32 decoding sequences counts, and what is added if each of them verifies draft tokens, then
exports and publishes as a stage with 512 tenants does.  The share of the periodic work is given for 50 steps per
second, about what the demo model does.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.observe.metrics import MAX_SERIES, Metrics
from stages.scheduler.metrics import ModelMetrics
from stages.scheduler.stats import Stats

SEQUENCES = 32
STEPS_PER_S = 50
ROUNDS = 2000


def microseconds(do: Callable[[], object], rounds: int) -> float:
    """Median time of a call."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter_ns()
        do()
        times.append(time.perf_counter_ns() - begun)
    return statistics.median(times) / 1e3


def main() -> None:
    """Print the cost of each part."""
    stats = Stats()

    def count() -> None:
        stats.steps += 1
        stats.batch.add(SEQUENCES)
        stats.step_tokens.add(SEQUENCES)
        stats.step_s["decode"].add(0.02)
        for _ in range(SEQUENCES):
            stats.generated += 1
            stats.prompt_computed += 0
            stats.discarded += 0

    def count_drafts() -> None:
        for _ in range(SEQUENCES):
            stats.accepted += 2
            stats.verified[2] += 1

    model = ModelMetrics("model")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        metrics = Metrics("scheduler", Path(directory))
        for number in range(MAX_SERIES):
            metrics.set("starling_tenant_tokens_total", number, f"tenant-{number}")
        found = {
            "count_us_per_step": microseconds(count, ROUNDS),
            "count_drafts_us_per_step": microseconds(count_drafts, ROUNDS),
            "export_us_every_500_ms": microseconds(lambda: model.export(metrics), ROUNDS // 10),
            "publish_us_every_s": microseconds(metrics.publish, ROUNDS // 10),
        }
    periodic = (2 * found["export_us_every_500_ms"] + found["publish_us_every_s"]) / STEPS_PER_S
    found["us_per_step"] = found["count_us_per_step"] + periodic
    found["us_per_step_with_drafts"] = found["us_per_step"] + found["count_drafts_us_per_step"]
    print(msgspec.json.encode({name: round(value, 2) for name, value in found.items()}).decode())


if __name__ == "__main__":
    main()
