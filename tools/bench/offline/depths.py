"""`python -m tools.bench.offline.depths`: speed with long contexts, beside llama.cpp in turns.

For each depth: a chunk of 512 prompt tokens and single output tokens behind so many positions.  Neither engine computes
all of these: Starling's cache is filled with random K and V, llama.cpp's with one computed block again and again
(filled_cache.py).  What the values are takes no time: `--check N` compares that with N computed positions.  llama.cpp
has one context at a time, without flash attention and with it; of int8 its Q8_0, which it has with flash attention
alone.  The read is that of as many bytes as a step of output reads, in the same round.  Where the memory does not hold
both engines, `--apart` measures one after the other.  The last line is one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from pipeline.config import paths
from pipeline.models import store
from shm.pages import KV_TYPES
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tools.bench.disturbance import Signs, Watch
from tools.bench.offline.bandwidth import read_bandwidth
from tools.bench.offline.baseline import LLAMA_CPP, Baseline, available
from tools.bench.offline.candidate import STEP_TOKENS, Candidate
from tools.bench.offline.command import READ_BYTES, located
from tools.bench.offline.native_baseline import FLASH, resident_mb
from tools.bench.offline.results import machine
from tools.tiny_gguf import SHAPES

N_TOKENS = 24
SPARE = STEP_TOKENS + 256  # positions of llama.cpp beyond those of Starling: a block is restored before it is cut
CHOICES = {"both": FLASH, "off": FLASH[:1], "on": FLASH[1:]}
NAMES = {0: "without flash attention", 1: "with flash attention"}


class Rates:
    """Rates of one engine, tokens/s by kind of work."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {"chunk": [], "decode": []}

    def add(self, chunk: float, decode: float) -> None:
        """One round."""
        self.of["chunk"].append(chunk)
        self.of["decode"].append(decode)

    def plain(self) -> dict[str, list[float]]:
        """By kind: median, lowest, highest."""
        of = self.of.items()
        return {kind: [round(f(values), 2) for f in (statistics.median, min, max)] for kind, values in of}

    def __str__(self) -> str:
        named = {"prompt": self.plain()["chunk"], "output": self.plain()["decode"]}
        return ", ".join(f"{name} {one:,.2f} ({low:,.2f}-{high:,.2f})" for name, (one, low, high) in named.items())


