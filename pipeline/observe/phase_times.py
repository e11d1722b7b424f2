"""How long each phase of a long task took. Phases follow each other; the clock is injected."""

from __future__ import annotations

import time
from collections.abc import Callable


class PhaseTimes:
    """Call `enter` with the name of each phase as it begins, and `end` after the last one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}  # by phase; one that was entered twice has the sum
        self._clock = clock
        self._phase = ""
        self._begun = 0.0

    def enter(self, phase: str) -> bool:
        """The phase begins, unless it is the current one. Returns whether it begins."""
        if phase == self._phase:
            return False
        self.end()
        self._phase = phase
        return True

    def end(self) -> None:
        """The current phase has ended."""
        now = self._clock()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._begun
        self._phase, self._begun = "", now
