"""Request priority as a bounded head start in the tenant's queue, so that low priorities never starve."""

from __future__ import annotations

import math

HEAD_START_S = 10.0  # head start of priority 1 over priority 0
MAX_HEAD_START_S = 50.0  # limit that no priority reaches
MAX_DEADLINE_SHARE = 1 / 6  # the head start is also less than this share of the time that the request may take


def head_start_s(priority: int, time_s: float = math.inf) -> float:
    """Head start of a request that may take `time_s` seconds. Each further level adds less."""
    limit_s = min(MAX_HEAD_START_S, MAX_DEADLINE_SHARE * time_s)
    return limit_s * priority / (abs(priority) + MAX_HEAD_START_S / HEAD_START_S - 1)
