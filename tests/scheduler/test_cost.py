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
