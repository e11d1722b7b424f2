"""The last layer computes K and V of all tokens, and the rest only of those that are sampled or pooled.

Logits and pages have the bytes of the same steps with every position sampled, where nothing is left out.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shm.checkpoint import load_index
from shm.step_ring import NO_MASK
from stages.worker import activations_arena as act
from stages.worker.adapters.prepared import prepare_adapter
from stages.worker.kernels import plan as p
from tests.worker.conftest import Ingested, TinyGguf
from tools.step_runner import Entry, StepRunner
from tools.tiny_adapter import write_adapter

pytestmark = pytest.mark.slow

ROWS, TOKENS, LONG = 6, 320, 290
BOUNDS = {"max_rows": ROWS, "max_tokens": TOKENS, "step_tokens": 384, "max_samples": 384}
# Row, first position, positions, samples: each row's entries follow each other.
STEPS: list[list[Entry]] = [
    [(0, 0, 40, 1), (1, 0, 3, 0), (2, 0, 1, 0), (3, 0, 1, 1), (4, 0, 30, 30), (5, 0, LONG, 0)],
    [(1, 3, 20, 0)],  # nothing of it is needed
    [(5, LONG, 6, 1)],  # one query behind a whole KV split
    [(0, 40, 1, 1), (1, 23, 2, 1), (2, 1, 7, 3)],
    [(1, 25, 3, 1)],  # few tokens: every rank norms them itself
    [(4, 30, 12, 5)],  # few are not needed, and too many are for that
    [(3, 1, 2, 0), (2, 8, 1, 0)],
    [(0, 41, 50, 0), (1, 28, 60, 1), (2, 9, 40, 2), (3, 3, 1, 1), (4, 42, 33, 0)],
    # Attention divides the one needed query into KV splits; with 3 KV heads or more it divides none of all entries.
    [(0, 91, 3, 0), (1, 88, 2, 0), (2, 49, 2, 0), (3, 4, 2, 0), (4, 75, 2, 0), (5, LONG + 6, 3, 1)],
]
NEEDED = [33, 0, 1, 5, 1, 5, 1, 4, 1]  # an entry with one token is needed for its K and V


def prompts(vocab: int, n: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(11).integers(0, vocab, (ROWS, n)).astype(np.int32)


def compute(runner: StepRunner, steps: list[list[Entry]], digests: list[str]) -> list[list[bytes]]:
    """The logits of every sample of every step."""
    found = []
    for entries in steps:
        # Again: an entry with one sample has written the token after its position.
        for row, tokens in enumerate(prompts(runner.model.hyper.vocab_size, runner.geometry.max_positions)):
            runner.write_row(row, tokens, adapter=digests[row % len(digests)])
        runner.run(entries)
        found.append([runner.logits(i).tobytes() for i in range(sum(samples for *_, samples in entries))])
    return found


def needed_of(logits: list[bytes], entries: list[Entry]) -> list[bytes]:
    """Of the logits of all positions of a step those of its samples."""
    found, end = [], 0
    for _, _, count, samples in entries:
        end += count
        found += logits[end - samples : end]
    return found


def n_needed(runner: StepRunner) -> int:
    offset = act.offsets(runner.geometry, runner.model.hyper)[0][act.c.PLAN]
    return int(runner.activations.view(offset, (p.NEEDED + 1,), np.int64)[p.NEEDED])


@pytest.mark.parametrize(
    ("shape", "recipe", "adapted", "ranks", "kv_type"),
    [
        ("grouped", "Q4_0_M", False, 1, "f16"),
        ("grouped", "Q4_0_M", True, 2, "f16"),
        ("grouped", "Q4_0_M", False, 3, "f16"),
        ("grouped", "Q4_0_M", False, 2, "int8"),
        ("odd", "Q4_K_M", False, 2, "f16"),
        ("odd", "Q4_K_M", False, 1, "int8"),
        ("odd", "Q4_K_M", False, 2, "f32"),
        ("gemma3", "Q4_0", False, 1, "f16"),
        ("gpt2", "Q8_0", False, 2, "f16"),
        ("olmo2", "Q8_0", True, 1, "f16"),
        ("biased", "F16", True, 2, "f16"),
        ("qwen2moe", "Q4_0_M", False, 2, "f16"),
        ("wide", "Q4_1", False, 1, "f16"),  # of a single layer
    ],
)
def test_logits_and_pages_equal_those_of_steps_that_leave_nothing_out(
    tiny_gguf: TinyGguf,
    ingested: Ingested,
    tmp_path: Path,
    shape: str,
    recipe: str,
    adapted: bool,
    ranks: int,
    kv_type: str,
) -> None:
    model = tiny_gguf(shape, recipe)
    index = ingested(model)
    adapters = []
    if adapted:
        for rank in (3, 8):
            source = write_adapter(tmp_path / f"{rank}.gguf", model, rank, rank)
            adapters.append(prepare_adapter(source, load_index(index), tmp_path / "adapters", 64, 1 << 30))
    digests = [*(one.digest for one in adapters), ""]
    (tmp_path / "all").mkdir()
    everything = [[(row, start, count, count) for row, start, count, _ in entries] for entries in STEPS]
    with StepRunner(index, tmp_path / "all", adapters=adapters, kv_type=kv_type, **BOUNDS) as runner:
        whole = compute(runner, everything, digests)
        assert n_needed(runner) == sum(count for _, _, count, _ in STEPS[-1])
        pages = runner.pages.tobytes()
    with StepRunner(index, tmp_path, ranks=ranks, adapters=adapters, kv_type=kv_type, **BOUNDS) as runner:
        found, needed = [], []
        for entries in STEPS:
            found += compute(runner, [entries], digests)
            needed.append(n_needed(runner))
            runner.compute()  # again, as by the successor of a dead worker
            n = sum(samples for *_, samples in entries)
            assert [runner.logits(i).tobytes() for i in range(n)] == found[-1]
        assert needed == NEEDED
        assert runner.pages.tobytes() == pages
    assert found == [needed_of(logits, entries) for logits, entries in zip(whole, STEPS, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", ["bert", "nomic-bert"])
def test_pooled_positions_of_an_encoder_equal_those_of_the_whole_text(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, ranks: int
) -> None:
    """Wherever they are: their queries attend to the whole text."""
    index = ingested(tiny_gguf(shape, "Q8_0"))
    with StepRunner(index, tmp_path, ranks=ranks, **BOUNDS) as runner:
        tokens = prompts(runner.model.hyper.vocab_size)
        for row in range(3):
            runner.write_row(row, tokens[row])
        each = []
        for first in range(40):  # a sum of one position is that position
            (one,) = runner.pool([(0, 0, 40, first, 1)])
            assert n_needed(runner) == 1
            each.append(one)
        (whole,) = runner.pool([(0, 0, 40, 0, 40)])
        assert n_needed(runner) == 40
        assert np.sum(each, axis=0).tobytes() == whole.tobytes()
        alone = [runner.pool([(row, 0, 60, first, n)])[0] for row, first, n in ((1, 0, 1), (2, 20, 9))]
        together = runner.pool([(0, 0, 40, 0, 40), (1, 0, 60, 0, 1), (2, 0, 60, 20, 9)])
        assert n_needed(runner) == 50
        assert together.tobytes() == np.stack([whole, *alone]).tobytes()


@pytest.mark.parametrize(("ranks", "kv_type"), [(1, "f16"), (2, "f16"), (2, "int8")])
def test_a_window_that_has_passed_the_first_kv_split(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, ranks: int, kv_type: str
) -> None:
    """The window has 300 positions in every layer: from position 555 on no query attends to the first split."""
    index = ingested(tiny_gguf("windowed", "Q8_0"))
    steps: list[list[Entry]] = [
        [(0, 0, 320, 1), (1, 0, 10, 0)],
        [(0, 320, 200, 0), (1, 10, 5, 1)],
        [(0, 520, 50, 1), (1, 15, 9, 0)],
        [(0, 570, 9, 1), (1, 24, 9, 1)],
        [(0, 579, 40, 7), (1, 33, 1, 1)],
        [(0, 619, 1, 1), (1, 34, 3, 1)],
    ]
    (tmp_path / "all").mkdir()
    bounds = BOUNDS | {"max_tokens": 640}
    with StepRunner(index, tmp_path / "all", kv_type=kv_type, **bounds) as runner:
        whole = compute(runner, [[(row, at, n, n) for row, at, n, _ in entries] for entries in steps], [""])
        pages = runner.pages.tobytes()
    with StepRunner(index, tmp_path, ranks=ranks, kv_type=kv_type, **bounds) as runner:
        found = compute(runner, steps, [""])
        assert n_needed(runner) == 2
        assert runner.pages.tobytes() == pages
    assert found == [needed_of(logits, entries) for logits, entries in zip(whole, steps, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_token_masks_belong_to_the_samples_of_their_rows(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, ranks: int
) -> None:
    """Behind entries that are left out, an entry and its samples have other places than in the step's own plan."""
    index = ingested(tiny_gguf("grouped", "Q4_0_M"))
    entries: list[Entry] = [(0, 0, 40, 0), (1, 0, 30, 1), (2, 0, 20, 1), (3, 0, 25, 2), (4, 0, 10, 1), (5, 0, 7, 1)]
    (tmp_path / "all").mkdir()
    with StepRunner(index, tmp_path / "all", **BOUNDS) as runner:
        (whole,) = compute(runner, [[(row, at, n, n) for row, at, n, _ in entries]], [""])
    logits = [np.frombuffer(one, np.float32) for one in needed_of(whole, entries)]
    best = [int(np.argmax(one)) for one in logits]
    with StepRunner(index, tmp_path, ranks=ranks, **BOUNDS) as runner:
        for row, tokens in enumerate(prompts(runner.model.hyper.vocab_size)):
            runner.write_row(row, tokens)
        expected = list(best)
        for place, row, known in ((0, 1, 30), (2, 3, 24), (3, 3, 25), (5, 5, 7)):
            allowed = [token for token in range(row, 200, 7) if token != best[place]]
            runner.write_mask(row, known, allowed)
            expected[place] = max(allowed, key=logits[place].__getitem__)
        runner.epochs[4] = 1
        expected[4] = NO_MASK  # it has not come in time
        assert runner.run(entries) == expected
        assert n_needed(runner) == 6


