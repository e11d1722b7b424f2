"""The kernels agree with llama.cpp about every architecture: the same file, the same tokens, nearly the same logits.

Weights and KV cache are f16 in both, so what is left are other roundings: a switch that is missing, or is applied at
another place, moves these logits by whole units.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shm.checkpoint import load_index
from stages.worker.adapters.prepared import prepare_adapter
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.kernel_logits import kernel_logits
from tests.worker.peer_logits import is_installed, peer_logprobs
from tests.worker.reference import log_softmax
from tools.tiny_adapter import write_adapter
from tools.tiny_gguf import SHAPES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="llama.cpp is not installed; `make peers` does that"),
]

# Without `windowed` and `partial`: llama.cpp ignores the window of a llama and rotates whole heads of it.
PROMPTS = {
    "grouped": 40,
    "super": 40,
    "biased": 40,
    "linear": 40,
    "yarn": 300,
    "qwen3": 40,
    "gemma": 40,
    "gemma2": 60,
    "gemma3": 330,
    "phi3": 40,
    "phi3-long": 40,
    "granite": 40,
    "olmo2": 40,
    "stablelm": 40,
    "starcoder2": 40,
    "gpt2": 40,
    "mixtral": 40,
    "qwen2moe": 40,
    "qwen3moe": 40,
    "granitemoe": 40,
    "olmoe": 40,
}


@pytest.mark.parametrize("shape", PROMPTS)
def test_logits_agree_with_llama_cpp(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str) -> None:
    path, n = tiny_gguf(shape, "F16"), PROMPTS[shape]
    tokens = np.random.default_rng(11).integers(3, 260, n)
    ends = [1, 2, 7, n // 2, n - 1, n]
    expected = peer_logprobs(path, [tokens[:end] for end in ends], SHAPES[shape].context_length)
    logits = kernel_logits(ingested(path), tmp_path, tokens, chunk=64)
    found = log_softmax(logits[[end - 1 for end in ends]])
    divergence = (np.exp(expected) * (expected - found)).sum(axis=1)
    assert divergence.mean() <= 0.0005
    assert np.abs(expected - found).max() <= 0.1


@pytest.mark.parametrize("shape", ["grouped", "biased", "gemma2", "phi3", "gpt2"])
def test_adapters_agree_with_llama_cpp(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, shape: str) -> None:
    path = tiny_gguf(shape, "F16")
    adapter = write_adapter(tmp_path / "adapter.gguf", path, rank=8, seed=4)
    prepared = prepare_adapter(adapter, load_index(ingested(path)), tmp_path / "adapters", 64, 1 << 30)
    tokens = np.random.default_rng(12).integers(3, 260, 40)
    ends = [1, 2, 7, 20, 39, 40]
    expected = peer_logprobs(path, [tokens[:end] for end in ends], SHAPES[shape].context_length, adapter)
    found = log_softmax(kernel_logits(ingested(path), tmp_path, tokens, chunk=64, adapters=[prepared]))
    found = found[[end - 1 for end in ends]]
    assert (np.exp(expected) * (expected - found)).sum(axis=1).mean() <= 0.0005
    assert np.abs(expected - found).max() <= 0.1
    plain = log_softmax(kernel_logits(ingested(path), tmp_path, tokens, chunk=64))[[end - 1 for end in ends]]
    assert np.abs(expected - plain).max() > 1.0, "the adapter changes what the model says"
