"""top_p of many candidates, which are not sorted, keeps and draws what the definition keeps and draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stages.worker.kernels import sampler_nucleus as nucleus
from stages.worker.kernels.buffer_sizes import SUM_BLOCK, sampler_bytes
from stages.worker.kernels.sampler_vocabulary import shares_at
from tests.worker.sampler_row import logits_of
from tools.reference.candidates import Candidates, block_sums, running

pytestmark = pytest.mark.slow

ALMOST_ONE = float(np.float32(1) - np.float32(2**-24))
KINDS = ("normal", "ties", "flat", "close", "equal", "outlier", "zeros", "coarse", "tail")


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
        self.n = nucleus.top_p(self.address, self.vocab, np.float32(p))

    @property
    def total(self) -> float:
        at = shares_at(0, self.vocab) + nucleus._SUM
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
    return logits_of(rng, vocab, kind)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(KINDS),
    st.sampled_from([1, 15, 1025, 2049, 3000, 5000, 9001]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, ALMOST_ONE]),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 1000),
    st.lists(st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53), min_size=1, max_size=5),
)
@example("outlier", 9001, 0.9, 0.0, 1, [0.0, 0.3, 1 - 2**-53])
@example("tail", 9001, ALMOST_ONE, 0.0, 1, [0.5])
def test_what_is_kept_and_drawn_is_that_of_the_definition(
    kind: str, vocab: int, p: float, forbidden: float, seed: int, draws: list[float]
) -> None:
    values = values_of(kind, vocab, seed)
    values[np.random.default_rng(seed).random(vocab) < forbidden] = -np.inf
    if not np.isfinite(values).any():
        values[0] = 1.0
    plain, kernel = Plain(values, p), Kernel(values, p)
    if kernel.n != nucleus.CUT:
        assert kernel.ids(kernel.n) == plain.ids
        return
    assert kernel.total == plain.total  # nothing was rounded
    for u in draws:
        assert nucleus.draw_of_cut(kernel.address, vocab, u) == plain.draw(u)
    assert kernel.ids(nucleus.list_of_cut(kernel.address, vocab)) == plain.ids


@pytest.mark.parametrize(
    ("kind", "p", "is_sorted"),
    [(kind, 0.9, False) for kind in ("ties", "flat", "close", "equal", "outlier", "zeros", "coarse")]
    + [("normal", 0.9, True), ("tail", ALMOST_ONE, True)],
)
def test_a_list_is_made_only_of_few_candidates_or_where_sums_are_rounded(kind: str, p: float, is_sorted: bool) -> None:
    assert (Kernel(values_of(kind, 40_000, 3), p).n != nucleus.CUT) == is_sorted
