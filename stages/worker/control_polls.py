"""When a busy worker reads its control socket, which all ranks wait for."""

from __future__ import annotations

SHORTEST_POLL_MS, LONGEST_POLL_MS = 120, 250  # between two reads under load, in which heartbeats are sent
STOPPING_POLL_NS = 20_000_000  # the same while the stage is stopping, which frames end


def poll_every_ns(heartbeat_ms: int) -> int:
    """Time between two reads under load, for stages that expect a heartbeat every `heartbeat_ms`."""
    return max(SHORTEST_POLL_MS, min(LONGEST_POLL_MS, heartbeat_ms)) * 1_000_000


def next_poll_ns(now: int, planned: int, is_stopping: bool) -> int:
    """When the socket is read next, in ns of the monotonic clock: as planned, or sooner while the stage is stopping."""
    return min(planned, now + STOPPING_POLL_NS) if is_stopping else planned
