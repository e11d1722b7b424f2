"""Whose fault it is when a step kills the worker, or stalls it until it is killed.

The first unacknowledged step is the one under way, if the worker had taken it up at all.  Each sequence in it
gets a strike; an acknowledged step with it clears its strikes.  A sequence with too many strikes is a suspect,
and suspects compute alone, one step each.  If the worker dies in such a step, the suspect in it is the
culprit and ends with an error; otherwise it is cleared and goes on in the batch.  A step of one sequence needs no
separation.

A stall is the step's own doing: the worker was given all the time it may take.  A death may be anybody's (it is
killed from outside, and once more before it has computed again), so it counts half:

    deaths   in the step      strikes      then
    1        A B C            1 1 1        the step again (whatever the policy composes)
    2        A B C            2 2 2        the step again
    3        A B C            3 3 3        A alone: fine; B alone
    4        B                0 4 3        B ends with an error; C alone: fine; A C go on

    stalls   1: 2 2 2         2: 4 4 4     A alone: fine; B alone     3: 0 6 4    B ends with an error
"""

from __future__ import annotations

from collections.abc import Iterable

from stages.scheduler.core.sequence import Sequence

DEATH, STALL = 1, 2  # strikes
SUSPECT = 3
CONVICT = 4  # of one alone


def is_suspect(sequence: Sequence) -> bool:
    return sequence.strikes >= SUSPECT


def strike(members: Iterable[Sequence], strikes: int) -> Sequence | None:
    """The worker died (`DEATH`, `STALL`) in a step of `members`: the convicted sequence, if it is clear now."""
    alone = list(members)
    for sequence in alone:
        sequence.strikes += strikes
    if len(alone) == 1 and alone[0].strikes >= CONVICT:
        return alone[0]
    return None


def alone(held: Iterable[Sequence]) -> Sequence | None:
    """The suspect that must compute by itself now: the oldest that has work and pages."""
    for sequence in held:
        if is_suspect(sequence) and not sequence.is_over and not sequence.is_leaving:
            known = sequence.length + sequence.ahead
            if known < sequence.end and sequence.planned < min(known, sequence.leased):
                return sequence
    return None
