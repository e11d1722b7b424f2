"""What the kernels alone would give: the steps that a server has computed, once more in this process, without a server.

The steps are read from the arena while the server computes them, and computed again by the same number of ranks on the
cores that these have, in turns with the server (turns.py).  Nothing runs between two of them.  The gap is the share of
the throughput that is missing over HTTP: control plane, client, waits, and what these take from the ranks' cores, but
not the cores that the control plane has alone.  Each gap is reported with what makes it: CPU time of the control plane
and of this client, the time that ranks waited for their cores, and the time without a step.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from tools.bench.disturbance import Watch
from tools.bench.http.scenarios import CLIENT, watched
from tools.bench.http.server_under_test import CONTROL_PLANE, ServerUnderTest
from tools.bench.http.turns import Replay, Turns
from tools.bench.http.workload import OUTPUT, Prompts, Row, Spread, body

FIRST_TOKEN_SHARE = 0.4  # of the baseline's time to a first token: the target
FIRST_TOKEN_CLIENTS = (8, 16)  # of the workloads that have that target


class Load(NamedTuple):
    """A workload whose gap is measured."""

    title: str
    prompt: int  # tokens
    output: int
    requests: int  # of each client, one after the other
    target: float  # largest gap


CLIENTS = 16
DRAFTED = 16  # positions of a sequence beyond its output, and samples of a step beyond one of each, at most
PARTS = ("control", "client", "taken", "without_step")  # fields of `Measured`
LOADS = (
    Load("16 streams of 256 tokens", 16, 256, 1, 0.10),
    Load("16 clients, prompts of 100 tokens", 100, OUTPUT, 2, 0.25),
)


class Measured(NamedTuple):
    """One run of a workload over HTTP in turns with its kernels alone. All but `kernels` is of the server's turns."""

    served: float  # tokens/s over HTTP
    kernels: float  # tokens/s of the kernels alone
    control: float  # CPU time of the control plane, cores
    client: float  # CPU time of this process meanwhile, cores
    taken: float  # time in which a rank could run while another process had its core; share, mean of the ranks
    without_step: float  # time before the first step, between two and after the last; share

    @property
    def gap(self) -> float:
        """The share of the throughput that is missing over HTTP."""
        return 1 - self.served / self.kernels


def measure(server: ServerUnderTest, prompts: Prompts, index: Path, load: Load) -> Measured:
    """A workload once. `RuntimeError` if requests fail or steps are missed."""
    texts = [[prompts.text(load.prompt) for _ in range(load.requests)] for _ in range(CLIENTS)]
    requests = [[server.request(body(server.model, text, load.output)) for text in own] for own in texts]
    before, cores = server.rank_waits_s(), server.rank_cores()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        Replay(
            index,
            Path(directory),
            cores,
            rows=CLIENTS * load.requests,  # each may have one of its own
            tokens=load.prompt + load.output + DRAFTED,
            samples=CLIENTS * (1 + DRAFTED),
        ) as replay,
    ):
        turns = Turns(server.pids, replay)
        run, watch, used = watched(server, requests, turns)
    waits = [after - first for after, first in zip(server.rank_waits_s(), before, strict=True)]
    failed = [response for response in run.responses if not response.is_good]
    if failed or watch.missed:
        raise RuntimeError(f"{load.title}: {len(failed)} requests failed, {watch.missed} steps were not seen")
    tokens = sum(response.tokens for response in run.responses)
    seconds = max(response.times[-1] for response in run.responses) - run.began - turns.stopped_s
    return Measured(
        tokens / seconds,
        tokens / turns.kernels_s,
        sum(used.get(stage, 0.0) for stage in CONTROL_PLANE),
        used[CLIENT],
        statistics.fmean(waits) / seconds,
        max(0.0, 1 - computing_s(watch.spans, turns.spans) / seconds),
    )


def computing_s(steps: Sequence[tuple[int, int]], stops: Sequence[tuple[float, float]]) -> float:
    """The time of steps (ns of the monotonic clock) without that of the stops (s) within them."""
    within = sum(
        max(0.0, min(end, step_end / 1e9) - max(begin, step_begin / 1e9))
        for step_begin, step_end in steps
        for begin, end in stops
    )
    return sum(end - begin for begin, end in steps) / 1e9 - within


def gaps(
    server: ServerUnderTest, prompts: Prompts, index: Path, cores: list[int], rounds: int, loads: Sequence[Load] = LOADS
) -> dict[str, Any]:
    """The gap of each workload over the rounds, beside its target."""
    watch = Watch(server.pids, cores)
    found: dict[str, list[Measured]] = {load.title: [] for load in loads}
    for number in range(rounds):
        for load in loads:
            one = watch.undisturbed(partial(measure, server, prompts, index, load))
            found[load.title].append(one)
            click.echo(
                f"gaps, round {number + 1} of {rounds}: {load.title}: {one.served:,.0f} over HTTP, {one.kernels:,.0f} "
                f"tokens/s of the kernels alone"
            )
    rows = []
    for load in loads:
        runs = found[load.title]
        shares = Spread.of([round(one.gap, 3) for one in runs])
        rows.append(
            {
                "work": load.title,
                "served_tokens_per_s": _plain(Spread.of([round(one.served, 1) for one in runs])),
                "kernels_tokens_per_s": _plain(Spread.of([round(one.kernels, 1) for one in runs])),
                "gap": _plain(shares),
                **{name: round(statistics.median(getattr(one, name) for one in runs), 3) for name in PARTS},
                "target": load.target,
                "holds": shares.median <= load.target,
            }
        )
    return {"rows": rows, **watch.plain()}


def _plain(spread: Spread) -> list[float]:
    return [spread.median, spread.low, spread.high]


def gap_lines(report: dict[str, Any]) -> list[str]:
    """The gaps as text, with their targets."""
    lines = []
    for row in report["rows"]:
        served, kernels, shares = row["served_tokens_per_s"], row["kernels_tokens_per_s"], row["gap"]
        median, low, high = (100 * share for share in shares)
        verdict = _verdict(row["holds"], f"{100 * row['target']:.0f} %")
        lines.append(
            f"{row['work']}: {served[0]:,.0f} of {kernels[0]:,.0f} tokens/s of the kernels alone, gap {median:.0f} % "
            f"({low:.0f} to {high:.0f}), {verdict}"
        )
        lines.append(
            f"  control plane {row['control']:.3f} and client {row['client']:.3f} of a core; ranks waited for their "
            f"cores {100 * row['taken']:.1f} % of the time, without a step {100 * row['without_step']:.1f} %"
        )
    return lines


def first_token_lines(rows: Sequence[Row]) -> list[str]:
    """Times to a first token as shares of the baseline's, for the workloads with a target."""
    return [
        f"{row.work.title}: first token after {row.first_ratio:.2f} of the baseline's time, "
        + _verdict(row.first_ratio <= FIRST_TOKEN_SHARE, f"{FIRST_TOKEN_SHARE}")
        for row in rows
        if row.first_ratio is not None
        and row.work.clients in FIRST_TOKEN_CLIENTS
        and (row.work.prompt, row.work.shared) == (100, 0)
    ]


def _verdict(holds: bool, target: str) -> str:
    return f"target {target}: {'met' if holds else 'MISSED'}"
