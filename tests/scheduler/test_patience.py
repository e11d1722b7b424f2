"""Silence is punished ever later: a machine that is too busy to speak must not be too busy to compute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.scheduler.recovery.reconnect_backoff import CALM_S, FIRST_S, MOST_S, Patience


@given(st.floats(0.0, MOST_S), st.floats(0.0, CALM_S / 2))
def test_whoever_comes_back_in_a_minute_is_killed_a_few_times_at_most(away_s: float, lives_s: float) -> None:
    """Each life is `lives_s` of work, then silence for `away_s`."""
    patience, now = Patience(), 0.0
    for _ in range(7):
        patience.attached(now)
        now += lives_s
        allowed_s = patience.lost(now, is_stopped=False)
        assert FIRST_S <= allowed_s <= MOST_S
        if away_s <= allowed_s:
            return
        now += allowed_s
        patience.killed()
    raise AssertionError(f"seven were killed, the last one after {allowed_s} s")


@given(st.integers(0, 20))
def test_one_that_has_lasted_forgets_what_was(kills: int) -> None:
    patience = Patience()
    patience.attached(0.0)
    for _ in range(kills):
        patience.lost(1.0, is_stopped=False)
        patience.killed()
    patience.attached(2.0)
    assert patience.lost(2.0 + CALM_S, is_stopped=False) == FIRST_S


@given(st.integers(0, 20))
def test_a_stopped_one_never_gets_more(kills: int) -> None:
    patience = Patience()
    for _ in range(kills):
        patience.killed()
    assert patience.lost(0.0, is_stopped=True) == FIRST_S
