"""What the predicted cycles of static_cycles.py mean for steps of the demo model on two cores of the Xeon with AMX.

Starling has been timed there before its AMX kernels were written: with VNNI, with an older AMX kernel, and in a trial.
The constants below have these figures, and those of the engines beside it.  A step takes

    max(products / share, reading the weights) + positions * OTHER_S + attention

The products come from the cycles, all else from the trial.  Nothing here was measured with the kernels of this version.
Rates are tokens/s.
"""

from __future__ import annotations

from typing import NamedTuple

from stages.worker.kernels.amx import STREAMED
from stages.worker.kernels.features import TILE_TOKENS

LAYERS, WIDTH, FFN, KV_WIDTH, VOCABULARY = 30, 576, 1536, 192, 49152  # of the demo model
LAYER_MACS = LAYERS * WIDTH * (2 * WIDTH + 2 * KV_WIDTH + 3 * FFN)  # of a position, Q4_1
HEAD_MACS = WIDTH * VOCABULARY  # of a sample, Q8_0
Q4_1_BYTES, Q8_0_BYTES = 20 / 32, 34 / 32  # of a weight
HEAD_BYTES = HEAD_MACS * Q8_0_BYTES
WEIGHT_BYTES = LAYER_MACS * Q4_1_BYTES + HEAD_BYTES
KV_BYTES = LAYERS * 2 * KV_WIDTH * 2  # of a position, f16
BLOCK_MACS = 16 * 32  # of a token
RANKS, CHUNK_TOKENS, TILED = 2, 512, 16  # TILED: fewer tokens use VNNI

# What is measured on the Xeon: best of 6, of Starling with VNNI but for the trial. At a batch some 110 positions are
# cached. The rest of a prefill is all but the products and attention.
READ = 356 * WEIGHT_BYTES  # bytes/s, at batch 1
OTHER_S = (0.066 - 0.044 - HEAD_BYTES / READ) / 512  # of a position: norms, quantizing, SiLU, waiting
PREFILL_ATTENTION = 4.54e9 / 0.044  # multiplications and additions/s
BATCH_ATTENTION_S = 0.0021 / 16  # of a sequence
FULL_S, FULL_ATTENTION_S = 0.211, 0.051  # a prefill of 512 with VNNI, by phases of rank 0; its attention
FMA = 225e9  # multiplications and additions/s of both cores on registers
CASCADE_LAKE_ATTENTION = 0.68  # of that, what this version reaches on Cascade Lake behind 2,048 positions

REACHED = 0.78  # of a prediction, by a loop of the same order of instructions
LOWEST = REACHED / 1.5  # the trial's products took 1.5 times as long in prefills as in their loop alone
DOTS_REACHED = {4: 0.5, 8: 0.65}  # of the prediction, by VNNI on Cascade Lake


class Cycles(NamedTuple):
    """Predicted for 16 tokens, 16 rows and a block; unpacking for 16 rows and a block; dots for one token of it."""

    tiles: dict[str, float]  # by format
    streaming: dict[str, float]
    unpacking: dict[str, float]
    dots: dict[int, float]  # Q4_1, by tokens of a tile
    ghz: float

    def products_s(self, tokens: int, fmt: str, macs: float) -> float:
        """Seconds of both cores for a product of `macs` for each token."""
        of_block = self.dots_of(tokens) if tokens < TILED else self.tiles_of(tokens, fmt)
        return macs / BLOCK_MACS * of_block / self.ghz / 1e9 / RANKS

    def tiles_of(self, tokens: int, fmt: str) -> float:
        """Cycles of a block and 16 rows, of whole tiles."""
        whole = tokens / TILE_TOKENS
        if tokens <= STREAMED:
            return self.streaming[fmt] + (whole - 1) * self.tiles[fmt]
        return self.unpacking[fmt] + whole * self.tiles[fmt]

    def dots_of(self, tokens: int) -> float:
        """The same of 4 or 8 tokens without tiles."""
        return self.unpacking["Q4_1"] + tokens * self.dots[4]


