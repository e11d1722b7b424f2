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

    def retry_after_s(self, tenant: Tenant) -> float:
        """When to send a refused request again: `tenant`'s backlog is done then. Whole seconds, at least 1."""
        return max(1.0, math.ceil(self.backlog_s(tenant)))

    def backlog_s(self, tenant: Tenant) -> float:
        """Seconds until the waiting sequences of `tenant` are done."""
        output_us, prompt_us = self._costs_us()
        return self._done_s(tenant, output_us, prompt_us)(self._work_us(tenant, output_us, prompt_us))

    def run_s(self, frame: Submit) -> float:
        """Expected computing time of a new sequence in a full batch."""
        output_us, prompt_us = self._costs_us()
        outputs: float = frame.max_tokens
        if not frame.sampling.ignore_eos:
            outputs = min(outputs, self._stats.expected_output)
        return (outputs * output_us * self._max_batch_size + len(frame.prompt) // 4 * self._n_groups * prompt_us) * 1e-6

    def too_late(
        self, tenant: Tenant, now: float, margin: float, n_begin: int = 0
    ) -> Iterator[tuple[SequenceState, float]]:
        """The waiting sequences of `tenant` that will miss their deadline, and the seconds that each would take.

        Sequences behind one that is yielded are estimated without it.  A sequence is late if it would take more than
        `margin` times its remaining time.  The first `n_begin` are not late: their batch may be far from full.
        """
        output_us, prompt_us = self._costs_us()
        done_s = self._done_s(tenant, output_us, prompt_us)
        mean, ahead_us = self._stats.expected_output, 0.0
        for place, sequence in enumerate(self._queues.in_order(tenant)):
            outputs = _outputs(sequence, mean)
            fresh_us = sequence.run.length * prompt_us
            takes_s = done_s(ahead_us) + (outputs * output_us * self._max_batch_size + self._n_groups * fresh_us) * 1e-6
            if place >= n_begin and takes_s > margin * (sequence.deadline - now):
                yield sequence, takes_s
            else:
                ahead_us += outputs * output_us + fresh_us

    def _work_us(self, tenant: Tenant, output_us: float, prompt_us: float) -> float:
        """Computing time of the waiting sequences of `tenant`."""
        endless = tenant.endless_backlog
        stopping = (tenant.waiting - tenant.endless) * self._stats.expected_output
        outputs = min(stopping, tenant.output_backlog - endless) + endless
        return outputs * output_us + tenant.prompt_backlog * prompt_us

    def _done_s(self, tenant: Tenant, output_us: float, prompt_us: float) -> Callable[[float], float]:
        """Seconds until `tenant` has had so many us of computing time, as a function of these."""
        n, scheduled, mean = self._max_batch_size, self._table.scheduled, self._stats.expected_output
        active = [t for t in self._queues.tenants.values() if t.is_active]
        others_us = sum(self._work_us(t, output_us, prompt_us) for t in active if t is not tenant)
        others_us += sum(max(0, s.run.length - s.run.planned) for s in scheduled) * prompt_us
        outputs = [_outputs(s, mean) for s in scheduled]
        others_us += sum(outputs) * output_us
        share = tenant.weight / (sum(t.weight for t in active if t is not tenant) + tenant.weight)
        # Until a sequence of the running batch ends: the harmonic mean, because a long one keeps no other from ending.
        typical = len(outputs) / sum(1 / max(1.0, left) for left in outputs) if outputs else 0.0
        first_us = typical * output_us * n / 2
        return lambda own_us: min(others_us + own_us, own_us / share + first_us) * 1e-6

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


def _outputs(sequence: SequenceState, mean: float) -> float:
    """Tokens that a sequence is expected to generate still."""
    most = sequence.run.end - sequence.run.length
    return most if sequence.sampling.ignore_eos else min(mean, most)
