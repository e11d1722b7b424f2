"""Events per second over a sliding window."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

STEPS = 10  # of a window


class Rate:
    """A sliding window of `window_s` seconds that moves in ten steps."""

    def __init__(self, window_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._step_s = window_s / STEPS
        self._clock = clock
        self._started = clock()
        self._steps: deque[list[float]] = deque(maxlen=STEPS + 1)  # [number of the step, events]

    def add(self, events: float) -> None:
        """Count `events` now."""
        step = self._clock() // self._step_s
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append([step, 0.0])
        self._steps[-1][1] += events

    def value(self) -> float:
        """Events per second; over a shorter time while the window is not full."""
        now = self._clock()
        oldest = now // self._step_s - STEPS
        events = sum(count for step, count in self._steps if step >= oldest)
        start = max(self._started, oldest * self._step_s)
        return events / max(now - start, self._step_s)
