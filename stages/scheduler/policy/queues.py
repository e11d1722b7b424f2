"""Who waits: a queue for each tenant of a model, bounded, and each tenant's share of the machine.

Fairness counts tokens computed.  Each tenant has a virtual time, `served` = tokens / weight; whoever
has the lowest goes next (batch.py), so two tenants that both have work waiting never drift
apart by more than what one pick computes.  A tenant whose work was all taken has little claim on
what it did not ask for: `settle` moves its time up to within one `QUANTUM` of those that wait.  That
much is left to it so that the first prompt of a quiet tenant does not queue behind a flood.

Within a tenant the order is arrival, where priority is worth some time of waiting (`head_start_s`): lower ones are
overtaken for a bounded time and never starve.

Bounds: `max_depth` sequences in all, `max_tenant_depth` of a tenant.  A full queue never locks
out a tenant that has nothing in it: the newest sequence of the tenant with the longest queue for
its weight is put out instead.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Iterable, Iterator

from stages.scheduler.core.sequence import Sequence

QUANTUM = 512.0  # tokens (at weight 1) that a tenant may be ahead by for having been quiet


class Tenant:
    """Whose requests these are. Waiting sequences lie in `heap`; those that left early stay until met."""

    __slots__ = (
        "computed",
        "heap",
        "held",
        "inverse",
        "name",
        "prompt_backlog",
        "served",
        "waiting",
        "weight",
    )

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.inverse = 1.0 / weight
        self.served = 0.0  # virtual time: tokens computed / weight, with idle times left out
        self.computed = 0  # tokens, for the metrics
        self.held = 0  # sequences that have a row
        self.waiting = 0
        self.prompt_backlog = 0  # tokens known to the waiting sequences
        self.heap: list[tuple[tuple[float, int], Sequence]] = []

    @property
    def is_active(self) -> bool:
        return self.held > 0 or self.waiting > 0

    def __repr__(self) -> str:
        counts = f"served {self.served:.1f} waiting {self.waiting} held {self.held}"
        return f"<{self.name} x{self.weight:g} {counts}>"


class Queues:
    """The waiting sequences of one model. A sequence in it has `state` PENDING and no row."""

    def __init__(self, max_depth: int, max_tenant_depth: int, weight_of: Callable[[str], float]) -> None:
        """`max_tenant_depth` 0: no bound of its own."""
        self.max_depth = max_depth
        self.max_tenant_depth = max_tenant_depth or max_depth
        self.depth = 0
        self.tenants: dict[str, Tenant] = {}
        self._weight_of = weight_of
        self._in: set[Sequence] = set()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._in

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._in)

    def tenant(self, name: str) -> Tenant:
        """The tenant of that name; one that comes from idleness starts near the least served."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name, self._weight_of(name))
        if not tenant.is_active:
            tenant.served = max(tenant.served, self._floor() - QUANTUM * tenant.inverse)
        return tenant

    def is_full(self, tenant: Tenant) -> bool:
        """One more of `tenant` needs room to be made."""
        return self.depth >= self.max_depth or tenant.waiting >= self.max_tenant_depth

    def room(self, tenant: Tenant, begun: Container[str] = ()) -> Sequence | None:
        """Make room for one more of `tenant`: the sequence to put out for it, if any.

        `begun`: requests of which texts are under way; they would fail with the one that waits, and come last.
        Raises `QueueFullError` when there is no room and nobody to put out.
        """
        if tenant.waiting >= self.max_tenant_depth:
            raise QueueFullError(f"{tenant.waiting} of your sequences wait, at most {self.max_tenant_depth}")
        if self.depth < self.max_depth:
            return None
        longest = max(self.tenants.values(), key=lambda t: (t.waiting * t.inverse, t.name), default=None)
        if tenant.waiting or longest is None or longest.waiting < 2:
            raise QueueFullError(f"{self.depth} sequences wait, at most {self.max_depth}")
        waiting = (s for s in self._in if s.tenant is longest and not s.outputs)
        return max(waiting, key=lambda s: (s.request not in begun, s.key), default=None)

    def push(self, sequence: Sequence) -> None:
        """Unbounded: what was set aside must come back in. New ones ask for `room` first."""
        tenant = sequence.tenant
        heapq.heappush(tenant.heap, (sequence.key, sequence))
        self._in.add(sequence)
        tenant.waiting += 1
        tenant.prompt_backlog += sequence.length
        self.depth += 1

    def take(self, tenant: Tenant) -> Sequence:
        """Take out the next of a tenant that has `waiting` > 0."""
        sequence = self.head(tenant)
        heapq.heappop(tenant.heap)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out one that waits, for good (cancelled, timed out, put out)."""
        self._in.remove(sequence)
        tenant = sequence.tenant
        tenant.waiting -= 1
        tenant.prompt_backlog -= sequence.length
        self.depth -= 1
        if not tenant.waiting:
            tenant.heap.clear()
        elif len(tenant.heap) > 16 + 2 * tenant.waiting:
            tenant.heap = [entry for entry in tenant.heap if entry[1] in self._in]
            heapq.heapify(tenant.heap)

    def head(self, tenant: Tenant) -> Sequence:
        """The next of a tenant that has `waiting` > 0."""
        heap = tenant.heap
        while heap[0][1] not in self._in:
            heapq.heappop(heap)
        return heap[0][1]

    def next_tenant(self, places: int, batch: int) -> Tenant | None:
        """Whose sequence is taken up next, when `places` of `batch` regular ones are left.

        While there are regular places: the fewest held for its weight, then the least served.  With
        none left, only tenants that hold less than their share of a batch.
        """
        waiting = [t for t in self.tenants.values() if t.waiting]
        if not waiting:
            return None
        if places <= 0:
            total = sum(t.weight for t in self.tenants.values() if t.is_active)
            waiting = [t for t in waiting if t.held < math.ceil(batch * t.weight / total)]
            if not waiting:
                return None
        return min(waiting, key=lambda t: (t.held * t.inverse, t.served, t.name))

    def settle(self, backlogged: Iterable[Tenant]) -> None:
        """After a step was composed; `backlogged` have held work that found no place in it.

        Whoever has nothing waiting moves up to a quantum below the least served of those that have;
        with none waiting, below the most served of all.
        """
        active = [t for t in self.tenants.values() if t.is_active]
        if len(active) < 2:
            return
        waiting = set(backlogged)
        waiting.update(t for t in active if t.waiting)
        if waiting:
            floor = min(t.served for t in waiting)
        else:
            floor = max(t.served for t in active)
        for tenant in active:
            if tenant not in waiting:
                tenant.served = max(tenant.served, floor - QUANTUM * tenant.inverse)

    def forget_idle(self, keep: int = 1024) -> None:
        """Bound the number of tenants remembered: the ones without work go."""
        if len(self.tenants) > keep:
            self.tenants = {name: t for name, t in self.tenants.items() if t.is_active}

    def _floor(self) -> float:
        """What a tenant that comes to the queue starts from: idle time earns nothing."""
        active = [t.served for t in self.tenants.values() if t.is_active]
        return min(active) if active else max((t.served for t in self.tenants.values()), default=0.0)


class QueueFullError(Exception):
    """The bound and how many wait, in words."""