class Row(NamedTuple):
    """A cell of the targets."""

    work: str
    target: float
    medians: float | None  # ratio to llama.cpp's build with AMX, measured; None: not recorded
    theirs: float | None  # tokens/s of that build, best of 6


ROWS = (
    Row("prefill 64", 3.0, None, None),
    Row("prefill 512", 3.0, 1.4, 1362),
    Row("prefill 4,096", 3.0, 1.6, None),
    Row("batch 1", 2.0, None, 192),
    Row("batch 4", 3.0, 2.0, 386),
    Row("batch 8", 3.5, 2.3, 544),
    Row("batch 16", 4.0, 2.2, 733),
    Row("batch 32", 4.0, 2.2, 810),
    Row("512 cached", 2.5, None, 113),
    Row("2,048 cached", 3.5, 2.5, 70),
)
OPENVINO, OPENVINO_TARGET = (3400.0, 3950.0), 1.2  # tokens/s of prefill 512


class Served(NamedTuple):
    """A workload over HTTP: its clients, prompt, target, measured ratio, and the share that its kernels leave."""

    clients: int
    prompt: int
    target: float
    measured: float
    gap: float  # measured without AMX: 16 clients on Ice Lake, the others on Zen 5


OUTPUT = 64
SERVED = (
    Served(1, 100, 2.2, 1.5, 0.22),
    Served(8, 100, 3.0, 1.8, 0.14),
    Served(16, 100, 3.0, 1.8, 0.12),
    Served(8, 500, 3.0, 1.4, 0.14),
)
MEASURED_PREFILL = 1923.0  # with VNNI, medians
MEASURED = {1: 356.0, 8: 1206.0, 16: 1586.0}  # by batch; of batch 1 the best of 6


def attention_macs(tokens: int, before: int = 0) -> float:
    """Of a prompt whose positions attend to those before them, and to themselves."""
    return 2 * 3 * KV_WIDTH * LAYERS * tokens * (before + (tokens + 1) / 2)


class Step(NamedTuple):
    """A prompt, or a step of several sequences."""

    positions: int
    products_s: float  # as predicted
    read_s: float  # while they are computed
    rest_s: float
    shares: tuple[float, float]  # of the prediction: as a loop reached, and the lowest

    def seconds(self, share: float) -> float:
        """If the products reach this share of the prediction."""
        return max(self.products_s / share, self.read_s) + self.rest_s

    def rate(self, share: float) -> float:
        """The same as a rate."""
        return self.positions / self.seconds(share)

    def rates(self) -> tuple[float, float]:
        """The lowest and the highest."""
        return self.rate(self.shares[1]), self.rate(1.0)


def prefill(cycles: Cycles, tokens: int, attention: float = PREFILL_ATTENTION) -> Step:
    """A prompt in chunks of 512; `attention`: multiplications and additions/s."""
    chunk = min(tokens, CHUNK_TOKENS)
    chunks = tokens / chunk
    rest_s = tokens * OTHER_S + HEAD_BYTES / READ + attention_macs(tokens) / attention
    products_s, read_s = cycles.products_s(chunk, "Q4_1", LAYER_MACS), (WEIGHT_BYTES - HEAD_BYTES) / READ
    return Step(tokens, chunks * products_s, chunks * read_s, rest_s, (REACHED, LOWEST))


def batch(cycles: Cycles, sequences: int) -> Step:
    """A step of 4 sequences or more."""
    products_s = cycles.products_s(sequences, "Q4_1", LAYER_MACS) + cycles.products_s(sequences, "Q8_0", HEAD_MACS)
    shares = (REACHED, LOWEST) if sequences >= TILED else (DOTS_REACHED[sequences],) * 2
    return Step(sequences, products_s, WEIGHT_BYTES / READ, sequences * (OTHER_S + BATCH_ATTENTION_S), shares)


def cached_rate(cached: int) -> float:
    """Of one sequence, if its step reads K and V as fast as that of batch 1 reads the weights: at most."""
    return READ / (WEIGHT_BYTES + cached * KV_BYTES)


