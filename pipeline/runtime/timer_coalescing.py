"""When a process wakes that has nothing to do. Pure, light to import.

Most of what a short wake-up costs is that everything it touches is in no cache any more.  So all processes
of a server at rest wake at the same moments, on the beat that CLOCK_MONOTONIC gives them: the multiples of
`ALIGN_S`.  Each at a time of its own costs half as much again.
"""

from __future__ import annotations

ALIGN_S = 0.5  # of the stages that say who is ready: within a second of a silence it is known
IDLE_HEARTBEAT_S = 1.5  # of who is not listened to for that
_EARLY_S = ALIGN_S / 8  # a wait may end a little before its time: the beat is not taken twice


def until_aligned(now: float, wait_s: float) -> float:
    """Seconds from `now` to the last beat within `wait_s`, which is a beat at least (and 1/8 of one more)."""
    return (now + wait_s + _EARLY_S) // ALIGN_S * ALIGN_S - now


def has_period_elapsed(now: float, before: float, period_s: float) -> bool:
    """A new period has begun since `before`; for all processes at the same moment."""
    return (now + _EARLY_S) // period_s * period_s > before + _EARLY_S