class Bench:
    """One model on some cores. `signs`: what disturbed each round."""

    def __init__(
        self,
        gguf: Path | None,
        shape: str,
        recipe: str,
        rounds: int,
        flash: Sequence[int],
        kv_type: str,
        is_apart: bool = False,
    ) -> None:
        """`is_apart`: one engine after the other."""
        self.cores = sorted(os.sched_getaffinity(0))[:2]
        self.model = located(gguf, None if gguf else shape, recipe)
        self.path = store.fetch(self.model, paths.models_dir()).path
        self.rounds = rounds
        self.kv_type = kv_type
        # Contexts of llama.cpp, one after the other; it computes with no V of Q8_0 without flash attention.
        self.flash = [kind for kind in flash if kind or kv_type == "f16"]
        self.is_apart = is_apart
        self.signs: list[Signs] = []

    def peer(self, stack: ExitStack, tokens: int, flash: int) -> Baseline:
        """llama.cpp with one context, which ends with `stack`."""
        baseline = Baseline(self.path, self.cores, 1, tokens + SPARE, flash=(flash,), kv_type=self.kv_type)
        stack.callback(baseline.close)
        return baseline

    def depth(self, depth: int, with_peer: bool) -> dict[str, Any]:
        """Both engines behind `depth` positions."""
        index = prepare_checkpoint(self.model, paths.models_dir())
        ours, reads = Rates(), list[float]()
        tokens = depth + STEP_TOKENS + N_TOKENS
        row: dict[str, Any] = {"depth": depth}
        peers: dict[str, Any] = {}

        def beside(flash: int | None, turn: Callable[[], object]) -> None:
            """Rounds of `turn`, beside a context of llama.cpp in turns unless `flash` is None."""
            with ExitStack() as own:
                theirs, peer = Rates(), None if flash is None else self.peer(own, tokens, flash)
                if peer is not None:
                    peer.fill(depth)

                def one_round() -> None:
                    turn()
                    if peer is not None:
                        theirs.add(*peer.depth(depth, N_TOKENS))

                watch = Watch([peer.pid] if peer is not None else [], self.cores)
                for _ in range(self.rounds):
                    _, signs = watch.observe(one_round)
                    self.signs.append(signs)
                if peer is not None and flash is not None:
                    memory = {name: round(peer.about[name]) for name in ("kv_mb", "resident_mb")}
                    peers[NAMES[flash]] = theirs.plain() | memory
                    click.echo(f"{depth:,}: {LLAMA_CPP} {NAMES[flash]}: {theirs}")

        def of_starling() -> int:
            """Rounds of the candidate, of which nothing is left after it; what a step of output reads, bytes."""
            with ExitStack() as stack:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
                candidate = stack.enter_context(
                    Candidate(index, directory, self.cores, 1, tokens, kv_type=self.kv_type)
                )
                candidate.fill_cache()
                candidate.chunk_at(0)  # maps the activations, whatever the depth: else the first round's chunk does
                candidate.decode_at(depth, 2)
                nbytes = candidate.step_bytes(1, depth + N_TOKENS // 2)
                row["kv_mb"] = round(candidate.runner.pages.nbytes / 1e6)
                row["resident_mb"] = round(resident_mb())

                def turn() -> None:
                    ours.add(candidate.chunk_at(depth), candidate.decode_at(depth, N_TOKENS))
                    reads.append(read_bandwidth(min(nbytes, READ_BYTES), self.cores, 0.3, 1) / 1e9)

                for flash in self.flash if with_peer and not self.is_apart else (None,):
                    beside(flash, turn)
                return nbytes

        nbytes = of_starling()
        gc.collect()  # arenas are mapped until the last view of them is gone
        read = statistics.median(reads)
        share = nbytes * statistics.median(ours.of["decode"]) / 1e9 / read
        row |= ours.plain() | {"of_read": round(share, 2), "read_gb_s": round(read, 1)}
        click.echo(
            f"{depth:,}: {ours} tokens/s, {share:.2f} of {read:.1f} GB/s, KV {row['kv_mb']:,} MB, resident "
            f"{row['resident_mb']:,} MB"
        )
        if with_peer and self.is_apart:
            for flash in self.flash:
                beside(flash, lambda: None)
        if peers:
            row[LLAMA_CPP] = peers
            row["ratio"] = {kind: ratio(row[kind], [peer[kind] for peer in peers.values()]) for kind in ours.of}
            click.echo(f"{depth:,}: prompt {row['ratio']['chunk']}, output {row['ratio']['decode']} times {LLAMA_CPP}")
        return row

    def check(self, n: int) -> dict[str, Any]:
        """Computed and filled positions of llama.cpp in turns: rates of both, and whether restored ones are equal."""
        found: dict[str, Any] = {}
        for flash in self.flash:
            with ExitStack() as own:
                peer = self.peer(own, n + STEP_TOKENS + N_TOKENS, flash)
                is_restored = peer.is_restored(n)
                kinds = {"computed": Rates(), "filled": Rates()}
                watch = Watch([peer.pid], self.cores)
                for _ in range(self.rounds):
                    for kind, rates in kinds.items():
                        one, signs = watch.observe(partial(peer.depth, n, N_TOKENS, kind == "computed"))
                        rates.add(*one)
                        self.signs.append(signs)
            found[NAMES[flash]] = {kind: rates.plain() for kind, rates in kinds.items()} | {"same_logits": is_restored}
            click.echo(f"{LLAMA_CPP} {NAMES[flash]}, {n:,} positions: logits {'equal' if is_restored else 'DIFFER'}")
            for kind, rates in kinds.items():
                click.echo(f"  {kind}: {rates} tokens/s")
        return found


def ratio(ours: list[float], theirs: list[list[float]]) -> float:
    """Median of the candidate divided by that of the faster peer."""
    return round(ours[0] / max(median for median, *_ in theirs), 1)


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model file.")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="llama-1b", show_default=True)
@click.option("--format", "recipe", default="Q4_K_M", show_default=True, help="Format of the random model.")
@click.option("--depths", default="8192,32768,130000", show_default=True, help="Comma separated.")
@click.option(
    "--baseline/--no-baseline", default=True, show_default=True, help="Compare with llama.cpp if it is installed."
)
@click.option(
    "--cache", "kv_type", type=click.Choice(sorted(KV_TYPES)), default="f16", show_default=True, help="Type of K and V."
)
@click.option(
    "--check", "n_checked", default=0, help="Only check llama.cpp's filled cache, with so many positions: 2048."
)
@click.option("--flash", type=click.Choice(list(CHOICES)), default="both", show_default=True, help="Of llama.cpp.")
@click.option("--rounds", default=3, show_default=True, help="Beside each context of llama.cpp.")
@click.option("--apart", "is_apart", is_flag=True, help="One engine after the other, where memory holds no two.")
def main(
    gguf: Path | None,
    shape: str,
    recipe: str,
    depths: str,
    baseline: bool,
    kv_type: str,
    n_checked: int,
    flash: str,
    rounds: int,
    is_apart: bool,
) -> None:
    """Speed of prompts and output behind long contexts."""
    if not available() and (baseline or n_checked):
        if n_checked:
            raise click.UsageError("--check needs llama.cpp, which is not installed here: `make peers` installs it")
        click.echo("llama.cpp is not installed (`make peers` installs it): measuring Starling alone")
    if kv_type == "int8" and flash == "off":
        raise click.UsageError("--flash off: llama.cpp has int8 K and V with flash attention alone; leave --flash out")
    bench = Bench(gguf, shape, recipe, rounds, CHOICES[flash], kv_type, is_apart)
    has_peer = baseline and available()
    report: dict[str, Any] = {
        "model": bench.model.name,
        "cache": kv_type,
        "apart": is_apart,
        "machine": machine(bench.cores),
    }
    if n_checked:
        report["check"] = bench.check(n_checked)
    else:
        report["depths"] = [bench.depth(int(one), has_peer) for one in sorted(depths.split(","), key=int)]
    worst = max(bench.signs, key=lambda signs: signs.excess)
    report |= {"disturbed": sum(signs.is_disturbed for signs in bench.signs), "worst": str(worst)}
    click.echo(f"{report['disturbed']} of {len(bench.signs)} rounds were disturbed, at worst: {worst}")
    click.echo(json.dumps(report))
    if not all(one["same_logits"] for one in report.get("check", {}).values()):
        sys.exit(1)


if __name__ == "__main__":
    # Context managers remove the arenas and end the children: turn SIGTERM into an exception, so that they run.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
