"""Timer coalescing: processes wake at common moments. Pure, light to import.

Most of the cost of a short wake-up is that its code and data are no longer in any cache.  So all idle processes of a
server wake at the same moments: the multiples of `ALIGN_S` on CLOCK_MONOTONIC.  Waking each at a time of its own
costs half as much again.  Stages in steady work tick at the multiples of `STEADY_ALIGN_S`: beside ranks that use all
cores, each tick costs half a millisecond, for which all ranks wait.
"""

from __future__ import annotations

STEADY_ALIGN_S = 0.25  # ticks of stages in steady work
ALIGN_S = 0.5  # wake-ups of stages from whose heartbeats readiness is derived: a silence is seen within a second
IDLE_HEARTBEAT_S = 1.5  # wake-ups of all other idle stages
_EARLY = 1 / 8  # of the distance of two moments: a wait may end early by this, so that no moment is used twice
_EARLY_S = _EARLY * ALIGN_S


def until_aligned(now: float, wait_s: float, align_s: float = ALIGN_S) -> float:
    """Seconds from `now` to the last multiple of `align_s` within `wait_s` (at least `align_s`; plus 1/8 of it)."""
    return (now + wait_s + _EARLY * align_s) // align_s * align_s - now


def has_period_elapsed(now: float, before: float, period_s: float) -> bool:
    """Whether a new period has begun since `before`; periods begin at the same moments in all processes."""
    return (now + _EARLY_S) // period_s * period_s > before + _EARLY_S
