"""The engine of one model: frames and acknowledged steps in, published steps and frames out. No I/O, no clock.

    submit --> queue --(row, Acquire)--> scheduled --(Granted)--> steps --> finish
                 ^                                       |
                 `------------- preempted ---------------'   pages ran out: page_supply.py

`Engine` builds the parts and connects them; each part receives the parts that it uses.  Frames for kv gather in
`leases.frames`, frames for the gateways in `outbox`.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.protocol.messages import KvReady, ModelState
from shm.layer_groups import ONE_GROUP, LayerGroups
from stages.scheduler.constraints.constraints import Constraints
from stages.scheduler.constraints.vetting import Vetting
from stages.scheduler.core.completion import StepCompletion
from stages.scheduler.core.engine_groups import EngineGroup, EngineGroups
from stages.scheduler.core.leases import Leases
from stages.scheduler.core.outbox import Outbox
from stages.scheduler.core.page_supply import PageSupply
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.row_scheduler import RowScheduler
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.sequence_table import SequenceTable
from stages.scheduler.core.settings import Settings
from stages.scheduler.core.step_log import StepLog
from stages.scheduler.core.step_loop import StepLoop
from stages.scheduler.core.submission_queue import UNAVAILABLE_S, SubmissionQueue
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.draft.draft_pool import DraftPool
from stages.scheduler.draft.proposer import Proposer
from stages.scheduler.policy.admission import Limits, Refusal, lacks_adapter
from stages.scheduler.policy.batch import Budget
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.pacing import PacingPolicy
from stages.scheduler.policy.queues import TenantQueues
from stages.scheduler.policy.wait_estimate import WaitEstimate
from stages.scheduler.recovery.quarantine import Quarantine
from stages.scheduler.stats import Stats


class Engine:
    """Everything about one model but its sockets. `set_ring` or `worker.ring` precedes `attach`."""

    def __init__(
        self,
        settings: Settings,
        now: float,
        weight_of: Callable[[str], float] = lambda _: 1.0,
        vetting: Vetting | None = None,
    ) -> None:
        """`vetting`: of constraints; without it they are refused."""
        s = self.settings = settings
        pacing = PacingPolicy(depth=2 if s.run_ahead else 1)
        self._adapters: tuple[tuple[str, str], ...] = ()  # of the workers: name and digest
        limits = self._limits = Limits(s.max_prompt_tokens, s.max_output_tokens)
        budget = Budget(s.max_batch_size, max(s.max_step_tokens, s.max_batch_size), s.max_samples, pacing)
        stats = self.stats = Stats()
        cost = self.cost = CostModel()
        links = [WorkerLink(now) for _ in range(s.worker_groups)]
        worker = self.worker = links[0] if len(links) == 1 else WorkerLink(now)
        outbox = self.outbox = Outbox()
        leases = self.leases = Leases(s.model)
        limits.most_pages = leases.most_pages
        queues = self.queues = TenantQueues(s.max_queue_depth, s.max_tenant_depth, weight_of)
        constraints = self.constraints = Constraints(s.model, worker, vetting)
        table = self.table = SequenceTable(queues, leases, outbox, stats, s.n_rows, constraints, len(links))
        constraints.fail = table.fail
        drafts = self.drafts = DraftPool(s, worker, leases, table, limits, budget, cost)
        pages = self.pages = PageSupply(limits, worker, table, leases, drafts, stats)
        rows = self.rows = RowScheduler(s, limits, worker, queues, table, leases, pages, constraints)
        waits = self.waits = WaitEstimate(s.max_batch_size, queues, table, cost, stats, s.worker_groups)
        self.submissions = SubmissionQueue(
            s, limits, worker, queues, table, rows, outbox, waits, cost, stats, constraints
        )
        proposer = self.proposer = Proposer(table, queues, cost, stats, constraints)

        def make_group(link: WorkerLink, members: list[SequenceState]) -> EngineGroup:
            step_log, quarantine = StepLog(s.model), Quarantine()
            completion = StepCompletion(
                pacing, table, leases, outbox, proposer, drafts, cost, stats, constraints, step_log, link
            )
            steps = StepLoop(
                budget,
                now,
                link,
                members,
                queues,
                table,
                rows,
                pages,
                leases,
                completion,
                proposer,
                drafts,
                quarantine,
                cost,
                stats,
                constraints,
            )
            return EngineGroup(link, members, steps, quarantine, step_log)

        made = [make_group(link, members) for link, members in zip(links, table.members, strict=True)]
        self._groups = EngineGroups(worker, made, queues, table, outbox, stats)
        self.groups = self._groups.all
        self.steps = made[0].steps  # of the first group: of most models the only one

    # -------------------------------------------------------------- the worker's life

    def set_ring(self, number: int, ring: Ring | None) -> None:
        """The step ring of a worker group; None: the step arena is gone."""
        self.groups[number].link.ring = ring
        if number == 0:
            self.worker.ring = ring

    def attach(
        self,
        context_length: int,
        vocab_size: int,
        is_causal: bool = True,
        adapters: tuple[tuple[str, str], ...] = (),
        window: int = 0,
        groups: LayerGroups = ONE_GROUP,
        number: int = 0,
    ) -> None:
        """Worker group `number` has let go of everything before and reads its ring from now on.

        `adapters`: name and digest.
        `window`: positions that attention reads in layers with a window; 0: all. All groups have the same model.
        """
        self.leases.set_window(window if window < context_length else 0, self.steps.budget.max_tokens, groups)
        self._adapters = adapters
        self._limits.adapters = frozenset(digest for _, digest in adapters)
        for sequence in list(self.table.scheduled):
            if not sequence.is_done and (refusal := lacks_adapter(sequence, self._limits)):
                self.table.fail(sequence, refusal.code, refusal.message)
        self._limits.context_length, self._limits.vocab_size = context_length, vocab_size
        self._limits.whole_prompt_tokens = 0 if is_causal else self.steps.budget.max_tokens
        self._groups.attached(number)
        self.cost.start_worker()

    def halt(self, now: float, number: int = 0) -> None:
        """Publish nothing more for a group and return no row or page of it; it may still compute a step."""
        self._groups.halted(number, now)

    def detached(self, now: float, suspicion: int = 0, number: int = 0) -> None:
        """A worker group computes no step any more; steps that it has not acknowledged are void.

        `suspicion`: DEATH or STALL if it ended in the first unacknowledged step, see recovery/quarantine.py.
        """
        self.outbox.now = now
        group = self.groups[number]
        group.steps.complete(now)
        culprit = None
        steps = group.steps.unacknowledged
        if steps:
            self.stats.repeated += 1
            members = [entry.sequence for entry in steps[0].entries if not entry.sequence.is_done]
            if suspicion:
                culprit = group.quarantine.record(members, suspicion)
                for drafted in steps[0].draft_entries:
                    drafted.sequence.suspicion = suspicion
        steps.clear()
        self.proposer.dismiss_drafts()
        self.drafts.void_steps()
        for sequence in list(group.members):
            sequence.run.void_unacknowledged()
            sequence.draft_tokens = ()
            if sequence.is_done:
                self.table.release(sequence)
            elif sequence.is_preempting:
                self.table.preempt(sequence)
            else:
                self.constraints.restart(sequence)
        if culprit is not None:
            self.stats.culprits += 1
            message = "the worker died or made no progress each time it computed this request"
            self.table.fail(culprit, "INFERENCE", message)
        group.quarantine.update(group.members)
        self.halt(now, number)
        self._groups.detached(number)

    def record_worker(self, name: str, now: float, number: int = 0) -> None:
        """For the timelines of requests: a worker group is "lost", or has "started".

        Of all requests of the model, or with several groups of those that the group computes.
        """
        if len(self.groups) > 1:
            self._groups.record(self.groups[number].members, name, now)
            return
        gateways = {sequence.gateway for sequence in self.table.live.values() if sequence.gateway}
        self.outbox.add_worker_event(gateways, name, now, self.worker.pid)

    # -------------------------------------------------------------- kv's life

    def kv_ready(self, frame: KvReady) -> bool:
        """See `PageSupply.kv_ready`."""
        return self.pages.kv_ready(frame)

    def kv_down(self) -> None:
        """See `PageSupply.kv_down`."""
        self.pages.kv_down()

    # -------------------------------------------------------------- time and state

    def tick(self, now: float) -> None:
        """Call at each tick."""
        self.table.expire(now)
        self.submissions.shed(now)
        self.queues.forget_idle()
        for group in self.groups:
            group.step_log.flush()
        if not self.worker.is_attached and now - self.worker.detached_since > UNAVAILABLE_S:
            self.reject_all(Refusal("MODEL_UNAVAILABLE", "no worker became ready in time", "model", 5.0))

    def reject_all(self, refusal: Refusal) -> None:
        """End all sequences with `refusal`."""
        for gateway, frame in self.constraints.take_held():
            self.outbox.add_rejected(gateway, frame.sequence, refusal)
        for sequence in list(self.table.live.values()):
            self.table.reject(sequence, refusal)

    def fail_all(self, code: str, message: str) -> None:
        """End all sequences with an error, also those that have output."""
        for gateway, frame in self.constraints.take_held():
            self.outbox.add_rejected(gateway, frame.sequence, Refusal(code, message))
        for sequence in list(self.table.live.values()):
            self.table.fail(sequence, code, message)

    @property
    def is_busy(self) -> bool:
        """It has sequences, or published steps that are not acknowledged."""
        return bool(self.table.live or self.has_steps or self.constraints.is_busy)

    @property
    def has_steps(self) -> bool:
        """Steps are published and not acknowledged."""
        return any(group.steps.unacknowledged for group in self.groups)

    @property
    def is_ready(self) -> bool:
        """Sequences can be computed: a worker is attached and kv is up."""
        return self.worker.is_attached and self.leases.is_up

    def has_work(self, now: float) -> bool:
        """A step is published, or could be; False while all sequences wait for draft tokens."""
        if self.has_steps or self.drafts.has_work:
            return True
        return bool(self.table.live) and not self.proposer.is_waiting(now)

    def state(self, digest: str, reason: str, kv_free: int) -> ModelState:
        """State for the gateways. `reason`: why the model is not ready, "" when it is."""
        return ModelState(
            self.settings.model,
            digest,
            not reason,
            reason,
            self.queues.depth,
            len(self.table.scheduled),
            self.settings.max_batch_size,
            kv_free,
            self.leases.total_pages,
            self._adapters,
        )
