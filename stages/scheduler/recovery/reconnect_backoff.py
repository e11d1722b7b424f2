"""Reconnect backoff: how long a disconnected worker group whose processes live may stay away before it is killed.

On an overloaded machine a group may get no CPU time for seconds.  Its successor would not either, and a server that
kept killing its workers would never compute a step.  So each group that is killed for staying away doubles the time
of the next one, until a group stays connected for `RESET_AFTER_S`.  Pure.
"""

from __future__ import annotations

FIRST_S = 1.0
MAX_S = 60.0
RESET_AFTER_S = 60.0


class ReconnectBackoff:
    """The backoff of one model. Times in s of one monotonic clock."""

    def __init__(self) -> None:
        self._seconds = FIRST_S
        self._attached_at = float("-inf")

    def record_attached(self, now: float) -> None:
        """A group was attached."""
        self._attached_at = now

    def allowed_s(self, now: float, is_stopped: bool) -> float:
        """The group was disconnected: seconds in which it may reconnect.

        A stopped group (SIGSTOP) gets the shortest time: it must not continue later, when its pages belong to others.
        """
        if now - self._attached_at >= RESET_AFTER_S:
            self._seconds = FIRST_S
        return FIRST_S if is_stopped else self._seconds

    def record_killed(self) -> None:
        """The group was killed because it did not reconnect in time."""
        self._seconds = min(MAX_S, 2 * self._seconds)
