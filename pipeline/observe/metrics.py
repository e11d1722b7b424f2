"""Metrics: one table of families, a stage's own numbers, and how they reach `/metrics`.

A stage counts in plain dictionaries and, once a second, places a snapshot (`ARENA_DIR/STAGE.metrics`,
msgpack, on tmpfs) by rename; the gateway merges the snapshots of all stages with its own numbers when
somebody asks (`exposition.py`).  So nothing waits for anything, a scrape sees the last second of a stage
that has died, and a killed writer leaves the snapshot before it.  At rest it is placed when a number has
changed, and else every 20 s for what the process uses.

Bounded: `MAX_SERIES` label sets for each family (more are folded into "other").
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from shm.arena import process_ticks

INTERVAL_S = 1.0
QUIET_INTERVAL_S = 4.0  # between two looks of a stage at rest whether a number has changed
QUIET_MOST_S = 20.0  # its own memory, descriptors and CPU time are as old as this at most
MAX_SERIES = 512
OTHER = "other"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
BATCH = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """One metric. Counters end in `_total`; `labels` are positional where values are given."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # histogram: upper bounds, ascending, without +Inf


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # gateway
        Family("starling_requests_total", "counter", "HTTP requests answered.", ("endpoint", "status")),
        Family(
            "starling_request_duration_seconds",
            "histogram",
            "From the request's first byte to the answer's last.",
            ("endpoint",),
            SECONDS,
        ),
        Family(
            "starling_time_to_first_token_seconds",
            "histogram",
            "From the request's first byte to its first token.",
            ("model",),
            SECONDS,
        ),
        Family("starling_requests_in_flight", "gauge", "HTTP requests being answered."),
        Family("starling_recoveries_total", "counter", "Sequences submitted again after a stage died."),
        Family("starling_journal_left_out_total", "counter", "Requests that the gateway's journal has not."),
        Family("starling_rejections_total", "counter", "Requests refused, by error code.", ("code",)),
        Family(
            "starling_response_cache_hits_total", "counter", "Requests answered from the response cache.", ("model",)
        ),
        Family(
            "starling_response_cache_misses_total",
            "counter",
            "Requests whose answer was looked for there and computed.",
            ("model",),
        ),
        Family(
            "starling_response_cache_evictions_total",
            "counter",
            "Answers dropped: the cache was full, or their time was over (ttl).",
            ("reason",),
        ),
        Family("starling_response_cache_entries", "gauge", "Answers kept."),
        Family("starling_response_cache_bytes", "gauge", "What they take."),
        # tokenizer
        Family(
            "starling_tokenizer_tokens_total",
            "counter",
            "Tokens that texts were encoded to, and that were decoded for /v1/detokenize.",
            ("direction",),
        ),
        # scheduler
        Family("starling_tokens_generated_total", "counter", "Output tokens.", ("model",)),
        Family("starling_tokens_per_second", "gauge", "Output tokens, over the last 5 s.", ("model",)),
        Family(
            "starling_prompt_tokens_total", "counter", "Prompt positions, by where they came from.", ("model", "source")
        ),
        Family("starling_tenant_tokens_total", "counter", "Tokens computed for a tenant.", ("tenant",)),
        Family("starling_queue_depth", "gauge", "Sequences waiting.", ("model",)),
        Family("starling_running_sequences", "gauge", "Sequences being generated.", ("model",)),
        Family("starling_queue_wait_seconds", "histogram", "From arrival to the first step.", ("model",), SECONDS),
        Family("starling_batch_size", "histogram", "Sequences in a step.", ("model",), BATCH),
        Family("starling_step_seconds", "histogram", "A step on the worker.", ("model",), SECONDS),
        Family("starling_steps_total", "counter", "Steps.", ("model",)),
        Family("starling_steps_repeated_total", "counter", "Steps computed again after a worker's death.", ("model",)),
        Family("starling_preemptions_total", "counter", "Running sequences preempted.", ("model",)),
        Family("starling_finished_total", "counter", "Sequences ended, by finish reason.", ("model", "reason")),
        Family(
            "starling_draft_tokens_total",
            "counter",
            "Speculated tokens, by outcome and by where they came "
            "from: lookup (the text itself) or model (the draft model).",
            ("model", "outcome", "source"),
        ),
        # kv
        Family(
            "starling_kv_cache_bytes", "gauge", "KV pages, by state: allocated, resident, spilled, saved.", ("state",)
        ),
        Family(
            "starling_kv_cache_fragmentation_ratio",
            "gauge",
            "Share of what is reserved and holds nothing: "
            "positions of leased pages (arena), slots of files (spilled, saved).",
            ("model", "where"),
        ),
        Family(
            "starling_kv_cache_compacted_bytes_total",
            "counter",
            "Given back to the file system by closing holes in files of pages.",
        ),
        Family("starling_kv_cache_pages", "gauge", "KV pages, by state: free, cached, leased.", ("model", "state")),
        Family("starling_kv_cache_evictions_total", "counter", "KV pages evicted."),
        Family("starling_kv_cache_hits_total", "counter", "KV pages found again by their tokens.", ("model",)),
        Family("starling_kv_cache_misses_total", "counter", "KV pages asked for and not found.", ("model",)),
        Family(
            "starling_kv_cache_checksum_failures_total", "counter", "Pages dropped because their bytes had changed."
        ),
        Family(
            "starling_kv_cache_disk_errors_total",
            "counter",
            "Pages that a full or failing disk did not keep, or room that it did not give.",
        ),
        Family("starling_kv_cache_spilled_pages_total", "counter", "Evicted pages copied to the disk."),
        Family(
            "starling_kv_cache_restored_pages_total",
            "counter",
            "Pages that came back from a disk, or over from an older version of the same file.",
        ),
        Family("starling_kv_cache_restore_seconds", "histogram", "Time to bring a page back.", (), SECONDS),
        Family("starling_sessions", "gauge", "Sessions held.", ("model",)),
        # every stage
        Family("starling_stage_up", "gauge", "1 while the stage's process lives.", ("stage",)),
        Family("starling_stage_ready", "gauge", "1 while the stage can take work.", ("stage",)),
        Family("starling_stage_restarts_total", "counter", "Restarts by the supervisor.", ("stage",)),
        Family(
            "starling_frames_dropped_total",
            "counter",
            "Frames that were not understood or came from strangers.",
            ("stage", "edge"),
        ),
        Family(
            "starling_frames_refused_total",
            "counter",
            "Frames not sent: peer not up, or queue full.",
            ("stage", "edge"),
        ),
        Family("starling_process_cpu_seconds_total", "counter", "CPU time of the stage's own process.", ("stage",)),
        Family("starling_process_resident_bytes", "gauge", "Resident memory, shared pages included.", ("stage",)),
        Family("starling_process_open_fds", "gauge", "Open file descriptors.", ("stage",)),
    )
}


