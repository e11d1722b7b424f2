"""Stall detection: whether a worker group computes, from its ring's counter and the CPU time of its ranks.

The ring's counter grows with every layer, but a layer of a large model takes seconds.  So a group whose ranks all use
CPU time counts as computing as well.  A stopped group does not, nor does a group in which one rank sleeps for good
while the others wait for it.  Pure except for reading /proc; the clock is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeline.procfs import cpu_s

CHECK_CPU_AFTER_S = 0.2  # CPU times are read when the counter has not changed for so long


class StallDetector:
    """Observes one worker group. Times in s of one monotonic clock."""

    def __init__(self, cpu_s: Callable[[int], float] = cpu_s) -> None:
        self._cpu_s = cpu_s
        self._counter = -1
        self._last_sign = 0.0
        self._cpu_times: dict[int, tuple[float, float]] = {}  # pid: CPU time, and when it last grew

    def observe(self, now: float, counter: int, ranks: Iterable[tuple[int, int]]) -> None:
        """Call at each tick with the counter (-1: the group has no step) and (pid, start_ticks) of all ranks."""
        if counter < 0 or counter != self._counter:
            self._counter, self._last_sign = counter, now
            self._cpu_times.clear()
            return
        if now - self._last_sign < CHECK_CPU_AFTER_S and not self._cpu_times:
            return
        for pid, _ in ranks:
            used = self._cpu_s(pid)
            before = self._cpu_times.get(pid)
            if before is None or used > before[0]:
                self._cpu_times[pid] = used, (now if before is not None else self._last_sign)
        # The ranks compute in lockstep: the one that has not run for longest decides.
        slowest = min((grown_at for _, grown_at in self._cpu_times.values()), default=self._last_sign)
        self._last_sign = max(self._last_sign, slowest)

    def stalled_s(self, now: float) -> float:
        """Seconds since the last sign of computing; 0.0 when the group has no step."""
        return 0.0 if self._counter < 0 else now - self._last_sign
