"""How long a worker group that lives, and is not heard of, may stay away before it is killed. Pure.

On a machine with far more to do than it can, a group may not get to say anything for seconds: its
successor would not either, and a server that goes on killing them never computes a step.  So each one
that is killed for its silence gives the next one twice the time, until one has lasted.
"""

from __future__ import annotations

FIRST_S = 1.0
MOST_S = 60.0
CALM_S = 60.0  # a group that was attached for so long was no victim of this


class Patience:
    """Of one model. Times in s of one monotonic clock."""

    def __init__(self) -> None:
        self._seconds = FIRST_S
        self._attached_at = float("-inf")

    def attached(self, now: float) -> None:
        self._attached_at = now

    def lost(self, now: float, is_stopped: bool) -> float:
        """The group's connection has gone down; how long it may take to come back.

        One that is stopped (SIGSTOP) does not come back: whoever stopped it may continue it later, when its
        pages are others'.
        """
        if now - self._attached_at >= CALM_S:
            self._seconds = FIRST_S
        return FIRST_S if is_stopped else self._seconds

    def killed(self) -> None:
        """It did not come back in time."""
        self._seconds = min(MOST_S, 2 * self._seconds)
