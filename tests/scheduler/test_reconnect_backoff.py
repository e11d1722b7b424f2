"""Worker groups that do not reconnect are killed ever later, so that an overloaded machine still computes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.scheduler.recovery.reconnect_backoff import FIRST_S, MAX_S, RESET_AFTER_S, ReconnectBackoff


@given(st.floats(0.0, MAX_S), st.floats(0.0, RESET_AFTER_S / 2))
def test_a_group_that_reconnects_within_a_minute_is_killed_a_few_times_at_most(away_s: float, lives_s: float) -> None:
    """Each group works for `lives_s`, then is disconnected for `away_s`."""
    backoff, now = ReconnectBackoff(), 0.0
    for _ in range(7):
        backoff.record_attached(now)
        now += lives_s
        allowed_s = backoff.allowed_s(now, is_stopped=False)
        assert FIRST_S <= allowed_s <= MAX_S
        if away_s <= allowed_s:
            return
        now += allowed_s
        backoff.record_killed()
    raise AssertionError(f"seven groups were killed, the last one after {allowed_s} s")


@given(st.integers(0, 20))
def test_a_lasting_connection_resets_the_backoff(kills: int) -> None:
    backoff = ReconnectBackoff()
    backoff.record_attached(0.0)
    for _ in range(kills):
        backoff.allowed_s(1.0, is_stopped=False)
        backoff.record_killed()
    backoff.record_attached(2.0)
    assert backoff.allowed_s(2.0 + RESET_AFTER_S, is_stopped=False) == FIRST_S


@given(st.integers(0, 20))
def test_a_stopped_group_gets_the_shortest_time(kills: int) -> None:
    backoff = ReconnectBackoff()
    for _ in range(kills):
        backoff.record_killed()
    assert backoff.allowed_s(0.0, is_stopped=True) == FIRST_S
