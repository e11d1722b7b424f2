"""Waiting sequences: a bounded queue for each tenant of a model, and each tenant's share of the computing.

Fairness counts computed tokens.  Each tenant has a virtual time, `served` = tokens / weight, and the tenant with the
lowest one goes next (batch.py), so two tenants that both have work waiting never drift apart by more than what one
pick computes.  A tenant that has nothing waiting saves no time up: `settle` raises its virtual time to within one
`QUANTUM` of the waiting tenants.  One quantum remains so that the first prompt of a quiet tenant does not queue
behind a flood.

Within a tenant sequences are ordered by arrival; priority is worth a bounded head start (priority.py).

Bounds: `max_depth` sequences in all, `max_tenant_depth` for each tenant.  A full queue is divided by weight: a tenant
that has nothing in it, or less than its part, gets the place of the newest sequence of the tenant with the longest
queue for its weight.  A request of several sequences, which fails with each of them, gets places only if its tenant's
part has room for all.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator

from pipeline.observe.metrics import OTHER
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.policy.tenant import Tenant

QUANTUM = 512.0  # tokens (at weight 1) by which a quiet tenant may be ahead
MAX_FORGOTTEN = 4096  # tenants whose sums are kept by name after `forget_idle`, for the metrics


class QueueFullError(Exception):
    """The message names the bound and the number of waiting sequences."""


class TenantQueues:
    """The waiting sequences of one model. They have phase PENDING and no row."""

    def __init__(self, max_depth: int, max_tenant_depth: int, weight_of: Callable[[str], float]) -> None:
        """`max_tenant_depth` 0: only `max_depth` applies."""
        self.max_depth = max_depth
        self.max_tenant_depth = max_tenant_depth or max_depth
        self.depth = 0
        self.tenants: dict[str, Tenant] = {}
        self.forgotten: Counter[str] = Counter()  # tokens computed for tenants that `forget_idle` has dropped
        self._weight_of = weight_of
        # By tenant name, ordered by `key`; removed sequences stay in a heap until they reach its top.
        self._heaps: dict[str, list[tuple[tuple[float, int], SequenceState]]] = {}
        self._waiting: set[SequenceState] = set()

    def __contains__(self, sequence: SequenceState) -> bool:
        return sequence in self._waiting

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._waiting)

    @property
    def heap_size(self) -> int:
        """Sequences that the heaps refer to, removed ones included."""
        return sum(len(heap) for heap in self._heaps.values())

    def tenant(self, name: str) -> Tenant:
        """The tenant of that name; a tenant that was idle starts near the least served one."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name, self._weight_of(name))
        if not tenant.is_active:
            tenant.served = max(tenant.served, self._floor() - QUANTUM * tenant.inverse)
        return tenant

    def is_full(self, tenant: Tenant) -> bool:
        """A sequence of `tenant` cannot be added without removing one."""
        return self.depth >= self.max_depth or tenant.waiting >= self.max_tenant_depth

    def make_room(self, tenant: Tenant, begun: Container[str] = (), following: int = 0) -> SequenceState | None:
        """The sequence that must be removed for one more of `tenant`; None if none must.

        `begun` are requests with sequences that compute already: those would fail with the removed one, so they
        are chosen last.  `following`: sequences that come with the new one, and are of no use without it or it without
        them.  Raises `QueueFullError` when no sequence may be removed.
        """
        if tenant.waiting >= self.max_tenant_depth:
            key = "rate_limits" if self.max_tenant_depth < self.max_depth else "scheduler"
            raise QueueFullError(
                f"{tenant.waiting} of your sequences wait, at most {self.max_tenant_depth} ({key}.max_queue_depth)"
            )
        if self.depth < self.max_depth:
            return None
        longest = max(self.tenants.values(), key=lambda t: ((t.waiting - 1) * t.inverse, t.name), default=None)
        if longest is None or longest is tenant or longest.waiting < 2 or not self._may_replace(tenant, 1 + following):
            raise QueueFullError(f"{self.depth} sequences wait, at most {self.max_depth} (scheduler.max_queue_depth)")
        candidates = [s for s in self._waiting if s.tenant is longest and not s.outputs]
        if tenant.waiting and not candidates:
            raise QueueFullError(f"{self.depth} sequences wait, at most {self.max_depth} (scheduler.max_queue_depth)")
        return max(candidates, key=lambda s: (s.request not in begun, s.key), default=None)

    def push(self, sequence: SequenceState) -> None:
        """Add a sequence. Not bounded, because preempted sequences must return; for new ones see `make_room`."""
        tenant = sequence.tenant
        heapq.heappush(self._heaps.setdefault(tenant.name, []), (sequence.key, sequence))
        self._waiting.add(sequence)
        _count(sequence, 1)
        self.depth += 1

    def pop(self, tenant: Tenant) -> SequenceState:
        """Take out the next sequence of a tenant that has waiting ones."""
        heap = self._heaps[tenant.name]
        while heap[0][1] not in self._waiting:
            heapq.heappop(heap)
        sequence = heapq.heappop(heap)[1]
        self.remove(sequence)
        return sequence

    def remove(self, sequence: SequenceState) -> None:
        """Take out a waiting sequence."""
        self._waiting.remove(sequence)
        tenant = sequence.tenant
        _count(sequence, -1)
        self.depth -= 1
        heap = self._heaps[tenant.name]
        if not tenant.waiting:
            del self._heaps[tenant.name]
        elif len(heap) > 16 + 2 * tenant.waiting:
            heap = self._heaps[tenant.name] = [item for item in heap if item[1] in self._waiting]
            heapq.heapify(heap)

    def in_order(self, tenant: Tenant) -> list[SequenceState]:
        """The tenant's waiting sequences, the next one first."""
        heap = self._heaps.get(tenant.name, ())
        return [sequence for _, sequence in sorted(heap) if sequence in self._waiting]

    def next_tenant(self, places: int, batch: int) -> Tenant | None:
        """The tenant whose sequence is scheduled next; `places` of the regular `batch` places are free.

        While there are regular places: the fewest scheduled sequences for its weight, then the least served.
        Without places: only tenants that have less than their share of a batch scheduled.
        """
        waiting = [t for t in self.tenants.values() if t.waiting]
        if not waiting:
            return None
        if places <= 0:
            total = sum(t.weight for t in self.tenants.values() if t.is_active)
            waiting = [t for t in waiting if t.scheduled < math.ceil(batch * t.weight / total)]
            if not waiting:
                return None
        return min(waiting, key=lambda t: (t.scheduled * t.inverse, t.served, t.name))

    def settle(self, unscheduled: Iterable[Tenant]) -> None:
        """Call after a step was composed; `unscheduled` have work that found no place in it.

        A tenant with nothing waiting is raised to a quantum below the least served tenant that has; if no tenant
        has, below the most served one.
        """
        active = [t for t in self.tenants.values() if t.is_active]
        if len(active) < 2:
            return
        waiting = set(unscheduled)
        waiting.update(t for t in active if t.waiting)
        if waiting:
            floor = min(t.served for t in waiting)
        else:
            floor = max(t.served for t in active)
        for tenant in active:
            if tenant not in waiting:
                tenant.served = max(tenant.served, floor - QUANTUM * tenant.inverse)

    def forget_idle(self, keep: int = 1024) -> None:
        """Drop tenants without work if more than `keep` are stored."""
        if len(self.tenants) > keep:
            for tenant in self.tenants.values():
                if not tenant.is_active:
                    known = tenant.name in self.forgotten or len(self.forgotten) < MAX_FORGOTTEN
                    self.forgotten[tenant.name if known else OTHER] += tenant.computed
            self.tenants = {name: t for name, t in self.tenants.items() if t.is_active}

    def _may_replace(self, tenant: Tenant, count: int) -> bool:
        """Whether the others can give up `count` places, each keeping as many for its weight as `tenant` has then.

        Any other one gives a single place to a tenant that has none.
        """
        if not tenant.waiting and count == 1:
            return True
        if tenant.waiting + count > self.max_tenant_depth:
            return False
        n_own = tenant.waiting + count
        parts = ((t.waiting, n_own * (t.weight / tenant.weight)) for t in self.tenants.values() if t is not tenant)
        return sum(max(0, int(n_waiting - part)) for n_waiting, part in parts) >= count

    def _floor(self) -> float:
        """Virtual time of the least served active tenant: idle time is not saved up."""
        active = [t.served for t in self.tenants.values() if t.is_active]
        return min(active) if active else max((t.served for t in self.tenants.values()), default=0.0)


def _count(sequence: SequenceState, sign: int) -> None:
    """A sequence has begun to wait (`sign` 1), or ended that (-1)."""
    tenant, run = sequence.tenant, sequence.run
    tenant.waiting += sign
    tenant.prompt_backlog += sign * run.length
    tenant.output_backlog += sign * (run.end - run.length)
    if sequence.sampling.ignore_eos:
        tenant.endless += sign
        tenant.endless_backlog += sign * (run.end - run.length)
