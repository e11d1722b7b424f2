"""Whose fault it is when a step kills the worker, or stalls it until it is killed.

The first unacknowledged step is the one under way.  Each sequence in it gets a strike; an acknowledged
step with it clears its strikes.  A sequence with two strikes is a suspect, and suspects compute
alone, one step each.  If the worker dies in such a step, the suspect in it is the culprit and ends with an
error; otherwise it is cleared and goes on in the batch.  A step of one sequence needs no separation:
its second death convicts.

    deaths   in the step      strikes      then
    1        A B C            1 1 1        the step again (whatever the policy composes)
    2        A B C            2 2 2        A alone: fine; B alone
    3        B                0 3 2        B ends with an error; C alone: fine; A C go on
"""

from __future__ import annotations

from collections.abc import Iterable

from stages.scheduler.sequence import Sequence

SUSPECT = 2  # strikes


def is_suspect(sequence: Sequence) -> bool:
    return sequence.strikes >= SUSPECT


def strike(members: Iterable[Sequence]) -> Sequence | None:
    """The worker died in a step of `members`: the convicted sequence, if it is clear now."""
    alone = list(members)
    for sequence in alone:
        sequence.strikes += 1
    if len(alone) == 1 and is_suspect(alone[0]):
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
