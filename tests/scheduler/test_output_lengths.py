"""The mean length of outputs is estimated from running outputs, too."""

from __future__ import annotations

import random

import pytest

from stages.scheduler.policy.output_lengths import INITIAL_MEAN, OutputLengths


def run(mean: float, limit: int, batch: int, steps: int) -> list[float]:
    """A batch of outputs that stop at random or at the limit, replaced at once; the estimates after each step."""
    rng = random.Random(3)
    lengths, generated, estimates = OutputLengths(), 0, []
    outputs = [0] * batch
    for _ in range(steps):
        for i in range(batch):
            generated += 1
            outputs[i] += 1
            has_stopped = rng.random() < 1 / mean
            if has_stopped or outputs[i] == limit:
                lengths.record_end(generated, has_stopped)
                outputs[i] = 0
        estimates.append(lengths.mean(generated))
    return estimates


@pytest.mark.parametrize("mean", [20.0, 100.0, 400.0])
@pytest.mark.parametrize("limit", [200, 10_000])
def test_the_mean_is_found_whatever_the_limit(mean: float, limit: int) -> None:
    estimates = run(mean, limit, 32, 2000)
    assert sum(estimates[1000:]) / 1000 == pytest.approx(mean, rel=0.3)


def test_long_outputs_are_known_to_be_long_before_the_first_one_ends() -> None:
    estimates = run(1e9, 2000, 32, 200)
    assert estimates[0] < 1.1 * INITIAL_MEAN
    assert estimates[-1] > 10 * INITIAL_MEAN
    assert estimates == sorted(estimates)


def test_outputs_that_never_stop_have_a_finite_mean() -> None:
    lengths = OutputLengths()
    for i in range(5000):
        lengths.record_end(1000 * i, False)
    assert 1000 < lengths.mean(5_000_000) < 20_000
    assert lengths.mean(10**9) == 1e6


@pytest.mark.parametrize("limit", [1, 16])
def test_outputs_of_few_tokens_say_little_about_longer_ones(limit: int) -> None:
    lengths = OutputLengths()
    for i in range(1, 601):
        lengths.record_end(limit * i, False)
    assert lengths.mean(limit * 600) < INITIAL_MEAN + 13 * limit
