"""What a server does: tokens, steps, queues and pages, from two readings of its stages' metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.observe import exposition
from pipeline.observe.metrics import Series

Families = dict[str, dict[tuple[str, ...], Series]]  # series by name and labels
MAX_TENANTS = 10
PAGE_STATES = ("leased", "cached", "free")


class Reading(msgspec.Struct):
    """The merged metrics of all stages at one moment."""

    at: float  # s, monotonic
    families: Families


class ModelActivity(msgspec.Struct):
    """One model. Rates are means between the two readings."""

    model: str
    output_tokens_per_s: float
    prompt_tokens_per_s: float  # computed ones: those from the cache cost nothing
    cached_prompt_tokens_per_s: float
    steps_per_s: float
    batch: float  # sequences in a step; 0.0 without a step
    running: int  # sequences
    queued: int
    kv_pages: dict[str, int]  # by state: leased, cached, free


class TenantActivity(msgspec.Struct):
    """One tenant."""

    tenant: str
    tokens_per_s: float  # computed: prompts and outputs
    tokens: int  # since the server started


class Activity(msgspec.Struct):
    """The whole server."""

    seconds: float  # between the two readings
    in_flight: int  # HTTP requests
    models: list[ModelActivity]
    tenants: list[TenantActivity]  # the busiest ones


def read(arena_dir: Path, clock: Callable[[], float] = time.monotonic) -> Reading:
    """Read the stages' snapshots, which are up to 1 s old."""
    return Reading(clock(), exposition.merge(exposition.read_snapshots(arena_dir)))


def compare(before: Reading, now: Reading) -> Activity:
    """What happened between two readings. A counter that is lower than before has started again at zero."""
    seconds = max(now.at - before.at, 1e-6)

    def value(of: Reading, name: str, labels: tuple[str, ...]) -> float:
        series = of.families.get(name, {}).get(labels)
        return series.value if series is not None else 0.0

    def observed(of: Reading, name: str, labels: tuple[str, ...]) -> int:
        series = of.families.get(name, {}).get(labels)
        return sum(series.counts) if series is not None else 0

    def rate(name: str, *labels: str) -> float:
        return _grown(value(before, name, labels), value(now, name, labels)) / seconds

    def gauge(name: str, *labels: str) -> int:
        return round(value(now, name, labels))

    models = []
    for model in _models(now.families):
        batch = "starling_batch_size"
        sequences = _grown(value(before, batch, (model,)), value(now, batch, (model,)))
        steps = _grown(observed(before, batch, (model,)), observed(now, batch, (model,)))
        models.append(
            ModelActivity(
                model,
                round(rate("starling_tokens_generated_total", model), 1),
                round(rate("starling_prompt_tokens_total", model, "computed"), 1),
                round(rate("starling_prompt_tokens_total", model, "cached"), 1),
                round(rate("starling_steps_total", model), 1),
                round(sequences / steps, 2) if steps else 0.0,
                gauge("starling_running_sequences", model),
                gauge("starling_queue_depth", model),
                {state: gauge("starling_kv_cache_pages", model, state) for state in PAGE_STATES},
            )
        )
    name = "starling_tenant_tokens_total"
    tenants = [
        TenantActivity(labels[0], round(rate(name, *labels), 1), round(series.value))
        for labels, series in now.families.get(name, {}).items()
    ]
    tenants.sort(key=lambda one: (-one.tokens_per_s, -one.tokens, one.tenant))
    return Activity(round(seconds, 3), gauge("starling_requests_in_flight"), models, tenants[:MAX_TENANTS])


def _models(families: Families) -> list[str]:
    """Models with a scheduler or with pages, by name."""
    names = ("starling_running_sequences", "starling_kv_cache_pages")
    return sorted({labels[0] for name in names for labels in families.get(name, {})})


def _grown(before: float, now: float) -> float:
    return now - before if now >= before else now
