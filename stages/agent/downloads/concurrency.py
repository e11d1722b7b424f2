"""How many requests at once. Pure: grows while that makes the download faster, shrinks when a source asks for it.

Like TCP's congestion control, but on throughput: the limit doubles while each doubling gains at least a fifth, then
stays, and is tried again later, because the other users of the link may have gone.  A refusal (429, 503, a time-out)
halves it, at most once in the time of a window.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST = 4
GAIN = 1.2  # by which twice the requests must be faster
PROBE_AFTER = 8  # windows without growth, then one more request is tried


class AdaptiveLimit:
    """`value`: requests at once, from 1 to `most`."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """`clock`: monotonic, s."""
        self.most = most
        self.value = min(FIRST, most)
        self._clock = clock
        self._begun = clock()
        self._bytes = self._pieces = self._windows = 0
        self._before = 0.0  # bytes/s of the window before the last growth
        self._is_growing = True
        self._may_shrink = True

    def arrived(self, nbytes: int) -> None:
        """A piece has arrived. A window ends after as many pieces as there are requests."""
        self._bytes += nbytes
        self._pieces += 1
        if self._pieces < self.value:
            return
        now = self._clock()
        rate = self._bytes / max(now - self._begun, 1e-6)
        self._begun, self._bytes, self._pieces, self._may_shrink = now, 0, 0, True
        if self._is_growing and rate >= GAIN * self._before:
            self._grow(self.value * 2, rate)
            return
        self._is_growing = False
        self._windows += 1
        if self._windows >= PROBE_AFTER:
            self._grow(self.value + 1, rate)

    def throttled(self) -> None:
        """A source refuses, or answers too late."""
        if self._may_shrink:
            self.value = max(1, self.value // 2)
            self._is_growing, self._may_shrink, self._windows = False, False, 0

    def _grow(self, value: int, rate: float) -> None:
        self._before, self._windows = rate, 0
        self.value = min(self.most, value)
