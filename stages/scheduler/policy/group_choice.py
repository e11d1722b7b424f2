"""Which worker group computes a sequence, where a model has several. Pure.

A sequence stays in its group while the group lives.  The group with the least work gets the next sequence: the least
positions that its sequences have yet to compute, of prompts and of outputs as long as the model's are on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stages.scheduler.core.sequence import SequenceState


def work(sequences: Iterable[SequenceState], mean_output: float) -> float:
    """Positions that the sequences have yet to compute, estimated."""
    total = 0.0
    for sequence in sequences:
        if not sequence.is_done:
            run = sequence.run
            total += run.length - run.computed + min(run.end - run.length, mean_output)
    return total


def least_loaded(groups: Sequence[Sequence[SequenceState]], candidates: Iterable[int], mean_output: float) -> int:
    """The candidate with the least work, then the fewest sequences, then the lowest number. There must be one."""
    return min(candidates, key=lambda number: (work(groups[number], mean_output), len(groups[number]), number))
