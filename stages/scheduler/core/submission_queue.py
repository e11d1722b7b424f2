"""The submission queue: admits the gateways' submissions to the tenants' queues, or refuses them; cancels."""

from __future__ import annotations

import logging

from pipeline.config.schema import MAX_DRAFT_TOKENS
from pipeline.observe.log_names import log_names
from pipeline.protocol.messages import Cancel, Submit
from stages.scheduler.constraints.constraints import Constraints
from stages.scheduler.core.outbox import Outbox
from stages.scheduler.core.phase_points import PhasePoints
from stages.scheduler.core.row_scheduler import RowScheduler
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.sequence_table import SequenceTable
from stages.scheduler.core.settings import Settings
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.policy.admission import Limits, Refusal, check_frame, check_limits, log_fields
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.queues import QueueFullError, TenantQueues
from stages.scheduler.policy.wait_estimate import WaitEstimate
from stages.scheduler.stats import Stats

log = logging.getLogger("starling.scheduler")

UNAVAILABLE_S = 60.0  # sequences are refused when no worker has been attached for so long
MIN_STEPS = 32  # steps after which sequences are refused for a deadline even if none of them was measured
SHED_S = 0.5  # between two checks of the waiting sequences
SHED_MARGIN = 1.25  # a waiting sequence is refused if it would take so many times its remaining time


