"""`starling chaos`: inject faults into a running server and compare every stream with an undisturbed one."""

from __future__ import annotations

import asyncio
import re
import time

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.table import Table

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.runtime.process import EXIT_FATAL
from starling.chaos.client import CLIENT_TIMEOUT_S, Client
from starling.chaos.report import Row
from starling.chaos.requests import plan
from starling.chaos.resources import UsageHistory
from starling.chaos.runner import run
from starling.chaos.scenario import SCENARIOS
from starling.chaos.traffic import Traffic
from starling.cli.options import exit_codes, json_option
from starling.client import address as addresses

UNITS = {"s": 1, "m": 60, "h": 3600}


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Seconds of a duration such as 90s, 10m or 1h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is not a duration; write 90s, 10m or 1h")
    return float(match[1]) * UNITS[match[2] or "s"]


EPILOG = exit_codes(
    {
        0: "every stream had the expected bytes",
        1: "a stream was lost or had other bytes, or no server is ready",
        2: "wrong usage",
    }
)


@click.command(epilog=EPILOG)
@click.option(
    "--scenario", type=click.Choice(SCENARIOS), default="mixed", show_default=True, help="Which faults to inject."
)
@click.option(
    "--duration",
    default="60s",
    callback=_seconds,
    show_default=True,
    metavar="TIME",
    help="How long to inject faults, more than 0: a number with s, m or h (90s, 10m, 1h).",
)
@click.option("--streams", type=click.IntRange(1, 256), default=8, show_default=True, help="Streams in flight.")
@click.option("--tokens", type=click.IntRange(2, 4096), default=160, show_default=True, help="Tokens of an answer.")
@click.option("--requests", type=click.IntRange(1, 1000), default=24, show_default=True, help="Different requests.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed for drawing requests and faults.")
@click.option("--key", default="", metavar="KEY", help="API key, if the server requires one.")
@json_option("Print the tables as JSON.")
def chaos(
    scenario: str,
    duration: float,
    streams: int,
    tokens: int,
    requests: int,
    seed: int,
    key: str,
    as_json: bool,
) -> int:
    """Inject faults into the running server; compare every byte.

    \b
    kill-each   SIGKILL each stage and rank in turn
    zombie      SIGSTOP each stage and rank in turn
    disk-full   refuse every write to the server's files for some seconds
    slow-disk   delay every access to the server's files by some milliseconds
    bit-flip    change one bit of a cached page
    memory      send long prompts that evict each other from the arena
    reload      `starling reload` each model, again and again
    mixed       all of these, in an order drawn with --seed

    A client whose connection ends early repeats its request with its Idempotency-Key, from the last event that it
    received on. Thus the gateway is killed and stopped like any other stage.

    The command first records the answers of the undisturbed server. In the mixed scenario it does not reload a model
    that does not fit into memory twice, and reports that.
    """
    config = load()
    console = Console(stderr=as_json)
    begun = time.monotonic()
    rows, usage = asyncio.run(_run(config, scenario, duration, streams, tokens, requests, seed, key, console.print))
    if as_json:
        report = {
            "scenario": scenario,
            "seed": seed,
            "duration_s": round(time.monotonic() - begun, 1),
            "rows": [row.as_dict() for row in rows],
            "use": usage.rows(),
        }
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        console.print(_table(rows))
        console.print(_use_table(usage))
    total = rows[-1]
    return EXIT_FATAL if total.lost or total.different else 0


async def _run(
    config: Config,
    scenario: str,
    duration: float,
    streams: int,
    tokens: int,
    requests: int,
    seed: int,
    key: str,
    report: object,
) -> tuple[list[Row], UsageHistory]:
    address = addresses.of_config(config)
    url = "http://localhost" if address.scheme == "unix" else str(address)
    timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
    connector: aiohttp.BaseConnector
    if address.scheme == "unix":
        connector = aiohttp.UnixConnector(address.path, limit=0)
    else:
        connector = aiohttp.TCPConnector(limit=0, ssl=address.tls() or True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Client(url, session, key)
        try:
            models = await client.models_when_ready()
            if not models:
                raise click.ClickException(f"no server is ready at {address}; start one first")
            if config.cache.responses.enabled:
                raise click.ClickException("cache.responses is enabled: cached answers would prove nothing; disable it")
            long_prompts = scenario == "memory"
            tokens = min(tokens, config.scheduler.max_output_tokens or tokens)
            most = config.scheduler.max_prompt_tokens
            asked = plan(requests, seed, tokens, models, long_prompts, most)
            heavy = plan(-(-requests // 3), seed + 1, tokens, models, True, most) if scenario == "mixed" else []
            traffic = Traffic(client, asked, streams, seed, heavy)
            return await run(scenario, config, traffic, duration, seed, report)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise click.ClickException(str(error)) from None


def _table(rows: list[Row]) -> Table:
    """A line for each kind of fault."""
    table = Table("fault", "n", "streams", "same", "diff", "lost", "resumed", "pause p50", "p95", "max ms")
    for row in rows:
        d = row.as_dict()
        table.add_row(
            row.fault,
            str(row.faults),
            str(row.streams),
            str(row.identical),
            str(row.different),
            str(row.lost),
            str(row.resumed),
            *("" if d[k] is None else f"{d[k]:.0f}" for k in ("pause_ms_p50", "pause_ms_p95", "pause_ms_max")),
        )
    return table


def _use_table(usage: UsageHistory) -> Table:
    """Resources of the server: first, last and largest value. A shared page counts by its share."""
    table = Table("start > end (most)", "memory MB", "descriptors", "files MB")
    for row in usage.rows():
        cells = []
        for what in ("pss_mb", "descriptors", "file_mb"):
            start, end, most = (row[f"{what}_{when}"] for when in ("start", "end", "most"))
            cells.append("" if not most else f"{start:.0f} > {end:.0f} ({most:.0f})")
        table.add_row(str(row["name"]), *cells)
    return table
