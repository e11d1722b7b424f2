"""What the stage shows of its models: the names of pipeline/telemetry.py, from `Stats` and the engines."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.telemetry import Metrics, Rate
from stages.scheduler.engine import Engine

INTERVAL_S = 0.5  # snapshots are placed once a second


class Gauge:
    """Of one model: puts its numbers into the stage's metrics."""

    def __init__(self, name: str, engine: Engine) -> None:
        self._name = name
        self._engine = engine
        self._rate = Rate()
        self._generated = 0

    def show(self, metrics: Metrics) -> None:
        name, engine, stats = self._name, self._engine, self._engine.stats
        self._rate.add(stats.generated - self._generated)
        self._generated = stats.generated
        for family, value in (
            ("starling_tokens_generated_total", stats.generated),
            ("starling_tokens_per_second", self._rate.value()),
            ("starling_queue_depth", engine.queues.depth),
            ("starling_running_sequences", sum(1 for s in engine.roster.held if s.pages)),
            ("starling_steps_total", stats.steps),
            ("starling_steps_repeated_total", stats.repeated),
            ("starling_preemptions_total", stats.preemptions),
        ):
            metrics.set(family, value, name)
        metrics.set("starling_prompt_tokens_total", stats.prompt_computed, name, "computed")
        metrics.set("starling_prompt_tokens_total", stats.prompt_cached, name, "cached")
        metrics.set("starling_draft_tokens_total", stats.accepted, name, "accepted")
        metrics.set("starling_draft_tokens_total", stats.drafted - stats.accepted, name, "rejected")
        for reason, count in stats.finished.items():
            metrics.set("starling_finished_total", count, name, reason)
        for family, histogram in (
            ("starling_queue_wait_seconds", stats.waited_s),
            ("starling_batch_size", stats.batch),
            ("starling_step_seconds", stats.step_s),
        ):
            metrics.put(family, histogram.bounds, histogram.counts, histogram.total, name)


def show_tenants(metrics: Metrics, engines: Iterable[Engine]) -> None:
    """Tokens computed for each tenant, over all models."""
    totals: dict[str, int] = {}
    for engine in engines:
        for tenant in engine.queues.tenants.values():
            totals[tenant.name] = totals.get(tenant.name, 0) + tenant.computed
    for name, total in totals.items():
        metrics.set("starling_tenant_tokens_total", total, name)
