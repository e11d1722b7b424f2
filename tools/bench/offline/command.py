"""`python -m tools.bench`: Starling's kernels and llama.cpp, alternating, on the same file and the same cores.

Each round times every unit of work once on each engine; figures are medians over the rounds with the lowest and the
highest.  Decoding is bound by memory bandwidth, so each decode figure at batch 1 is reported with the speed of a plain
read of as many bytes as its step reads, measured in the same run.  The last line is one JSON object.
"""

from __future__ import annotations

import datetime
import os
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL, ModelConfig
from pipeline.models import store
from pipeline.procfs import available_memory
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tools.bench.disturbance import Watch
from tools.bench.http import command as over_http
from tools.bench.http.first_byte import first_byte
from tools.bench.kv import command as kv
from tools.bench.offline import candidate as starling
from tools.bench.offline import peers
from tools.bench.offline.bandwidth import read_bandwidth
from tools.bench.offline.baseline import Baseline, EngineRefusesError, available
from tools.bench.offline.plots import can_plot, write_plots
from tools.bench.offline.results import (
    Figure,
    Rate,
    Report,
    Work,
    machine,
)
from tools.tiny_gguf import LARGE, SHAPES, write_model

SHORT = 16  # cached tokens that are too few to matter
BATCHES = (1, 4, 8, 16, 32)
CACHED = (512, 1024, 2048)
PROMPTS = (64, 512, 4096)
HTTP_ROUNDS = 3
LEAST_TOKENS = 8  # that are decoded, and
SECOND_BYTES = 10 << 30  # that a machine reads in about a second
READ_BYTES = 2 << 30  # most of the plain read, which needs memory beside both engines' weights


def works(quick: bool, is_large: bool = False) -> list[Work]:
    """The units of work, in the order of the table. Of a large model few are quick."""
    if quick and is_large:
        return [Work("prefill", tokens=64), *(Work("decode", batch=n, cached=SHORT) for n in BATCHES[:2])]
    prompts = [Work("prefill", tokens=n) for n in PROMPTS if not (quick and n > 512)]
    batches = [Work("decode", batch=n, cached=SHORT) for n in BATCHES]
    return prompts + batches + [Work("decode", batch=1, cached=n) for n in CACHED if not (quick and n > 512)]


def chosen_works(prompts: str, batches: str, cached: str) -> list[Work]:
    """The units of work that comma separated lists of numbers ask for. Raises `BadParameter`."""
    return [
        *(Work("prefill", tokens=n) for n in _numbers(prompts, "--prompts")),
        *(Work("decode", batch=n, cached=SHORT) for n in _numbers(batches, "--batches")),
        *(Work("decode", batch=1, cached=n) for n in _numbers(cached, "--cached")),
    ]


