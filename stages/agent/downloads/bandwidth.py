"""A bound in bytes per second for all downloads together. Pure: a token bucket of one second that may go into debt.

A request of 8 MiB exceeds any small bucket, so it is admitted when the bucket is not in debt, and the next ones wait
until its bytes are paid for.
"""

from __future__ import annotations

from collections.abc import Callable


class Bandwidth:
    """`bytes_per_s` 0: no bound."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float]) -> None:
        """`clock`: monotonic, s."""
        self._rate = bytes_per_s
        self._clock = clock
        self._credit = bytes_per_s  # negative: debt
        self._at = clock()

    def delay_s(self, nbytes: int) -> float:
        """Take `nbytes`; the seconds to wait before they are requested."""
        if not self._rate:
            return 0.0
        now = self._clock()
        self._credit = min(self._rate, self._credit + (now - self._at) * self._rate)
        self._at = now
        wait = max(0.0, -self._credit / self._rate)
        self._credit -= nbytes
        return wait
