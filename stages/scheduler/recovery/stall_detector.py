"""Does a worker group compute? What its ring and the kernel's clock tell, without asking it.

The ring's counter grows with every layer, but a layer of a large model takes seconds.  So a group whose
ranks all use CPU time counts as computing as well; one that is stopped, or of which a rank sleeps for good
while the others wait for it, does not.  Pure but for /proc; the clock is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeline.procfs import cpu_s

LOOK_AFTER_S = 0.2  # the counter stands so long: ask the kernel


class Evidence:
    """Of one group. Times in s of one monotonic clock."""

    def __init__(self, cpu_s: Callable[[int], float] = cpu_s) -> None:
        self._cpu_s = cpu_s
        self._counter = -1
        self._seen_at = 0.0  # the last sign
        self._used: dict[int, tuple[float, float]] = {}  # pid: CPU time, and when it was seen to grow

    def look(self, now: float, counter: int, ranks: Iterable[tuple[int, int]]) -> bool:
        """Call every 100 ms: the counter (-1: the group has nothing to do) and (pid, ticks) of all ranks.

        True: there is a sign of work since the last look.
        """
        if counter < 0 or counter != self._counter:
            self._counter, self._seen_at = counter, now
            self._used.clear()
            return counter >= 0
        if now - self._seen_at < LOOK_AFTER_S and not self._used:
            return False
        for pid, _ in ranks:
            used = self._cpu_s(pid)
            before = self._used.get(pid)
            if before is None or used > before[0]:
                self._used[pid] = used, (now if before is not None else self._seen_at)
        # The group is as far as the rank that has not run for longest.
        latest = min((at for _, at in self._used.values()), default=self._seen_at)
        if latest <= self._seen_at:
            return False
        self._seen_at = latest
        return True

    def stands_for_s(self, now: float) -> float:
        """Since the last sign; 0.0 when there is nothing to do."""
        return 0.0 if self._counter < 0 else now - self._seen_at
