"""The text of `/metrics`: the merged snapshots of all stages, as Prometheus text or OpenMetrics. Called by the
gateway and by orchestrators (scrapes.py).

Series of the same name and labels are added.  Counters, histograms and peaks of a stage whose process has ended
remain until its successor replaces the snapshot; its gauges are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.observe import status
from pipeline.observe.aliases import ALIASES, Alias
from pipeline.observe.exemplars import Exemplars
from pipeline.observe.metric_families import FAMILIES, Family
from pipeline.observe.metrics import Metrics, Series, Snapshot, decode_snapshot, fits, read_snapshot
from pipeline.observe.process_use import ProcessTotals
from shm.arena import process_ticks

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
ALL_TENANTS = "all"  # the label under which hidden tenants are added up


def prepare(
    config: Config,
    own: Metrics | None = None,
    shows_tenants: bool = True,
    exemplars: Exemplars | None = None,
    processes: ProcessTotals | None = None,
    unready: Collection[str] = (),
) -> Callable[[], bytes]:
    """What writes Prometheus text of all stages' snapshots and of `own`; with `exemplars` in the format OpenMetrics.

    It has copies of `own` and `exemplars`, and may be called in a thread.  `shows_tenants`: one series for each tenant,
    not a sum.  `processes`: of `own`; without it the counters of processes that do not measure themselves begin anew
    with each process.  `unready`: stages that the caller finds not ready; the record of a process that hangs still says
    that it is.
    """
    stages = _stage_families(paths.run_dir(config), processes, unready)
    encoded = own.publish() if own is not None else b""
    skip = own.stage if own is not None else ""
    copied = exemplars.copy() if exemplars is not None else None

    def text() -> bytes:
        """Render it."""
        snapshots = list(read_snapshots(paths.arena_dir(config), skip))
        if encoded:
            snapshots.append(decode_snapshot(encoded))
        return _text(config, [*snapshots, stages], shows_tenants, copied)

    return text


def _text(config: Config, snapshots: list[Snapshot], shows_tenants: bool, exemplars: Exemplars | None) -> bytes:
    if not shows_tenants:
        for snapshot in snapshots:
            _hide_tenants(snapshot)
    registry = CollectorRegistry(auto_describe=False)
    aliases = [alias for name in dict.fromkeys(config.metrics.aliases) for alias in ALIASES[name]]
    registry.register(_MergedCollector(merge(snapshots), aliases, exemplars))
    return generate_latest(registry) if exemplars is None else openmetrics.generate_latest(registry)


def read_snapshots(directory: Path, skip: str = "") -> Iterator[Snapshot]:
    """The snapshots of all stages; files that do not decode are skipped."""
    for path in sorted(directory.glob("*.metrics")):
        snapshot = read_snapshot(path) if path.stem != skip else None
        if snapshot is None:
            continue
        if process_ticks(snapshot.pid) != snapshot.ticks:
            snapshot.families = {
                name: series
                for name, series in snapshot.families.items()
                if name in FAMILIES and FAMILIES[name].is_kept
            }
        yield snapshot


def merge(snapshots: Iterable[Snapshot]) -> dict[str, dict[tuple[str, ...], Series]]:
    """Add series of the same name and labels; unknown families are skipped."""
    merged: dict[str, dict[tuple[str, ...], Series]] = {}
    for snapshot in snapshots:
        for name, several in snapshot.families.items():
            family = FAMILIES.get(name)
            if family is None:
                continue
            into = merged.setdefault(name, {})
            for series in several:
                if not fits(family, series):
                    continue
                known = into.get(series.labels)
                if known is None:
                    into[series.labels] = Series(series.labels, series.value, list(series.counts))
                else:
                    known.value += series.value
                    known.counts = [a + b for a, b in zip(known.counts, series.counts, strict=True)]
    return merged


def _hide_tenants(snapshot: Snapshot) -> None:
    """Replace tenants' names; `merge` adds the series up."""
    for name, several in snapshot.families.items():
        family = FAMILIES.get(name)
        if family is None or "tenant" not in family.labels:
            continue
        at = family.labels.index("tenant")
        snapshot.families[name] = [
            Series((*s.labels[:at], ALL_TENANTS, *s.labels[at + 1 :]), s.value, s.counts) for s in several
        ]


def _stage_families(run_dir: Path, processes: ProcessTotals | None, unready: Collection[str]) -> Snapshot:
    """Families about the stages themselves, from their status records, and about their other processes."""
    up = Metrics("", None)
    (processes or ProcessTotals(up)).measure(run_dir, up)
    recorded = set[str]()
    for record in status.read_all(run_dir):
        is_ready = record.alive and record.ready and record.stage not in unready
        up.set("starling_stage_up", float(record.alive), record.stage)
        up.set("starling_stage_ready", float(is_ready), record.stage)
        up.set("starling_stage_restarts_total", record.restarts, record.stage)
        recorded.add(record.stage)
    for stage in set(unready) - recorded:  # it has not begun, or its process has ended in order
        up.set("starling_stage_up", 0.0, stage)
        up.set("starling_stage_ready", 0.0, stage)
    return up.snapshot()


class _MergedCollector(Collector):
    """Passes merged series to prometheus_client, which writes the text format."""

    def __init__(
        self,
        merged: dict[str, dict[tuple[str, ...], Series]],
        aliases: Iterable[Alias] = (),
        exemplars: Exemplars | None = None,
    ) -> None:
        self._merged = merged
        self._aliases = aliases
        self._exemplars = exemplars

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of the table; counters without labels are 0 before the first event."""
        for name, family in FAMILIES.items():
            several = self._merged.get(name, {})
            if not several and not family.labels and family.kind != "gauge":
                several = {(): Series((), 0.0, [0] * (len(family.bounds) + 1) if family.bounds else [])}
            yield _metric(family, several.values(), self._exemplars)
        for alias in self._aliases:
            yield _metric(alias.family, alias.make(self._merged))


def _metric(family: Family, several: Iterable[Series], exemplars: Exemplars | None = None) -> Metric:
    if family.kind == "counter":
        counter = CounterMetricFamily(family.name, family.help, labels=family.labels)
        for series in several:
            counter.add_metric(series.labels, series.value)
        return counter
    if family.kind == "gauge":
        gauge = GaugeMetricFamily(family.name, family.help, labels=family.labels)
        for series in several:
            gauge.add_metric(series.labels, series.value)
        return gauge
    histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for series in several:
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        below = 0
        known = exemplars.of(family.name, series.labels) if exemplars is not None else {}
        for index, (bound, count) in enumerate(zip((*family.bounds, float("inf")), series.counts, strict=True)):
            below += count
            upper = "+Inf" if bound == float("inf") else repr(float(bound))
            buckets.append((upper, below, known[index]) if index in known else (upper, below))
        histogram.add_metric(series.labels, buckets=buckets, sum_value=series.value)
    return histogram
