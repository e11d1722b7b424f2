"""`python -m tools.bench.fleet`: a fleet on this machine, with the demo model or an engine that computes nothing.

All agents share the cores of one machine, so that the figures compare ways of routing and of continuing, and say
nothing of the speed of several machines.  The last line is one JSON object.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import click

from tools.bench.fleet import cold_start, deaths, fan_out, forwarding, overhead, routing
from tools.bench.offline.results import machine

SECTIONS = ("forwarding", "overhead", "deaths", "routing", "cold-start", "fan-out")


@click.command()
@click.option("--section", "sections", type=click.Choice(SECTIONS), multiple=True, help="Only these; default: all.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=40,
    show_default=True,
    help="Of the overhead; forwarding has five times as many.",
)
@click.option("--deaths", "n_deaths", type=click.IntRange(1), default=20, show_default=True, help="Of each kind.")
@click.option("--kind", "kinds", type=click.Choice(deaths.KINDS), multiple=True, help="What dies; default: all.")
@click.option("--words", type=click.IntRange(0), default=0, show_default=True, help="More in prompts of deaths.")
@click.option(
    "--requests", type=click.IntRange(1), default=72, show_default=True, help="Of a routing policy in a round."
)
@click.option(
    "--loads", type=click.IntRange(1), default=3, show_default=True, help="Rounds of routing, cold-start and fan-out."
)
@click.option("--agents", type=click.IntRange(2, 8), default=4, show_default=True, help="Of routing and fan-out.")
@click.option("--plots", type=click.Path(path_type=Path), metavar="DIR", help="Draw routing into DIR/routing.svg.")
def run(
    sections: tuple[str, ...],
    rounds: int,
    n_deaths: int,
    kinds: tuple[str, ...],
    words: int,
    requests: int,
    loads: int,
    agents: int,
    plots: Path | None,
) -> None:
    """Measure a fleet on this machine."""
    found: dict[str, Any] = {"machine": machine(sorted(os.sched_getaffinity(0))), "load_before": os.getloadavg()}
    chosen = sections or SECTIONS
    if "forwarding" in chosen:
        found["forwarding"] = forwarding.measure(5 * rounds)
        _print_forwarding(found["forwarding"])
    if "overhead" in chosen:
        found["overhead"] = overhead.measure(rounds)
        _print_overhead(found["overhead"])
    if "deaths" in chosen:
        found["deaths"] = deaths.measure(n_deaths, kinds or deaths.KINDS, words)
    if "routing" in chosen:
        found["routing"] = routing.measure(requests, agents, loads)
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
            title = f"{agents} agents, {found['machine']['cpu']}, {datetime.date.today():%-d %B %Y}"
            routing.write_plot(found["routing"], plots / "routing.svg", title)
    if "cold-start" in chosen:
        found["cold-start"] = cold_start.measure(loads)
    if "fan-out" in chosen:
        found["fan-out"] = fan_out.measure(loads, agents)
    found["load_after"] = os.getloadavg()
    click.echo(json.dumps(found))


def _print_forwarding(found: dict[str, Any]) -> None:
    for n_streams, ways in found["first_token"].items():
        for way, one in ways.items():
            added = json.dumps(one["added_ms"])
            click.echo(f"{n_streams} streams, {way}: ms to the first token beyond the engine's: {added}")
    for n_streams, one in found["events"].items():
        click.echo(f"{n_streams} streams: {one['events_per_cpu_s']} events for a second of CPU time")
    for side, one in found["tiny_requests"].items():
        click.echo(f"{side}: {one['requests_per_s']} tiny requests/s")


def _print_overhead(found: dict[str, Any]) -> None:
    for n_streams, one in found.items():
        click.echo(
            f"{n_streams} streams: {one['added_p50_ms']} ms added to the first token at p50 (check "
            f"{one['check_p50_ms']} ms), {one['cpu_ms_per_request']} ms of CPU a request of "
            f"{one['tokens_per_request']} tokens; p50 and p99 in ms: {json.dumps(one['first_token_ms'])}"
        )
