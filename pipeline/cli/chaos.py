"""`starling chaos`: break a live server on purpose and compare every stream with the undisturbed one."""

from __future__ import annotations

import asyncio
import re

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.table import Table

from pipeline.chaos.run import SCENARIOS, Row, run
from pipeline.chaos.traffic import CLIENT_TIMEOUT_S, Client, Traffic, plan
from pipeline.config import load
from pipeline.config_schema import Config
from pipeline.process import EXIT_FATAL

UNITS = {"s": 1, "m": 60, "h": 3600}


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no duration; write 90s, 10m or 1h")
    return float(match[1]) * UNITS[match[2] or "s"]


@click.command()
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
    """Break the running server (this home's) under traffic; exits 1 at a lost or different byte."""
    config = load()
    console = Console(stderr=as_json)
    rows = asyncio.run(_run(config, scenario, duration, streams, tokens, requests, seed, key, console.print))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode([row.as_dict() for row in rows])).decode())
    else:
        console.print(_table(rows))
    total = rows[-1]
    return EXIT_FATAL if total.lost or total.different else 0


async def _run(
    config: Config, scenario: str, duration: float, streams: int, tokens: int, requests: int, seed: int,
    key: str, say: object,
) -> list[Row]:  # fmt: skip
    host = config.server.host if config.server.host not in ("0.0.0.0", "::") else "127.0.0.1"
    timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Client(f"http://{host}:{config.server.port}", session, key)
        if not await client.ready():
            raise click.ClickException(f"no server is ready at {host}:{config.server.port}; start one first")
        long_prompts = scenario == "memory"
        traffic = Traffic(client, plan(requests, seed, tokens, long_prompts), streams, seed)
        try:
            rows, _ = await run(scenario, config, traffic, duration, seed, say)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise click.ClickException(str(error)) from None
    return rows


def _table(rows: list[Row]) -> Table:
    table = Table("fault", "n", "streams", "same", "diff", "lost", "pause p50", "p95", "max ms")
    for row in rows:
        d = row.as_dict()
        table.add_row(
            row.fault, str(row.faults), str(row.streams), str(row.identical), str(row.different),
            str(row.lost), *("" if d[k] is None else f"{d[k]:.0f}"
                             for k in ("pause_ms_p50", "pause_ms_p95", "pause_ms_max")),
        )  # fmt: skip
    return table
