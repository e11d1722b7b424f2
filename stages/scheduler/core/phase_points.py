"""Fault points at the phases of a request in the scheduler. Without a fault plan a call costs a comparison or two."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.faults import points
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.step import StepEntry


class PhasePoints:
    """One per model; the points themselves are those of the process."""

    def __init__(self) -> None:
        self._queued = points.fault_point("scheduler", "queued")
        self._prefill = points.fault_point("scheduler", "prefill")
        self._decode = points.fault_point("scheduler", "decode")
        self._finishing = points.fault_point("scheduler", "finishing")

    def queued(self, sequence: SequenceState) -> None:
        """The sequence waits in its tenant's queue."""
        if self._queued.trigger is not None:
            self._queued.count("", _detail(sequence))

    def published(self, entries: Iterable[StepEntry[SequenceState]]) -> None:
        """A step is in the ring: a prompt chunk, or a decode step, of each of its sequences."""
        if self._prefill.trigger is None and self._decode.trigger is None:
            return
        for entry in entries:
            sequence = entry.sequence
            point = self._prefill if entry.start < sequence.prompt_len else self._decode
            point.count(sequence.id, f"{_detail(sequence)} start={entry.start} count={entry.count}")

    def finishing(self, sequence: SequenceState) -> None:
        """The sequence has its last token, which has not been sent."""
        if self._finishing.trigger is not None:
            self._finishing.count("", _detail(sequence))


def _detail(sequence: SequenceState) -> str:
    run = sequence.run
    return f"{sequence.id} prompt={sequence.prompt_len} computed={run.computed} outputs={sequence.outputs}"
