"""Timer coalescing: idle processes wake at common moments. Pure, light to import.

Most of the cost of a short wake-up is that its code and data are no longer in any cache.  So all idle processes of a
server wake at the same moments: the multiples of `ALIGN_S` on CLOCK_MONOTONIC.  Waking each at a time of its own
costs half as much again.
"""

from __future__ import annotations

ALIGN_S = 0.5  # wake-ups of stages from whose heartbeats readiness is derived: a silence is seen within a second
IDLE_HEARTBEAT_S = 1.5  # wake-ups of all other idle stages
_EARLY_S = ALIGN_S / 8  # a wait may end early by this much, so that the same moment is not used twice


def until_aligned(now: float, wait_s: float) -> float:
    """Seconds from `now` to the last aligned moment within `wait_s` (at least `ALIGN_S`; plus 1/8 of it)."""
    return (now + wait_s + _EARLY_S) // ALIGN_S * ALIGN_S - now


def has_period_elapsed(now: float, before: float, period_s: float) -> bool:
    """Whether a new period has begun since `before`; periods begin at the same moments in all processes."""
    return (now + _EARLY_S) // period_s * period_s > before + _EARLY_S
