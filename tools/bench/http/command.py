"""`python -m tools.bench.http`: the server over HTTP with streaming, everything included, beside llama-server.

Both serve the same file with as many slots on the same cores; each round runs every workload once on each of
them, in turn.  Figures are medians over the rounds with the lowest and the highest.  Output is 64 tokens at
temperature 0, prompts are distinct texts of an exact number of tokens.  The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL, ModelConfig
from pipeline.models import store
from stages.worker.checkpoint.prepare import prepare
from tools.bench.http import scenarios as special
from tools.bench.http.baseline import Peer, PeerMissing
from tools.bench.http.client import drive
from tools.bench.http.server_under_test import Starling
from tools.bench.http.workload import TENANTS, WORKS, Outcome, Prompts, Row, Side, Work, body, outcome, table
from tools.bench.offline.results import Quiet, machine

SLOTS = 16
SLOT_TOKENS = 1024  # of context for each of the peer's slots
SECTIONS = ("table", "steps", "long", "speculation", "idle")
BATCHES = (1, 16, 32)  # of streams whose pauses between steps are looked at


def describe(model: ModelConfig) -> dict[str, Any]:
    return {"name": model.name, **({"path": model.path} if model.path else {})}


class Bench:
    """What all sections share. `rounds` of each measurement."""

    def __init__(self, stack: ExitStack, model: ModelConfig, cores: list[int], rounds: int) -> None:
        self.stack, self.model, self.cores, self.rounds = stack, model, cores, rounds
        index = prepare(model, paths.models_dir())
        self.source = store.fetch(model, paths.models_dir())
        self.prompts = Prompts(index, int.from_bytes(os.urandom(4)))

    def starling(self, slots: int) -> Starling:
        keys = {tenant: f"sk-bench-tenant-{tenant}" for tenant in TENANTS}
        settings = {"performance": {"batch_size": slots}}
        return self.stack.enter_context(Starling(describe(self.model), self.cores, settings, keys))

    def table(self, works: tuple[Work, ...], slots: int, peer: bool) -> dict[str, Any]:
        """Every workload on every side in turn, round by round."""
        ours = self.starling(slots)
        sides: list[Starling | Peer] = [ours]
        if peer:
            try:
                sides.append(self.stack.enter_context(Peer(self.source.path, self.cores, slots, SLOT_TOKENS)))
            except PeerMissing as error:
                click.echo(f"{error}\nours alone")
                peer = False
        found: dict[tuple[Work, str], list[Outcome]] = {(w, s.name): [] for w in works for s in sides}
        quiet = Quiet([os.getpid(), *(pid for side in sides for pid in side.pids)])
        for side in sides:  # maps, compiles and fills whatever a first request does
            self._run(works[0]._replace(requests=1), side)
        for number in range(self.rounds):
            for work in works:
                for side in sides:
                    found[work, side.name].append(self._run(work, side))
                rates = ", ".join(f"{side.name} {found[work, side.name][-1].tokens_per_s:,.0f}" for side in sides)
                click.echo(f"http, round {number + 1} of {self.rounds}: {work.title}: {rates} tokens/s")
        share = quiet.others_share()
        for side in sides:
            side.close()
        rows = [
            Row(work, Side.of(found[work, ours.name]), Side.of(found[work, Peer.name]) if peer else None)
            for work in works
        ]
        click.echo("\n".join(table(rows)))
        about = [side.about for side in sides if isinstance(side, Peer)]
        return {"slots": slots, "rows": [row.plain() for row in rows], "others_share": share, "peer": about}

    def _run(self, work: Work, side: Starling | Peer) -> Outcome:
        return outcome(work, drive(side.address, self.prompts.asks(work, side.model, side.keys)))


def measure(
    model: ModelConfig,
    cores: list[int],
    rounds: int,
    peer: bool,
    quick: bool = False,
    sections: Sequence[str] = SECTIONS,
    slots: int = SLOTS,
    flat_s: float = 0.0,
) -> dict[str, Any]:
    """Run the sections and print what they say; all figures."""
    works = tuple(work for work in WORKS if not (quick and work.clients * work.prompt > 2000))
    report: dict[str, Any] = {}
    with ExitStack() as stack:
        bench = Bench(stack, model, cores, rounds)
        if "table" in sections:
            report["table"] = bench.table(works, slots, peer)
        if not flat_s and set(sections) <= {"table"}:
            return report
        server, prompts = bench.starling(max(BATCHES)), bench.prompts
        drive(server.address, [[server.ask(body(server.model, prompts.text(100)))]])

        def section(name: str, figures: Callable[[], Any]) -> None:
            if name in sections:
                report[name] = figures()
                click.echo(f"{name}: {json.dumps(report[name])}")

        section("idle", lambda: special.at_rest(server))
        section("steps", lambda: [special.pauses(server, prompts, batch) for batch in BATCHES])
        section("long", lambda: [special.long_prompt(server, prompts, batch) for batch in (1, 8, 16)])
        section("speculation", lambda: special.speculation(server, prompts, max(3, rounds)))
        if flat_s:
            report["memory"] = special.flat_memory(server, prompts, flat_s)
            click.echo(f"memory: {json.dumps(report['memory'])}")
    return report


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model file; default: the demo model.")
@click.option("--cores", default="", help="Comma separated; default: two of those allowed.")
@click.option("--rounds", default=3, show_default=True, help="Repetitions of each workload.")
@click.option("--slots", default=SLOTS, show_default=True, help="Sequences in a step, on both sides.")
@click.option("--peer/--no-peer", default=True, show_default=True, help="Beside llama-server if it is installed.")
@click.option("--quick", is_flag=True, help="Leave out what takes long.")
@click.option("--only", "sections", multiple=True, type=click.Choice(SECTIONS), help="Sections; default: all.")
@click.option("--flat", "flat_s", default=0.0, help="Seconds of traffic during which memory must stay flat: 180.")
def main(
    gguf: Path | None,
    cores: str,
    rounds: int,
    slots: int,
    peer: bool,
    quick: bool,
    sections: tuple[str, ...],
    flat_s: float,
) -> None:
    """Figures of speed over HTTP, beside llama-server in the same run."""
    numbers = [int(c) for c in cores.split(",")] if cores else sorted(os.sched_getaffinity(0))[:2]
    model = ModelConfig(name=gguf.stem, path=str(gguf)) if gguf else ModelConfig(name=DEMO_MODEL)
    chosen = sections or (() if flat_s else SECTIONS)
    report = measure(model, numbers, rounds, peer, quick, chosen, slots, flat_s)
    click.echo(json.dumps({"machine": machine(numbers), "http": report}))


def run() -> None:
    """The command as a program."""
    # Servers and arenas go by their context managers: an end by signal, too, takes them away.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
