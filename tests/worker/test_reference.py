"""The float reference and an independent engine on the demo model: same graph, little loss by an int8 cache.

The exact reference, which takes 0.6 s of a core for a position, is compared in test_kernels_exact.py alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.worker import reference
from tools.reference.float_forward import FloatModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts() -> reference.Reference:
    return reference.load()


def test_float_reference_agrees_in_every_listed_logit(demo_gguf: Path, facts: reference.Reference) -> None:
    logits = FloatModel(demo_gguf).logits(facts.tokens)
    assert np.abs(np.take_along_axis(logits, facts.top_ids, axis=1) - facts.top_logits).max() < 2e-2
    found = reference.distance(logits, facts)
    assert found.mean_kl < 1e-6
    assert abs(found.mean_nll - found.reference_nll) < 1e-4


def test_float_reference_continues_greedily_as_the_engine(demo_gguf: Path) -> None:
    """One pass over prompt and continuation: each token is the argmax after those before it."""
    greedy = reference.facts()["greedy"]["F32"]
    prompt, continuation = greedy["prompt_ids"], greedy["greedy_ids"]
    logits = FloatModel(demo_gguf).logits([*prompt, *continuation[:-1]])
    assert logits[len(prompt) - 1 :].argmax(axis=1).tolist() == continuation


def test_int8_cache_costs_little(demo_gguf: Path, facts: reference.Reference) -> None:
    """With f32 activations: any change of the input, however small, gives int8 activations new rounding noise, and
    the divergence of two such noises (0.004 here) does not measure the cache."""
    p_log, q_log = (
        reference.log_softmax(FloatModel(demo_gguf, kv_type).logits(facts.tokens)) for kv_type in ("f16", "int8")
    )
    kl = (np.exp(p_log) * (p_log - q_log)).sum(axis=-1)
    assert kl.mean() <= 0.001
