"""`python -m tools.bench.http`: the whole server over HTTP with streaming, compared with llama-server.

Both serve the same file with the same number of slots on the same cores.  Each round runs every workload once on each
server, alternating; llama-server runs twice, with flash attention and without, and the faster one counts for each
workload.  A round that was disturbed is repeated (disturbance.py).  Figures are medians over the rounds with the
lowest and the highest.  Outputs have 64 tokens at temperature 0; prompts are distinct texts with an exact number of
tokens.  The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL, Config, ModelConfig
from pipeline.models import store
from shm.checkpoint import load_index
from shm.pages import KvGeometry, kv_arena_bytes
from stages.worker.checkpoint.prepare import prepare
from starling.bench.load import drive
from tools.bench.disturbance import Watch
from tools.bench.http import scenarios
from tools.bench.http.baseline import FLASH_ATTENTION, BaselineMissing, BaselineServer
from tools.bench.http.bound import first_token_lines, gap_lines, gaps
from tools.bench.http.constrained import constrained
from tools.bench.http.predictions import predictions
from tools.bench.http.server_under_test import ServerUnderTest
from tools.bench.http.workload import TENANTS, WORKS, Outcome, Prompts, Row, ServerFigures, Work, body, outcome, table
from tools.bench.offline.results import machine

SLOTS = 16
SLOT_TOKENS = 1024  # of context for each of the baseline's slots
SECTIONS = ("table", "gaps", "steps", "long", "speculation", "prediction", "constrained", "idle")
LONG_STREAMS = (1, 8, 16)  # beside a long prompt
PROMPT_BESIDE = 64  # at least the tokens of the streams' prompts, and those that a step drafts
BATCHES = (1, 16, 32)  # streams of the runs that measure pauses between steps


def describe(model: ModelConfig) -> dict[str, Any]:
    """The model's entry in a server's configuration."""
    return {"name": model.name, **({"path": model.path} if model.path else {})}


def kv_cache_mb(model: ModelConfig, index: Path, sequences: Sequence[int]) -> int:
    """The KV cache, in MiB, that holds sequences of so many tokens: at least what a server has without a setting."""
    geometry = KvGeometry.of(load_index(index).hyper, model.page_tokens, model.kv_type)
    places = sum(-(-tokens // geometry.page_tokens) for tokens in sequences)
    needed = kv_arena_bytes(geometry, geometry.groups.n_pages(places))
    return max(Config().cache.max_size_mb, 1 + (needed >> 20))


def _brief(name: str, one: Outcome) -> str:
    """What a line says of a round, which is all there is of a run that is interrupted."""
    return f"{name} {one.tokens_per_s:,.0f} tokens/s, first token {one.first_p50_ms:,.0f} ms"


def compare(row: Row, baselines: Mapping[str, ServerFigures]) -> None:
    """Set a row's baseline: the faster of llama-server with and without flash attention, for each of both figures."""
    if baselines:
        row.baseline_name = max(baselines, key=lambda name: baselines[name].tokens_per_s.median)
        row.baseline = baselines[row.baseline_name]
        first_ms = min(one.first_p50_ms.median for one in baselines.values())
        row.first_ratio = round(row.candidate.first_p50_ms.median / first_ms, 3)


def about_line(name: str, about: Mapping[str, Any]) -> str:
    """What a baseline reports of itself: its version and build, and the CPU's features that it uses."""
    return f"{name}: " + ", ".join(f"{key} {value}" for key, value in about.items())


class Bench:
    """The model, prompts and servers that all sections share; each measurement is repeated `rounds` times."""

    def __init__(self, stack: ExitStack, model: ModelConfig, cores: list[int], rounds: int) -> None:
        self.stack, self.model, self.cores, self.rounds = stack, model, cores, rounds
        self.index = prepare(model, paths.models_dir())
        self.source = store.fetch(model, paths.models_dir())
        self.prompts = Prompts(self.index, int.from_bytes(os.urandom(4)))

    def server_under_test(self, slots: int, sequences: Sequence[int] = ()) -> ServerUnderTest:
        """Start a server with `slots` sequences in a step, a key for each tenant, and pages for `sequences` at once."""
        keys = {tenant: f"sk-bench-tenant-{tenant}" for tenant in TENANTS}
        server = {"request_timeout_ms": int(1000 * scenarios.LONG_S)}
        settings = {"performance": {"batch_size": slots}, "server": server}
        model = describe(self.model) | {"kv_cache_mb": kv_cache_mb(self.model, self.index, sequences)}
        return self.stack.enter_context(ServerUnderTest(model, self.cores, settings, keys))

    def table(self, works: tuple[Work, ...], slots: int, baseline: bool) -> dict[str, Any]:
        """Every workload on every server, alternating, round by round."""
        candidate = self.server_under_test(slots)
        baselines = self._baselines(slots) if baseline else []
        servers: list[ServerUnderTest | BaselineServer] = [candidate, *baselines]
        found: dict[tuple[Work, str], list[Outcome]] = {(w, s.name): [] for w in works for s in servers}
        watch = Watch([pid for server in servers for pid in server.pids], self.cores)

        def once(work: Work) -> list[Outcome]:
            """The workload on all servers; they are compared, so they are repeated together."""
            return [self._run(work, server) for server in servers]

        for server in servers:  # a first request maps files and fills caches
            self._run(works[0]._replace(requests=1), server)
        for number in range(self.rounds):
            for work in works:
                for server, one in zip(servers, watch.undisturbed(partial(once, work)), strict=True):
                    found[work, server.name].append(one)
                seen = ", ".join(_brief(server.name, found[work, server.name][-1]) for server in servers)
                click.echo(f"http, round {number + 1} of {self.rounds}: {work.title}: {seen}")
        for server in servers:
            server.close()
        rows = []
        for work in works:
            row = Row(work, ServerFigures.of(found[work, candidate.name]))
            compare(row, {server.name: ServerFigures.of(found[work, server.name]) for server in baselines})
            rows.append(row)
        click.echo("\n".join([*table(rows), *first_token_lines(rows)]))
        if watch.disturbed:
            click.echo(
                f"{watch.disturbed} of {self.rounds * len(works)} rounds of a workload were disturbed each time, at "
                f"worst: {watch.worst}; measure on a quiet machine"
            )
        about = [server.about for server in baselines]
        for server in baselines:
            click.echo(about_line(server.name, server.about))
        return {"slots": slots, "rows": [row.plain() for row in rows], **watch.plain(), "baseline": about}

    def _baselines(self, slots: int) -> list[BaselineServer]:
        """llama-server with and without flash attention; none if it does not start."""
        try:
            return [
                self.stack.enter_context(BaselineServer(self.source.path, self.cores, slots, SLOT_TOKENS, flash))
                for flash in FLASH_ATTENTION
            ]
        except BaselineMissing as error:
            click.echo(f"{error}\nmeasuring Starling alone")
            return []

    def _run(self, work: Work, server: ServerUnderTest | BaselineServer) -> Outcome:
        return outcome(work, drive(server.address, self.prompts.requests(work, server.model, server.keys)))


