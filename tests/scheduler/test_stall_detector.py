"""A group computes while its counter changes or all of its ranks use CPU time; otherwise it is stalled."""

from __future__ import annotations

from collections.abc import Callable

from stages.scheduler.core.version_runner import STALLED_S
from stages.scheduler.recovery.stall_detector import StallDetector

RANKS = ((10, 1), (11, 1))
LOOK_S = 0.1


def run(counter: Callable[[int], int], cpu: Callable[[int, int], float], looks: int = 60) -> list[float]:
    """Seconds without a sign of computing, at each look; `counter(look)`, `cpu(pid, look)`."""
    look = 0
    detector = StallDetector(lambda pid: cpu(pid, look))
    stalled = []
    for look in range(looks):
        detector.observe(look * LOOK_S, counter(look), RANKS)
        stalled.append(detector.stalled_s(look * LOOK_S))
    return stalled


def test_a_changing_counter_is_a_sign_of_computing() -> None:
    assert max(run(lambda look: look // 3, lambda pid, look: 0.0)) < STALLED_S


def test_cpu_time_of_all_ranks_is_a_sign_of_computing() -> None:
    assert max(run(lambda look: 7, lambda pid, look: 0.09 * look)) < STALLED_S
    # Another process uses half of the machine.
    assert max(run(lambda look: 7, lambda pid, look: 0.04 * (look // 2))) < STALLED_S


def test_a_rank_without_cpu_time_stalls_the_group() -> None:
    stalled = run(lambda look: 7, lambda pid, look: 0.09 * look if pid == 10 else 5.0)
    assert stalled[7] > STALLED_S
    assert stalled == sorted(stalled)


def test_a_group_without_a_step_is_not_stalled() -> None:
    assert set(run(lambda look: -1, lambda pid, look: 0.0)) == {0.0}


def test_a_new_step_has_time_to_show_a_sign() -> None:
    stalled = run(lambda look: 3 if look >= 40 else -1, lambda pid, look: 0.0)
    assert max(stalled[:46]) <= STALLED_S + 1e-9
    assert stalled[47] > STALLED_S
