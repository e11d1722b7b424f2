"""A step in parts of its layers, over a file whose later bytes are not here yet, has the results of the whole step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm.checkpoint import load_index
from stages.worker.arriving_weights import layer_ends
from stages.worker.kernels import parameter_block as pb
from tests.worker.conftest import Ingested, TinyGguf
from tools.step_runner import Entry, StepRunner

pytestmark = pytest.mark.slow

BOUNDS = {"max_rows": 4, "max_tokens": 96, "step_tokens": 64, "max_samples": 8}
STEPS: list[list[Entry]] = [
    [(0, 0, 40, 1), (1, 0, 3, 3)],
    [(0, 40, 1, 1), (1, 3, 20, 0), (2, 0, 1, 1)],
    [(0, 41, 1, 1), (2, 1, 1, 1)],
]


def results(runner: StepRunner, entries: list[Entry]) -> list[bytes]:
    n = sum(samples for *_, samples in entries)
    return [runner.logits(i).tobytes() for i in range(n)] + [np.array(runner.tokens(n)).tobytes()]


def fill(runner: StepRunner) -> None:
    for row in range(3):
        runner.write_row(
            row, np.random.default_rng(row).integers(0, 200, 60), temperature=0.8, seed=row, output_start=60
        )


def compute_parts(runner: StepRunner, entries: list[Entry], ends: list[int]) -> Iterator[int]:
    """Compute a step in parts that end at these layers; yields the number of the layer that is next before each."""
    runner.publish(entries)
    words = runner.group.tables[0].table
    for first, end in zip([0, *ends], [*ends, 0], strict=True):
        yield first
        words[pb.FIRST_LAYER], words[pb.END_LAYER] = first, end
        assert runner.compute() == 0
    words[pb.FIRST_LAYER] = words[pb.END_LAYER] = 0


@pytest.mark.parametrize(("shape", "recipe", "ranks"), [
    ("gemma3", "Q4_0", 2),
    ("gemma3", "Q8_0", 1),
    ("odd", "Q4_K_M", 2),
])  # fmt: skip
def test_parts_give_the_bytes_of_the_whole(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, recipe: str, ranks: int
) -> None:
    index_path = ingested(tiny_gguf(shape, recipe))
    index = load_index(index_path)
    arriving = tmp_path / "arriving"
    arriving.mkdir()
    path = Path(shutil.copy(index_path, arriving))
    source = index_path.with_suffix(".bin").read_bytes()
    ends = layer_ends(index)
    assert ends == sorted(ends)
    assert ends[-1] <= len(source)
    # What has not arrived is noise: any byte of it that is read changes the results.
    noise = np.random.default_rng(7).integers(0, 256, len(source), np.uint8).tobytes()
    path.with_suffix(".bin").write_bytes(noise)
    fd = os.open(path.with_suffix(".bin"), os.O_WRONLY)
    arrived = 0

    def arrive(n_layers: int) -> None:
        nonlocal arrived
        end = ends[n_layers - 1] if n_layers <= len(ends) else len(source)
        os.pwrite(fd, source[arrived:end], arrived)
        arrived = max(arrived, end)

    (tmp_path / "whole").mkdir()
    cuts = list(range(1, index.hyper.n_layers))
    with (
        StepRunner(index_path, tmp_path / "whole", ranks=ranks, **BOUNDS) as whole,
        StepRunner(path, arriving, ranks=ranks, **BOUNDS) as parts,
    ):
        fill(whole)
        fill(parts)
        for entries in STEPS:
            whole.run(entries)
            for first in compute_parts(parts, entries, cuts):
                arrive(first + 1 if first < cuts[-1] else len(ends) + 1)
            assert results(parts, entries) == results(whole, entries)
            # Once more what is behind the layers, as a part that has none.
            words = parts.group.tables[0].table
            words[pb.FIRST_LAYER] = index.hyper.n_layers
            parts.compute()
            words[pb.FIRST_LAYER] = 0
            assert results(parts, entries) == results(whole, entries)
        # A whole step after parts.
        for runner in (whole, parts):
            runner.run([(0, 42, 1, 1)])
        assert results(parts, [(0, 42, 1, 1)]) == results(whole, [(0, 42, 1, 1)])
    os.close(fd)
