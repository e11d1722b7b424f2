"""Attach failure: why a worker cannot attach to its arenas, or kv has none, and whether that lasts. Pure.

Memory for the arenas may become free within a moment, for instance when another version is unloaded.  A failure that
lasts `LASTING_S` is reported to the model's requests, which would otherwise wait until their time is over.
"""

from __future__ import annotations

import math

LASTING_S = 5.0


class AttachFailure:
    """The failure of one worker group, or of kv. Times in s of one monotonic clock."""

    def __init__(self) -> None:
        self.error = ""  # "": the last attempt has not failed
        self.since = 0.0  # s: the first attempt that failed; meaningful with an error

    def record(self, error: str, now: float) -> bool:
        """An attempt has failed. Returns whether the error is new."""
        is_new = error != self.error
        if not self.error:
            self.since = now
        self.error = error
        return is_new

    def clear(self) -> None:
        """A worker has attached, or the group is a new one."""
        self.error = ""

    def lasting(self, now: float, begun: float = -math.inf) -> str:
        """The error, if attempts have failed for `LASTING_S` since `begun`; otherwise ""."""
        return self.error if now - max(self.since, begun) >= LASTING_S else ""
