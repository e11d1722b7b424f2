"""The cost model is fitted to steps."""

from __future__ import annotations

import random

import pytest

from stages.scheduler.policy.cost import CostModel


def test_cost_is_learned_from_steps_and_ignores_outliers():
    rng = random.Random(1)
    cost = CostModel()
    for _ in range(600):
        tokens = rng.choice([1, 4, 16, 16 + rng.randrange(100)])
        positions = tokens * rng.randrange(10, 2000)
        took = (1800 + 90 * tokens + 0.05 * positions) * rng.gauss(1, 0.03)
        cost.learn(tokens, positions, took * (30 if rng.random() < 0.01 else 1))
    for tokens, positions in ((1, 100), (16, 8000), (80, 40_000)):
        true = 1800 + 90 * tokens + 0.05 * positions
        assert cost.predict(tokens, positions) == pytest.approx(true, rel=0.15)


def test_cost_stays_positive_when_all_steps_are_alike():
    cost = CostModel()
    for _ in range(2000):
        cost.learn(1, 50, 900.0)
    assert cost.predict(1, 50) == pytest.approx(900, rel=0.05)
    assert min(cost.fixed_us, cost.token_us, cost.position_us) > 0


def test_a_chunk_costs_what_is_left_and_no_more():
    cost = CostModel(1000, 100, 0.5)
    for start in (0, 500, 4000):
        n = cost.chunk(10_000, start, 10_000)
        price = 100 * n + 0.5 * (n * start + n * n / 2)
        another = 100 + 0.5 * (start + n)
        assert 0.9 * 10_000 - another < price <= 10_000
    assert cost.chunk(-1, 0, 100) == 0
    assert cost.chunk(1e9, 0, 7) == 7


@pytest.mark.parametrize("factor", [0.01, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("first", [1.0, 1000.0])
def test_a_few_steps_give_costs_of_the_right_size(factor: float, first: float) -> None:
    """Also of full batches, which were not measured, and if one of the steps included a compilation."""
    cost = CostModel()
    true = CostModel(4000 * factor, 150 * factor, 0.1 * factor)
    steps = [(200, 20_000), (1, 200), (1, 201), (2, 350), (2, 352)]
    for i, (tokens, positions) in enumerate(steps):
        assert not cost.is_known
        cost.learn(tokens, positions, true.predict(tokens, positions) * (first if i == 0 else 1.0))
    assert cost.is_known
    for tokens, positions in ((1, 300), (32, 6400), (100, 30_000)):
        assert 0.4 < cost.predict(tokens, positions) / max(true.predict(tokens, positions), 10.0) < 2.5


def test_the_first_step_of_a_worker_is_not_learned() -> None:
    cost = known_cost(1000.0)
    before = cost.predict(1, 100)
    cost.start_worker()
    cost.learn(1, 100, 5e6)
    cost.learn_pace(0.001, 5.0)
    assert (cost.predict(1, 100), cost.pace) == (before, 1.0)
    cost.learn(1, 100, 2.0 * before)
    assert cost.predict(1, 100) > before


def test_one_stall_hardly_changes_the_pace_and_a_slow_machine_does() -> None:
    cost = known_cost(1000.0)
    cost.learn_pace(0.001, 20.0)
    assert cost.pace < 1.2
    for _ in range(300):
        cost.learn_pace(0.001, 0.005)
    assert cost.pace == pytest.approx(5.0, rel=0.1)


def known_cost(took_us: float) -> CostModel:
    cost = CostModel()
    while not cost.is_known:
        cost.learn(1, 100, took_us)
    return cost
