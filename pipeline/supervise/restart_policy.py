"""When to start a stage again, and when to give up. Pure: time and chance come from outside.

Deaths fill a bucket, running empties it.  The first few in the bucket cost no wait at all (a client sees
the pause); after them the wait doubles, with jitter so that stages that fall together do not rise
together; a full bucket means that restarting does not help.

A stage that had been ready is one that restarting does help: whoever kills it again and again (an
operator, a chaos test, memory that is short for a while) must not end the server.  Its death fills the
bucket by a fraction only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Limits(NamedTuple):
    """Times in seconds."""

    immediate: int = 3  # deaths without a wait
    most: int = 16  # deaths in the bucket at which to give up
    heal_s: float = 5.0  # running this long makes good one death
    ready: float = 0.125  # what the death of one that had been ready counts
    base_s: float = 0.1  # the first wait
    longest_s: float = 10.0  # and the bound of its doubling


class RestartPolicy:
    """Of one stage. `chance` is uniform in [0, 1)."""

    def __init__(self, chance: Callable[[], float], limits: Limits = Limits()) -> None:  # noqa: B008
        self._chance = chance
        self.limits = limits
        self.deaths = 0.0  # in the bucket

    def after_death(self, ran_s: float, was_ready: bool = False) -> float | None:
        """Seconds to wait before the next start; None: give up. `ran_s`: how long the stage ran."""
        limits = self.limits
        self.deaths = max(0.0, self.deaths - ran_s / limits.heal_s) + (limits.ready if was_ready else 1.0)
        count = math.ceil(self.deaths)
        if count >= limits.most:
            return None
        doublings = count - limits.immediate - 1
        if doublings < 0:
            return 0.0
        wait = min(limits.longest_s, limits.base_s * 2.0**doublings)
        return wait * (0.5 + 0.5 * self._chance())
