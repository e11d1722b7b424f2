"""A tenant's account in one model: its weight, its share of the computing, and what it has waiting."""

from __future__ import annotations


class Tenant:
    """Counters of one tenant. `TenantQueues` holds its waiting sequences."""

    __slots__ = (
        "computed",
        "endless",
        "endless_backlog",
        "inverse",
        "name",
        "output_backlog",
        "prompt_backlog",
        "scheduled",
        "served",
        "waiting",
        "weight",
    )

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.inverse = 1.0 / weight
        self.served = 0.0  # virtual time: tokens computed / weight, idle time left out
        self.computed = 0  # tokens, for the metrics
        self.scheduled = 0  # sequences that have a row
        self.waiting = 0  # sequences in the queue
        self.prompt_backlog = 0  # known tokens of the waiting sequences
        self.output_backlog = 0  # most tokens that they may still generate
        self.endless = 0  # those that do not stop by themselves (`ignore_eos`)
        self.endless_backlog = 0  # the tokens that these will generate, a part of `output_backlog`

    @property
    def is_active(self) -> bool:
        """It has sequences that wait or compute."""
        return self.scheduled > 0 or self.waiting > 0

    def __repr__(self) -> str:
        counts = f"served {self.served:.1f} waiting {self.waiting} scheduled {self.scheduled}"
        return f"<{self.name} x{self.weight:g} {counts}>"
