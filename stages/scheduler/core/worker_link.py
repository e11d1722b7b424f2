"""What the engine's parts share about the worker: the ring to publish in, and whether a worker reads it."""

from __future__ import annotations

from stages.scheduler.core.ring import Ring


class WorkerLink:
    """Set by `Engine` and the version's runner; everything else only reads it."""

    def __init__(self, now: float) -> None:
        self.ring: Ring | None = None  # None until the step arena exists
        self.is_attached = False  # a worker reads the ring
        self.detached_since = now  # s; meaningful while no worker is attached
        self.failure = ""  # why no worker has been able to attach for seconds
