"""When a busy worker reads its control socket, which all ranks wait for."""

from __future__ import annotations

POLL_EVERY_NS = 120_000_000  # between two reads under load: one tick
STOPPING_POLL_NS = 20_000_000  # the same while the stage is stopping, which frames end


def next_poll_ns(now: int, planned: int, is_stopping: bool) -> int:
    """When the socket is read next, in ns of the monotonic clock: as planned, or sooner while the stage is stopping."""
    return min(planned, now + STOPPING_POLL_NS) if is_stopping else planned
