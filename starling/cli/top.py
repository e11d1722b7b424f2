"""`starling top`: what the server does now, refreshed on a terminal, one plain report for a pipe.

Reads the stages' records, /proc and the snapshots of the metrics, so that it works when no stage answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.runtime.process import EXIT_FATAL, EXIT_OK
from starling import activity
from starling.activity import Activity, ModelActivity
from starling.cli import status
from starling.cli.options import Seconds, exit_codes, json_option

COLUMNS = 80
NAME = 26  # columns of a model's or tenant's name
LEAST_NAME = 10  # of it on a narrow terminal
LINE = 67  # columns of a model's line
LEAST_S = 0.2
MAX_COUNT = 1_000_000


class Report(msgspec.Struct):
    """One report."""

    time: float  # s since 1970
    activity: Activity
    stages: list[status.Row]


@click.command(epilog=exit_codes({0: "reported", 1: "the server does not run", 78: "the configuration is wrong"}))
@click.option(
    "--interval",
    type=Seconds(LEAST_S),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="The time that rates are measured over.",
)
@click.option(
    "--count",
    type=click.IntRange(1, MAX_COUNT),
    metavar="N",
    help="Reports; by default one, on a terminal until Ctrl-C.",
)
@json_option("Print a line of JSON for each report.")
def top(interval: float, count: int | None, as_json: bool) -> int:
    """Show what models, tenants and stages do now.

    \b
    TOK/S     output tokens per second
    PROMPT/S  prompt tokens computed per second
    CACHED/S  prompt tokens found in the cache, per second
    BATCH     sequences in a step
    RUN       sequences being generated; QUEUE those that wait
    KV%       pages of running sequences (leased), of the prefix cache, and free
    """
    config = load()
    is_live = sys.stdout.isatty() and not as_json
    reports = measure(config, interval, count or (MAX_COUNT if is_live else 1))
    if is_live:
        return _show_live(reports)
    code = EXIT_OK
    for report in reports:
        if not is_running(report):
            code = EXIT_FATAL
        if as_json:
            click.echo(msgspec.json.encode(report))
        else:
            click.echo("\n".join(lines(report)))
    return code


def measure(
    config: Config, interval_s: float, count: int, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Report]:
    """`count` reports, one after each interval. The first interval begins at the first step."""
    arena_dir = paths.arena_dir(config)
    before = activity.read(arena_dir)
    for _ in range(count):
        slept = False

        def wait(_: float) -> None:
            nonlocal slept
            slept = True
            sleep(interval_s)

        rows = status.look(config, wait)
        if not slept:  # no stage runs
            sleep(interval_s)
        now = activity.read(arena_dir)
        yield Report(round(time.time(), 3), activity.compare(before, now), rows)
        before = now


def is_running(report: Report) -> bool:
    """Whether any stage runs."""
    return any(row.pid is not None for row in report.stages)


def _show_live(reports: Iterator[Report]) -> int:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    code = EXIT_OK
    try:
        with Live(Text("measuring ..."), console=console, screen=True, auto_refresh=False) as live:
            for report in reports:
                code = EXIT_OK if is_running(report) else EXIT_FATAL
                shown = list(lines(report, console.width))[: max(1, console.height - 1)]
                live.update(Text("\n".join(shown), no_wrap=True, overflow="crop"), refresh=True)
    except KeyboardInterrupt:  # the usual end of a view without an end
        pass
    return code


# ------------------------------------------------------------------ text


def lines(report: Report, columns: int = COLUMNS) -> Iterator[str]:
    """The report in lines of at most 80 columns, fewer on a narrow terminal."""
    wide = max(LEAST_NAME, NAME - max(0, LINE - columns))
    if not is_running(report):
        yield "no stage is running"
        return
    found = report.activity
    yield f"{time.strftime('%H:%M:%S', time.localtime(report.time))}  {found.in_flight} requests in flight"
    yield ""
    if found.models:
        yield f"{'MODEL':<{wide}}{'TOK/S':>7}{'PROMPT/S':>9}{'CACHED/S':>9}{'BATCH':>6}{'RUN':>4}{'QUEUE':>6}"
    else:
        yield "no figures: metrics are disabled, or no model is loaded"
    for model in found.models:
        yield (
            f"{_cut(model.model, wide):<{wide}}{_number(model.output_tokens_per_s):>7}"
            f"{_number(model.prompt_tokens_per_s):>9}{_number(model.cached_prompt_tokens_per_s):>9}"
            f"{_number(model.batch):>6}{_number(model.running):>4}{_number(model.queued):>6}"
        )
        yield f"  KV%  {_pages(model)}"
    if found.tenants:
        yield ""
        yield f"{'TENANT':<{wide}}{'TOK/S':>7}{'TOKENS':>9}"
        for tenant in found.tenants:
            yield f"{_cut(tenant.tenant, wide):<{wide}}{_number(tenant.tokens_per_s):>7}{_number(tenant.tokens):>9}"
    yield ""
    for line in status.table(report.stages, min(COLUMNS, columns)):
        yield line[:COLUMNS]


def _pages(model: ModelActivity) -> str:
    total = sum(model.kv_pages.values())
    if not total:
        return "no arena"
    shares = [f"{state} {100 * pages / total:.0f}" for state, pages in model.kv_pages.items()]
    return f"{'  '.join(shares)}  of {total} pages"


def _cut(name: str, wide: int) -> str:
    name = "".join(c if c.isprintable() else "?" for c in name)
    return name if len(name) < wide else name[: wide - 2] + "…"


def _number(value: float) -> str:
    """At most five characters: 0.4, 12, 950, 12.3k, 4.5M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            scaled = value / (1e3 if unit == "k" else size)
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}" if value >= 100 or value == round(value) else f"{value:.1f}"
