"""Models that read a whole text at once (`bert`, `nomic-bert`): kernels, references and llama.cpp agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shm.step_ring import POOL_SCALE
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.peer_embeddings import peer_embeddings
from tests.worker.peer_logits import is_installed
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.reference.float_forward import FloatModel
from tools.step_runner import StepRunner

SHAPES = ["bert", "nomic-bert"]
LENGTHS = (1, 2, 25, 300)  # one query, few, many in one or two blocks, several blocks and more than a KV split


def prompt(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(5, 260, n)


def fixed(hidden: np.ndarray) -> np.ndarray:
    return np.rint(hidden.astype(np.float64) * 2.0**POOL_SCALE).astype(np.int64).sum(axis=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_and_float_reference_agree(tiny_gguf: TinyGguf, shape: str) -> None:
    path = tiny_gguf(shape, "F32")
    exact = ExactSequence(ExactModel(path), "f32").hidden(prompt(32))
    assert np.abs(exact - FloatModel(path).hidden(prompt(32))).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_reference(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, ranks: int
) -> None:
    path = tiny_gguf(shape, "Q4_0_M")
    expected = [fixed(ExactSequence(ExactModel(path)).hidden(prompt(n))).tolist() for n in LENGTHS]
    index = ingested(path)
    with StepRunner(index, tmp_path, ranks=ranks, max_rows=5, max_tokens=310, step_tokens=512) as runner:
        for row, n in enumerate(LENGTHS):
            runner.write_row(row, prompt(n))
        together = runner.pool([(row, 0, n, 0, n) for row, n in enumerate(LENGTHS)])
        assert together.tolist() == expected, "in one step"
        for row, n in enumerate(LENGTHS):
            assert runner.pool([(row, 0, n, 0, n)])[0].tolist() == expected[row], "alone"


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="llama.cpp is not installed; `make peers` does that")
@pytest.mark.parametrize(("shape", "pooling"), [("bert", "mean"), ("bert", "cls"), ("nomic-bert", "mean")])
def test_embeddings_agree_with_llama_cpp(tiny_gguf: TinyGguf, shape: str, pooling: str) -> None:
    path = tiny_gguf(shape, "F16")
    inputs = [prompt(n) for n in (1, 9, 50)]
    expected = peer_embeddings(path, inputs, pooling)
    for tokens, vector in zip(inputs, expected, strict=True):
        hidden = ExactSequence(ExactModel(path)).hidden(tokens).astype(np.float64)
        pooled = hidden.mean(axis=0) if pooling == "mean" else hidden[0]
        assert pooled @ vector / np.linalg.norm(pooled) > 0.9999
