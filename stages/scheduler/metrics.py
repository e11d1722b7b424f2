"""Metrics of the stage: values for the names in pipeline/observe/metric_families.py, from `Stats` and the engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pipeline.observe.metric_families import ACCEPTED
from pipeline.observe.metrics import MAX_SERIES, OTHER, Metrics
from pipeline.observe.rate import Rate
from stages.scheduler.core.engine import Engine
from stages.scheduler.stats import Stats

INTERVAL_S = 0.5  # snapshots are written once a second


class ModelMetrics:
    """Metrics of one model: the sums over its versions, unloaded ones included."""

    def __init__(self, name: str) -> None:
        self.engines: dict[str, Engine] = {}  # by version
        self._name = name
        self._past = Stats()
        self._rate = Rate()
        self._prompt_rate = Rate()
        self._generated = 0
        self._prompt_computed = 0

    def remove(self, version: str) -> None:
        """A version was unloaded; its counters are kept. Unknown versions are ignored."""
        engine = self.engines.pop(version, None)
        if engine is not None:
            self._past.merge(engine.stats)

    @property
    def late(self) -> int:
        """Frames for sequences that had ended."""
        return self._past.late + sum(engine.stats.late for engine in self.engines.values())

    def export(self, metrics: Metrics) -> None:
        """Write all values."""
        name, engines, stats = self._name, self.engines.values(), Stats()
        for counted in (self._past, *(engine.stats for engine in engines)):
            stats.merge(counted)
        self._rate.add(stats.generated - self._generated)
        self._generated = stats.generated
        self._prompt_rate.add(stats.prompt_computed - self._prompt_computed)
        self._prompt_computed = stats.prompt_computed
        scheduled = [s for engine in engines for s in engine.table.scheduled]
        for family, value in (
            ("starling_tokens_generated_total", stats.generated),
            ("starling_tokens_per_second", self._rate.value()),
            ("starling_queue_depth", sum(engine.queues.depth for engine in engines)),
            ("starling_prompt_tokens_per_second", self._prompt_rate.value()),
            ("starling_running_sequences", sum(1 for s in scheduled if s.run.pages)),
            ("starling_deferred_sequences", sum(1 for s in scheduled if not s.run.pages and not s.is_done)),
            ("starling_steps_total", stats.steps),
            ("starling_steps_repeated_total", stats.repeated),
            ("starling_preemptions_total", stats.preemptions),
            ("starling_discarded_samples_total", stats.discarded),
            ("starling_quarantined_total", stats.culprits),
            ("starling_sequences_submitted_total", stats.submitted),
            ("starling_sequences_refused_total", stats.refused),
        ):
            metrics.set(family, value, name)
        metrics.set("starling_prompt_tokens_total", stats.prompt_computed, name, "computed")
        metrics.set("starling_prompt_tokens_total", stats.prompt_cached, name, "cached")
        for source, drafted, accepted in (
            ("lookup", stats.drafted - stats.model_drafted, stats.accepted - stats.model_accepted),
            ("model", stats.model_drafted, stats.model_accepted),
        ):
            metrics.set("starling_draft_tokens_total", accepted, name, "accepted", source)
            metrics.set("starling_draft_tokens_total", drafted - accepted, name, "rejected", source)
        for reason, count in stats.finished.items():
            metrics.set("starling_finished_total", count, name, reason)
        for family, histogram in (
            ("starling_queue_wait_seconds", stats.waited_s),
            ("starling_batch_size", stats.batch),
            ("starling_step_tokens", stats.step_tokens),
        ):
            metrics.put(family, histogram.bounds, histogram.counts, histogram.total, name)
        metrics.put("starling_draft_accepted_tokens", ACCEPTED, stats.verified, stats.accepted, name)
        for phase, steps in stats.step_s.items():
            if steps.number:
                metrics.put("starling_step_seconds", steps.bounds, steps.counts, steps.total, name, phase)


class TenantMetrics:
    """Tokens computed for each tenant, over all models. Tenants beyond the bound on series share one."""

    def __init__(self) -> None:
        self._past: Counter[str] = Counter()  # of engines of unloaded versions
        self._named: set[str] = set()  # tenants with a series

    def remove(self, engine: Engine) -> None:
        """The engine's version was unloaded. Tenants without a series of their own are added up: names are bounded."""
        past = self._totals([engine])
        self._past = Counter[str]()
        for name, total in past.items():
            self._past[self._series(name)] += total

    def export(self, metrics: Metrics, engines: Iterable[Engine]) -> None:
        """Write all values."""
        others = 0
        for name, total in self._totals(engines).items():
            if (series := self._series(name)) == OTHER:
                others += total
            else:
                metrics.set("starling_tenant_tokens_total", total, series)
        if others:
            metrics.set("starling_tenant_tokens_total", others, OTHER)

    def _series(self, name: str) -> str:
        """The series of a tenant: the first ones have one each."""
        if name not in self._named:
            if name == OTHER or len(self._named) >= MAX_SERIES - 1:
                return OTHER
            self._named.add(name)
        return name

    def _totals(self, engines: Iterable[Engine]) -> Counter[str]:
        totals = Counter(self._past)
        for engine in engines:
            totals.update(engine.queues.forgotten)
            for tenant in engine.queues.tenants.values():
                totals[tenant.name] += tenant.computed
        return totals
