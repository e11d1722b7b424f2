"""Pooled hidden states: equal to the exact reference, whatever steps, ranks and neighbours; bad entries left out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shm import step_ring as sh
from stages.worker.kernels.plan import BAD_ENTRY
from tests.worker.conftest import Ingested, TinyGguf
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.step_runner import StepRunner

pytestmark = pytest.mark.slow

N = 75
BOUNDS = {"max_rows": 6, "max_tokens": 96, "step_tokens": 96, "max_samples": 8}
PROMPT = (np.arange(N) * 37 + 11) % 300


@pytest.fixture(scope="module")
def sums(tiny_gguf: TinyGguf) -> np.ndarray:
    """The reference: (N, width) i64, the sum of the first 1, 2, ... hidden states of PROMPT."""
    hidden = ExactSequence(ExactModel(tiny_gguf("small", "Q4_1"))).hidden(PROMPT)
    return np.cumsum(np.rint(hidden.astype(np.float64) * 2.0**sh.POOL_SCALE).astype(np.int64), axis=0)


@pytest.fixture(scope="module", params=[1, 2])
def runner(
    request: pytest.FixtureRequest,
    tiny_gguf: TinyGguf,
    ingested: Ingested,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StepRunner]:
    index = ingested(tiny_gguf("small", "Q4_1"))
    with StepRunner(index, tmp_path_factory.mktemp("pooling"), ranks=request.param, **BOUNDS) as made:
        yield made


@pytest.mark.parametrize("chunk", [N, 32, 7])
def test_sums_equal_the_reference_in_any_chunks(runner: StepRunner, sums: np.ndarray, chunk: int) -> None:
    runner.write_row(0, PROMPT)
    total = np.zeros(sums.shape[1], np.int64)
    for start in range(0, N, chunk):
        count = min(chunk, N - start)
        total += runner.pool([(0, start, count, 0, count)])[0]
    assert total.tobytes() == sums[-1].tobytes()


def test_one_position_beside_other_entries_and_repeated(runner: StepRunner, sums: np.ndarray) -> None:
    for row in range(4):
        runner.write_row(row, PROMPT if row < 3 else PROMPT[::-1])
    last = sums[-1] - sums[-2]
    alone = runner.run([(3, 0, 9, 1)])
    for _ in range(2):
        found = runner.pool([(0, 0, 5, 0, 1), (1, 0, 40, 10, 20), (2, 0, 3, 2, 1)], [(3, 0, 9, 1)])
        assert found.tobytes() == np.stack([sums[0], sums[29] - sums[9], sums[2] - sums[1]]).tobytes()
        assert runner.tokens(1) == alone
    runner.pool([(0, 5, N - 6, 0, 1)])
    for _ in range(2):
        assert runner.pool([(0, N - 1, 1, 0, 1)])[0].tobytes() == last.tobytes()
        assert runner.compute() == 0, "the step is computed again, as by the successor of a dead worker"
        assert runner.steps.pooled[runner.slot, 0].tobytes() == last.tobytes()


@pytest.mark.parametrize(
    "bad", [(0, -1, 4), (0, 0, 11), (0, 3, 8), (0, 0, -1), (8, 0, 4), (-1, 0, 4), (2**31 - 1, 0, 4), (0, 2**31 - 1, 4)]
)
def test_a_pooled_entry_out_of_bounds_is_left_out(runner: StepRunner, bad: tuple[int, int, int]) -> None:
    base, first, pooled = bad
    for row in range(2):
        runner.write_row(row, PROMPT)
    good = runner.run([(0, 0, 10, 1)])
    runner.publish([(0, 0, 10, 1), (1, 0, 10, 0)])
    entry = runner.steps.entries[runner.slot, 1]
    entry[sh.SAMPLE_BASE], entry[sh.POOL_FIRST], entry[sh.POOL_COUNT] = base, first, pooled
    runner.steps.pool_states[runner.slot] = 77
    assert runner.compute() == 1
    assert runner.tokens(1) == good
    states = runner.steps.pool_states[runner.slot].tolist()
    assert states == [BAD_ENTRY if place == base else 77 for place in range(sh.MAX_POOLED)]


def test_an_entry_that_samples_is_not_pooled(runner: StepRunner) -> None:
    runner.write_row(0, PROMPT)
    runner.publish([(0, 0, 10, 1)])
    runner.steps.entries[runner.slot, 0, sh.POOL_COUNT] = 1
    assert runner.compute() == 1
    assert runner.tokens(1) == [BAD_ENTRY]
