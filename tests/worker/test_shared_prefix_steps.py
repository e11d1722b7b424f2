"""Steps drawn at random from sequences that share pages: the bytes are those of each entry alone, on pages of its own.

They combine what tests/worker/test_shared_prefixes.py shows one by one: prefix groups with any number of ranks and KV
heads, positions beside the ends of KV splits, entries with several samples, chunks, and steps of few entries, whose KV
splits may be units of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from shm.pages import KV_SPLIT
from stages.worker.kernels.buffer_sizes import SPLIT_UNITS
from tests.properties import FACTOR, examples
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.test_shared_prefixes import n_shared
from tools.step_runner import Entry, StepRunner
from tools.tiny_gguf import SHAPES

pytestmark = pytest.mark.slow

PAGE_TOKENS, ROWS, TOKENS = 64, 18, 3 * KV_SPLIT + 64
SEED = 11
# Of each row, the row whose text it continues and how far both are equal; the first ones continue none.
ORIGINS = [(0, 0), (1, 0), *((row % 2, 640 if row % 3 else 300) for row in range(2, ROWS))]
# Beside the ends of KV splits, and where a sequence has less than a whole one.
STARTS = [1, 200, 255, 256, 257, 511, 512, 513, 600, 767, 768, 769, 800]


class Step(NamedTuple):
    """Entries of a step, and the pages that rows have in common: (row, other row, leading pages)."""

    entries: list[Entry]
    shared: list[tuple[int, int, int]]


def texts(vocab: int) -> np.ndarray:
    found = np.random.default_rng(SEED).integers(0, vocab, (ROWS, TOKENS)).astype(np.int32)
    for row, (of, equal) in enumerate(ORIGINS):
        found[row, :equal] = found[of, :equal]
    return found


def draw_step(rng: np.random.Generator, n_entries: int) -> Step:
    """A step of `n_entries` entries, most of them single queries behind a long prefix."""
    starts = [int(start) for start in rng.choice(STARTS[4:], ROWS)]
    for row in rng.choice(ROWS, ROWS // 6, replace=False):
        starts[row] = int(rng.choice(STARTS))
    entries: list[Entry] = []
    for row in rng.choice(ROWS, n_entries, replace=False):
        count = int(rng.choice([1, 1, 1, 1, 1, 1, 2, 5, 30]))
        samples = count if count < 30 else int(rng.integers(2))
        entries.append((int(row), starts[row], count, samples))
    shared = []
    for row, (of, equal) in enumerate(ORIGINS):
        # A page that an entry writes to is not full, and then no other sequence has it.
        most = min(equal, starts[row], starts[of]) // PAGE_TOKENS
        if of != row and most:
            shared.append((row, of, most if rng.integers(3) else int(rng.integers(most + 1))))
    return Step(entries, shared)


def draw_steps(kv_heads: int, n: int) -> list[Step]:
    """Steps of many entries, of all, and of so few that KV splits may be units."""
    rng = np.random.default_rng(None if FACTOR else SEED)  # `make properties` draws others each time
    few = max(1, (SPLIT_UNITS - 1) // kv_heads)
    sizes = [ROWS, int(min(ROWS, few + 1)), int(min(ROWS, few)), 3]
    return [draw_step(rng, sizes[i % len(sizes)]) for i in range(n)]


def logits_of(runner: StepRunner, entries: list[Entry]) -> list[list[bytes]]:
    """Compute a step; the logits of each entry's samples."""
    runner.run(entries)
    found, first = [], 0
    for *_, samples in entries:
        found.append([runner.logits(first + i).tobytes() for i in range(samples)])
        first += samples
    return found


@pytest.mark.parametrize(
    ("shape", "kv_type"),
    [
        ("grouped", "f16"),  # two KV heads of three query heads
        ("odd", "int8"),  # three KV heads of one
        ("wide", "f32"),  # one KV head: it is a unit for one of the ranks
        ("gpt2", "f16"),  # four KV heads of one: equal shares of one and of two ranks
        ("windowed", "int8"),  # no groups: no layer attends to whole prefixes
    ],
)
def test_a_step_of_any_entries_gives_each_its_own_bytes(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, kv_type: str
) -> None:
    hyper = SHAPES[shape]
    index = ingested(tiny_gguf(shape, "Q4_0"))
    tokens = min(TOKENS, hyper.context_length)
    steps = [
        Step([entry for entry in entries if sum(entry[1:3]) <= tokens], shared)
        for entries, shared in draw_steps(hyper.n_kv_heads, examples(8))
    ]
    alone: dict[Entry, list[bytes]] = {}
    for ranks in (1, 2, 3, 5):
        bounds = {"max_rows": ROWS, "max_tokens": tokens, "step_tokens": 640, "max_samples": 5 * ROWS}
        with StepRunner(index, tmp_path, ranks=ranks, page_tokens=PAGE_TOKENS, kv_type=kv_type, **bounds) as runner:  # type: ignore[arg-type]
            own, text = runner.steps.tables.copy(), texts(hyper.vocab_size)[:, :tokens]
            for row in range(ROWS):
                runner.write_row(row, text[row], output_start=tokens)
            for row in range(0, ROWS, 2):
                for start in range(0, tokens, 320):
                    count = min(320, tokens - start)
                    runner.run([(row, start, count, 0), (row + 1, start, count, 0)])
            groups = []
            for step in steps:
                runner.steps.tables[:] = own
                if ranks == 1:
                    for entry in step.entries:
                        runner.write_row(entry[0], text[entry[0]], output_start=tokens)
                        alone[entry] = logits_of(runner, [entry])[0]
                for row, of, pages in step.shared:
                    runner.steps.tables[row, :pages] = runner.steps.tables[of, :pages]
                for row in range(ROWS):
                    runner.write_row(row, text[row], output_start=tokens)  # a sample has replaced a token
                found = logits_of(runner, step.entries)
                assert found == [alone[entry] for entry in step.entries], (ranks, step)
                groups.append(n_shared(runner))
        assert any(groups) == (shape != "windowed")
        assert groups[2::4] == groups[3::4] == [0] * (len(steps) // 4)  # too few entries
