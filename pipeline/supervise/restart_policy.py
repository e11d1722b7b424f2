"""When to restart a stage, and when to give up. Pure: time and randomness are passed in.

A leaky bucket: deaths fill it, running time empties it.  The first few deaths cause no wait (clients notice
every pause); then the wait doubles, with jitter so that stages that fail together do not restart together.  A full
bucket means that restarting does not help.

For a stage that had been ready, restarting does help: repeated kills from outside (an operator, a chaos test,
a shortage of memory) must not end the server, so such a death counts only a fraction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Limits(NamedTuple):
    """Times in seconds."""

    immediate: int = 3  # deaths without a wait
    most: int = 16  # deaths in the bucket at which the supervisor gives up
    heal_s: float = 5.0  # running time that removes one death
    ready: float = 0.125  # weight of the death of a stage that had been ready
    base_s: float = 0.1  # the first wait
    longest_s: float = 10.0  # upper bound of the doubled wait


class RestartPolicy:
    """Of one stage. `random` returns a number uniform in [0, 1)."""

    def __init__(self, random: Callable[[], float], limits: Limits = Limits()) -> None:  # noqa: B008
        self._random = random
        self.limits = limits
        self.deaths = 0.0  # in the bucket

    def after_death(self, ran_s: float, was_ready: bool = False) -> float | None:
        """Seconds to wait before the next start; None: give up. `ran_s`: running time of the stage in seconds."""
        limits = self.limits
        self.deaths = max(0.0, self.deaths - ran_s / limits.heal_s) + (limits.ready if was_ready else 1.0)
        count = math.ceil(self.deaths)
        if count >= limits.most:
            return None
        doublings = count - limits.immediate - 1
        if doublings < 0:
            return 0.0
        wait = min(limits.longest_s, limits.base_s * 2.0**doublings)
        return wait * (0.5 + 0.5 * self._random())
