"""What `starling models --plan` predicts of a model, and what a server takes after work that fills the KV arena.

Weights are the sum of the processes' proportional shares of the `.bin`; arenas are what their files on tmpfs hold.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.config.load import resolve
from pipeline.models.store import find_index
from shm.checkpoint import Checkpoint
from stages.worker.checkpoint.prepare import prepare_checkpoint
from starling.cli.plan import MEASURED_BYTES, Plan, plan, read_rate
from tools.bench.http.server_under_test import ServerUnderTest
from tools.real_models.served import post

CONTEXT = 1024
PROMPT = 400  # tokens of a prompt that fills
N_DECODED = 96
ROUNDS = 5
PARTS = {".bin": "weights", ".kv": "KV arena", ".steps": "step arena", ".act": "activations"}
HEAD = (
    f"| model | {', MB | '.join(PARTS.values())}, MB | all, MB | tokens/s |",
    f"|---|{'---|' * (len(PARTS) + 2)}",
)
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")


class Measured(NamedTuple):
    """Predicted and measured bytes of each part, and tokens/s of one request."""

    name: str
    bytes: dict[str, tuple[int, int]]  # by part
    tokens_per_s: tuple[float, float]  # what reading allows, and what one request got; medians of rounds

    @property
    def total(self) -> tuple[int, int]:
        """Sums of both."""
        pairs = self.bytes.values()
        return sum(predicted for predicted, _ in pairs), sum(found for _, found in pairs)

    def line(self) -> str:
        """A row of the table."""
        pairs = [*self.bytes.values(), self.total]
        cells = [f"{predicted / 1e6:,.1f} / {found / 1e6:,.1f}" for predicted, found in pairs]
        rate, got = self.tokens_per_s
        return f"| {self.name} | {' | '.join(cells)} | {rate:,.1f} / {got:,.1f} ({got / rate:.0%}) |"


def resident(smaps: str) -> Counter[str]:
    """Proportional shares of the files that one process maps, bytes by suffix, from its /proc/PID/smaps."""
    found: Counter[str] = Counter()
    suffix = ""
    for line in smaps.splitlines():
        if mapping := _MAPPING.match(line):
            suffix = Path(mapping[1].removesuffix(" (deleted)")).suffix
        elif suffix in PARTS and line.startswith("Pss:"):
            found[suffix] += int(line.split()[1]) << 10
    return found


def taken(pids: Iterable[int]) -> Counter[str]:
    """Bytes by suffix: the processes' shares of weights, and what the files of their arenas hold."""
    found: Counter[str] = Counter()
    arenas: set[Path] = set()
    for pid in pids:
        try:
            smaps = Path(f"/proc/{pid}/smaps").read_text()
        except OSError:  # it has just ended
            continue
        found[".bin"] += resident(smaps)[".bin"]
        mapped = {Path(line[1]) for line in map(_MAPPING.match, smaps.splitlines()) if line and line[1]}
        arenas |= {path for path in mapped if path.suffix in PARTS and path.suffix != ".bin"}
    for path in arenas:
        if path.exists():
            found[path.suffix] += 512 * path.stat().st_blocks
    return found


def measure(model: dict[str, object], models_dir: Path, cores: list[int]) -> Measured:
    """Predict, serve, fill the KV arena, and measure one model."""
    settings = {"performance": {"control_cores": 0}}  # one rank on each core, as planned
    config = resolve({"models": [{**model, "cpus": cores}], **settings}, {})
    prepare_checkpoint(config.models[0], models_dir)
    predicted, index_path = plan(config, config.models[0], models_dir), find_index(config.models[0], models_dir)
    assert predicted is not None and index_path is not None  # it has just been prepared
    with ServerUnderTest(model, cores, settings, {}) as server:
        fill(server, predicted)
        sizes = taken(server.pids)
        data = Checkpoint(index_path).data[:MEASURED_BYTES]
        rates, got = [], []
        for _ in range(ROUNDS):
            rates.append(read_rate(data, len(cores)) / predicted.weights_per_token)
            got.append(decode_rate(server))
    expected = (predicted.weights, predicted.kv_arena, predicted.step_arena, predicted.activations)
    pairs = {name: (size, sizes[suffix]) for (suffix, name), size in zip(PARTS.items(), expected, strict=True)}
    return Measured(str(model["name"]), pairs, (statistics.median(rates), statistics.median(got)))


def fill(server: ServerUnderTest, predicted: Plan) -> None:
    """Compute different prompts until the arena is full of their pages."""
    rng, done = np.random.default_rng(0), 0
    while done < predicted.kv_positions + PROMPT:
        prompt = [int(token) for token in rng.integers(300, 20000, PROMPT)]
        post(server, "/v1/generate", {"model": server.model, "prompt": prompt, "max_tokens": 1})
        done += PROMPT


def decode_rate(server: ServerUnderTest) -> float:
    """Tokens per second of one request behind a short prompt, without the time to its first token."""

    def seconds(n: int) -> float:
        body = {"model": server.model, "prompt": "Once", "max_tokens": n, "ignore_eos": True, "temperature": 0}
        begun = time.perf_counter()
        post(server, "/v1/generate", body)
        return time.perf_counter() - begun

    return (N_DECODED - 1) / (seconds(N_DECODED) - seconds(1))
