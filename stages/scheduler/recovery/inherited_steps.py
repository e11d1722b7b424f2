"""The progress of a worker group in steps that an earlier process of this stage has published.

The group answers after its step, which may take longer than a step may stand still.  Its ring outlives the process
that made it, so its counter is read there.
"""

from __future__ import annotations

from pathlib import Path

from shm import step_ring as sh
from shm import words
from shm.arena import ArenaError
from shm.step_ring import attach_steps
from shm.step_rings import ring_path


class InheritedSteps:
    """Of one group. Without its ring the counter stands still."""

    def __init__(self, steps_path: Path, number: int) -> None:
        try:
            self._arena, steps, _ = attach_steps(ring_path(steps_path, number))
        except (ArenaError, OSError):
            self._control = None
        else:
            self._control = steps.control

    @property
    def counter(self) -> int:
        """Grows with every layer and every step."""
        control = self._control
        return 0 if control is None else words.load(control, sh.PROGRESS) + words.load(control, sh.DONE)

    def close(self) -> None:
        """The group is settled."""
        if self._control is not None:
            self._control = None
            self._arena.close()
