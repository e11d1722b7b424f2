"""Wait estimate: how long a tenant's backlog will take, from measured costs and the tenant's share."""

from __future__ import annotations

import math

from pipeline.protocol.messages import Submit
from stages.scheduler.core.sequence_table import SequenceTable
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.queues import TenantQueues
from stages.scheduler.policy.tenant import Tenant
from stages.scheduler.stats import Stats


class WaitEstimate:
    """Estimates for one model. They steer only admission and the Retry-After of refusals."""

    def __init__(
        self, max_batch_size: int, queues: TenantQueues, table: SequenceTable, cost: CostModel, stats: Stats
    ) -> None:
        self._max_batch_size = max_batch_size
        self._queues = queues
        self._table = table
        self._cost = cost
        self._stats = stats

    def retry_after_s(self, tenant: Tenant) -> float:
        """When to send a refused request again: `tenant`'s backlog is done then. Whole seconds, at least 1."""
        return max(1.0, math.ceil(self.backlog_s(tenant)))

    def backlog_s(self, tenant: Tenant) -> float:
        """Seconds until the waiting sequences of `tenant` are done."""
        n, scheduled = self._max_batch_size, self._table.scheduled
        step_us, prompt_us = self._costs_us()
        output_us = step_us / n * self._stats.mean_output

        def work_us(t: Tenant) -> float:
            return t.waiting * output_us + t.prompt_backlog * prompt_us

        active = [t for t in self._queues.tenants.values() if t.is_active]
        total_us = sum(work_us(t) for t in active)
        total_us += sum(max(0, s.run.length - s.run.planned) * prompt_us + output_us / 2 for s in scheduled)
        share = tenant.weight / (sum(t.weight for t in active if t is not tenant) + tenant.weight)
        own_us = work_us(tenant) / share + output_us * n / 2
        return min(total_us, own_us) * 1e-6

    def run_s(self, frame: Submit) -> float:
        """Expected computing time of a new sequence in a full batch."""
        step_us, prompt_us = self._costs_us()
        outputs = min(frame.max_tokens, self._stats.mean_output)
        return (outputs * step_us + len(frame.prompt) // 4 * prompt_us) * 1e-6

    def _costs_us(self) -> tuple[float, float]:
        """Cost of a step with a full batch, and of a prompt token (some of which the cache has)."""
        n, cost, scheduled = self._max_batch_size, self._cost, self._table.scheduled
        # Attention is estimated for sequences as long as the scheduled ones.
        length = sum(s.run.length for s in scheduled) / len(scheduled) if scheduled else self._stats.mean_output / 2
        step_us = cost.predict(n, round(n * length))
        prompt_us = (cost.token_us + cost.position_us * length / 2) * self._stats.mean_fresh
        return step_us * cost.pace, prompt_us * cost.pace
