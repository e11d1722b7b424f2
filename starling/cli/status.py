"""`starling status`: the state, resource usage and activity of each stage, in 80 columns.

Reads the stages' records, /proc and the snapshots of the metrics, so that it works when no stage answers. Only the
state of admission comes from the gateway, over its control socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.ipc import control
from pipeline.models import versions, worker_groups
from pipeline.observe import exposition
from pipeline.observe import status as records
from pipeline.observe.status import StageStatus
from pipeline.runtime.process import EXIT_FATAL
from starling.cli.options import exit_codes, json_option
from starling.cli.stage import STAGES
from starling.cli.terminal import width

SAMPLE_S = 0.3  # the time over which CPU usage is measured
MAX_NAME = 24  # columns; a longer name is cut
GATEWAY_TIMEOUT_S = 1.0
STOPPED = "the process is stopped by a signal (SIGSTOP); SIGCONT continues it"


class Row(msgspec.Struct):
    """One stage. Unknown numbers are None."""

    stage: str
    state: str  # ready, not ready, draining, not running
    reason: str = ""
    pid: int | None = None
    supervisor: int | None = None
    uptime_s: float | None = None
    restarts: int | None = None
    cpu_percent: float | None = None  # of one core, over `SAMPLE_S`, with all ranks
    memory_bytes: int | None = None  # proportional set size: a shared page counts by its share
    processes: int = 0
    queue: int | None = None  # requests: waiting in the scheduler, or in flight in the gateway
    running: int | None = None
    busy: bool = False
    progress: int | None = None
    last_progress_s: float | None = None  # time since the last progress


@click.command(
    epilog=exit_codes({0: "every stage is ready", 1: "a stage is not ready", 78: "the configuration is wrong"})
)
@json_option()
def status(as_json: bool) -> int:
    """Show the state and the resource usage of every stage.

    \b
    PID    process id
    UP     time since the start
    RST    restarts
    CPU%   percent of one core over 0.3 s, with all ranks
    MEM    proportional set size (a shared page counts by its share)
    QUEUE  requests waiting (scheduler) or in flight (gateway)
    LAST   time since the last progress
    """
    config = load()
    rows = look(config)
    is_running = any(row.pid is not None for row in rows)
    if as_json:
        found = rows if is_running else []
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    elif not is_running:
        click.echo("no stage is running")
    else:
        for line in table(rows, width()):
            click.echo(line)
    return 0 if is_running and all(row.state == "ready" for row in rows) else EXIT_FATAL


def look(config: Config, sleep: Callable[[float], None] = time.sleep) -> list[Row]:
    """A row for every stage that is configured or has left a record. Takes `SAMPLE_S`."""
    run_dir = paths.run_dir(config)
    found = {record.stage: record for record in records.read_all(run_dir)}
    names = [name for name in STAGES if name != "worker"]
    loaded = versions.read(config).versions
    names += [one.stage for version in loaded for one in worker_groups.of_version(config, version)]
    names += sorted(set(found).difference(names))
    if not any(record.alive for record in found.values()):
        return [Row(name, "not running") for name in names]
    families = {r.stage: procfs.process_tree(r.pid) for r in found.values() if r.alive}
    before = {pid: procfs.cpu_s(pid) for family in families.values() for pid in family}
    begun = time.monotonic()
    sleep(SAMPLE_S)
    took = time.monotonic() - begun
    used = {pid: max(0.0, procfs.cpu_s(pid) - cpu) / took for pid, cpu in before.items()}
    now = time.time()
    rows = []
    for name in names:
        record = found.get(name)
        if record is None or not record.alive:
            rows.append(Row(name, "not running", "" if record is None else "the process has died"))
            continue
        family = families[name]
        rows.append(_row(record, now, sum(used[pid] for pid in family), family))
    _add_queues(rows, config)
    _add_admission(rows, run_dir)
    return rows


def _row(record: StageStatus, now: float, cpu: float, family: list[int]) -> Row:
    # A scheduler that is ready names the models and worker groups that wait beside others.
    is_told = not record.ready or record.stage == "scheduler"
    reason = STOPPED if procfs.is_stopped(record.pid) else record.reason if is_told else ""
    return Row(
        record.stage,
        "ready" if record.ready and reason != STOPPED else "not ready",
        reason,
        record.pid,
        record.parent,
        round(max(0.0, now - record.epoch / 1e9), 1),
        record.restarts,
        round(cpu * 100, 1),
        sum(map(procfs.memory_bytes, family)),
        len(family),
        busy=record.busy,
        progress=record.progress,
        last_progress_s=round(max(0.0, now - record.progressed), 1) if record.progressed else None,
    )


def _add_queues(rows: list[Row], config: Config) -> None:
    """Add queue lengths from the snapshots, which are at most 1 s old. There are none if metrics are disabled."""
    named = {row.stage: row for row in rows if row.pid is not None}
    for snapshot in exposition.read_snapshots(paths.arena_dir(config)):
        row = named.get(snapshot.stage)
        if row is None:
            continue

        def total(name: str, families: dict[str, Any] = snapshot.families) -> int | None:
            series = families.get(name)
            return None if series is None else round(sum(one.value for one in series))

        if row.stage == "scheduler":
            row.queue = total("starling_queue_depth")
            row.running = total("starling_running_sequences")
        elif row.stage == "gateway":
            row.queue = total("starling_requests_in_flight")


def _add_admission(rows: list[Row], run_dir: Path) -> None:
    gateway = next((row for row in rows if row.stage == "gateway" and row.pid is not None), None)
    if gateway is None:
        return
    try:
        state = control.call(run_dir, "gateway", {"op": "state"}, GATEWAY_TIMEOUT_S)
    except control.Unreachable:
        return
    gateway.queue = state["in_flight"]
    if state["draining"] and gateway.state == "ready":
        gateway.state = "draining"
        gateway.reason = "refuses requests for " + ", ".join(state["draining"])


# ------------------------------------------------------------------ the table


class Column(NamedTuple):
    """A column of the table: its title, its width, and how a row fills it."""

    title: str
    width: int
    cell: Callable[[Row], str]


COLUMNS = (
    Column("PID", 8, lambda row: _or(row.pid, str)),
    Column("UP", 6, lambda row: _or(row.uptime_s, duration)),
    Column("RST", 4, lambda row: _or(row.restarts, str)),
    Column("CPU%", 6, lambda row: _or(row.cpu_percent, lambda value: f"{value:.0f}")),
    Column("MEM", 6, lambda row: _or(row.memory_bytes, size)),
    Column("QUEUE", 6, lambda row: _or(row.queue, str)),
    Column("LAST", 6, lambda row: _or(row.last_progress_s, duration)),
)

LEFT_OUT = ("LAST", "RST", "QUEUE", "PID")  # the order in which columns leave a narrow terminal
STATE_WIDTH = 2 + len("not running")


def table(rows: list[Row], terminal_width: int = 80) -> Iterator[str]:
    """Lines of at most 80 columns, fewer on a narrow terminal. A reason has a line of its own."""
    longest = min(MAX_NAME, max(len(row.stage) for row in rows))
    columns = list(COLUMNS)
    too_wide = longest + sum(c.width for c in columns) + STATE_WIDTH - terminal_width
    for title in LEFT_OUT:
        if too_wide > 0:
            too_wide -= next(c.width for c in columns if c.title == title)
            columns = [c for c in columns if c.title != title]
    yield f"{'STAGE':<{longest}}" + "".join(f"{c.title:>{c.width}}" for c in columns) + "  STATE"
    for row in rows:
        name = row.stage if len(row.stage) <= longest else row.stage[: longest - 1] + "…"
        state = "working" if row.state == "ready" and row.busy else row.state
        yield f"{name:<{longest}}" + "".join(f"{c.cell(row):>{c.width}}" for c in columns) + f"  {state}"
        if row.reason:
            yield f"  {row.reason}"


def _or(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def duration(seconds: float) -> str:
    """At most five characters: 42s, 59m, 23h, 6d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def size(count: int) -> str:
    """At most five characters: 950K, 12M, 1.5G."""
    for unit, shift in (("G", 30), ("M", 20)):
        if count >= 1 << shift:
            value = count / (1 << shift)
            return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"
    return f"{count >> 10}K"
