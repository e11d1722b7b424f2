"""min_p, top_n_sigma, typical_p, XTC and DRY: the kernel equals the reference, and both do what they are named for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shm.sampler_steps import DEFAULT_ORDER
from tests.worker.sampler_row import MAX_TOKENS, Sampler, logits_of
from tools.reference import sampling as reference

pytestmark = pytest.mark.slow

NEW_STEPS = ("dry", "top_n_sigma", "typical_p", "min_p", "xtc")
PARAMETERS = st.builds(
    reference.Parameters,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 3, 60]),
    top_p=st.sampled_from([0.9, 1.0, 1.0]),
    frequency=st.sampled_from([0.0, 0.4]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0, 1e-40]),
    typical_p=st.sampled_from([1.0, 0.2, 0.9, 0.9999999]),
    top_n_sigma=st.sampled_from([0.0, 1.0, 2.5, 100.0]),
    dry_multiplier=st.sampled_from([0.0, 0.8, 1e30]),
    dry_base=st.sampled_from([1.0, 1.75, 90.0]),
    dry_allowed_length=st.sampled_from([0, 1, 2, 5]),
    dry_penalty_last_n=st.sampled_from([-1, 0, 4, 20, 1000]),
    breakers=st.sampled_from([(), (0,), (1, 3)]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.02, 0.1, 0.5, 0.6]),
    mask_ids=st.sampled_from([(), (2,)]),
    ignore_eos=st.booleans(),
    order=st.permutations(DEFAULT_ORDER).map(tuple) | st.just(DEFAULT_ORDER),
)


# A filter that leaves a stop id alone, before the step that once forbade it.
ONLY_STOP = ("min_p", "mask")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    PARAMETERS,
    st.sampled_from([4, 17, 64, 1025, 5000]),
    st.sampled_from(["normal", "ties", "flat", "close", "equal", "outlier"]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 1000),
)
@example(
    reference.Parameters(temperature=0.0, min_p=0.5, mask_ids=(2,), ignore_eos=True, order=ONLY_STOP),
    17,
    "normal",
    0.3,
    0,
)
def test_kernel_equals_reference(p: reference.Parameters, vocab: int, kind: str, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = logits_of(rng, vocab, kind)
    # Few different tokens: their repetitions are long and overlap.
    tokens = rng.integers(0, min(vocab, int(rng.integers(1, 5))), int(rng.integers(1, MAX_TOKENS))).astype(np.int32)
    start = int(rng.integers(0, len(tokens) + 1))
    allowed = None
    if share:
        allowed = rng.random(vocab) < share
        allowed[rng.integers(0, vocab)] = True
    kernel = Sampler(vocab)
    for _ in range(2):  # the scratch is as it was
        token = kernel(logits, tokens, start, p, allowed)
        assert token == reference.sample(logits, tokens, start, p, allowed)
    assert allowed is None or allowed[token]


def _drawn(logits: np.ndarray, p: dict[str, object], tokens: tuple[int, ...] = (0,), n: int = 300) -> set[int]:
    """The tokens that `n` seeds draw."""
    kernel, text = Sampler(len(logits)), np.array(tokens, np.int32)
    return {kernel(logits, text, len(text), reference.Parameters(seed=seed, **p)) for seed in range(n)}  # type: ignore[arg-type]


LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05])).astype(np.float32)


def test_min_p_keeps_a_share_of_the_highest_probability() -> None:
    assert _drawn(LOGITS, {"min_p": 0.3}) == {0, 1, 2}
    assert _drawn(LOGITS, {"min_p": 0.3, "top_k": 2}) == {0, 1}
    assert _drawn(LOGITS, {"min_p": 1.0}) == {0}


def test_top_n_sigma_keeps_what_is_near_the_highest_logit() -> None:
    logits = np.array([10, 9, 0, 0, 0, 0, 0, 0], np.float32)  # deviation 4.1
    assert _drawn(logits, {"top_n_sigma": 0.2}) == {0}
    assert _drawn(logits, {"top_n_sigma": 0.3}) == {0, 1}
    assert _drawn(logits, {"top_n_sigma": 0.3, "temperature": 0.5}, n=500) == {0, 1}  # it scales with temperature


def test_typical_p_keeps_what_is_as_surprising_as_the_average() -> None:
    # Entropy 1.39 nats: 0.3 (1.20), 0.4 (0.92) and 0.15 (1.90) are the closest, in this order.
    assert _drawn(LOGITS, {"typical_p": 0.2}) == {1}
    assert _drawn(LOGITS, {"typical_p": 0.6}) == {0, 1}
    assert _drawn(LOGITS, {"typical_p": 0.2, "temperature": 0.0}) == {1}  # even of a greedy request


def test_xtc_drops_all_but_the_last_likely_token() -> None:
    assert _drawn(LOGITS, {"xtc_probability": 1.0, "xtc_threshold": 0.08}) == {3, 4}
    assert _drawn(LOGITS, {"xtc_probability": 1.0, "xtc_threshold": 0.45}) == {0, 1, 2, 3, 4}  # fewer than two of them
    assert _drawn(LOGITS, {"xtc_probability": 0.5, "xtc_threshold": 0.2, "top_k": 2}) == {0, 1}
    assert _drawn(LOGITS, {"xtc_probability": 1.0, "temperature": 0.0}) == {0}


@pytest.mark.parametrize(
    ("tokens", "fields", "token"),
    [
        ((1, 2, 3, 4, 1, 2, 3), {}, 0),  # 4 would continue "1 2 3"
        ((1, 2, 3, 4, 1, 2, 3), {"dry_allowed_length": 4}, 4),
        ((1, 2, 3, 4, 1, 2, 3), {"dry_penalty_last_n": 5}, 4),  # only "3" is repeated in the last five
        ((1, 2, 3, 4, 1, 2, 3), {"breakers": (2,)}, 4),  # only "3" counts after the breaker
        ((1, 2, 3, 4, 1, 2, 3), {"breakers": (4,)}, 4),  # a breaker is never lowered
        ((9, 2, 3, 4, 1, 2, 3), {"dry_multiplier": 0.5}, 4),  # 0.5 is too little for "2 3"
        ((1, 2, 3, 4, 1, 2, 3), {"dry_multiplier": 0.5, "dry_base": 3.0}, 0),  # 0.5 * 3 ** (3 - 2) is enough
    ],
)
def test_dry_lowers_what_would_continue_a_repetition(
    tokens: tuple[int, ...], fields: dict[str, object], token: int
) -> None:
    logits = np.zeros(10, np.float32)
    logits[4], logits[0] = 2.0, 1.0
    assert _drawn(logits, {"temperature": 0.0, "dry_multiplier": 2.0, **fields}, tokens, n=1) == {token}


def test_dry_takes_linear_time() -> None:
    """A long text of one token, whose repetitions overlap everywhere, compares each token a bounded number of times."""
    from stages.worker.kernels.sampler_dry import _write_repeats

    n = 100_000
    tokens, repeats = np.zeros(n, np.int32), np.zeros(n, np.int32)
    _write_repeats(tokens.ctypes.data + 4 * (n - 1), n, repeats.ctypes.data)  # quadratic: 5e9 comparisons
    assert repeats[1:].tolist() == list(range(n - 1, 0, -1))
