"""Poison-request quarantine: finds the sequence whose step kills the worker, or stalls it until it is killed.

The first unacknowledged step is the one that was computing, if the worker had started it at all.  The suspect count
of each sequence in it grows; an acknowledged step resets the counts of its sequences.  A sequence that reaches
`QUARANTINE_AT` is quarantined: it computes alone, one step at a time.  If the worker dies in such a step at
`CULPRIT_AT`, the sequence ends with an error; otherwise it returns to the batch.  A step of one sequence needs no
separation.

A stall is caused by the step itself: the worker has had all the time that a step may take.  A death may have another
cause (the worker was killed from outside, and again before it computed), so it counts half:

    deaths   in the step      counts       then
    1        A B C            1 1 1        the step again (as the policy composes it)
    2        A B C            2 2 2        the step again
    3        A B C            3 3 3        A alone: succeeds; B alone
    4        B                0 4 3        B ends with an error; C alone: succeeds; A C continue

    stalls   1: 2 2 2         2: 4 4 4     A alone: succeeds; B alone     3: 0 6 4    B ends with an error
"""

from __future__ import annotations

from collections.abc import Iterable

from stages.scheduler.core.sequence import SequenceState

DEATH, STALL = 1, 2  # what a death and a stall of the worker add to the suspect count
QUARANTINE_AT = 3
CULPRIT_AT = 4  # of a sequence that was alone in its step


class Quarantine:
    """The quarantine of one model. `is_active`: some sequence is quarantined."""

    def __init__(self) -> None:
        self.is_active = False

    def record(self, members: Iterable[SequenceState], weight: int) -> SequenceState | None:
        """The worker ended in a step of `members`; `weight` is DEATH or STALL. Returns the culprit if it is known."""
        suspects = list(members)
        for sequence in suspects:
            sequence.suspect_count += weight
        if len(suspects) == 1 and suspects[0].suspect_count >= CULPRIT_AT:
            return suspects[0]
        return None

    def update(self, scheduled: Iterable[SequenceState]) -> None:
        """Call after counts have changed."""
        self.is_active = any(is_quarantined(sequence) for sequence in scheduled)


def is_quarantined(sequence: SequenceState) -> bool:
    """It must compute alone."""
    return sequence.suspect_count >= QUARANTINE_AT


def next_alone(scheduled: Iterable[SequenceState]) -> SequenceState | None:
    """The quarantined sequence that computes now: the oldest one with work and pages."""
    for sequence in scheduled:
        if is_quarantined(sequence) and not sequence.is_done and not sequence.is_preempting:
            run = sequence.run
            if run.known < run.end and run.planned < min(run.known, run.leased):
                return sequence
    return None
