"""Tokens are counted by tenant, over all versions of all models, with a bounded number of names."""

from __future__ import annotations

from pipeline.observe.metrics import MAX_SERIES, OTHER, Metrics
from stages.scheduler.core.engine import Engine
from stages.scheduler.metrics import TenantMetrics

from .world import World


def engine_of(names: list[str]) -> Engine:
    """An engine that has computed a token for each of these tenants."""
    engine = World().engine
    for name in names:
        engine.queues.tenant(name).computed = 1
    return engine


def test_the_names_of_unloaded_versions_are_bounded_and_no_token_is_lost() -> None:
    metrics, tenants = Metrics("scheduler", None), TenantMetrics()
    for i in range(3):
        engine = engine_of(["known", *(f"t{i}-{j}" for j in range(MAX_SERIES))])
        tenants.export(metrics, [engine])
        tenants.remove(engine)
        assert len(tenants._past) <= MAX_SERIES
    tenants.export(metrics, [])
    values = {one.labels[0]: one.value for one in metrics.snapshot().families["starling_tenant_tokens_total"]}
    assert values["known"] == 3
    assert sum(values.values()) == 3 * (MAX_SERIES + 1) and values[OTHER] > 0