def _numbers(text: str, option: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not (word.isdecimal() and int(word) > 0):
            raise click.BadParameter(f"{word!r} is no number above 0; an example: 64,512", param_hint=option)
    return [int(word) for word in words]


def instances(planned: list[Work]) -> list[tuple[int, int]]:
    """Sequences and tokens of each, of one or two instances of an engine, each of which may copy the weights.

    The first is for short work, the last for prompts and for long work.
    """
    longest = max(max(w.tokens, w.cached) for w in planned)
    if longest <= 64:
        return [(max(w.batch for w in planned), 128)]
    short = [w.batch for w in planned if w.kind == "decode" and w.cached <= SHORT]
    return [*([(max(short), 128)] if short else []), (1, longest + 128)]


def decode_tokens(work: Work, weight_bytes: int) -> int:
    """Output tokens of each sequence: about a second of work, few compared with the cached tokens."""
    return min({1: 64, 4: 48, 8: 32}.get(work.batch, 24), max(LEAST_TOKENS, SECOND_BYTES // weight_bytes))


def located(gguf: Path | None, shape: str | None, recipe: str) -> ModelConfig:
    """The model under test; a random one is written to the cache at its first use."""
    if shape is not None:
        name = f"random-{shape}-{recipe}"
        gguf = paths.cache_dir() / "bench" / f"{name}.gguf"
        if not gguf.exists():
            gguf.parent.mkdir(parents=True, exist_ok=True)
            click.echo(f"writing {gguf} ...")
            write_model(gguf.with_suffix(".part"), SHAPES[shape], recipe, equal_layers=shape in LARGE).rename(gguf)
    return ModelConfig(name=DEMO_MODEL) if gguf is None else ModelConfig(name=gguf.stem, path=str(gguf))


class Engines:
    """Both engines, each with the instances that the planned work needs."""

    def __init__(
        self, stack: ExitStack, index: Path, gguf: Path, cores: list[int], baseline: bool, planned: list[Work]
    ) -> None:
        geometries = instances(planned)
        temporary = [Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))) for _ in geometries]
        self.cores = cores
        self.candidate = [
            stack.enter_context(starling.Candidate(index, directory, cores, rows, tokens))
            for directory, (rows, tokens) in zip(temporary, geometries, strict=True)
        ]
        self.baselines: list[Baseline] = []
        for slots, tokens in geometries if baseline else ():
            self.baselines.append(Baseline(gguf, cores, slots, tokens))
            stack.callback(self.baselines[-1].close)
        python = peers.environment() / "bin" / "python"
        self.peers = peers.start(stack, gguf, cores, geometries, python) if baseline else {}

    def measure(self, work: Work, engines: list[starling.Candidate] | list[Baseline]) -> float:
        """Tokens per second of one unit of work on one engine."""
        if work.kind == "prefill":
            return engines[-1].prefill(work.tokens)
        return engines[-1 if work.cached > SHORT else 0].decode(work.batch, work.cached, self.decode_tokens(work))

    def decode_tokens(self, work: Work) -> int:
        """Output tokens of each sequence."""
        return decode_tokens(work, self.candidate[0].runner.model.weight_bytes)

    def step_bytes(self, work: Work) -> int:
        """Bytes that a decode step of this work reads, half way through its tokens."""
        return self.candidate[0].step_bytes(work.batch, work.cached + self.decode_tokens(work) // 2)


class Rounds:
    """Rates of every unit of work on each engine, and of the plain read where it is the bound, by work and round."""

    def __init__(self, engines: Engines, planned: list[Work], n: int) -> None:
        self.candidate: dict[Work, list[float]] = {work: [] for work in planned}
        self.baseline: dict[Work, list[float]] = {work: [] for work in planned}
        self.read: dict[Work, list[float]] = {w: [] for w in planned if w.kind == "decode" and w.batch == 1}
        for work in planned:  # compile, map files and fill caches
            if work.tokens <= 512 and work.cached <= SHORT:
                engines.measure(work, engines.candidate)
                if engines.baselines:
                    engines.measure(work, engines.baselines)
                for name, instances in list(engines.peers.items()):
                    try:
                        engines.measure(work, instances)
                    except EngineRefusesError as error:  # it cannot be compared with in the other rows either
                        click.echo(f"left out: {error} ({work.title})")
                        del engines.peers[name]
        self.peers = {name: {work: list[float]() for work in planned} for name in engines.peers}
        others = [*engines.baselines, *(one for instances in engines.peers.values() for one in instances)]
        self.watch = Watch([p.pid for p in others], engines.cores)

        def once(work: Work) -> tuple[float, float, float, list[float]]:
            """Rates of the engines and of the plain read; they are compared, so they are repeated together."""
            return (
                engines.measure(work, engines.candidate),
                engines.measure(work, engines.baselines) if engines.baselines else 0.0,
                self._read(engines, work) if work in self.read else 0.0,
                [engines.measure(work, peer) for peer in engines.peers.values()],
            )

        for number in range(n):
            for work in planned:
                candidate, baseline, read, more = self.watch.undisturbed(partial(once, work))
                self.candidate[work].append(candidate)
                if engines.baselines:
                    self.baseline[work].append(baseline)
                for rates_of, rate in zip(self.peers.values(), more, strict=True):
                    rates_of[work].append(rate)
                if work in self.read:
                    self.read[work].append(read)
                # Show progress: on a busy machine a round takes many times as long.
                rates = ", ".join(
                    f"{engine[work][-1]:,.0f}"
                    for engine in (self.candidate, self.baseline, *self.peers.values())
                    if engine[work]
                )
                click.echo(f"round {number + 1} of {n}: {work.title}: {rates} tokens/s")

    @staticmethod
    def _read(engines: Engines, work: Work) -> float:
        return read_bandwidth(min(engines.step_bytes(work), READ_BYTES), engines.cores, 0.2, 1)

    def figure(self, engines: Engines, work: Work) -> Figure:
        """The table's row for one unit of work."""
        candidate, baseline = self.candidate[work], self.baseline[work]
        figure = Figure(work, Rate.of(candidate), Rate.of(baseline) if baseline else None)
        figure.peers = {name: Rate.of(rates[work]) for name, rates in self.peers.items()}
        if work.kind == "decode":
            nbytes = engines.step_bytes(work) / work.batch
            figure.read_gb_s = round(nbytes * figure.candidate.median / 1e9, 2)
            if work in self.read:
                figure.compare(nbytes, candidate, self.read[work])
        return figure

    def bandwidth_gb_s(self, work: Work) -> float:
        """Median speed of the plain read beside `work`."""
        return statistics.median(self.read[work]) / 1e9


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model file; default: the demo model.")
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A random model of a shape instead.")
@click.option("--format", "recipe", default="Q4_0", show_default=True, help="Format of the random model.")
@click.option("--cores", default="", help="Comma separated; default: two of those allowed.")
@click.option("--rounds", default=5, show_default=True, help="Repetitions of each unit of work.")
@click.option(
    "--baseline/--no-baseline", default=True, show_default=True, help="Compare with llama.cpp if it is installed."
)
@click.option(
    "--http/--no-http", default=True, show_default=True, help="Measure the server over HTTP as well (not with --shape)."
)
@click.option(
    "--url",
    default="http://127.0.0.1:8080",
    show_default=True,
    help="A running server, for the time to the first byte.",
)
@click.option("--quick", is_flag=True, help="Leave out long prompts, and most of a large shape.")
@click.option("--prompts", default="", help="Only these lengths of prompts (64,512), and what the next two name.")
@click.option("--batches", default="", help="Only these batches, and what the other two name.")
@click.option("--cached", default="", help="Only output behind so many tokens, and what the other two name.")
@click.option("--plots", type=click.Path(path_type=Path), help="Directory for plots of the forward pass.")
def main(
    gguf: Path | None,
    shape: str | None,
    recipe: str,
    cores: str,
    rounds: int,
    baseline: bool,
    http: bool,
    url: str,
    quick: bool,
    prompts: str,
    batches: str,
    cached: str,
    plots: Path | None,
) -> None:
    """Figures of speed: prefill and decode, alone and compared with llama.cpp."""
    if plots and not can_plot():
        raise click.UsageError("--plots needs matplotlib, which is not installed here: `make peers` installs it")
    numbers = [int(c) for c in cores.split(",")] if cores else sorted(os.sched_getaffinity(0))[:2]
    model = located(gguf, shape, recipe)
    models_dir = paths.models_dir()
    index = prepare_checkpoint(model, models_dir)
    source = store.fetch(model, models_dir)
    planned = chosen_works(prompts, batches, cached) or works(quick, shape in LARGE)
    to_first_byte = first_byte(url)
    if to_first_byte is None:
        click.echo(f"no server at {url}: the time to the first byte is left out")
    baseline_over_http = baseline
    if baseline and not available():
        click.echo("llama.cpp is not installed (`make peers` installs it): measuring Starling alone")
        baseline = False
    if baseline and source.nbytes + READ_BYTES > (free := available_memory()):
        click.echo(f"llama.cpp is left out: its weights take {source.nbytes:,} bytes of memory, and {free:,} are free")
        baseline = False

    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        engines = Engines(stack, index, source.path, numbers, baseline, planned)
        done = Rounds(engines, planned, rounds)
        engine = starling.about() | {
            "first_byte": to_first_byte,
            "step_overhead_us": round(engines.candidate[0].overhead_us(engines.decode_tokens(Work("decode"))), 1),
            "load_ms": round(starling.load_ms(index, directory, numbers), 1),
            "weights_resident_mb": round(starling.resident_mb(".bin"), 1),
        }
        bandwidth = {f"{engines.step_bytes(w) / 1e6:.0f} MB": round(done.bandwidth_gb_s(w), 1) for w in done.read}
        report = Report(
            machine(numbers) | {"read_gb_s": bandwidth} | done.watch.plain(),
            {
                "name": model.name,
                "sha256": source.digest,
                "gguf_mb": round(source.nbytes / 1e6, 1),
                "weights_mb": round(engines.candidate[0].runner.model.weight_bytes / 1e6, 1),
            },
            [done.figure(engines, work) for work in planned],
            engine,
            engines.baselines[0].about if baseline else None,
            {name: instances[0].about for name, instances in engines.peers.items()},
        )
    click.echo("\n".join(report.lines()))
    if done.watch.disturbed:
        click.echo(
            f"{done.watch.disturbed} of {rounds * len(planned)} measurements were disturbed each time, at worst: "
            f"{done.watch.worst}; measure on a quiet machine"
        )
    for name, part in (
        ("machine", report.machine),
        ("model", report.model),
        ("engine", report.engine),
        ("llama.cpp", report.baseline),
        *report.peers.items(),
    ):
        if part:
            click.echo(f"{name}: " + ", ".join(f"{k} {v}" for k, v in part.items()))
    if http and shape is None:  # a random model has no words for prompts
        report.http = over_http.measure(model, numbers, min(rounds, HTTP_ROUNDS), baseline_over_http, quick)
        report.kv = kv.measure(model, numbers, rounds)
    title = f"{model.name}, {report.machine['cpu']}, {datetime.date.today():%-d %B %Y}"
    for path in write_plots(report, plots, title) if plots else ():
        click.echo(f"wrote {path}")
    click.echo(report.as_json().decode())


def run() -> None:
    """Run the command as a program."""
    # Context managers remove the arenas: turn SIGTERM into an exception, so that they run.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
