"""Whose constraint the mask process compiles next: tenants take turns, and the sequences of each wait in order.

Not the turns of pipeline/tenant_turns.py: a compilation takes seconds, so a tenant that comes while one runs goes
before what else waits of the tenant for which it runs, and a sequence that closes leaves at once.
"""

from __future__ import annotations


class CompileTurns:
    """The sequences that wait for a compilation, each at most once."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, None]] = {}  # sequences by tenant, in the order of turns; none is empty
        self._latest = ""  # the tenant that had the latest turn, which may not have ended

    def add(self, tenant: str, sequence: str) -> None:
        """The sequence waits. A tenant that had none waiting gets a turn before the one that had the latest."""
        queue = self._waiting.get(tenant)
        if queue is None:
            queue = self._waiting[tenant] = {}
            if (latest := self._waiting.pop(self._latest, None)) is not None:
                self._waiting[self._latest] = latest
        queue[sequence] = None

    def discard(self, tenant: str, sequence: str) -> None:
        """The sequence does not wait any more, or never did."""
        queue = self._waiting.get(tenant)
        if queue is not None:
            queue.pop(sequence, None)
            if not queue:
                del self._waiting[tenant]

    def take(self) -> str | None:
        """Remove the sequence whose turn it is, and move its tenant behind the others; None: none waits."""
        if not self._waiting:
            return None
        tenant = self._latest = next(iter(self._waiting))
        queue = self._waiting.pop(tenant)
        sequence = next(iter(queue))
        del queue[sequence]
        if queue:
            self._waiting[tenant] = queue
        return sequence
