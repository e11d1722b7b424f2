"""What the engine's parts share about the workers: the ring to publish in, and whether a worker reads it."""

from __future__ import annotations

import math

from stages.scheduler.core.ring import Ring


class WorkerLink:
    """Set by `Engine` and the version's runner; everything else only reads it.

    Of one worker group.  Where a model has several, the parts that are about all of them share one whose `ring` is the
    first group's, for the rows, and which is attached while any group is.
    """

    def __init__(self, now: float) -> None:
        self.ring: Ring | None = None  # None until the step arena exists
        self.is_attached = False  # a worker reads the ring
        self.is_stalled = False  # it has a step, and shows no sign of computing it
        self.first_attached = -math.inf  # s: when the version's first group was; before, -inf
        self.detached_since = now  # s; meaningful while no worker is attached
        self.failure = ""  # why no worker has been able to attach for seconds
        self.pid = 0  # of rank 0 of the attached group
