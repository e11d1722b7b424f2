"""Every number in a slot is checked: one out of bounds ends its entry, and only that entry."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shm import step_ring as sh
from stages.worker.kernels.plan import BAD_ENTRY
from tests.worker.conftest import Ingested, TinyGguf
from tools.step_runner import StepRunner

pytestmark = pytest.mark.slow

BIG = 2**31 - 1


@pytest.fixture(scope="module")
def runner(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepRunner]:
    bounds = {"max_rows": 6, "max_tokens": 96, "step_tokens": 64, "max_samples": 8}
    with StepRunner(ingested(tiny_gguf("small", "Q4_1")), tmp_path_factory.mktemp("plan"), **bounds) as made:
        yield made


def fresh(runner: StepRunner) -> None:
    for row in range(6):
        runner.write_row(row, np.arange(row, row + 40))
    runner.steps.tables[:] = np.arange(runner.steps.tables.size).reshape(runner.steps.tables.shape)


@pytest.mark.parametrize(
    "bad",
    [
        (-1, 0, 1, 1),
        (6, 0, 1, 1),
        (BIG, 0, 1, 1),
        (-BIG, 0, 1, 1),
        (1, -1, 1, 1),
        (1, BIG, 1, 1),
        (1, 96, 1, 1),
        (1, 90, 7, 1),
        (1, 0, 0, 0),
        (1, 0, -5, 1),
        (1, 0, 65, 1),
        (1, 0, BIG, 1),
        (1, BIG, BIG, 1),
        (1, 0, 4, 5),
        (1, 0, 20, 9),
    ],
)
def test_an_entry_out_of_bounds_is_left_out(runner: StepRunner, bad: tuple[int, int, int, int]) -> None:
    fresh(runner)
    good = runner.run([(0, 0, 10, 1)])
    logits = runner.logits(0)
    fresh(runner)
    runner.publish([(0, 0, 10, 1), bad, (2, 0, 3, 0)])
    assert runner.compute() == 1
    assert runner.tokens(1) == good
    assert runner.logits(0).tobytes() == logits.tobytes()
    if bad[3] > 0:
        assert runner.tokens(2)[1] == BAD_ENTRY


@pytest.mark.parametrize("base", [-1, 8, BIG, -BIG])
def test_a_sample_outside_the_outputs_is_left_out(runner: StepRunner, base: int) -> None:
    fresh(runner)
    runner.publish([(0, 0, 4, 1)])
    runner.steps.entries[runner.slot, 0, sh.SAMPLE_BASE] = base
    assert runner.compute() == 1


@pytest.mark.parametrize("page", [-1, 10**6, BIG, -BIG])
def test_a_page_that_does_not_exist(runner: StepRunner, page: int) -> None:
    fresh(runner)
    runner.steps.tables[1, 1] = page
    assert runner.run([(1, 0, 40, 1), (0, 0, 4, 1)])[0] == BAD_ENTRY
    assert runner.run([(1, 0, 30, 1)])[0] >= 0  # these positions are in the first page


@pytest.mark.parametrize("token", [-1, -2, 300, BIG, -BIG])
def test_a_token_outside_the_vocabulary(runner: StepRunner, token: int) -> None:
    fresh(runner)
    runner.steps.tokens[1, 7] = token
    assert runner.run([(1, 0, 8, 1)]) == [BAD_ENTRY]
    assert runner.run([(1, 0, 7, 1)])[0] >= 0


def test_more_tokens_than_a_step_holds(runner: StepRunner) -> None:
    fresh(runner)
    outputs = runner.run([(0, 0, 40, 1), (1, 0, 30, 1), (2, 0, 24, 1)])
    assert outputs[1] == BAD_ENTRY
    assert outputs[0] >= 0
    assert outputs[2] >= 0


@pytest.mark.parametrize("entries", [-1, 7, 2**40])
def test_an_impossible_count_of_entries(runner: StepRunner, entries: int) -> None:
    fresh(runner)
    runner.publish([(row, 0, 2, 1) for row in range(6)])
    runner.steps.slot_head[runner.slot, sh.SLOT_ENTRIES] = entries
    runner.compute()
    runner.publish([(0, 0, 2, 1)])
    runner.steps.slot_head[runner.slot, sh.SLOT_STEP] += 1  # a slot of another step
    runner.steps.out_token[runner.slot, 0] = 77
    runner.compute()
    assert runner.tokens(1) == [77]


def test_history_and_parameters_out_of_range(runner: StepRunner) -> None:
    """In a row that is valid otherwise: nothing outside it is read or written."""
    fresh(runner)
    runner.write_row(0, np.arange(8), repetition=1.5, frequency=0.5, mask_ids=(1, 2), bias=((5, 1.0),))
    ints = runner.steps.row_ints[0]
    for column, value in (
        (sh.OUTPUT_START, -(2**60)),
        (sh.OUTPUT_START, 2**60),
        (sh.N_MASK, 2**40),
        (sh.N_BIAS, 2**40),
        (sh.TOP_K, -7),
        (sh.LOGPROBS, 2**40),
        (sh.ORDER, -1),
    ):
        before, ints[column] = ints[column].copy(), value
        assert 0 <= runner.run([(0, 0, 8, 1)])[0] < 300
        ints[column] = before
    runner.steps.bias_ids[0, 0] = -BIG
    runner.steps.mask_ids[0, 0] = BIG
    assert 0 <= runner.run([(0, 0, 8, 1)])[0] < 300
