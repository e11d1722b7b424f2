"""Row scheduling: waiting sequences get rows of the step arena and request their first pages."""

from __future__ import annotations

from stages.scheduler.constraints.constraints import Constraints
from stages.scheduler.core.leases import Leases
from stages.scheduler.core.page_supply import PageSupply
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.sequence_table import SequenceTable
from stages.scheduler.core.settings import Settings
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.policy import prefix_dedup
from stages.scheduler.policy.admission import Limits, check_limits
from stages.scheduler.policy.queues import TenantQueues

PREFETCH = 2  # sequences that get rows and pages before a place in the batch is free


class RowScheduler:
    """Gives rows to waiting sequences, by their tenants' shares."""

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        worker: WorkerLink,
        queues: TenantQueues,
        table: SequenceTable,
        leases: Leases,
        pages: PageSupply,
        constraints: Constraints,
    ) -> None:
        self._constraints = constraints
        self._settings = settings
        self._limits = limits
        self._worker = worker
        self._queues = queues
        self._table = table
        self._leases = leases
        self._pages = pages
        self._has_followers = False  # scheduled sequences that wait for a leader, see policy/prefix_dedup.py

    def schedule(self, now: float) -> None:
        """Allocate rows while there are free ones and pages may be available."""
        table, queues = self._table, self._queues
        if self._has_followers:
            self._acquire_for_followers(now)
        if not queues.depth or not self._worker.is_attached or not self._leases.is_up or self._pages.is_short:
            return
        if self.batch_wait_s(now) > 0 or self._lacks_pages:
            return
        batch = self._settings.max_batch_size
        while queues.depth and table.free_rows:
            tenant = queues.next_tenant(batch + PREFETCH - len(table.scheduled), batch)
            if tenant is None:
                return
            sequence = queues.pop(tenant)
            refusal = check_limits(sequence, self._limits)
            if refusal is None:
                self._allocate(sequence, now)
            elif sequence.outputs:
                table.fail(sequence, refusal.code, refusal.message)
            else:
                table.reject(sequence, refusal)

    @property
    def free_places(self) -> int:
        """Waiting sequences that join the running batch as soon as a round can schedule them."""
        if self._pages.is_short or self._lacks_pages:
            return 0
        return max(0, self._settings.max_batch_size - len(self._table.scheduled))

    @property
    def _lacks_pages(self) -> bool:
        """A scheduled sequence waits for pages, or is about to release its own. Those of a stuck group do not count."""
        table = self._table
        return any((s.run.is_starved or s.is_preempting) and table.responds(s) for s in table.scheduled)

    @property
    def begins_at_once(self) -> bool:
        """Whether a sequence that arrives now joins the running batch in the next round."""
        return self._queues.depth < self.free_places

    def _allocate(self, sequence: SequenceState, now: float) -> None:
        ring, run = self._worker.ring, sequence.run
        assert ring is not None
        if sequence.pooled is not None:
            sequence.pooled.is_whole = self._limits.whole_prompt_tokens > 0
        self._table.allocate_row(sequence)
        stop_ids = tuple(sequence.stop_ids)
        ring.write_row(
            run.row,
            run.tokens,
            sequence.prompt_len,
            sequence.sampling,
            sequence.choice,
            stop_ids,
            sequence.breakers,
            sequence.scores.top if sequence.scores is not None else -1,
            sequence.adapter,
        )
        self._constraints.restart(sequence)
        # A sequence that continues after a recovery had its prompt computed: kv has the pages, no leader is needed.
        # Neither has one whose positions are all computed, to be scored.
        may_follow = self._settings.prefix_cache and not sequence.outputs and sequence.pooled is None
        may_follow = may_follow and sequence.sharable < 0
        table, page_tokens = self._table, self._leases.page_tokens
        if may_follow and prefix_dedup.assign_leader(sequence, table.scheduled, page_tokens, table.responds):
            self._has_followers = True
        else:
            sequence.acquired_at = now
            self._leases.acquire(run, sequence.salt, sequence.sharable)

    def _acquire_for_followers(self, now: float) -> None:
        """Request pages for sequences whose leader has computed the common prefix, or will not."""
        followers = [s for s in self._table.scheduled if s.dedup_leader is not None and not s.is_done]
        for sequence in followers:
            if prefix_dedup.is_over(sequence, self._table.responds):
                sequence.dedup_leader = None
                sequence.acquired_at = now
                self._leases.acquire(sequence.run, sequence.salt, sequence.sharable)
        self._has_followers = bool(followers)

    def batch_wait_s(self, now: float) -> float:
        """Seconds that an idle model still waits for more sequences before it starts a batch (`batch_timeout_s`)."""
        timeout_s, queues = self._settings.batch_timeout_s, self._queues
        if not timeout_s or self._table.scheduled or not queues.depth:
            return 0.0
        if queues.depth >= min(self._settings.max_batch_size, queues.max_depth, queues.max_tenant_depth):
            return 0.0
        return max(0.0, min(s.arrived for s in queues) + timeout_s - now)
