"""The reference implementation's pooled hidden states agree with llama.cpp's embeddings of the same file.

The kernels' sums equal the reference's (test_pooling.py).  Weights and KV cache are f16 in both.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.conftest import TinyGguf
from tests.worker.peer_embeddings import peer_embeddings
from tests.worker.peer_logits import is_installed
from tools.reference.exact_forward import ExactModel, ExactSequence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="llama.cpp is not installed; `make peers` does that"),
]


@pytest.mark.parametrize(("shape", "pooling"), [("grouped", "mean"), ("qwen3", "last"), ("gemma2", "cls")])
def test_embeddings_agree_with_llama_cpp(tiny_gguf: TinyGguf, shape: str, pooling: str) -> None:
    path = tiny_gguf(shape, "F16")
    inputs = [np.random.default_rng(n).integers(3, 260, n) for n in (1, 9, 50)]
    expected = peer_embeddings(path, inputs, pooling)
    for tokens, vector in zip(inputs, expected, strict=True):
        hidden = ExactSequence(ExactModel(path)).hidden(tokens).astype(np.float64)
        pooled = {"mean": hidden.mean(axis=0), "last": hidden[-1], "cls": hidden[0]}[pooling]
        assert pooled @ vector / np.linalg.norm(pooled) > 0.9999