class Series(msgspec.Struct, array_like=True):
    """One label set. A histogram's `counts` are by bucket (not cumulative), the last one +Inf."""

    labels: tuple[str, ...]
    value: float = 0.0  # of a histogram: the sum
    counts: list[int] = []


class Snapshot(msgspec.Struct, array_like=True):
    """What a stage places in its file."""

    stage: str
    pid: int
    ticks: int
    families: dict[str, list[Series]]


class Metrics:
    """A stage's numbers. Names are those of `FAMILIES`; label values are positional.

    Not thread-safe.  `clock` in seconds.
    """

    def __init__(self, stage: str, directory: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage = stage
        self.path = directory / f"{stage}.metrics" if directory else None
        self._clock = clock
        self.is_idle = False  # nothing moves: there is hardly news
        self._looked = self._placed = float("-inf")
        self._last = b""  # what has been placed
        self._ticks = process_ticks(os.getpid())
        self._series: dict[str, dict[tuple[str, ...], Series]] = {}

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """A counter grows, a gauge moves."""
        self._find(name, labels).value += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """A gauge, or a counter whose total the stage keeps itself."""
        self._find(name, labels).value = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """One value of a histogram."""
        series = self._find(name, labels)
        series.counts[bisect_left(FAMILIES[name].bounds, value)] += 1
        series.value += value

    def put(self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float, *labels: str) -> None:
        """A histogram that the stage keeps itself; its buckets are poured into the family's.

        counts[i] is the number of values in (bounds[i-1], bounds[i]], the last one beyond all.
        """
        series = self._find(name, labels)
        ours = FAMILIES[name].bounds
        series.counts = [0] * (len(ours) + 1)
        for i, count in enumerate(counts):
            upper = bounds[i] if i < len(bounds) else float("inf")
            series.counts[bisect_left(ours, upper)] += count
        series.value = total

    def drop(self, name: str, *labels: str) -> None:
        """Forget a label set (a model that was unloaded)."""
        self._series.get(name, {}).pop(labels, None)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.stage,
            os.getpid(),
            self._ticks,
            {name: list(series.values()) for name, series in self._series.items()},
        )

    def _encoded(self) -> bytes:
        return msgspec.msgpack.encode(self.snapshot())

    @property
    def is_due(self) -> bool:
        """Whether `write` would do anything."""
        return self.path is not None and self._clock() >= self._looked + (
            QUIET_INTERVAL_S if self.is_idle else INTERVAL_S
        )

    def write(self) -> None:
        """Place the snapshot, at most once a second. A full disk is ignored: the old one stays."""
        if self.path is None or not self.is_due:
            return
        now = self._looked = self._clock()
        if self.is_idle and now < self._placed + QUIET_MOST_S and self._encoded() == self._last:
            return
        self._placed = now
        self._measure_process()
        encoded = self._encoded()
        temporary = self.path.with_name(f".{self.path.name}.new")
        try:
            temporary.write_bytes(encoded)
            os.replace(temporary, self.path)
            self._last = encoded
        except OSError:
            pass

    def remove(self) -> None:
        """At an orderly end."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _measure_process(self) -> None:
        used = os.times()
        self.set("starling_process_cpu_seconds_total", used.user + used.system, self.stage)
        try:
            with open("/proc/self/statm", "rb") as f:
                pages = int(f.read().split()[1])
            self.set("starling_process_resident_bytes", pages * os.sysconf("SC_PAGESIZE"), self.stage)
            self.set("starling_process_open_fds", len(os.listdir("/proc/self/fd")) - 1, self.stage)
        except OSError:
            pass

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


class Rate:
    """Events per second over a sliding window, in ten steps of it."""

    def __init__(self, window_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._step_s = window_s / 10
        self._clock = clock
        self._started = clock()
        self._steps: deque[list[float]] = deque(maxlen=11)  # [number of the step, events]

    def add(self, events: float) -> None:
        step = self._clock() // self._step_s
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append([step, 0.0])
        self._steps[-1][1] += events

    def value(self) -> float:
        now = self._clock()
        oldest = now // self._step_s - 10
        events = sum(count for step, count in self._steps if step >= oldest)
        begun = max(self._started, oldest * self._step_s)
        return events / max(now - begun, self._step_s)
