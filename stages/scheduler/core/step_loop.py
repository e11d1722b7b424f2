"""The step loop of a worker group: complete acknowledged steps, schedule waiting sequences, publish the next steps.

Usually two steps are unacknowledged: one computes, and the next one is ready behind it, composed before the samples
of the first are known (shm/step_ring.py explains why that works).  Short steps run further ahead (policy/pacing.py).
Tokens that were computed past a stop or a cancel are discarded.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from stages.scheduler.constraints.constraints import Constraints
from stages.scheduler.core.completion import StepCompletion
from stages.scheduler.core.leases import Leases
from stages.scheduler.core.page_supply import PageSupply
from stages.scheduler.core.phase_points import PhasePoints
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.row_scheduler import RowScheduler
from stages.scheduler.core.sequence import Phase, SequenceState
from stages.scheduler.core.sequence_table import SequenceTable
from stages.scheduler.core.step import Batch, PooledPart, Step
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.draft.draft_pool import DraftPool
from stages.scheduler.draft.draft_sequence import DraftSequence
from stages.scheduler.draft.proposer import Proposer
from stages.scheduler.policy.batch import Budget, compose, compose_alone
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.pacing import LeadTime
from stages.scheduler.policy.queues import TenantQueues
from stages.scheduler.policy.tenant import Tenant
from stages.scheduler.recovery.quarantine import Quarantine, next_alone
from stages.scheduler.stats import Stats

_PROMPT_PHASES = (Phase.PENDING, Phase.PREFILLING)  # a constant, because access to enum members is slow


class StepLoop:
    """Publishes steps and keeps the unacknowledged ones, in order."""

    def __init__(
        self,
        budget: Budget,
        now: float,
        worker: WorkerLink,
        members: list[SequenceState],
        queues: TenantQueues,
        table: SequenceTable,
        rows: RowScheduler,
        pages: PageSupply,
        leases: Leases,
        completion: StepCompletion,
        proposer: Proposer,
        drafts: DraftPool,
        quarantine: Quarantine,
        cost: CostModel,
        stats: Stats,
        constraints: Constraints,
    ) -> None:
        """`members`: the scheduled sequences that the worker group of `worker` computes."""
        self._constraints = constraints
        self._members = members
        self._phases = PhasePoints()
        self.unacknowledged: deque[Step] = deque()
        self.budget = budget
        self.pacing = budget.pacing
        self.lead = LeadTime(self.pacing)
        self.allowed_depth = self.pacing.depth  # less while other models want the same cores (policy/core_sharing.py)
        self.is_alone = True  # no other model is loaded that may want the same cores
        # Called with the tenants that have work and found no place in a step. Of all groups, if there are several.
        self.settle: Callable[[Sequence[Tenant]], None] = queues.settle
        self._worker = worker
        self._queues = queues
        self._table = table
        self._rows = rows
        self._pages = pages
        self._leases = leases
        self._completion = completion
        self._proposer = proposer
        self._drafts = drafts
        self._quarantine = quarantine
        self._cost = cost
        self._stats = stats
        self._began = now  # when the worker began the first unacknowledged step
        self._is_delayed = False  # a step could be published, and waits for the end of the current one
        self._is_late = False  # it was still waiting when that one ended
        self._has_paused = False  # the step that was composed last had no running stream

    def run_round(self, now: float) -> int:
        """One round of the loop. Returns the number of steps published."""
        self.complete(now)
        if self._drafts.sequences:
            self._drafts.dismiss_unused(now)
        # Before there is room in the ring: pages are granted while a step computes.
        self._rows.schedule(now)
        published = 0
        while self._publish_next(now):
            published += 1
        self._constraints.flush(now)
        return published

    def complete(self, now: float) -> None:
        """Process all acknowledged steps."""
        ring, steps = self._worker.ring, self.unacknowledged
        if not steps or ring is None:
            return
        done = ring.done
        began, predicted_s = self._began, 0.0
        kinds: set[bool | None] = set()
        while steps and steps[0].number <= done:
            step = steps.popleft()
            predicted_s += step.expected_s
            kinds.add(step.has_prompts_beside_streams)
            self._completion.complete(step, ring, now)
            if self._quarantine.is_active:
                self._quarantine.update(self._members)
            self._began = now
            self._is_late, self._is_delayed = self._is_delayed, False
            self.lead.record_step()
        if predicted_s:
            kind = kinds.pop() if len(kinds) == 1 else None
            spread = None if kind is None else self._cost.beside if kind else self._cost.alone
            self._cost.learn_pace(predicted_s, now - began, spread)

    def _publish_next(self, now: float) -> bool:
        """Compose and publish the next step, if there is room in the ring and something to compute."""
        steps = self.unacknowledged
        if not self._worker.is_attached:
            return False
        if len(steps) >= min(self.pacing.depth, self.allowed_depth):
            return self._publish_ahead(now)
        if steps:
            if steps[-1].is_verifying or self._quarantine.is_active:
                return False
            self._is_delayed = self.publish_wait_s(now) > 0
            if self._is_delayed:
                return False
        else:
            self._began = now
        batch = self._compose(now)
        is_late, self._is_late = self._is_late, False
        if batch.entries:
            self._publish(batch, now)
        elif not (self._drafts.sequences and self._publish_drafts()):
            return False
        if is_late:
            self.lead.record_late()
        return True

    def _compose(self, now: float) -> Batch[SequenceState]:
        if self._quarantine.is_active:
            sequence = next_alone(self._members)
            if sequence is not None:
                return compose_alone(sequence, self.budget)
        self._pages.preempt_if_starved()
        self._constraints.resume_void()
        self._proposer.begin_step(now)
        batch = compose(self._members, self.budget, self._cost, self._proposer, not self._has_paused)
        self._has_paused = batch.pauses_streams
        return batch

    # -------------------------------------------------------------- publishing

    def _publish_ahead(self, now: float) -> bool:
        """Publish a short step beyond the usual depth, so that the scheduler is woken once for a few steps.

        A request that arrives waits for all of them, and steps past a stop are discarded.
        """
        steps, pacing = self.unacknowledged, self.pacing
        is_shared = self.allowed_depth < pacing.depth or pacing.depth < 2
        if is_shared or len(steps) >= pacing.max_depth or self._quarantine.is_active:
            return False
        expected_s = sum(step.expected_s for step in steps)
        if self._drafts.sequences:
            if self._table.live or expected_s > pacing.short_step_s:
                return False
            return self._publish_drafts()
        if not pacing.may_follow(len(steps), expected_s, len(steps[-1].entries)) or not self._is_steady:
            return False
        self._proposer.begin_step(now)
        batch = compose(self._members, self.budget, self._cost, self._proposer)
        if batch.entries:
            self._publish(batch, now)
        return bool(batch.entries)

    def _publish(self, batch: Batch[SequenceState], now: float) -> None:
        ring, stats = self._worker.ring, self._stats
        assert ring is not None
        rows: list[tuple[int, int, int, int, int]] = []
        samples = 0
        pooled: list[PooledPart] = []
        is_verifying = has_news = is_growing = False
        for entry in batch.entries:
            sequence, start, count = entry.sequence, entry.start, entry.count
            run = sequence.run
            if entry.draft_tokens:
                ring.write_tokens(run.row, start + 1, array("i", entry.draft_tokens))
                sequence.draft_tokens = entry.draft_tokens
                is_verifying = True
            elif entry.samples:
                run.ahead += 1
                outputs = run.length + run.ahead - sequence.prompt_len
                has_news = has_news or outputs == 1 or count > 1 or outputs == sequence.max_tokens
            elif sequence.pooled is not None:
                part = sequence.pooled.part(start, count)
                if part[1]:
                    pooled.append(PooledPart(len(rows), *part))
                has_news = has_news or start + count == sequence.prompt_len
            if not sequence.started:
                sequence.started = now
                # The load of a version is no queue, such as for its self-test, which is sent meanwhile.
                stats.waited_s.add(now - max(sequence.arrived, self._worker.first_attached))
            run.planned = start + count
            run.inflight += 1
            tenant = sequence.tenant
            tenant.served += count * tenant.inverse
            tenant.computed += count
            n_samples = entry.samples + entry.scored
            samples += n_samples
            masks = sequence.masks
            if masks is not None and masks.has_drafts and not entry.draft_tokens:
                self._constraints.skip_drafts(sequence)
            epoch = masks.epoch if masks is not None and not entry.scored else 0
            rows.append((run.row, start, count, n_samples, epoch))
            if run.planned > run.extend_at and not run.pending_id:
                self._leases.extend(run)
                is_growing = True
        if is_growing:
            self._pages.extend_neighbours()
        step = self._write_step(ring, rows, samples, batch, pooled)
        stats.step_tokens.add(batch.tokens)
        self._phases.published(batch.entries)
        step.entries, step.is_verifying, step.has_news = batch.entries, is_verifying, has_news
        step.pooled = pooled
        self.settle(batch.unscheduled)

    def _publish_drafts(self) -> bool:
        batch: Batch[DraftSequence] = self._drafts.compose()
        if not batch.entries:
            return False
        ring = self._worker.ring
        assert ring is not None
        rows: list[tuple[int, int, int, int, int]] = []
        samples = 0
        for entry in batch.entries:
            run = entry.sequence.run
            run.ahead += entry.samples
            run.planned = entry.start + entry.count
            run.inflight += 1
            samples += entry.samples
            rows.append((run.row, entry.start, entry.count, entry.samples, 0))
            if run.planned > run.extend_at and not run.pending_id:
                self._leases.extend(run)
        self._write_step(ring, rows, samples, batch).draft_entries = batch.entries
        return True

    def _write_step(
        self,
        ring: Ring,
        rows: list[tuple[int, int, int, int, int]],
        samples: int,
        batch: Batch[SequenceState] | Batch[DraftSequence],
        pooled: list[PooledPart] | None = None,
    ) -> Step:
        number = ring.publish(rows, pooled or ())
        expected_s = self._cost.predict(batch.tokens, batch.positions) * 1e-6
        step = Step(number, [], [], batch.tokens, batch.positions, samples, expected_s)
        self.unacknowledged.append(step)
        self._stats.steps += 1
        self._stats.batch.add(len(rows))
        return step

    # -------------------------------------------------------------- timing

    @property
    def _is_steady(self) -> bool:
        """All sequences are streams that get one token in each step, and no request waits.

        Token masks are written for one step at a time: sequences with constraints are not steady.
        """
        if self._queues.depth or self._constraints.is_used:
            return False
        is_idle = self._proposer.is_idle
        return all(s.phase not in _PROMPT_PHASES and is_idle(s) for s in self._members)

    @property
    def _is_full(self) -> bool:
        """The next step is for running streams alone, also if a request of their tenant arrives before it begins.

        They fill all places of the batch.  One that has ended leaves its place, though published steps compute it; a
        step with news may have the last token of another one.

        Not full: a batch of several tenants, because their streams make room for each other's requests; one of a model
        that shares its cores, whose next step another model's requests would wait for; one that is divided among
        worker groups, because a stream that ends in one of them leaves a place in each.
        """
        members = self._members
        if not self.is_alone or len(members) < self.budget.max_entries:
            return False
        if any(step.has_news for step in self.unacknowledged):
            return False
        tenant = members[0].tenant
        if any(sequence.tenant is not tenant for sequence in self._table.scheduled):
            return False
        return sum(not sequence.is_done for sequence in members) >= self.budget.max_entries

    @property
    def wake_step(self) -> int:
        """The unacknowledged step (there must be one) after whose end the scheduler is woken.

        The worker has another step behind it at that time.
        """
        steps = self.unacknowledged
        if len(steps) > 2 and not (self._queues.depth or self._drafts.sequences):
            with_news = (step.number for step in steps if step.has_news)
            return min(next(with_news, steps[-2].number), steps[-2].number)
        return steps[0].number

    def publish_wait_s(self, now: float) -> float:
        """Seconds until the current step is near enough to its end to publish the next one.

        A step that is composed late includes what has arrived meanwhile; after a step that is composed early,
        an arriving request waits for two steps.  A step of a full batch is composed early: this saves a wake-up, and
        falls into the time in which the gateway writes the tokens of the last step.  Two kinds of requests wait for one
        step more than if it were composed late: the first one of another tenant, and one for whose place a stream is
        cancelled meanwhile.
        """
        steps, pacing = self.unacknowledged, self.pacing
        if len(steps) != 1 or pacing.depth < 2:
            return 0.0
        expected_s = steps[0].expected_s
        if expected_s < pacing.short_step_s:
            return 0.0
        is_short = expected_s < pacing.stream_wait_s(len(steps[0].entries)) / 2
        if (is_short or self._is_full) and self._is_steady:
            return 0.0
        return max(0.0, self._began + expected_s - self.lead.seconds - now)

    def delay_s(self, now: float) -> float:
        """Seconds until `run_round` may have something to do without an event; inf: never."""
        waits = (
            self._rows.batch_wait_s(now),
            self.publish_wait_s(now),
            self._proposer.wait_s(now),
            self._constraints.wait_s(now),
        )
        return min((wait for wait in waits if wait > 0), default=math.inf)
