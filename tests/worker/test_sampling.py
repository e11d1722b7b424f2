"""The sampler kernel draws the token that the reference draws, for any order of steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shm.sampler_steps import DEFAULT_ORDER
from stages.worker.kernels import sampler
from stages.worker.kernels.buffer_sizes import sampler_bytes
from tests.worker.sampler_row import MAX_TOKENS, Sampler, logits_of
from tools.reference import sampling as reference

pytestmark = pytest.mark.slow

PARAMETERS = st.builds(
    reference.Parameters,
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 7),
    temperature=st.sampled_from([0.0, 0.2, 1.0, 1.7, 1e-30, 1.2e-38, 1e-45]).map(lambda t: float(np.float32(t))),
    top_k=st.sampled_from([0, 1, 2, 40, 49, 300, 100000]),
    top_p=st.sampled_from([0.0, 0.1, 0.9, 0.99, 1.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    frequency=st.sampled_from([0.0, 0.4, -1.0]),
    presence=st.sampled_from([0.0, 0.6]),
    min_tokens=st.sampled_from([0, 9]),
    ignore_eos=st.booleans(),
    mask_ids=st.sampled_from([(), (2, 5), (0, 1, 2, 3)]),
    bias=st.sampled_from([(), ((3, 2.5), (3, -1.0), (1, 100.0)), ((0, -100.0),)]),
    order=st.permutations(DEFAULT_ORDER).map(tuple) | st.just(DEFAULT_ORDER),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    PARAMETERS,
    st.sampled_from([4, 5, 17, 63, 64, 1025, 5000]),
    st.sampled_from(["normal", "ties", "flat", "close", "equal", "outlier"]),
    st.integers(0, 1000),
)
def test_kernel_equals_reference(p: reference.Parameters, vocab: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = logits_of(rng, vocab, kind)
    tokens = rng.integers(0, vocab, int(rng.integers(1, 30))).astype(np.int32)
    start = int(rng.integers(0, len(tokens) + 1))
    kernel = Sampler(vocab)
    for _ in range(2):  # the scratch is as it was
        assert kernel(logits, tokens, start, p) == reference.sample(logits, tokens, start, p)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    PARAMETERS,
    st.sampled_from([4, 17, 63, 64, 1025, 5000]),
    st.sampled_from([0.0, 0.02, 0.5, 0.999]),
    st.integers(0, 1000),
)
def test_a_masked_draw_equals_the_reference_and_is_allowed(
    p: reference.Parameters, vocab: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = logits_of(rng, vocab, "normal")
    tokens = rng.integers(0, vocab, int(rng.integers(1, 30))).astype(np.int32)
    start = int(rng.integers(0, len(tokens) + 1))
    allowed = rng.random(vocab) < share
    allowed[rng.integers(0, vocab)] = True  # perhaps a stop id alone: it may be sampled before min_tokens
    token = Sampler(vocab)(logits, tokens, start, p, allowed)
    assert token == reference.sample(logits, tokens, start, p, allowed)
    assert allowed[token]


@pytest.mark.parametrize("temperature", [1e-36, 1.1754944e-38, 1e-38, 1e-45])
@pytest.mark.parametrize("logits", [[10.0, 20.0, 19.5, 20.0], [-5.0, -4.0, -6.0, -4.0]])
@pytest.mark.parametrize("vocab", [4, 5000])
def test_the_smallest_temperature_leaves_the_likeliest_tokens(
    temperature: float, logits: list[float], vocab: int
) -> None:
    """Quotients that leave the range of f32 are not equal, and not all of them are lost."""
    values = np.full(vocab, -9, np.float32)
    values[-4:] = logits
    kernel, token = Sampler(vocab), np.zeros(1, np.int32)
    drawn = set()
    for seed in range(50):
        p = reference.Parameters(seed=seed, temperature=temperature)
        drawn.add(kernel(values, token, 1, p))
        assert kernel(values, token, 1, p) == reference.sample(values, token, 1, p)
    assert drawn == {vocab - 3, vocab - 1}
    p = reference.Parameters(temperature=temperature, top_k=1)
    assert kernel(values, token, 1, p) == reference.sample(values, token, 1, p) == vocab - 3


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.9])
def test_the_values_of_other_temperatures_are_the_quotients(temperature: float) -> None:
    """Also of the largest logits that a quotient in range allows."""
    t = np.float32(temperature)
    for scale in (1.0, 2.9e38 * min(temperature, 1.0)):
        values = (np.linspace(-1, 1, 64) * scale).astype(np.float32)
        quotients = values / t
        for seed in range(10):
            p = reference.Parameters(seed=seed, temperature=temperature)
            token = Sampler(64)(values, np.zeros(1, np.int32), 1, p)
            plain = reference.Parameters(seed=seed)
            assert token == reference.sample(quotients, np.zeros(1, np.int32), 1, plain)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_draw_nothing(bad: float) -> None:
    logits = np.zeros(99, np.float32)
    logits[98] = bad
    assert Sampler(99)(logits, np.zeros(1, np.int32), 1, reference.Parameters()) == -1


def test_everything_masked_draws_the_first() -> None:
    p = reference.Parameters(ignore_eos=True, mask_ids=(0, 1, 2), top_p=0.5)
    logits = np.array([1, 2, 3], np.float32)
    tokens = np.zeros(1, np.int32)
    assert Sampler(3)(logits, tokens, 1, p) == reference.sample(logits, tokens, 1, p) == 0


def test_draws_follow_the_distribution() -> None:
    """20,000 draws from 4 probabilities: each frequency within 5 standard deviations."""
    probabilities = np.array([0.5, 0.25, 0.2, 0.05])
    logits = np.log(probabilities).astype(np.float32)
    kernel, n = Sampler(4), 20_000
    tokens = np.zeros(1, np.int32)
    counts = np.zeros(4)
    for seed in range(n):
        counts[kernel(logits, tokens, 1, reference.Parameters(seed=seed))] += 1
    sigma = np.sqrt(probabilities * (1 - probabilities) / n)
    assert (np.abs(counts / n - probabilities) < 5 * sigma).all()


def test_philox_known_answers() -> None:
    """Random123's kat_vectors: philox4x32 10, counter and key of zeros."""
    assert reference.philox(0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    for seed, position, choice in ((0, 0, 0), (2**64 - 1, 7, 3), (1 << 63, 2**31, 0)):
        signed = int(np.array(seed, np.uint64).astype(np.int64))
        for stream in (0, 1):
            assert sampler.uniform(signed, position, choice, stream) == reference.uniform(
                seed, position, choice, stream
            )


@pytest.mark.parametrize("vocab", [1, 16, 33, 2000])
def test_logprobs_equal_the_twin(vocab: int) -> None:
    logits = logits_of(np.random.default_rng(vocab), vocab, "normal")
    n = min(20, vocab)
    scratch = np.zeros(sampler_bytes(vocab, MAX_TOKENS), np.uint8)
    out, ids, best = np.zeros(1, np.float32), np.zeros(20, np.int32), np.zeros(20, np.float32)
    addresses = [a.ctypes.data for a in (out, ids, best, scratch)]
    sampler.logprobs(logits.ctypes.data, vocab, vocab // 2, n, *addresses)
    values, top, top_values = reference.logprobs(logits, n)
    assert out[0] == values[vocab // 2]
    np.testing.assert_array_equal(ids[:n], top)
    np.testing.assert_array_equal(best[:n], top_values)
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    np.testing.assert_allclose(values, exact, rtol=1e-5, atol=1e-5)
