"""Exemplars: for each bucket of a histogram the last request that fell into it, by its trace or its own id.

OpenMetrics carries them; the Prometheus text format has no place for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client.samples import Exemplar

from pipeline.observe.metric_families import FAMILIES

OPEN_METRICS = "application/openmetrics-text"
MAX_SERIES = 512  # label sets with exemplars
MAX_ID = 100  # characters; OpenMetrics allows 128 for names and values of an exemplar's labels


class Source(NamedTuple):
    """What an exemplar refers to: `trace_id` or `request_id`, and its value."""

    label: str
    id: str


class Exemplars:
    """Of one process. `wall` is s since 1970."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._buckets: dict[tuple[str, tuple[str, ...]], dict[int, Exemplar]] = {}

    def add(self, name: str, value: float, source: Source, *labels: str) -> None:
        """The request that a value of the histogram `name` comes from; an empty or too long id counts as none."""
        key = (name, labels)
        if not 0 < len(source.id) <= MAX_ID or (key not in self._buckets and len(self._buckets) >= MAX_SERIES):
            return
        bucket = bisect_left(FAMILIES[name].bounds, value)
        exemplar = Exemplar({source.label: source.id}, value, round(self._wall(), 3))
        self._buckets.setdefault(key, {})[bucket] = exemplar

    def copy(self) -> Exemplars:
        """Those of now, which do not change."""
        copied = Exemplars(self._wall)
        copied._buckets = {key: dict(buckets) for key, buckets in self._buckets.items()}
        return copied

    def of(self, name: str, labels: tuple[str, ...]) -> dict[int, Exemplar]:
        """The exemplars of a series, by the index of the bucket."""
        return self._buckets.get((name, labels), {})


def accepts_open_metrics(accept: str) -> bool:
    """Whether the `Accept` header of a scrape prefers OpenMetrics to the text format."""
    weights = {OPEN_METRICS: 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        kind, *parameters = (item.strip().lower() for item in part.split(";"))
        if kind in weights:
            weights[kind] = max(weights[kind], _weight(parameters))
    return 0 < weights[OPEN_METRICS] >= weights["text/plain"]


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 0.0
    return 1.0
