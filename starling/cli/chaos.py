"""`starling chaos`: break a live server on purpose and compare every stream with the undisturbed one."""

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
from pipeline.supervise import listen_fd
from starling.chaos.resources import Vitals
from starling.chaos.scenario import SCENARIOS, Row, run
from starling.chaos.traffic import CLIENT_TIMEOUT_S, Client, Traffic, plan

UNITS = {"s": 1, "m": 60, "h": 3600}


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is no duration; write 90s, 10m or 1h")
    return float(match[1]) * UNITS[match[2] or "s"]


EPILOG = "Exit codes: 0 every stream had its bytes; 1 one was lost or different, or no server is ready; 2 usage."


@click.command(epilog=EPILOG)
@click.option("--scenario", type=click.Choice(SCENARIOS), default="mixed", show_default=True)
@click.option("--duration", default="60s", callback=_seconds, show_default=True, help="90s, 10m, 1h.")
@click.option("--streams", type=click.IntRange(1, 256), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(2, 4096), default=160, show_default=True, help="Of an answer.")
@click.option("--requests", type=click.IntRange(1, 1000), default=24, show_default=True, help="In the plan.")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws requests and faults.")
@click.option("--key", default="", help="API key, when the server wants one.")
@click.option("--json", "as_json", is_flag=True, help="The table as JSON.")
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
    """Break the running server (this home's) under traffic and compare every byte.

    \b
    kill-each   SIGKILL to each stage and rank in turn
    zombie      SIGSTOP to each
    disk-full   no file of the server can be written for some seconds
    slow-disk   every access takes some ms more
    bit-flip    a bit of a cached page changes
    memory      long prompts that press each other out of the arena
    reload      `starling reload` of each model, again and again
    mixed       every one of these, in an order drawn by --seed

    A model for which there is not memory twice is not reloaded in the mixed scenario, and that is said.
    """
    config = load()
    console = Console(stderr=as_json)
    begun = time.monotonic()
    rows, vitals = asyncio.run(_run(config, scenario, duration, streams, tokens, requests, seed, key, console.print))
    if as_json:
        report = {
            "scenario": scenario,
            "seed": seed,
            "duration_s": round(time.monotonic() - begun, 1),
            "rows": [row.as_dict() for row in rows],
            "use": vitals.rows(),
        }
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        console.print(_table(rows))
        console.print(_use_table(vitals))
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
    say: object,
) -> tuple[list[Row], Vitals]:
    url = listen_fd.url(config)
    timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Client(url, session, key)
        if not await client.ready():
            raise click.ClickException(f"no server is ready at {url}; start one first")
        long_prompts = scenario == "memory"
        if config.cache.responses.enabled:
            raise click.ClickException("cache.responses answers without computing: switch it off to prove anything")
        try:
            models = await client.models()
            tokens = min(tokens, config.scheduler.max_output_tokens or tokens)
            most = config.scheduler.max_prompt_tokens
            asked = plan(requests, seed, tokens, models, long_prompts, most)
            heavy = plan(-(-requests // 3), seed + 1, tokens, models, True, most) if scenario == "mixed" else []
            traffic = Traffic(client, asked, streams, seed, heavy)
            return await run(scenario, config, traffic, duration, seed, say)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise click.ClickException(str(error)) from None


def _table(rows: list[Row]) -> Table:
    table = Table("fault", "n", "streams", "same", "diff", "lost", "pause p50", "p95", "max ms")
    for row in rows:
        d = row.as_dict()
        table.add_row(
            row.fault,
            str(row.faults),
            str(row.streams),
            str(row.identical),
            str(row.different),
            str(row.lost),
            *("" if d[k] is None else f"{d[k]:.0f}" for k in ("pause_ms_p50", "pause_ms_p95", "pause_ms_max")),
        )
    return table


def _use_table(vitals: Vitals) -> Table:
    """What the server used: at the first look, at the end, and at most. Shared memory counts by its share."""
    table = Table("start > end (most)", "memory MB", "descriptors", "files MB")
    for row in vitals.rows():
        cells = []
        for what in ("pss_mb", "descriptors", "file_mb"):
            start, end, most = (row[f"{what}_{when}"] for when in ("start", "end", "most"))
            cells.append("" if not most else f"{start:.0f} > {end:.0f} ({most:.0f})")
        table.add_row(str(row["name"]), *cells)
    return table
