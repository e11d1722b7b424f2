"""A step that stands still is waited for while its ranks wait for a core, and for a bounded time."""

from __future__ import annotations

from collections.abc import Callable

from stages.scheduler.recovery.starvation import MOST_PERIODS, Starvation

RANKS = ((10, 1), (11, 1))
STUCK_S = 10.0
LOOK_S = 0.1


def given_up_after(
    cpu: Callable[[int, float], float],
    runnable: Callable[[int], bool] = lambda pid: True,
    stopped: Callable[[int], bool] = lambda pid: False,
) -> float:
    """Seconds until the group is not excused any more; `cpu(pid, still_s)`."""
    still_s = 0.0
    starvation = Starvation(STUCK_S, lambda pid: cpu(pid, still_s), runnable, stopped)
    for look in range(int(STUCK_S * MOST_PERIODS * 2 / LOOK_S)):
        still_s = look * LOOK_S
        if not starvation.excuses(still_s, RANKS):
            return still_s
    raise AssertionError("it is waited for without end")


def test_a_loop_without_end_is_given_up_in_time() -> None:
    assert given_up_after(lambda pid, still_s: still_s) <= STUCK_S + 2 * LOOK_S


def test_a_loop_without_end_on_a_shared_core() -> None:
    assert given_up_after(lambda pid, still_s: 0.3 * still_s) <= 3 * STUCK_S


def test_ranks_that_sleep_or_are_stopped_are_given_up_in_time() -> None:
    assert given_up_after(lambda pid, still_s: 0.0, runnable=lambda pid: False) <= STUCK_S + 2 * LOOK_S
    assert given_up_after(lambda pid, still_s: 0.0, stopped=lambda pid: pid == 11) <= STUCK_S + 2 * LOOK_S


def test_ranks_without_a_core_are_waited_for_with_a_bound() -> None:
    waited_s = given_up_after(lambda pid, still_s: 0.02 * still_s)
    assert 0 <= waited_s - STUCK_S * MOST_PERIODS <= 2 * LOOK_S
    # One rank waits for a core, the other one for it.
    assert given_up_after(lambda pid, still_s: 0.0, runnable=lambda pid: pid == 10) > 2 * STUCK_S


def test_progress_begins_anew() -> None:
    used = {10: 0.0, 11: 0.0}
    starvation = Starvation(STUCK_S, used.__getitem__, lambda pid: True, lambda pid: False)
    for still_s in (6.0, 9.9):
        assert starvation.excuses(still_s, RANKS)
    used[10] = used[11] = 100.0  # computed, and then the counter changed
    starvation.progressed()
    for still_s in (0.0, 6.0, 10.1):
        assert starvation.excuses(still_s, RANKS)