@pytest.mark.parametrize(
    ("shape", "kv_type", "ranks"),
    [("grouped", "f16", 2), ("odd", "int8", 1), ("grouped", "int8", 2), ("odd", "f32", 2)],
)
def test_pooled_spans_of_a_causal_model_add_up_to_their_chunks(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, kv_type: str, ranks: int
) -> None:
    """Spans from one position to all of a chunk, at each place, beside an entry that samples its last position."""
    index = ingested(tiny_gguf(shape, "Q4_0"))
    # First position, positions, bounds of the spans.
    chunks = [
        (0, 40, [0, 1, 17, 18, 40]),
        (40, 110, [0, 109, 110]),
        (150, 140, [0, 120, 121, 140]),
        (290, 8, [0, 7, 8]),
    ]
    (tmp_path / "all").mkdir()
    with (
        StepRunner(index, tmp_path / "all", kv_type=kv_type, **BOUNDS) as whole,
        StepRunner(index, tmp_path, kv_type=kv_type, ranks=ranks, **BOUNDS) as runner,
    ):
        tokens = prompts(runner.model.hyper.vocab_size)
        for row in range(2):
            whole.write_row(row, tokens[row])
            runner.write_row(row, tokens[row])
        for start, count, bounds in chunks:
            expected = whole.pool([(0, start, count, 0, count)], [(1, start, count, count)])[0]
            sums = np.zeros_like(expected)
            for first, end in pairwise(bounds):
                runner.write_row(1, tokens[1])  # the token behind its entry has been replaced by the sample
                sums += runner.pool([(0, start, count, first, end - first)], [(1, start, count, 1)])[0]
                assert n_needed(runner) == end - first + 1
                assert runner.logits(0).tobytes() == whole.logits(count - 1).tobytes()
            assert sums.tobytes() == expected.tobytes()
            assert runner.pages.tobytes() == whole.pages.tobytes()
