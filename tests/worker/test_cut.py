"""Lists of thousands of candidates, which are not made: steps keep and draw what the definition keeps and draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shm.sampler_steps import DEFAULT_ORDER
from stages.worker.kernels import sampler_cut as cut
from stages.worker.kernels.buffer_sizes import SUM_BLOCK, sampler_bytes
from stages.worker.kernels.sampler_typical import typical_p
from stages.worker.kernels.sampler_vocabulary import parts_at
from tests.properties import examples
from tests.worker.sampler_row import Sampler
from tests.worker.test_nucleus import ALMOST_ONE, KINDS, values_of
from tools.reference import sampling as reference
from tools.reference import sampling_filters
from tools.reference.candidates import Candidates

pytestmark = pytest.mark.slow

VOCABULARIES = (cut.SORTED + 1, 5000, 9001, 20_000)
SHARES = st.sampled_from([1.0, 0.2, 0.9, 0.9999, ALMOST_ONE])
LATE_TEMPERATURE = ("mask", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
PARAMETERS = st.builds(
    reference.Parameters,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    typical_p=SHARES,
    top_p=SHARES,
    top_k=st.sampled_from([0, 0, 1000, cut.SORTED, cut.SORTED + 1, 4998]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5]),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 1e-6, 1e-4, 0.1]),
    frequency=st.sampled_from([0.0, 0.3, -0.3]),
    presence=st.sampled_from([0.0, 0.3]),
    repetition=st.sampled_from([1.0, 1.1]),
    order=st.permutations(DEFAULT_ORDER).map(tuple) | st.just(DEFAULT_ORDER) | st.just(LATE_TEMPERATURE),
)


def _tokens_equal(values: np.ndarray, p: reference.Parameters, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, len(values), 50).astype(np.int32)
    allowed = None
    if share:
        allowed = rng.random(len(values)) < share
        allowed[0] = True
    kernel = Sampler(len(values))
    for _ in range(2):  # the scratch is as it was
        assert kernel(values, tokens, 25, p, allowed) == reference.sample(values, tokens, 25, p, allowed)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    PARAMETERS,
    st.sampled_from(KINDS),
    st.sampled_from(VOCABULARIES[:3]),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 1000),
)
@example(  # rounded weights of 0, which XTC with a threshold of 0 must not take for candidates that it leaves
    reference.Parameters(
        seed=4560110602913686772,
        typical_p=0.2,
        top_k=19_997,
        xtc_probability=1.0,
        xtc_threshold=0.0,
        presence=0.3,
        order=("top_k", "temperature", "penalties", "mask", "xtc", "typical_p"),
    ),
    "normal",
    20_000,
    0.0,
    167,
)
def test_steps_of_a_list_that_is_not_made_equal_the_reference(
    p: reference.Parameters, kind: str, vocab: int, share: float, seed: int
) -> None:
    _tokens_equal(values_of(kind, vocab, seed), p, seed, share)


@pytest.mark.parametrize(
    ("fields", "largest"),
    [
        ({"temperature": 1e-6, "order": LATE_TEMPERATURE}, 3e33),
        ({"frequency": 3e38}, 1.0),
        ({"presence": 2e38, "frequency": 1e38}, 1.0),
    ],
)
def test_values_that_would_become_infinite_do_not_leave_the_list(fields: dict[str, Any], largest: float) -> None:
    """They would not be told from those that are no candidates."""
    values = np.linspace(0, largest, 6000).astype(np.float32)
    for seed in range(3):
        _tokens_equal(values, reference.Parameters(seed=seed, top_k=5000, **fields), seed, 0.0)


def _scratch_of(values: np.ndarray) -> np.ndarray:
    size = -(-len(values) // SUM_BLOCK) * SUM_BLOCK
    scratch = np.zeros(sampler_bytes(len(values), 1), np.uint8)
    scratch[: 4 * size].view(np.float32)[:] = -np.inf
    scratch[: 4 * len(values)].view(np.float32)[:] = values
    return scratch


def _ids(scratch: np.ndarray, vocab: int, n: int) -> list[int]:
    return scratch[16 * -(-vocab // SUM_BLOCK) * SUM_BLOCK :][: 4 * n].view(np.int32).tolist()


def test_weights_that_are_rounded_have_a_slack() -> None:
    """Beside 3 candidates of weight 1, thousands are lost, in no sum of the definition halfway between two places."""
    values = np.full(6000, -38, np.float32)
    values[[10, 20, 30]] = 0
    scratch = _scratch_of(values)
    address = scratch.ctypes.data
    assert cut.top_k_of_many(address, 6000, 5000) == cut.weigh_cut(address, 6000) == cut.CUT
    results = parts_at(0, 6000)
    total, slack = (float(scratch[results + at :][:8].view(np.float64)[0]) for at in (cut.SUM, cut.SLACK))
    assert abs(total - 3) <= slack


@pytest.mark.parametrize("threshold", [0.0, 4e-17])
def test_xtc_compares_weights_that_are_not_rounded(threshold: float) -> None:
    """They are below half a place of the sum, and none in the middle between two."""
    values = np.linspace(-36.7, -36.6, 6000).astype(np.float32)
    values[[10, 20, 30]] = 0
    for seed in range(3):
        p = reference.Parameters(seed=seed, top_k=5000, xtc_probability=1.0, xtc_threshold=threshold)
        _tokens_equal(values, p, seed, 0.0)


@pytest.mark.parametrize("n_infinite", [10, 5990, 6000])
def test_top_k_of_infinite_values(n_infinite: int) -> None:
    """A repetition penalty below 1 makes them, and a temperature behind top_k makes them finite."""
    values = np.random.default_rng(1).standard_normal(6000).astype(np.float32)
    values[np.random.default_rng(2).permutation(6000)[:n_infinite]] = np.inf
    scratch, best = _scratch_of(values), Candidates(np.arange(6000, dtype=np.int32), values.copy())
    best.sort()
    best.keep(5000)
    assert cut.top_k_of_many(scratch.ctypes.data, 6000, 5000) == 5000
    assert _ids(scratch, 6000, 5000) == best.ids.tolist()


@pytest.mark.parametrize("top_k", [5000, cut.SORTED + 1])
def test_top_k_keeps_infinitely_low_values_where_there_are_no_others(top_k: int) -> None:
    """If penalties make all values -inf, the lowest id of the list is drawn."""
    values = np.full(6000, -9, np.float32)
    likely = np.array([30, 20, 10], np.int32)
    values[likely] = 0
    p = reference.Parameters(min_p=0.5, top_k=top_k, frequency=3e38, order=("mask", "min_p", "top_k", "penalties"))
    tokens = np.tile(likely, 2)
    assert Sampler(len(values))(values, tokens, 0, p) == reference.sample(values, tokens, 0, p) == 0


@pytest.mark.parametrize("temperature", [1e-38, 1e-45])
def test_a_tiny_temperature_behind_a_list_leaves_the_likeliest(temperature: float) -> None:
    values = np.linspace(-9, -5, 6000).astype(np.float32)
    order = ("mask", "min_p", "top_k", "temperature")
    for seed in range(3):
        p = reference.Parameters(seed=seed, min_p=0.5, top_k=5000, temperature=temperature, order=order)
        assert Sampler(6000)(values, np.zeros(1, np.int32), 1, p) == 5999
        _tokens_equal(values, p, seed, 0.5)


class Kernel:
    """`typical_p` of some values: `n` and the list, which is made if it is not."""

    def __init__(self, values: np.ndarray, p: float) -> None:
        vocab = len(values)
        scratch = _scratch_of(values)
        self.n = typical_p(scratch.ctypes.data, vocab, vocab, True, np.float32(p))
        kept = cut.list_of_cut(scratch.ctypes.data, vocab) if self.n == cut.CUT else self.n
        self.ids = _ids(scratch, vocab, kept)


def _typical(values: np.ndarray, p: float) -> list[int]:
    c = Candidates(np.arange(len(values), dtype=np.int32), values.copy())
    sampling_filters.typical_p(c, p)
    return c.ids.tolist()


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(KINDS), st.sampled_from((1, 15, 1025, *VOCABULARIES)), SHARES, st.integers(0, 1000))
@example("normal", 151_936, 0.9, 1)
@example("wide", 151_936, ALMOST_ONE, 1)
def test_typical_candidates_are_those_of_the_definition(kind: str, vocab: int, p: float, seed: int) -> None:
    values = values_of(kind, vocab, seed)
    assert p == 1 or Kernel(values, p).ids == _typical(values, p)


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_two_values_may_be_equally_typical(p: float, noise: float) -> None:
    """8,544 candidates weigh as much as 23,225 of 1 / e: the mean is in the middle, and all distances are 1 / 2."""
    rng = np.random.default_rng(1)
    values = np.full(31_769, -1, np.float32)
    values[rng.permutation(31_769)[:8544]] = 0
    if noise:  # and others, as many on either side of the mean
        shifts = (rng.standard_normal(200) * noise).astype(np.float32)
        values = np.concatenate([values, np.float32(-0.5) + shifts, np.float32(-0.5) - shifts])
    assert Kernel(values, p).ids == _typical(values, p)


@pytest.mark.parametrize("p", [0.9, 0.9999])
@pytest.mark.parametrize("kind", KINDS)
def test_only_few_typical_candidates_are_sorted(kind: str, p: float) -> None:
    values = values_of(kind, 40_000, 3)
    assert len(_typical(values, p)) <= cut.SORTED or Kernel(values, p).n == cut.CUT


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.9, "frequency": 0.3, "presence": 0.2},
        {"top_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 1e-6},
        {"typical_p": 0.9, "top_p": 0.9, "min_p": 1e-6},
        {"typical_p": 0.9, "presence": 0.3},
        {"top_k": 20_000, "top_p": 0.99},
        {"top_p": 0.9, "top_k": 10_000, "order": ("mask", "top_p", "top_k")},
        {"top_p": 0.9, "temperature": 0.7, "order": LATE_TEMPERATURE},
    ],
)
def test_usual_steps_sort_hardly_anything(fields: dict[str, Any]) -> None:
    """The scratch of a sort stays as it was, but for the few candidates that are left at the end of a search."""
    vocab = 40_000
    kernel = Sampler(vocab)
    size = 4 * (-(-vocab // SUM_BLOCK) * SUM_BLOCK)
    sorted_keys = kernel.scratch[6 * size : 7 * size].view(np.int32)  # K2
    sorted_keys[:] = 0x5A5A5A5A
    tokens = np.arange(50, dtype=np.int32)
    values = values_of("flat", vocab, 1)
    p = reference.Parameters(seed=1, **fields)
    assert kernel(values, tokens, 0, p) == reference.sample(values, tokens, 0, p)
    assert (sorted_keys != 0x5A5A5A5A).sum() < cut.SORTED
