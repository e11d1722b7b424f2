"""A stage's metrics, and the snapshot in which they reach `/metrics`.

A stage counts in plain dictionaries.  Once a second it replaces its snapshot (`ARENA_DIR/STAGE.metrics`, msgpack, on
tmpfs); the gateway merges the snapshots of all stages with its own metrics for each scrape (`exposition.py`).  So
no process waits for another, a scrape includes the last second of a stage that has died, and a killed writer leaves
the previous snapshot.  A successor adds the counters and histograms of its predecessor's snapshot to its own, and
starts with its peaks: they never go back while the server runs.  An idle stage writes its snapshot when a value has
changed, and otherwise every 20 s because of the process metrics.

Bounded: `MAX_SERIES` label sets per family; further ones are counted under the label "other".
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pipeline import procfs
from pipeline.files import replace_file
from pipeline.observe.metric_families import FAMILIES, Family
from shm.arena import process_ticks
from shm.decoding import DECODE_ERRORS

INTERVAL_S = 1.0
IDLE_INTERVAL_S = 4.0  # between two checks of an idle stage for changed values
IDLE_MAX_AGE_S = 20.0  # bound on the age of an idle stage's process metrics
MAX_SERIES = 512
MAX_SNAPSHOT_BYTES = 8 << 20
OTHER = "other"
_NOTES = "notes"  # in the place of a family


class Series(msgspec.Struct, array_like=True):
    """One label set. `counts` of a histogram are per bucket (not cumulative), the last one +Inf."""

    labels: tuple[str, ...]
    value: float = 0.0  # of a histogram: the sum of its values
    counts: list[int] = []


class Snapshot(msgspec.Struct, array_like=True):
    """Contents of a stage's file."""

    stage: str
    pid: int
    ticks: int
    families: dict[str, list[Series]]


_decoder = msgspec.msgpack.Decoder(Snapshot)


def read_snapshot(path: Path) -> Snapshot | None:
    """The snapshot in a file; None if it does not decode."""
    try:
        if path.stat().st_size > MAX_SNAPSHOT_BYTES:
            return None
        return decode_snapshot(path.read_bytes())
    except (OSError, *DECODE_ERRORS):
        return None


def decode_snapshot(encoded: bytes) -> Snapshot:
    """Raises `DECODE_ERRORS`."""
    return _decoder.decode(encoded)


def fits(family: Family, series: Series) -> bool:
    """Whether the series is one of the family, which another release may have changed."""
    expected = len(family.bounds) + 1 if family.kind == "histogram" else 0
    return len(series.labels) == len(family.labels) and len(series.counts) == expected


