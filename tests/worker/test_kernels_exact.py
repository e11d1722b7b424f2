"""The kernels' logits equal the exact reference's, byte for byte: every format, shape and type of cache.

The two programs share the numerics contract, and neither layout nor order of work.  On the demo model the kernels are
also compared with an independent engine, over the whole reference text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.worker import reference
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.kernel_logits import kernel_logits, same_bytes
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.step_runner import StepRunner
from tools.tiny_gguf import RECIPES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("shape", ["odd", "super"])
def test_every_format(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, recipe: str) -> None:
    path = tiny_gguf(shape, recipe)
    tokens = np.random.default_rng(1).integers(0, 261, 20)
    expected = ExactSequence(ExactModel(path)).extend(tokens)
    assert same_bytes(kernel_logits(ingested(path), tmp_path, tokens), expected)


@pytest.mark.parametrize("kv_type", ["f16", "f32", "int8"])
@pytest.mark.parametrize("shape", ["small", "odd", "grouped", "super", "wide", "biased"])
def test_every_shape_and_cache(
    tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str, kv_type: str
) -> None:
    path = tiny_gguf(shape, "Q4_0_M")
    tokens = np.random.default_rng(2).integers(0, 261, 40)
    expected = ExactSequence(ExactModel(path), kv_type).extend(tokens)
    assert same_bytes(kernel_logits(ingested(path), tmp_path, tokens, kv_type, chunk=33, ranks=2), expected)


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_across_kv_splits(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, kv_type: str) -> None:
    """530 positions are three KV splits; by single positions, splits are separate units of work."""
    path = tiny_gguf("grouped", "Q4_1")
    tokens = np.random.default_rng(3).integers(0, 515, 530)
    expected = ExactSequence(ExactModel(path), kv_type).extend(tokens)
    for chunk, ranks in ((1, 2), (64, 1)):
        found = kernel_logits(ingested(path), tmp_path, tokens, kv_type, chunk, ranks)
        assert same_bytes(found, expected), (chunk, ranks)


# ------------------------------------------------------------------ the demo model


@pytest.fixture(scope="module")
def exact_demo(demo_gguf: Path) -> ExactModel:
    """Unpacks its matrices once."""
    return ExactModel(demo_gguf)


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_demo_model_equals_the_exact_reference(
    demo_gguf: Path, exact_demo: ExactModel, ingested: Ingested, tmp_path: Path, kv_type: str
) -> None:
    """And the exact reference is near the engine, on the first positions only, where the mean NLL is noise."""
    facts = reference.load()
    expected = ExactSequence(exact_demo, kv_type).extend(facts.tokens[:24])
    assert reference.distance(expected, facts).mean_kl <= 0.004
    found = kernel_logits(ingested(demo_gguf), tmp_path, facts.tokens[:24], kv_type, chunk=17)
    assert same_bytes(found, expected)


@pytest.mark.parametrize("kv_type", ["f16", "f32", "int8"])
def test_demo_model_is_near_the_reference(demo_gguf: Path, ingested: Ingested, tmp_path: Path, kv_type: str) -> None:
    facts = reference.load()
    logits = kernel_logits(ingested(demo_gguf), tmp_path, facts.tokens, kv_type, chunk=64, ranks=2)
    found = reference.distance(logits, facts)
    assert found.mean_kl <= 0.004
    assert abs(found.mean_nll - found.reference_nll) <= 0.015


def test_demo_model_follows_the_reference_greedily(demo_gguf: Path, ingested: Ingested, tmp_path: Path) -> None:
    """Given the engine's text, its next token has the highest logit, or nearly: its own two builds differ at such a
    tie."""
    greedy = reference.facts()["greedy"]["F32"]
    prompt, continuation = greedy["prompt_ids"], np.array(greedy["greedy_ids"])
    tokens = np.array([*prompt, *continuation[:-1]])
    logits = kernel_logits(ingested(demo_gguf), tmp_path, tokens, chunk=64)[len(prompt) - 1 :]
    behind = logits.max(axis=1) - logits[np.arange(len(continuation)), continuation]
    assert behind.max() < 0.5
    assert np.mean(behind == 0) > 0.9
    free = _generate(ingested(demo_gguf), tmp_path, prompt, 20)
    assert free == continuation[:20].tolist()


def _generate(index_path: Path, directory: Path, prompt: list[int], n: int) -> list[int]:
    with StepRunner(index_path, directory, max_rows=1, max_tokens=256) as runner:
        runner.write_row(0, prompt, temperature=0.0)
        found = runner.run([(0, 0, len(prompt), 1)])
        while len(found) < n:
            found += runner.run([(0, len(prompt) + len(found) - 1, 1, 1)])
    return found