def measured_prefill_rate(tokens: int) -> float:
    """Of the version with VNNI, computed from the phases of its prefill of 512."""
    attention_s = FULL_ATTENTION_S * attention_macs(tokens) / attention_macs(CHUNK_TOKENS)
    return tokens / (tokens / CHUNK_TOKENS * (FULL_S - FULL_ATTENTION_S) + attention_s)


def served_ratios(cycles: Cycles, served: Served) -> tuple[float, float]:
    """To llama-server: as measured, with the time of the kernels as predicted and all other time as it was."""
    prompt = served.prompt / OUTPUT  # tokens of it for each of the output
    then = prompt / MEASURED_PREFILL + 1 / MEASURED[served.clients]
    rates = (cached_rate(0),) * 2 if served.clients == 1 else batch(cycles, served.clients).rates()
    now = [prompt / fast + 1 / rate for fast, rate in zip(prefill(cycles, CHUNK_TOKENS).rates(), rates, strict=True)]
    low, high = (served.measured / ((1 - served.gap) * one / then + served.gap) for one in now)
    return low, high


def _range(low: float, high: float, form: str) -> str:
    shown = [format(one, form) for one in (low, high)]
    return shown[0] if shown[0] == shown[1] else " to ".join(shown)


def lines(cycles: Cycles) -> list[str]:
    """Steps, then the cells of the targets."""
    deep = prefill(cycles, 4096, CASCADE_LAKE_ATTENTION * FMA)
    steps = {f"prefill {n:,}": prefill(cycles, n) for n in (64, 512, 4096)}
    steps |= {f"batch {n}": batch(cycles, n) for n in (4, 8, 16, 32)}
    found = []
    for name, step in (*steps.items(), ("prefill 4,096, attention of this version", deep)):
        reached, lowest = (1e3 * step.products_s / share for share in step.shares)
        found.append(
            f"{name}: products {1e3 * step.products_s:.1f} ms, {reached:.1f} as reached, {lowest:.1f} at most; reading "
            f"{1e3 * step.read_s:.1f} ms; rest {1e3 * step.rest_s:.1f} ms; {step.rate(1.0):,.0f}, "
            f"{step.rate(step.shares[0]):,.0f} and {step.rate(step.shares[1]):,.0f} tokens/s"
        )
    then, now = (attention_macs(4096) / speed for speed in (PREFILL_ATTENTION, CASCADE_LAKE_ATTENTION * FMA))
    low_share, high_share = now / deep.seconds(1.0), then / steps["prefill 4,096"].seconds(1.0)
    found.append(
        f"attention of prefill 4,096: {1e3 * then:,.0f} ms at {PREFILL_ATTENTION / FMA:.2f} of the FMAs on registers, "
        f"{1e3 * now:,.0f} at {CASCADE_LAKE_ATTENTION}; {100 * low_share:.0f} to {100 * high_share:.0f} % of the step"
    )
    rates = {name: step.rates() for name, step in steps.items()}
    rates["prefill 4,096"] = rates["prefill 4,096"][0], deep.rates()[1]
    rates |= {"batch 1": (cached_rate(0),) * 2} | {f"{n:,} cached": (cached_rate(n),) * 2 for n in (512, 2048)}
    for row in ROWS:
        low, high = rates[row.work]
        theirs = row.theirs
        if row.work == "prefill 4,096" and row.medians:
            theirs = measured_prefill_rate(4096) / row.medians
        ratio = f", {_range(low / theirs, high / theirs, '.1f')} times llama.cpp" if theirs else ""
        found.append(f"{row.work}: {_range(low, high, ',.0f')} tokens/s{ratio}; target {row.target:g}")
    low, high = rates["prefill 512"]
    ratio = _range(low / OPENVINO[1], high / OPENVINO[0], ".1f")
    found.append(f"prefill 512: {ratio} times OpenVINO GenAI; target {OPENVINO_TARGET:g}")
    for served in SERVED:
        ratio = _range(*served_ratios(cycles, served), ".1f")
        work = f"HTTP, clients {served.clients}, prompts of {served.prompt}"
        found.append(f"{work}: {ratio} times llama-server; target {served.target:g}")
    return found