class Metrics:
    """A stage's metrics. Names are those of `FAMILIES`; label values are positional.

    Not thread-safe.  `clock` in seconds.
    """

    def __init__(self, stage: str, directory: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage = stage
        self.path = directory / f"{stage}.metrics" if directory else None
        self._clock = clock
        self.is_idle = False  # set by the stage: values hardly change
        self._last_check = self._last_write = float("-inf")
        self._last = b""  # the last snapshot written
        self._ticks = process_ticks(os.getpid())
        self._series: dict[str, dict[tuple[str, ...], Series]] = {}
        self.before_publish: list[Callable[[], object]] = []  # set series that are no reason to publish by themselves
        self.notes: list[Series] = []  # in the snapshot for a successor, not exported
        predecessor = read_snapshot(self.path) if self.path is not None else None
        self.past_notes = predecessor.families.get(_NOTES, []) if predecessor is not None else []
        self._past = _counted(predecessor)
        self._started_at = procfs.started_at(os.getpid())
        for name, several in _peaks(predecessor).items():
            self._series[name] = {series.labels: series for series in several}

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter or a gauge."""
        self._find(name, labels).value += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge, or a counter whose total the stage maintains."""
        self._find(name, labels).value = float(value)  # no reader takes a snapshot with a bool

    def raise_to(self, name: str, value: float, *labels: str) -> None:
        """Set a peak to `value`, if that is higher."""
        series = self._find(name, labels)
        series.value = max(series.value, value)

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        """Add a value to a histogram, `times` times."""
        series = self._find(name, labels)
        series.counts[bisect_left(FAMILIES[name].bounds, value)] += times
        series.value += value * times

    def put(self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float, *labels: str) -> None:
        """Set a histogram that the stage maintains; its buckets are added to the family's.

        counts[i] is the number of values in (bounds[i-1], bounds[i]]; the last one has no upper bound.
        """
        series = self._find(name, labels)
        ours = FAMILIES[name].bounds
        series.counts = [0] * (len(ours) + 1)
        for i, count in enumerate(counts):
            upper = bounds[i] if i < len(bounds) else float("inf")
            series.counts[bisect_left(ours, upper)] += count
        series.value = total

    def drop(self, name: str, *labels: str) -> None:
        """Remove a label set (of a model that was unloaded), and what predecessors have counted in it."""
        self._series.get(name, {}).pop(labels, None)
        if name in self._past:
            self._past[name] = [series for series in self._past[name] if series.labels != labels]

    def label_sets(self, name: str) -> frozenset[tuple[str, ...]]:
        """The label sets of a family, those included that predecessors alone have counted."""
        return frozenset((*self._series.get(name, {}), *(series.labels for series in self._past.get(name, []))))

    def snapshot(self) -> Snapshot:
        """All series now, with what predecessors have counted."""
        families = {name: list(series.values()) for name, series in self._series.items()}
        for name, past in self._past.items():
            families[name] = _sum(families.get(name, []), past)
        return Snapshot(self.stage, os.getpid(), self._ticks, {**families, _NOTES: self.notes})

    def _encoded(self) -> bytes:
        return msgspec.msgpack.encode(self.snapshot())

    @property
    def is_due(self) -> bool:
        """Whether `write` has anything to do."""
        return self.path is not None and self._clock() >= self._last_check + (
            IDLE_INTERVAL_S if self.is_idle else INTERVAL_S
        )

    def write(self) -> None:
        """Replace the snapshot, at most once a second. On a full disk the old one stays."""
        if self.path is None or not self.is_due:
            return
        now = self._last_check = self._clock()
        if self.is_idle and now < self._last_write + IDLE_MAX_AGE_S and self._encoded() == self._last:
            return
        self.publish()

    def publish(self) -> bytes:
        """Replace the snapshot now: what is scraped must be there for a successor. The snapshot, encoded."""
        if self.path is None:
            return self._encoded()
        self._last_write = self._clock()
        self._measure_process()
        for measure in self.before_publish:
            measure()
        encoded = self._encoded()
        with contextlib.suppress(OSError):
            replace_file(self.path, encoded)
            self._last = encoded
        return encoded

    def close(self) -> None:
        """Write the last snapshot. It stays for a successor until the server has ended."""
        self.publish()

    def _measure_process(self) -> None:
        used = os.times()
        self.set("starling_process_cpu_seconds_total", used.user + used.system, self.stage)
        resident, private = procfs.resident_and_anonymous_bytes()
        self.set("starling_process_resident_bytes", resident, self.stage)
        self.set("starling_process_private_bytes", private, self.stage)
        for direction, amount in zip(("read", "written"), procfs.disk_bytes(), strict=True):
            self.set("starling_process_io_bytes_total", amount, self.stage, direction)
        with contextlib.suppress(OSError):
            self.set("starling_process_open_fds", procfs.open_fds(), self.stage)
        self.set("starling_process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0], self.stage)
        if self._started_at is not None:
            self.set("starling_process_start_time_seconds", self._started_at, self.stage)

    def _find(self, name: str, labels: tuple[str, ...]) -> Series:
        family = FAMILIES[name]
        known = self._series.get(name)
        if known is None:
            known = self._series[name] = {}
        series = known.get(labels)
        if series is None:
            if len(labels) != len(family.labels):
                raise ValueError(f"{name} has the labels {family.labels}, not {labels}")
            if len(known) >= MAX_SERIES:
                labels = (OTHER,) * len(labels)
                if labels in known:
                    return known[labels]
            counts = [0] * (len(family.bounds) + 1) if family.kind == "histogram" else []
            series = known[labels] = Series(labels, 0.0, counts)
        return series


def _counted(snapshot: Snapshot | None) -> dict[str, list[Series]]:
    """The counters and histograms of a predecessor's snapshot."""
    return _selected(snapshot, lambda family: family.kind != "gauge")


def _peaks(snapshot: Snapshot | None) -> dict[str, list[Series]]:
    """The peaks of a predecessor's snapshot."""
    return _selected(snapshot, lambda family: family.is_peak)


def _selected(snapshot: Snapshot | None, is_wanted: Callable[[Family], bool]) -> dict[str, list[Series]]:
    if snapshot is None:
        return {}
    return {
        name: [series for series in several if fits(FAMILIES[name], series)]
        for name, several in snapshot.families.items()
        if name in FAMILIES and is_wanted(FAMILIES[name])
    }


def _sum(own: list[Series], past: list[Series]) -> list[Series]:
    """Add series by label set; label sets beyond `MAX_SERIES` are added to "other"."""
    found = {series.labels: Series(series.labels, series.value, series.counts) for series in own}
    for series in past:
        labels = series.labels
        if labels not in found and len(found) >= MAX_SERIES:
            labels = (OTHER,) * len(labels)
        known = found.get(labels)
        if known is None:
            found[labels] = Series(labels, series.value, series.counts)
        else:
            known.value += series.value
            known.counts = [a + b for a, b in zip(known.counts, series.counts, strict=True)]
    return list(found.values())
