"""How long a download will take, by its speed in the last seconds. Pure.

At least as long as no byte has come: the last piece of a link that is dead is not about to arrive.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

WINDOW_S = 10.0
KEPT = 8  # samples that count however old they are: the pieces of a slow link


class Remaining:
    """Of one download."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic, s."""
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque(maxlen=256)  # when, and the bytes that were here
        self._total = 0
        self._grown_at = 0.0

    def note(self, done: int, total: int) -> None:
        """`done` of `total` bytes are here."""
        now = self._clock()
        if not self._samples or done > self._samples[-1][1]:
            self._grown_at = now
        self._samples.append((now, done))
        self._total = total

    def seconds(self) -> float:
        """Until all bytes are here; infinite while the speed is unknown."""
        now = self._clock()
        while len(self._samples) > KEPT and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        if not self._samples:
            return math.inf
        (begun, first), (_, last) = self._samples[0], self._samples[-1]
        if last >= self._total:
            return 0.0
        if last <= first:
            return math.inf
        return max((self._total - last) * (now - begun) / (last - first), now - self._grown_at)
