"""How far measured times exceed predicted ones, and the time for prompt tokens that follows from it."""

from __future__ import annotations

import random

import pytest

from stages.scheduler.policy.cost import BESIDE_PRIOR_P99, CostModel
from stages.scheduler.policy.pacing import PacingPolicy
from stages.scheduler.policy.spread import MAX_RATIO, PRIOR_P99, Spread

PACING = PacingPolicy()


@pytest.mark.parametrize("deviation", [0.02, 0.1, 0.2])
def test_the_99th_percentile_is_learned(deviation: float) -> None:
    rng = random.Random(2)
    spread, ratios = Spread(), []
    for _ in range(400):
        ratios.append(rng.lognormvariate(0.0, deviation))
        spread.learn(0.01, 0.01 * ratios[-1])
    assert spread.p99 == pytest.approx(sorted(ratios)[396], rel=0.1)


def test_exact_predictions_leave_no_spread_and_one_stop_is_no_reason_for_a_large_one() -> None:
    spread = Spread()
    assert spread.p99 == PRIOR_P99
    for _ in range(400):
        spread.learn(0.01, 0.01)
    assert spread.p99 == pytest.approx(1.0, abs=0.01)
    spread.learn(0.01, 3600.0)
    assert spread.p99 < MAX_RATIO / 2


def test_times_that_double_are_noticed_within_a_few_steps() -> None:
    spread = Spread()
    for _ in range(200):
        spread.learn(0.01, 0.01)
    for _ in range(3):
        spread.learn(0.01, 0.02)
    assert spread.p99 > 1.4


def test_the_budget_is_what_the_spread_leaves_of_the_bound() -> None:
    def step_us(streams_us: float, alone: float, beside: float) -> float:
        return streams_us + PACING.prompt_budget_us(streams_us, alone, beside)[0]

    # Tokens of short steps are sent together: the usual gap is not that of a step.
    together_us = PACING.gap_factor * 1e6 * PACING.wake_s
    assert step_us(3000.0, 1.0, 1.0) == PACING.margin * together_us
    assert step_us(3000.0, 1.0, 1.25) == pytest.approx(PACING.margin * together_us / 1.25)
    assert step_us(3000.0, 1.0, 9.0) == PACING.min_margin * together_us
    # The bound for long steps is a multiple of the usual gaps, which vary as well.
    assert step_us(50_000.0, 1.25, 1.25) == pytest.approx(PACING.margin * PACING.gap_factor * 50_000.0)
    assert step_us(50_000.0, 1.0, 1.25) == pytest.approx(PACING.margin * PACING.gap_factor * 50_000.0 / 1.25)
    for streams_us in (100.0, 5000.0, 500_000.0):
        assert step_us(streams_us, 1.0, 9.0) >= 1.5 * streams_us, "the prompt advances"


def test_only_steps_of_one_kind_count() -> None:
    cost = CostModel()
    while not cost.is_known:
        cost.learn(1, 100, 1000.0)
        cost.learn_pace(0.001, 0.009, cost.alone)
    before = cost.alone.p99
    cost.learn_pace(0.001, 0.004)
    assert (cost.alone.p99, cost.beside.p99) == (before, BESIDE_PRIOR_P99)
    for _ in range(3):
        cost.learn_pace(0.001, 0.004, cost.beside)
    assert cost.alone.p99 == before
    assert cost.beside.p99 > BESIDE_PRIOR_P99
