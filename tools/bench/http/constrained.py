"""Decoding with a JSON Schema in every request, compared with none: sixteen streams, sixteen different schemas.

Each round runs the same prompts three times on the same server: without schemas, with them, and without them again.
All outputs have the same number of tokens at temperature 1: the schemas describe lists that do not end before
(schemas.py), and `min_tokens` keeps the plain outputs as long.  `same` compares the two plain runs of each round: it
shows what the instrument makes of no difference.  Three figures, as ratios of plain to constrained cost:

    rate     tokens per second: what clients see, on a quiet machine
    period   from one step's end to the next one's; the lower quartile, which other programs disturb least
    cpu      CPU time of all processes per token; with `--cores 0`, one rank that never waits for another, this is the
             throughput of a core that does everything.  Other programs change it, too, through the caches
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from starling.bench.figures import percentile
from starling.bench.response import ClientRequest
from tools.bench.http.scenarios import watched
from tools.bench.http.schemas import schemas
from tools.bench.http.server_under_test import ServerUnderTest, exact_cpu_s
from tools.bench.http.workload import Prompts, body

OUTPUT = 64  # tokens of every response
PROMPT = 24
SIDES = ("plain", "schemas", "again")  # in this order, and in the reverse order, in turns


class Side(NamedTuple):
    """One run of all streams."""

    tokens_per_s: float  # from the first output of any stream to the last one of any
    period_us: float  # lower quartile
    cpu_us: dict[str, float]  # of each stage, per token; the mask process is part of the scheduler
    masks_us: float  # CPU time of the mask process, per token
    short: int  # streams that failed, or have fewer tokens than they must


def measure(server: ServerUnderTest, texts: list[str], constraints: list[dict[str, Any]], seed: int) -> Side:
    """Run one stream for each text. `constraints`: more fields of each body."""
    clients = [[request(server, text, more, seed + i)] for i, (text, more) in enumerate(zip(texts, constraints))]
    before = masks_cpu_s(server)
    run, watch, used = watched(server, clients)
    good = [response for response in run.responses if response.is_good]
    tokens = sum(response.tokens for response in good)
    began = min((response.times[0] for response in good), default=run.began)
    ended = max((response.times[-1] for response in good), default=run.ended)
    return Side(
        tokens / max(1e-9, ended - began),
        watch.period_us(len(texts)),
        {stage: 1e6 * share * run.seconds / max(1, tokens) for stage, share in used.items()},
        1e6 * (masks_cpu_s(server) - before) / max(1, tokens),
        sum(response.tokens != OUTPUT for response in good) + len(run.responses) - len(good),
    )


def masks_cpu_s(server: ServerUnderTest) -> float:
    """CPU time of the mask process so far; 0.0 before the first constraint."""
    pids = [pid for pid in server.stages().get("scheduler", ()) if b" mask " in command_line(pid)]
    return sum(map(exact_cpu_s, pids))


def command_line(pid: int) -> bytes:
    """The arguments of a process, with spaces between them; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def request(server: ServerUnderTest, text: str, more: dict[str, Any], seed: int) -> ClientRequest:
    """A request for exactly `OUTPUT` tokens, unless a constraint ends them before."""
    fields = {"temperature": 1.0, "seed": seed, "min_tokens": OUTPUT, "ignore_eos": False, **more}
    return server.request(body(server.model, text, OUTPUT, **fields))


def constrained(server: ServerUnderTest, prompts: Prompts, rounds: int) -> dict[str, Any]:
    """The figures of all rounds: medians of the ratios, with the lowest and the highest."""
    some = list(schemas().values())
    fields: dict[str, list[dict[str, Any]]] = {side: [{} for _ in some] for side in SIDES}
    fields["schemas"] = [{"json_schema": schema} for schema in some]
    found: dict[str, list[Side]] = {side: [] for side in SIDES}
    first = [prompts.text(PROMPT) for _ in some]
    measure(server, first, fields["schemas"], 0)  # compiles the schemas, and does not count
    for number in range(rounds):
        texts = [prompts.text(PROMPT) for _ in some]
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            found[side].append(measure(server, texts, fields[side], 1000 * number))
        rates = ", ".join(f"{side} {found[side][-1].tokens_per_s:,.0f}" for side in SIDES)
        cpu = ", ".join(f"{sum(found[side][-1].cpu_us.values()):,.0f}" for side in SIDES)
        masks = found["schemas"][-1].masks_us
        click.echo(f"constrained, round {number + 1} of {rounds}: {rates} tokens/s; CPU {cpu} us, masks {masks:,.0f}")
    return {
        "streams": len(some),
        "tokens": OUTPUT,
        "rounds": rounds,
        "short": sum(one.short for sides in found.values() for one in sides),
        "ratio": ratios(found, "schemas"),
        "same": ratios(found, "again"),
        "sides": {side: figures(sides) for side, sides in found.items()},
    }


def ratios(found: dict[str, list[Side]], side: str) -> dict[str, Any]:
    """Costs of the plain runs of a round, as multiples of the side's; of the schemas' side, both plain runs' mean."""

    def plain(number: int, value: Callable[[Side], float]) -> float:
        sides = ("plain", "again") if side == "schemas" else ("plain",)
        return statistics.fmean(value(found[name][number]) for name in sides)

    costs: dict[str, Callable[[Side], float]] = {
        "rate": lambda one: 1 / max(1e-9, one.tokens_per_s),
        "period": lambda one: one.period_us,
        "cpu": lambda one: sum(one.cpu_us.values()),
    }
    return {
        name: spread([plain(i, cost) / max(1e-9, cost(one)) for i, one in enumerate(found[side])])
        for name, cost in costs.items()
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    numbers = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: round(number, 3) for name, number in numbers.items()}


def figures(sides: list[Side]) -> dict[str, Any]:
    """Medians of one side."""
    stages = sorted({stage for one in sides for stage in one.cpu_us})
    cpu = {stage: round(percentile([one.cpu_us.get(stage, 0.0) for one in sides], 0.5), 1) for stage in stages}
    return {
        "tokens_per_s": spread([one.tokens_per_s for one in sides]),
        "period_us": spread([one.period_us for one in sides]),
        "cpu_us_per_token": cpu,
        "masks_us_per_token": spread([one.masks_us for one in sides]),
    }