def measure(
    model: ModelConfig,
    cores: list[int],
    rounds: int,
    baseline: bool,
    quick: bool = False,
    sections: Sequence[str] = SECTIONS,
    slots: int = SLOTS,
    flat_s: float = 0.0,
    long_prompt: int = scenarios.LONG_PROMPT,
    long_streams: Sequence[int] = LONG_STREAMS,
) -> dict[str, Any]:
    """Run the sections and print their figures; returns all of them."""
    works = tuple(work for work in WORKS if not (quick and work.clients * work.prompt > 2000))
    report: dict[str, Any] = {}
    with ExitStack() as stack:
        bench = Bench(stack, model, cores, rounds)
        if "table" in sections:
            report["table"] = bench.table(works, slots, baseline)
        if not flat_s and set(sections) <= {"table"}:
            return report
        beside = PROMPT_BESIDE + scenarios.beside_tokens(long_prompt)
        together = [long_prompt + beside] + max(long_streams) * [beside] if "long" in sections else []
        server, prompts = bench.server_under_test(max(BATCHES), together), bench.prompts
        drive(server.address, [[server.request(body(server.model, prompts.text(100)))]])

        def section(name: str, figures: Callable[[], Any]) -> None:
            if name in sections:
                report[name] = figures()
                click.echo(f"{name}: {json.dumps(report[name])}")

        section("idle", lambda: scenarios.at_rest(server))
        section("gaps", lambda: gaps(server, prompts, bench.index, cores, rounds))
        if "gaps" in report:
            click.echo("\n".join(gap_lines(report["gaps"])))
        section("steps", lambda: [scenarios.pauses(server, prompts, batch) for batch in BATCHES])
        section("long", lambda: [scenarios.long_prompt(server, prompts, n, long_prompt) for n in long_streams])
        section("speculation", lambda: scenarios.speculation(server, prompts, max(3, rounds)))
        section("prediction", lambda: predictions(server, prompts, max(3, rounds)))
        section("constrained", lambda: constrained(server, prompts, max(3, rounds)))
        if flat_s:
            report["memory"] = scenarios.flat_memory(server, prompts, flat_s)
            click.echo(f"memory: {json.dumps(report['memory'])}")
    return report


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model file; default: the demo model.")
@click.option("--cores", default="", help="Comma separated; default: two of those allowed.")
@click.option("--rounds", default=3, show_default=True, help="Repetitions of each workload.")
@click.option("--slots", default=SLOTS, show_default=True, help="Sequences in a step, for both servers.")
@click.option(
    "--baseline/--no-baseline", default=True, show_default=True, help="Compare with llama-server if it is installed."
)
@click.option("--quick", is_flag=True, help="Leave out what takes long.")
@click.option("--only", "sections", multiple=True, type=click.Choice(SECTIONS), help="Sections; default: all.")
@click.option(
    "--long-prompt", default=scenarios.LONG_PROMPT, show_default=True, help="Tokens of the prompt of the section long."
)
@click.option(
    "--long-streams",
    default=",".join(map(str, LONG_STREAMS)),
    show_default=True,
    help="Streams beside that prompt, comma separated.",
)
@click.option("--flat", "flat_s", default=0.0, help="Seconds of traffic during which memory must stay flat: 180.")
def main(
    gguf: Path | None,
    cores: str,
    rounds: int,
    slots: int,
    baseline: bool,
    quick: bool,
    sections: tuple[str, ...],
    long_prompt: int,
    long_streams: str,
    flat_s: float,
) -> None:
    """Figures of speed over HTTP, compared with llama-server in the same run."""
    numbers = [int(c) for c in cores.split(",")] if cores else sorted(os.sched_getaffinity(0))[:2]
    model = ModelConfig(name=gguf.stem, path=str(gguf)) if gguf else ModelConfig(name=DEMO_MODEL)
    streams = [int(n) for n in long_streams.split(",")]
    chosen = sections or (() if flat_s else SECTIONS)
    report = measure(model, numbers, rounds, baseline, quick, chosen, slots, flat_s, long_prompt, streams)
    click.echo(json.dumps({"machine": machine(numbers), "http": report}))


def run() -> None:
    """Run the command as a program."""
    # Context managers end the servers: turn SIGTERM into an exception, so that they run.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
