"""The benchmark's command: our engine and llama.cpp in turn, on the same file and the same cores.

Each round times every unit of work once on each side; figures are medians over the rounds with the lowest
and the highest.  Decode is bound by what memory delivers, so each decode figure at batch 1 stands beside a
plain read of as many bytes as its step reads, measured in the same run.  The last line is one JSON object.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL, ModelConfig
from pipeline.models import store
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tools.bench.http import command as over_http
from tools.bench.http.first_byte import first_byte
from tools.bench.kv import command as kv
from tools.bench.offline import candidate as starling
from tools.bench.offline.bandwidth import read_bandwidth
from tools.bench.offline.baseline import Peer, available
from tools.bench.offline.plots import can_plot, write_plots
from tools.bench.offline.results import (
    STRONGEST,
    STRONGEST_BANDWIDTH_GB_S,
    Figure,
    Quiet,
    Rate,
    Report,
    Work,
    busy_share,
    machine,
)
from tools.tiny_gguf import SHAPES, write_model

SHORT = 16  # cached tokens that count as none
BATCHES = (1, 4, 8, 16, 32)
CACHED = (512, 1024, 2048)
PROMPTS = (64, 512, 4096)
HTTP_ROUNDS = 3
BUSY = 0.1  # of the cores, by other programs


def works(quick: bool) -> list[Work]:
    prompts = [Work("prefill", tokens=n) for n in PROMPTS if not (quick and n > 512)]
    batches = [Work("decode", batch=n, cached=SHORT) for n in BATCHES]
    return prompts + batches + [Work("decode", batch=1, cached=n) for n in CACHED if not (quick and n > 512)]


def decode_tokens(work: Work) -> int:
    """Output tokens of each sequence: enough for a second or so, little beside what is cached."""
    return {1: 64, 4: 48, 8: 32}.get(work.batch, 24)


def located(gguf: Path | None, shape: str | None, recipe: str) -> ModelConfig:
    """The model under test; a random one is written to the cache at its first use."""
    if shape is not None:
        name = f"random-{shape}-{recipe}"
        gguf = paths.cache_dir() / "bench" / f"{name}.gguf"
        if not gguf.exists():
            gguf.parent.mkdir(parents=True, exist_ok=True)
            click.echo(f"writing {gguf} ...")
            write_model(gguf.with_suffix(".part"), SHAPES[shape], recipe).rename(gguf)
    return ModelConfig(name=DEMO_MODEL) if gguf is None else ModelConfig(name=gguf.stem, path=str(gguf))


class Sides:
    """Both engines, each twice: once for many short sequences, once for a long one."""

    def __init__(self, stack: ExitStack, index: Path, gguf: Path, cores: list[int], peer: bool, longest: int) -> None:
        temporary = [Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))) for _ in range(2)]
        many = (max(BATCHES), 128)
        one = (1, longest + 128)
        self.cores = cores
        self.ours = [
            stack.enter_context(starling.Ours(index, directory, cores, rows, tokens))
            for directory, (rows, tokens) in zip(temporary, (many, one), strict=True)
        ]
        self.peers: list[Peer] = []
        for slots, tokens in (many, one) if peer else ():
            self.peers.append(Peer(gguf, cores, slots, tokens))
            stack.callback(self.peers[-1].close)

    def measure(self, work: Work, sides: list[starling.Ours] | list[Peer]) -> float:
        if work.kind == "prefill":
            return sides[1].prefill(work.tokens)
        return sides[int(work.cached > SHORT)].decode(work.batch, work.cached, decode_tokens(work))

    def step_bytes(self, work: Work) -> int:
        """What a decode step of this work reads, half way through its tokens."""
        return self.ours[0].step_bytes(work.batch, work.cached + decode_tokens(work) // 2)


class Rounds:
    """Every unit of work in turn on each side, and the plain read where it is the bound; [work][round]."""

    def __init__(self, sides: Sides, planned: list[Work], n: int) -> None:
        self.ours: dict[Work, list[float]] = {work: [] for work in planned}
        self.peer: dict[Work, list[float]] = {work: [] for work in planned}
        self.read: dict[Work, list[float]] = {w: [] for w in planned if w.kind == "decode" and w.batch == 1}
        for work in planned:  # compiles, maps and fills caches on both sides
            if work.tokens <= 512 and work.cached <= SHORT:
                for side in (sides.ours, sides.peers) if sides.peers else (sides.ours,):
                    sides.measure(work, side)
        quiet = Quiet([os.getpid(), *(p.pid for p in sides.peers)])
        for number in range(n):
            for work in planned:
                self.ours[work].append(sides.measure(work, sides.ours))
                if sides.peers:
                    self.peer[work].append(sides.measure(work, sides.peers))
                if work in self.read:
                    self.read[work].append(read_bandwidth(sides.step_bytes(work), sides.cores, 0.2, 1))
                # At once: on a busy machine a round takes many times as long, and somebody waits for a sign.
                rates = ", ".join(f"{side[work][-1]:,.0f}" for side in (self.ours, self.peer) if side[work])
                click.echo(f"round {number + 1} of {n}: {work.title}: {rates} tokens/s")
        self.others_share = quiet.others_share()

    def figure(self, sides: Sides, work: Work, compare_with_strongest: bool) -> Figure:
        mine, theirs = self.ours[work], self.peer[work]
        figure = Figure(work, Rate.of(mine), Rate.of(theirs) if theirs else None)
        if work.kind == "decode":
            read_gb_s = sides.step_bytes(work) * figure.ours.median / work.batch / 1e9
            figure.read_gb_s = round(read_gb_s, 2)
            if work in self.read:
                figure.bandwidth_share = round(read_gb_s / self.bandwidth_gb_s(work), 3)
        if compare_with_strongest and work in STRONGEST:
            short = Work("decode", batch=1, cached=SHORT)
            scale = self.bandwidth_gb_s(short) / STRONGEST_BANDWIDTH_GB_S
            figure.strongest = round(STRONGEST[work] * scale, 1)
        return figure

    def bandwidth_gb_s(self, work: Work) -> float:
        return statistics.median(self.read[work]) / 1e9


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model file; default: the demo model.")
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A random model of a shape instead.")
@click.option("--format", "recipe", default="Q4_0", show_default=True, help="Format of the random model.")
@click.option("--cores", default="", help="Comma separated; default: two of those allowed.")
@click.option("--rounds", default=5, show_default=True, help="Repetitions of each unit of work.")
@click.option("--peer/--no-peer", default=True, show_default=True, help="Compare with llama.cpp if it is installed.")
@click.option("--http/--no-http", default=True, show_default=True, help="The server over HTTP, too (a GGUF file's).")
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="A server, if one is up.")
@click.option("--quick", is_flag=True, help="Leave out what takes long.")
@click.option("--plots", type=click.Path(path_type=Path), help="Directory for the plots of docs/performance.md.")
def main(
    gguf: Path | None,
    shape: str | None,
    recipe: str,
    cores: str,
    rounds: int,
    peer: bool,
    http: bool,
    url: str,
    quick: bool,
    plots: Path | None,
) -> None:
    """Figures of speed: prefill and decode, alone and beside llama.cpp."""
    if plots and not can_plot():
        raise click.UsageError("--plots needs matplotlib, which is not installed here: `make peers` installs it")
    numbers = [int(c) for c in cores.split(",")] if cores else sorted(os.sched_getaffinity(0))[:2]
    model = located(gguf, shape, recipe)
    models_dir = paths.models_dir()
    index = prepare_checkpoint(model, models_dir)
    source = store.fetch(model, models_dir)
    planned = works(quick)
    longest = max(max(w.tokens, w.cached) for w in planned)
    to_first_byte = first_byte(url)
    if to_first_byte is None:
        click.echo(f"no server at {url}: the time to the first byte is left out")
    peer_over_http = peer
    if peer and not available():
        click.echo("llama.cpp is not installed here (`make peers`): ours alone")
        peer = False

    share = busy_share()
    if share > BUSY:
        click.echo(
            f"other programs use {100 * share:.0f} % of the cores: figures will be low, and a step whose threads "
            f"wait for each other many times slower; measure on a quiet machine"
        )
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        sides = Sides(stack, index, source.path, numbers, peer, longest)
        done = Rounds(sides, planned, rounds)
        engine = starling.about() | {
            "first_byte": to_first_byte,
            "step_overhead_us": round(sides.ours[0].overhead_us(64), 1),
            "load_ms": round(starling.load_ms(index, directory, numbers), 1),
            "weights_resident_mb": round(starling.resident_mb(".bin"), 1),
        }
        bandwidth = {f"{sides.step_bytes(w) / 1e6:.0f} MB": round(done.bandwidth_gb_s(w), 1) for w in done.read}
        report = Report(
            machine(numbers) | {"read_gb_s": bandwidth, "others_share": done.others_share},
            {
                "name": model.name,
                "sha256": source.digest,
                "gguf_mb": round(source.nbytes / 1e6, 1),
                "weights_mb": round(sides.ours[0].runner.model.weight_bytes / 1e6, 1),
            },
            [done.figure(sides, work, model.name == DEMO_MODEL) for work in planned],
            engine,
            sides.peers[0].about if peer else None,
        )
    click.echo("\n".join(report.lines()))
    for name, part in (
        ("machine", report.machine),
        ("model", report.model),
        ("engine", report.engine),
        ("llama.cpp", report.peer),
    ):
        if part:
            click.echo(f"{name}: " + ", ".join(f"{k} {v}" for k, v in part.items()))
    if http and shape is None:  # a random model has no words
        report.http = over_http.measure(model, numbers, min(rounds, HTTP_ROUNDS), peer_over_http, quick)
        report.kv = kv.measure(model, numbers, rounds)
    for path in write_plots(report, plots) if plots else ():
        click.echo(f"wrote {path}")
    click.echo(report.as_json().decode())


def run() -> None:
    """The command as a program."""
    # Arenas stand in /dev/shm: an end by signal, too, takes them away.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
