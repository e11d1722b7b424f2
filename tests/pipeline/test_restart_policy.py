"""The restart policy: properties over any history of runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.supervise.restart_policy import Limits, RestartPolicy

LIMITS = Limits()
lives = st.lists(st.floats(0.0, 100.0), max_size=60)
chances = st.floats(0.0, 1.0, exclude_max=True)


def waits(ran_s: list[float], chance: float = 0.0) -> list[float | None]:
    policy = RestartPolicy(lambda: chance)
    return [policy.after_death(ran) for ran in ran_s]


@given(lives, chances)
def test_waits_are_bounded_and_the_bucket_never_overflows(ran_s: list[float], chance: float) -> None:
    policy = RestartPolicy(lambda: chance)
    for ran in ran_s:
        wait = policy.after_death(ran)
        assert 0.0 < policy.deaths <= LIMITS.most
        if wait is None:
            break
        assert 0.0 <= wait <= LIMITS.longest_s


@given(chances)
def test_a_crash_loop_waits_longer_each_time_and_ends(chance: float) -> None:
    found = waits([0.0] * LIMITS.most, chance)
    assert found[-1] is None
    assert found[: LIMITS.immediate] == [0.0] * LIMITS.immediate
    growing = [wait for wait in found[LIMITS.immediate : -1] if wait is not None]
    assert len(growing) == LIMITS.most - LIMITS.immediate - 1
    assert growing == sorted(growing)
    assert growing[0] > 0


@given(lives.filter(bool), chances)
def test_a_stable_run_empties_the_bucket(ran_s: list[float], chance: float) -> None:
    policy = RestartPolicy(lambda: chance)
    for ran in ran_s:
        policy.after_death(ran)
    assert policy.after_death(LIMITS.heal_s * (LIMITS.most + 1)) == 0.0
    assert policy.deaths == 1.0


@given(st.integers(1, 1000))
def test_a_stage_that_had_been_ready_may_die_each_second_for_ever(count: int) -> None:
    policy = RestartPolicy(lambda: 0.0)
    assert {policy.after_death(1.0, was_ready=True) for _ in range(count)} == {0.0}


@given(lives, chances)
def test_having_been_ready_never_makes_a_wait_longer(ran_s: list[float], chance: float) -> None:
    one, other = (RestartPolicy(lambda: chance) for _ in range(2))
    for ran in ran_s:
        wait, after_ready = one.after_death(ran), other.after_death(ran, was_ready=True)
        if wait is None:
            break
        assert after_ready is not None and after_ready <= wait


@given(st.lists(st.floats(LIMITS.heal_s, 1000.0), max_size=200))
def test_deaths_far_enough_apart_cost_no_wait_however_many(ran_s: list[float]) -> None:
    assert set(waits(ran_s)) <= {0.0}


@given(lives, chances, chances)
def test_jitter_is_at_most_half(ran_s: list[float], one: float, other: float) -> None:
    for a, b in zip(waits(ran_s, one), waits(ran_s, other), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a <= 2 * b
            assert b <= 2 * a


@given(lives, st.integers(0, 59), st.floats(0.0, 100.0))
def test_a_longer_run_never_makes_the_next_wait_longer(ran_s: list[float], at: int, more: float) -> None:
    longer = [ran + more if i == at else ran for i, ran in enumerate(ran_s)]
    for short, long in zip(waits(ran_s), waits(longer), strict=True):
        if short is None:
            break
        assert long is not None
        assert long <= short
