"""LoRA adapters: kernels equal the unmerged reference byte for byte, whatever else a step computes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from shm.checkpoint import load_index
from stages.worker.adapters.prepared import Prepared, prepare_adapter
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.kernel_logits import kernel_logits, same_bytes
from tests.worker.reference import log_softmax
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.step_runner import StepRunner
from tools.tiny_adapter import write_adapter

pytestmark = pytest.mark.slow

Prepare = Callable[[Path, Path], Prepared]
SMALL = (8, 1)  # rank, seed
OTHERS = ((3, 2), (33, 3))
FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}  # tensors of Phi-3
MERGED_KL = 1e-7  # nats; measured: 2.6e-8 ("odd"), and at most 2.1e-9 of the other shapes


@pytest.fixture
def prepare(ingested: Ingested, tmp_path: Path) -> Prepare:
    """`prepare(adapter, gguf)`: an adapter's prepared form for a model."""

    def get(source: Path, model: Path) -> Prepared:
        return prepare_adapter(source, load_index(ingested(model)), tmp_path / "adapters", 64, 1 << 30)

    return get


def three(model: Path, directory: Path, prepare: Prepare, dtype: str = "F32") -> tuple[Path, list[Prepared]]:
    """The file of the first one, and adapters of several ranks and types."""
    first = write_adapter(directory / "first.gguf", model, *SMALL, dtype=dtype)
    others = [
        write_adapter(directory / f"{rank}.gguf", model, rank, seed, alpha=0.0, dtype=kind)
        for (rank, seed), kind in zip(OTHERS, ("BF16", "F16"), strict=True)
    ]
    return first, [prepare(one, model) for one in (first, *others)]


@pytest.mark.parametrize(
    ("shape", "recipe", "dtype"),
    [
        ("odd", "Q4_K_M", "F32"),
        ("grouped", "Q4_0_M", "F16"),
        ("biased", "F16", "BF16"),
        ("gemma2", "Q8_0", "F32"),
        ("phi3", "Q4_0_M", "F16"),
        ("granite", "Q4_0", "F32"),
        ("olmo2", "BF16", "F32"),
        ("starcoder2", "Q4_0_M", "F32"),
        ("gpt2", "Q8_0", "F16"),
        ("mixtral", "Q4_0_M", "F32"),
    ],
)
def test_kernels_equal_the_unmerged_reference(
    tiny_gguf: TinyGguf, ingested: Ingested, prepare: Prepare, tmp_path: Path, shape: str, recipe: str, dtype: str
) -> None:
    model, tokens = tiny_gguf(shape, recipe), np.random.default_rng(5).integers(0, 260, 36)
    first, adapters = three(model, tmp_path, prepare, dtype)
    index = ingested(model)
    expected = ExactSequence(ExactModel(model, first)).extend(tokens)
    plain = ExactSequence(ExactModel(model)).extend(tokens)
    assert not np.allclose(expected, plain, atol=0.1), "the adapter changes what the model says"
    assert same_bytes(kernel_logits(index, tmp_path, tokens, chunk=32, adapters=adapters), expected), "in large chunks"
    mixed = kernel_logits(index, tmp_path, tokens, chunk=7, ranks=2, others=7, adapters=adapters)
    assert same_bytes(mixed, expected), "among others, on two ranks"
    assert same_bytes(kernel_logits(index, tmp_path, tokens, chunk=1, ranks=3, adapters=adapters[:1]), expected)


def test_the_base_model_is_the_same_beside_adapters(
    tiny_gguf: TinyGguf, ingested: Ingested, prepare: Prepare, tmp_path: Path
) -> None:
    model, tokens = tiny_gguf("grouped", "Q4_0_M"), np.random.default_rng(6).integers(0, 260, 30)
    _, adapters = three(model, tmp_path, prepare)
    alone = kernel_logits(ingested(model), tmp_path, tokens, chunk=30)
    with StepRunner(ingested(model), tmp_path, ranks=2, max_rows=4, max_samples=64, adapters=adapters) as runner:
        found = []
        for start in range(0, 30, 5):
            runner.write_row(1, tokens)
            for row, one in zip((0, 2, 3), adapters, strict=True):
                runner.write_row(row, np.roll(tokens, row), adapter=one.digest)
            runner.run([(0, start, 5, 0), (1, start, 5, 5), (2, start, 5, 0), (3, start, 5, 0)])
            found += [runner.logits(i) for i in range(5)]
    assert same_bytes(np.array(found), alone)


def test_an_adapter_that_is_not_loaded_is_refused_alone(
    tiny_gguf: TinyGguf, ingested: Ingested, prepare: Prepare, tmp_path: Path
) -> None:
    model, tokens = tiny_gguf("small", "Q8_0"), np.arange(20, 40)
    _, adapters = three(model, tmp_path, prepare)
    for given in (adapters, []):
        with StepRunner(ingested(model), tmp_path, max_rows=2, adapters=given) as runner:
            runner.write_row(0, tokens, adapter="ab" * 32, temperature=0.0)
            runner.write_row(1, tokens, temperature=0.0)
            runner.publish([(0, 0, 20, 1), (1, 0, 20, 1)])
            assert runner.compute() == 1
            refused, sampled = runner.tokens(2)
            assert refused == -2
            assert sampled >= 0


def merged(model: Path, adapter: Path, path: Path) -> Path:
    """The model of a file of F32 with the adapter's changes added to its matrices."""
    changes = {name: one.scale * (one.b @ one.a) for name, one in ExactModel(model, adapter).added.items()}
    shutil.copyfile(model, path)
    reader = gguf.GGUFReader(path, "r+")
    names = {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        parts = [tensor.name]
        for fused, separate in FUSED.items():
            others = [tensor.name.replace(f".{fused}.", f".{one}.") for one in separate]
            if f".{fused}." in tensor.name and set(others) - {tensor.name} <= changes.keys() - names:
                parts = others
        if parts[-1] in changes:
            tensor.data[:] += np.concatenate([changes.pop(part) for part in parts])
    assert not changes, "every change is merged"
    reader.data.flush()
    return path


def mean_kl(logs: np.ndarray, others: np.ndarray) -> float:
    """The mean KL of positions, in nats. Logarithms of probabilities: (positions, vocabulary)."""
    return float((np.exp(logs) * (logs - others)).sum(axis=1).mean())


@pytest.mark.parametrize("shape", ["odd", "grouped", "gemma2", "phi3"])
def test_the_distance_to_merged_weights_is_small(
    tiny_gguf: TinyGguf, ingested: Ingested, prepare: Prepare, tmp_path: Path, shape: str
) -> None:
    model, tokens = tiny_gguf(shape, "F32"), np.random.default_rng(8).integers(0, 260, 60)
    first, adapters = three(model, tmp_path, prepare)
    together = log_softmax(kernel_logits(ingested(merged(model, first, tmp_path / "m.gguf")), tmp_path, tokens))
    apart = log_softmax(kernel_logits(ingested(model), tmp_path, tokens, adapters=adapters))
    plain = log_softmax(kernel_logits(ingested(model), tmp_path, tokens))
    assert mean_kl(together, plain) >= 0.05, "the adapter changes what the model says"
    assert mean_kl(together, apart) <= MERGED_KL