class SubmissionQueue:
    """The submission queue of one model. Answers go to the outbox."""

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        worker: WorkerLink,
        queues: TenantQueues,
        table: SequenceTable,
        rows: RowScheduler,
        outbox: Outbox,
        waits: WaitEstimate,
        cost: CostModel,
        stats: Stats,
        constraints: Constraints,
    ) -> None:
        self._constraints = constraints
        self._phases = PhasePoints()
        self._settings = settings
        self._limits = limits
        self._worker = worker
        self._queues = queues
        self._table = table
        self._rows = rows
        self._outbox = outbox
        self._waits = waits
        self._cost = cost
        self._stats = stats
        self._next_shed = float("-inf")

    def submit(self, gateway: bytes, frame: Submit, now: float) -> None:
        """Queue a sequence, or answer with `Rejected`.

        Everything about the new sequence is decided before another tenant's one is removed for it: a refused
        submission costs no other sequence its place.  The first sequence of a request that needs another tenant's place
        decides for all that follow.
        """
        table = self._table
        self._outbox.now = now
        self._constraints.cancel_held(frame.sequence)  # it is submitted again
        refusal = check_frame(frame)
        replaced = table.live.get(frame.sequence)
        if refusal is None and replaced is not None:
            if table.reattach(gateway, frame):
                return
            table.cancel_silently(replaced)
        removed: SequenceState | None = None
        if refusal is None and not frame.forced:  # with forced tokens it was admitted before
            refusal, removed = self._check_load(frame, now)
        if refusal is not None:
            self._refuse(gateway, frame, refusal)
            return
        sequence = table.create(gateway, frame, now)
        refusal = check_limits(sequence, self._limits)
        if refusal is not None and frame.forced:
            table.add(sequence)
            table.fail(sequence, refusal.code, refusal.message)
            return
        if refusal is None and frame.constraint is not None:
            held = self._constraints.hold(gateway, frame, now, self.submit, self._refuse)
            if held is True:
                return
            refusal = held if isinstance(held, Refusal) else None
        if refusal is not None:
            self._refuse(gateway, frame, refusal)
            return
        table.add(sequence)
        sequence.max_draft_tokens = self._max_draft_tokens(frame)
        if replaced is not None and frame.revision > replaced.revision:  # the same stream: it keeps its age
            sequence.key = (replaced.key[0], sequence.key[1])
            sequence.arrival = replaced.arrival
        if sequence.outputs and sequence.run.tokens[-1] in sequence.stop_ids:
            table.finish(sequence, "stop")
        elif sequence.outputs >= sequence.max_tokens and (sequence.scores is None or sequence.scores.is_complete):
            table.finish(sequence, "length")
        else:
            if removed is not None:
                self._remove(removed)
            self._outbox.add_event(sequence, "queued", now, ahead=self._queues.depth)
            self._queues.push(sequence)
            self._phases.queued(sequence)

    def _max_draft_tokens(self, frame: Submit) -> int:
        configured = self._settings.speculate
        if frame.prediction and configured >= 0:
            configured = MAX_DRAFT_TOKENS
        return max(0, min(frame.speculate or configured, MAX_DRAFT_TOKENS))

    def _refuse(self, gateway: bytes, frame: Submit, refusal: Refusal) -> None:
        self._stats.refused += 1
        names = log_names(frame.request, frame.model, frame.tenant, frame.session)
        facts = {"sequence": frame.sequence, **log_fields(*refusal[:3])}
        log.info("a sequence is refused", extra={**names, **facts})
        self._outbox.add_rejected(gateway, frame.sequence, refusal)

    def _check_load(self, frame: Submit, now: float) -> tuple[Refusal | None, SequenceState | None]:
        """Why a new sequence cannot wait now, or which waiting sequence must be removed for it. Removes none."""
        if self._worker.failure:
            message = f"model {frame.model} cannot run: {self._worker.failure}"
            return Refusal("MODEL_UNAVAILABLE", message, "model", 5.0), None
        if not self._worker.is_attached and now - self._worker.detached_since > UNAVAILABLE_S:
            return Refusal("MODEL_UNAVAILABLE", f"model {frame.model} has no ready worker", "model", 5.0), None
        tenant = self._queues.tenant(frame.tenant)
        begun: frozenset[str] = frozenset()
        if self._queues.is_full(tenant):
            self._rows.schedule(now)  # sequences that arrived since the last round leave the queue if rows are free
            begun = frozenset(sequence.request for sequence in self._table.scheduled)
        try:
            removed = self._queues.make_room(tenant, begun, frame.following)
        except QueueFullError as error:
            wait_s = self._waits.retry_after_s(tenant)
            message = f"queue of {frame.model} is full: {error}; try again later"
            return Refusal("OVERLOADED", message, "", wait_s), None
        # The estimate is for a full batch.  A sequence that begins at once may be faster, and stop early enough.
        if frame.deadline_ms > 0 and self._is_estimated and not self._rows.begins_at_once:
            done_s = self._waits.backlog_s(tenant)
            if self._queues.depth:
                done_s += self._waits.run_s(frame)
            if done_s * 1000 > frame.deadline_ms:
                message = (
                    f"it would take {done_s:.1f} s, the request's time is {frame.deadline_ms} ms "
                    "(server.request_timeout_ms); try again later"
                )
                return Refusal("OVERLOADED", message, "", self._waits.retry_after_s(tenant)), None
        return None, removed

    def _remove(self, waiting: SequenceState) -> None:
        """Refuse a waiting sequence whose place in the full queue another tenant's new one gets."""
        message = (
            f"queue of {waiting.model} is full and most of it is yours (scheduler.max_queue_depth): send fewer "
            "requests at once, or try again later"
        )
        self._table.reject(waiting, Refusal("OVERLOADED", message, "", self._waits.retry_after_s(waiting.tenant)))

    def shed(self, now: float) -> None:
        """Refuse waiting sequences that will miss their deadline. Call at each tick.

        They were admitted before costs were known, or before it was known how long outputs become.  A request with a
        choice that computes is not refused, nor is one that only waits for a worker or for the batch to begin.
        """
        if now < self._next_shed or not self._queues.depth or not self._is_estimated:
            return
        self._next_shed = now + SHED_S
        n_begin = self._rows.free_places  # any tenant's first ones may be those
        if self._queues.depth <= n_begin:
            return
        begun = {sequence.request for sequence in self._table.scheduled}
        load = self._waits.load()
        for tenant in [tenant for tenant in self._queues.tenants.values() if tenant.waiting]:
            late = [
                (sequence, takes_s)
                for sequence, takes_s in self._waits.too_late(tenant, load, now, SHED_MARGIN, n_begin)
                if not sequence.outputs and sequence.request not in begun
            ]
            if not late:
                continue
            retry_s = self._waits.retry_after_s(tenant, load)
            for sequence, takes_s in late:
                left_s = sequence.deadline - now
                message = (
                    f"it would take {takes_s:.1f} s more, and {left_s:.1f} s of the request's time are left "
                    "(server.request_timeout_ms); try again later"
                )
                self._table.reject(sequence, Refusal("OVERLOADED", message, "", retry_s))
            load.changed(tenant)

    @property
    def _is_estimated(self) -> bool:
        """Sequences are refused for a deadline, and costs are known well enough."""
        return self._settings.refuses_late and (self._cost.is_known or self._stats.steps > MIN_STEPS)

    def cancel(self, frame: Cancel) -> None:
        """End a sequence whose output is not wanted any more. Unknown ids are late, which is normal."""
        sequence = self._table.live.get(frame.sequence)
        if sequence is None:
            if not self._constraints.cancel_held(frame.sequence):
                self._stats.late += 1
            return
        if frame.at >= 0:
            sequence.run.valid_end = sequence.prompt_len + frame.at
        self._table.finish(sequence, "stop" if frame.at >= 0 else "cancelled")
