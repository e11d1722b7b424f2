"""Whether a step that stands still only waits for a core.

A rank that loops without end uses CPU time, and one that is stopped or waits for something else is not runnable.  A
rank that is runnable, or waits for the disk, and has been given little CPU time, computes as soon as the machine lets
it: to kill its group would repeat the step on the same machine, and at last blame the request.  Pure except for
reading /proc; the clock is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeline.procfs import cpu_s, is_runnable, is_stopped

STARVED_SHARE = 0.5  # of `stuck_step_s` that a rank may compute in a step that stands still
MOST_PERIODS = 6.0  # of `stuck_step_s` that a group is waited for


class Starvation:
    """Observes one worker group in a step that stands still. Times in s of one monotonic clock."""

    def __init__(
        self,
        stuck_step_s: float,
        cpu_s: Callable[[int], float] = cpu_s,
        is_runnable: Callable[[int], bool] = is_runnable,
        is_stopped: Callable[[int], bool] = is_stopped,
    ) -> None:
        self._stuck_step_s = stuck_step_s
        self._cpu_s = cpu_s
        self._is_runnable = is_runnable
        self._is_stopped = is_stopped
        self._used: dict[int, float] = {}  # pid: CPU time when the step had stood still for half of the time

    def progressed(self) -> None:
        """The counter has changed, or the group has no step."""
        self._used.clear()

    def excuses(self, still_s: float, ranks: Iterable[tuple[int, int]]) -> bool:
        """Whether the group may go on. Call at each tick with the time for which the counter has not changed.

        `ranks`: (pid, start_ticks). Always true before `stuck_step_s`.
        """
        if still_s < self._stuck_step_s / 2:
            return True
        pids = [pid for pid, _ in ranks]
        if not self._used:
            self._used = {pid: self._cpu_s(pid) for pid in pids}
        if still_s <= self._stuck_step_s:
            return True
        if still_s > MOST_PERIODS * self._stuck_step_s:
            return False
        if any(self._is_stopped(pid) for pid in pids):
            return False
        most_s = STARVED_SHARE * min(still_s - self._stuck_step_s / 2, self._stuck_step_s)
        return any(self._is_runnable(pid) and self._cpu_s(pid) - self._used.get(pid, 0.0) < most_s for pid in pids)
