"""Wait estimate: how long a tenant's backlog will take, from measured costs and the tenant's share.

The length of an output is estimated from those that the model has generated so far (output_lengths.py), within the
request's own limit. An output that does not stop by itself (`ignore_eos`) is as long as its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from pipeline.protocol.messages import Submit
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.sequence_table import SequenceTable
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.queues import TenantQueues
from stages.scheduler.policy.tenant import Tenant
from stages.scheduler.stats import Stats


class WaitEstimate:
    """Estimates for one model. They steer only admission and the Retry-After of refusals."""

    def __init__(
        self,
        max_batch_size: int,
        queues: TenantQueues,
        table: SequenceTable,
        cost: CostModel,
        stats: Stats,
        n_groups: int = 1,
    ) -> None:
        """`n_groups`: worker groups, among which the batch is divided."""
        self._n_groups = n_groups
        self._max_batch_size = max_batch_size
        self._queues = queues
        self._table = table
        self._cost = cost
        self._stats = stats

    def load(self) -> Load:
        """What all tenants have to compute now."""
        return Load(self._max_batch_size, self._queues, self._table, self._stats.expected_output, *self._costs_us())

    def retry_after_s(self, tenant: Tenant, load: Load | None = None) -> float:
        """When to send a refused request again: `tenant`'s backlog is done then. Whole seconds, at least 1."""
        return max(1.0, math.ceil(self.backlog_s(tenant, load)))

    def backlog_s(self, tenant: Tenant, load: Load | None = None) -> float:
        """Seconds until the waiting sequences of `tenant` are done. `load`: as it is now; None: it is summed up."""
        load = load or self.load()
        return load.done_s(tenant)(load.work_us(tenant))

    def run_s(self, frame: Submit) -> float:
        """Expected computing time of a new sequence in a full batch."""
        output_us, prompt_us = self._costs_us()
        outputs: float = frame.max_tokens
        if not frame.sampling.ignore_eos:
            outputs = min(outputs, self._stats.expected_output)
        return (outputs * output_us * self._max_batch_size + len(frame.prompt) // 4 * self._n_groups * prompt_us) * 1e-6

    def too_late(
        self, tenant: Tenant, load: Load, now: float, margin: float, n_begin: int = 0
    ) -> Iterator[tuple[SequenceState, float]]:
        """The waiting sequences of `tenant` that will miss their deadline, and the seconds that each would take.

        Sequences behind one that is yielded are estimated without it.  A sequence is late if it would take more than
        `margin` times its remaining time.  The first `n_begin` are not late: their batch may be far from full.
        """
        output_us, prompt_us = load.output_us, load.prompt_us
        done_s = load.done_s(tenant)
        mean, ahead_us = self._stats.expected_output, 0.0
        for place, sequence in enumerate(self._queues.in_order(tenant)):
            outputs = _outputs(sequence, mean)
            fresh_us = sequence.run.length * prompt_us
            takes_s = done_s(ahead_us) + (outputs * output_us * self._max_batch_size + self._n_groups * fresh_us) * 1e-6
            if place >= n_begin and takes_s > margin * (sequence.deadline - now):
                yield sequence, takes_s
            else:
                ahead_us += outputs * output_us + fresh_us

    def _costs_us(self) -> tuple[float, float]:
        """Cost of an output token in a full batch, and of a prompt token (some of which the cache has).

        Of the time in which all worker groups compute.
        """
        n, cost, scheduled = self._max_batch_size, self._cost, self._table.scheduled
        # Attention is estimated for sequences as long as the scheduled ones.
        length = sum(s.run.length for s in scheduled) / len(scheduled) if scheduled else self._stats.mean_output / 2
        in_step = max(1, n // self._n_groups)  # sequences in a step of a group
        step_us = cost.predict(in_step, round(in_step * length))
        prompt_us = (cost.token_us + cost.position_us * length / 2) * self._stats.mean_fresh
        return step_us / (in_step * self._n_groups) * cost.pace, prompt_us / self._n_groups * cost.pace


class Load:
    """What the tenants of a model have to compute, summed up once, so that an estimate for each tenant costs O(1).

    It is as the queues were when it was made; `changed` follows a tenant whose waiting sequences have become fewer.
    """

    def __init__(
        self,
        max_batch_size: int,
        queues: TenantQueues,
        table: SequenceTable,
        expected_output: float,
        output_us: float,
        prompt_us: float,
    ) -> None:
        """`output_us`, `prompt_us`: cost of an output token in a full batch, and of a prompt token."""
        self.output_us, self.prompt_us = output_us, prompt_us
        self._expected_output = expected_output
        scheduled = table.scheduled
        outputs = [_outputs(sequence, expected_output) for sequence in scheduled]
        fresh = sum(max(0, sequence.run.length - sequence.run.planned) for sequence in scheduled)
        self._scheduled_us = fresh * prompt_us + sum(outputs) * output_us
        # Until a sequence of the running batch ends: the harmonic mean, because a long one keeps no other from ending.
        typical = len(outputs) / sum(1 / max(1.0, left) for left in outputs) if outputs else 0.0
        self._first_us = typical * output_us * max_batch_size / 2
        active = [tenant for tenant in queues.tenants.values() if tenant.is_active]
        self._waiting_us = {tenant.name: self.work_us(tenant) for tenant in active}
        self._weights = {tenant.name: tenant.weight for tenant in active}
        self._all_waiting_us = sum(self._waiting_us.values())
        self._all_weights = sum(self._weights.values())

    def work_us(self, tenant: Tenant) -> float:
        """Computing time of the waiting sequences of `tenant`, as they are now."""
        endless = tenant.endless_backlog
        stopping = (tenant.waiting - tenant.endless) * self._expected_output
        outputs = min(stopping, tenant.output_backlog - endless) + endless
        return outputs * self.output_us + tenant.prompt_backlog * self.prompt_us

    def done_s(self, tenant: Tenant) -> Callable[[float], float]:
        """Seconds until `tenant` has had so many us of computing time, as a function of these."""
        name, first_us = tenant.name, self._first_us
        others_us = self._all_waiting_us - self._waiting_us.get(name, 0.0) + self._scheduled_us
        share = tenant.weight / (self._all_weights - self._weights.get(name, 0.0) + tenant.weight)
        return lambda own_us: min(others_us + own_us, own_us / share + first_us) * 1e-6

    def changed(self, tenant: Tenant) -> None:
        """Waiting sequences of `tenant` have been removed."""
        work_us = self.work_us(tenant)
        self._all_waiting_us += work_us - self._waiting_us.get(tenant.name, 0.0)
        self._waiting_us[tenant.name] = work_us
        if not tenant.is_active:
            self._all_weights -= self._weights.pop(tenant.name, 0.0)


def _outputs(sequence: SequenceState, mean: float) -> float:
    """Tokens that a sequence is expected to generate still."""
    most = sequence.run.end - sequence.run.length
    return most if sequence.sampling.ignore_eos else min(mean, most)
