"""top_p of many candidates, which are not sorted, keeps and draws what the definition keeps and draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stages.worker.kernels import sampler_cut as cut
from stages.worker.kernels.buffer_sizes import SUM_BLOCK, sampler_bytes
from stages.worker.kernels.sampler_nucleus import top_p
from stages.worker.kernels.sampler_sums import round_weights
from stages.worker.kernels.sampler_vocabulary import parts_at
from tests.properties import examples
from tests.worker.sampler_row import logits_of
from tools.reference.candidates import Candidates, block_sums, running

pytestmark = pytest.mark.slow

ALMOST_ONE = float(np.float32(1) - np.float32(2**-24))
KINDS = (
    *("normal", "ties", "flat", "close", "equal", "outlier", "zeros", "coarse", "tail"),
    *("wide", "levels", "halves", "binade", "ladder", "denormal"),
)


class Plain:
    """The definition: the sorted vocabulary, its weights and their sums one after the other, up to the share p."""

    def __init__(self, values: np.ndarray, p: float) -> None:
        c = Candidates(np.arange(len(values), dtype=np.int32), values.copy())
        enough = float(np.float32(p)) * running(block_sums(c.weights()))
        c.sort()
        sums = np.cumsum(c.weights())  # in order, f64
        n = min(int(np.argmax(sums >= enough)) + 1 if (sums >= enough).any() else len(sums), len(sums))
        self.ids, self.sums, self.total = c.ids[:n].tolist(), sums[:n], float(sums[n - 1])

    def draw(self, u: float) -> int:
        above = self.sums > u * self.total
        return self.ids[int(np.argmax(above)) if above.any() else len(self.ids) - 1]


class Kernel:
    """`top_p` of some values: `n` and what it has left in the scratch."""

    def __init__(self, values: np.ndarray, p: float) -> None:
        self.vocab = len(values)
        self.size = -(-self.vocab // SUM_BLOCK) * SUM_BLOCK
        self.scratch = np.zeros(sampler_bytes(self.vocab, 1), np.uint8)
        self.scratch[: 4 * self.size].view(np.float32)[:] = -np.inf
        self.scratch[: 4 * self.vocab].view(np.float32)[:] = values
        self.address = self.scratch.ctypes.data
        self.n = top_p(self.address, self.vocab, np.float32(p))

    @property
    def total(self) -> float:
        return self._result(cut.SUM)

    @property
    def slack(self) -> float:
        return self._result(cut.SLACK)

    def _result(self, offset: int) -> float:
        at = parts_at(0, self.vocab) + offset
        return float(self.scratch[at : at + 8].view(np.float64)[0])

    def ids(self, n: int) -> list[int]:
        return self.scratch[16 * self.size :][: 4 * n].view(np.int32).tolist()


def values_of(kind: str, vocab: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "zeros":
        return rng.choice(np.array([0.0, -0.0, -1e-3], np.float32), vocab)
    if kind == "coarse":  # neighbours differ by 8: top - 4 is rounded to top - 8
        return (2.0**26 + 8 * rng.integers(0, 2, vocab)).astype(np.float32)
    if kind == "tail":  # weights so small beside the sum that f64 rounds
        values = rng.uniform(-16, -9, vocab).astype(np.float32)
        values[rng.permutation(vocab)[:200]] = -0.01
        return values
    if kind == "wide":
        return (rng.standard_normal(vocab) * 3).astype(np.float32)
    if kind == "levels":  # two, and hardly anything between their values
        return (rng.integers(0, 2, vocab) * 9 + rng.standard_normal(vocab) * 1e-4).astype(np.float32)
    if kind == "halves":  # many weights lie in the middle between two places of the sum
        values = np.full(vocab, -15.0, np.float32)
        values += (rng.standard_normal(vocab) * 0.3).astype(np.float32)
        values[rng.permutation(vocab)[:300]] = -0.02
        return values
    if kind == "binade":  # light weights are added below and above 256, where sums have another last place
        values = (-15 + rng.standard_normal(vocab) * 0.3).astype(np.float32)
        values[: min(256, vocab)] = -1e-6
        values[0] = 0
        return rng.permutation(values)
    if kind == "ladder":  # an outlier at each scale
        values = (rng.standard_normal(vocab) * 1e-7).astype(np.float32)
        values[:20] = 4.0 ** -np.arange(min(20, vocab), dtype=np.float32)
        return rng.permutation(values)
    if kind == "denormal":
        return (rng.integers(-3, 4, vocab) * np.float32(1e-45)).astype(np.float32)
    return logits_of(rng, vocab, kind)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(KINDS),
    st.sampled_from([1, 15, 1025, 4096, 4097, 5000, 9001, 20_000]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, ALMOST_ONE]),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 1000),
    st.lists(st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53), min_size=1, max_size=5),
)
@example("outlier", 9001, 0.9, 0.0, 1, [0.0, 0.3, 1 - 2**-53])
@example("tail", 9001, ALMOST_ONE, 0.0, 1, [0.5])
@example("binade", 20_000, ALMOST_ONE, 0.0, 1, [0.5])
@example("halves", 20_000, ALMOST_ONE, 0.0, 1, [0.5, 0.999999])
@example("outlier", 151_936, 0.9, 0.0, 1, [0.5])
@example("normal", 151_936, ALMOST_ONE, 0.0, 1, [0.5, 1 - 2**-53])
def test_what_is_kept_and_drawn_is_that_of_the_definition(
    kind: str, vocab: int, p: float, forbidden: float, seed: int, draws: list[float]
) -> None:
    values = values_of(kind, vocab, seed)
    values[np.random.default_rng(seed).random(vocab) < forbidden] = -np.inf
    if not np.isfinite(values).any():
        values[0] = 1.0
    plain, kernel = Plain(values, p), Kernel(values, p)
    if kernel.n != cut.CUT:
        assert kernel.ids(kernel.n) == plain.ids
        return
    assert abs(kernel.total - plain.total) <= kernel.slack
    at_sums = [float(plain.sums[int(u * len(plain.sums))] / plain.total) for u in draws]  # a rounding decides
    for u in [*draws, *(u for u in at_sums if u < 1)]:
        token = cut.draw_of_cut(kernel.address, vocab, u)
        assert token == plain.draw(u) or (token == -1 and kernel.slack > 0)
    assert kernel.ids(cut.list_of_cut(kernel.address, vocab)) == plain.ids


@pytest.mark.parametrize(
    ("kind", "p"),
    [(kind, 0.9) for kind in KINDS if kind != "normal"] + [("tail", ALMOST_ONE), ("wide", ALMOST_ONE)],
)
def test_only_few_candidates_are_sorted(kind: str, p: float) -> None:
    values = values_of(kind, 40_000, 3)
    assert (Kernel(values, p).n == cut.CUT) == (len(Plain(values, p).ids) > cut.SORTED)


def test_where_a_rounding_decides_the_candidates_are_sorted() -> None:
    """Of some shares close to 1, one needs a sum that no other order gives; what is kept is still right."""
    is_sorted = 0
    for seed in range(2):
        values = values_of("halves", 60_000, seed)
        for step in range(1, 900, 3):
            p = 1 - step * 2**-24
            kernel = Kernel(values, p)
            if kernel.n != cut.CUT:
                is_sorted += 1
                assert kernel.ids(kernel.n) == Plain(values, p).ids
    assert 0 < is_sorted < 60  # of 600


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 100, 3000]), st.sampled_from([0, 100, 20_000]), st.floats(-40, -8))
def test_rounded_weights_add_up_to_the_sums_of_the_definition(
    seed: int, n_heavy: int, n_light: int, middle: float
) -> None:
    """In any order, but for the slack."""
    rng = np.random.default_rng(seed)
    weights = np.exp(np.concatenate([[0.0], rng.uniform(-3, 0, n_heavy), middle + 3 * rng.standard_normal(n_light)]))
    weights = np.minimum(weights, 1).astype(np.float32)
    rounded = np.zeros(-(-len(weights) // 16) * 16, np.float32)
    rounded[: len(weights)] = weights
    slack = round_weights(rounded.ctypes.data, len(weights), float(weights.astype(np.float64).sum()))
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order].astype(np.float64))
    exact = [math.fsum(rounded[order[: i + 1]].tolist()) for i in range(0, len(order), 997)]
    assert slack == -1 or (np.abs(np.array(exact) - sums[::997]) <= slack).all()
