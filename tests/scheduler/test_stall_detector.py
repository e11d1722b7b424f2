"""A group computes while its counter moves or all of its ranks use time; one that stands is known for it."""

from __future__ import annotations

from collections.abc import Callable

from stages.scheduler.core.version_runner import STALLED_S
from stages.scheduler.recovery.stall_detector import StallDetector

RANKS = ((10, 1), (11, 1))
LOOK_S = 0.1


def run(counter: Callable[[int], int], cpu: Callable[[int, int], float], looks: int = 60) -> list[float]:
    """How long the group has stood, at each look; `counter(look)`, `cpu(pid, look)`."""
    look = 0
    detector = StallDetector(lambda pid: cpu(pid, look))
    stood = []
    for look in range(looks):
        detector.observe(look * LOOK_S, counter(look), RANKS)
        stood.append(detector.stalled_s(look * LOOK_S))
    return stood


def test_a_counter_that_moves_is_enough() -> None:
    assert max(run(lambda look: look // 3, lambda pid, look: 0.0)) < STALLED_S


def test_a_layer_that_takes_seconds_is_work() -> None:
    assert max(run(lambda look: 7, lambda pid, look: 0.09 * look)) < STALLED_S
    # Half of the machine is somebody else's.
    assert max(run(lambda look: 7, lambda pid, look: 0.04 * (look // 2))) < STALLED_S


def test_a_rank_that_does_not_run_holds_up_all() -> None:
    stood = run(lambda look: 7, lambda pid, look: 0.09 * look if pid == 10 else 5.0)
    assert stood[7] > STALLED_S
    assert stood == sorted(stood)


def test_nobody_stands_who_has_nothing_to_do() -> None:
    assert set(run(lambda look: -1, lambda pid, look: 0.0)) == {0.0}


def test_work_that_has_just_come_has_its_time() -> None:
    stood = run(lambda look: 3 if look >= 40 else -1, lambda pid, look: 0.0)
    assert max(stood[:46]) <= STALLED_S + 1e-9
    assert stood[47] > STALLED_S
