"""The sequences of one model, from submission until their row and pages are returned.

    live       by id: output is still wanted
    waiting    live, without a row (`TenantQueues`)
    scheduled  with a row, oldest first: waiting for pages, computing, or done and still computed by a published step

A sequence's terminal event is sent when it leaves `live`, which happens exactly once.
"""

from __future__ import annotations

import heapq
import logging
import math
from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable

from pipeline.observe.log_names import log_names
from pipeline.protocol.messages import Logprob, Submit
from stages.scheduler.constraints.constraints import Constraints
from stages.scheduler.core.leases import Leases
from stages.scheduler.core.outbox import Outbox
from stages.scheduler.core.sequence import Phase, SequenceState
from stages.scheduler.policy.admission import Refusal, log_fields
from stages.scheduler.policy.queues import TenantQueues
from stages.scheduler.stats import Stats

log = logging.getLogger("starling.scheduler")

REATTACH_S = 10.0  # a sequence of a disconnected gateway computes on for so long


class SequenceTable:
    """Sequences, rows and deadlines of one model."""

    def __init__(
        self,
        queues: TenantQueues,
        leases: Leases,
        outbox: Outbox,
        stats: Stats,
        n_rows: int,
        constraints: Constraints,
        n_groups: int = 1,
    ) -> None:
        self.live: dict[str, SequenceState] = {}
        self.scheduled: list[SequenceState] = []
        # The scheduled ones by worker group; with one group the same list.
        self.members = [self.scheduled] if n_groups == 1 else [[] for _ in range(n_groups)]
        self.choose_group: Callable[[], int] = lambda: 0  # for a sequence that is scheduled
        # Whether its worker group completes the steps of a scheduled sequence. False: it may hold its row and pages for
        # a minute, for which the sequences of other groups do not wait.
        self.responds: Callable[[SequenceState], bool] = lambda _: True
        self.by_lease: dict[str, SequenceState] = {}  # the scheduled ones
        # First in, first out: a row that was just released is reused last, so late readers of it do least harm.
        self.free_rows: deque[int] = deque(range(n_rows))
        self.on_pages_released: Callable[[], None] = lambda: None
        self._constraints = constraints
        self._queues = queues
        self._leases = leases
        self._outbox = outbox
        self._stats = stats
        self._submissions = 0
        self._timers = 0
        self._deadlines: list[tuple[float, int, SequenceState]] = []  # heap

    # -------------------------------------------------------------- beginning

    def create(self, gateway: bytes, frame: Submit, now: float) -> SequenceState:
        """A new sequence, which is not in the table yet."""
        self._submissions += 1
        return SequenceState(frame, gateway, self._queues.tenant(frame.tenant), now, self._submissions)

    def add(self, sequence: SequenceState) -> None:
        """Make a new sequence live, neither waiting nor scheduled yet. Its id must not be live."""
        if sequence.id in self.by_lease:  # a done sequence of the same id still has its lease
            sequence.run.lease_id = f"{sequence.id}~{sequence.arrival[1]}"
        self.live[sequence.id] = sequence
        self._constraints.open(sequence)
        self._stats.submitted += 1
        if sequence.deadline < math.inf:
            self._set_timer(sequence.deadline, sequence)

    def allocate_row(self, sequence: SequenceState) -> None:
        """Schedule a sequence that was taken out of its queue. A row must be free."""
        sequence.run.row = self.free_rows.popleft()
        sequence.tenant.scheduled += 1
        self.by_lease[sequence.run.lease_id] = sequence
        insort(self.scheduled, sequence, key=age)
        if len(self.members) > 1:
            sequence.run.group = self.choose_group()
            insort(self.members[sequence.run.group], sequence, key=age)

    def begin_prefill(self, sequence: SequenceState) -> None:
        """The scheduled sequence has its first pages."""
        sequence.enter_phase(Phase.PREFILLING)
        self._outbox.add_started(sequence)
        kv_ms = round(max(0.0, self._outbox.now - sequence.acquired_at) * 1000, 3)
        self._outbox.add_event(sequence, "admitted", cached_tokens=sequence.run.computed, kv_ms=kv_ms)
        if log.isEnabledFor(logging.DEBUG):
            queue_ms = round((sequence.acquired_at - sequence.arrived) * 1000, 3)
            facts = {"cached_tokens": sequence.run.computed, "queue_ms": queue_ms, "kv_ms": kv_ms}
            log.debug("a sequence is admitted", extra={**_ids(sequence), **facts})

    # -------------------------------------------------------------- ending

    def finish(
        self,
        sequence: SequenceState,
        reason: str,
        *,
        error: str = "",
        message: str = "",
        param: str = "",
        start: int = -1,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[Logprob, ...] = (),
        attachment: int = 0,
    ) -> None:
        """Send the terminal event of a live sequence, with its last tokens from output index `start`.

        `attachment`: of the worker group that computed them, see `ModelState`; 0: none did.

        Row and pages are returned as soon as no step computes the sequence.
        """
        begin = sequence.outputs if start < 0 else start
        self._outbox.add_tokens(sequence, begin, tokens, logprobs, reason, error, message, param, attachment)
        self._stats.record_finish(reason, sequence.outputs, not sequence.sampling.ignore_eos)
        if log.isEnabledFor(logging.DEBUG):
            took_ms = round((self._outbox.now - sequence.arrived) * 1000, 3)
            facts = {"finish": reason, "tokens": sequence.outputs, "duration_ms": took_ms}
            log.debug("a sequence has ended", extra={**_ids(sequence), **facts})
        self._remove(sequence, Phase.FAILED if error else Phase.FINISHED)

    def finish_pooled(self, sequence: SequenceState) -> None:
        """Send the vector of a live sequence whose whole prompt is computed and pooled: its terminal event."""
        vector = sequence.pooled.vector() if sequence.pooled is not None else None
        if vector is None:
            self.fail(sequence, "INTERNAL", "hidden states of the prompt were not computed")
            return
        self._outbox.add_pooled(sequence, vector)
        self._stats.record_pooled()
        self._remove(sequence, Phase.FINISHED)

    def fail(self, sequence: SequenceState, code: str, message: str, param: str = "") -> None:
        """End a live sequence with an error. `param`: the request's field at fault."""
        log.info("a sequence has failed", extra={**_ids(sequence), **log_fields(code, message, param)})
        self.finish(sequence, "error", error=code, message=message, param=param)

    def reject(self, sequence: SequenceState, refusal: Refusal) -> None:
        """End a live sequence that is not computed here and now."""
        log.info("a sequence is refused", extra={**_ids(sequence), **log_fields(*refusal[:3])})
        self._outbox.add_rejected(sequence.gateway, sequence.id, refusal)
        self._stats.refused += 1
        self._remove(sequence, Phase.FAILED)

    def cancel_silently(self, sequence: SequenceState) -> None:
        """End a live sequence without an event: no gateway receives it, or its id has been submitted again."""
        sequence.gateway = b""
        self.finish(sequence, "cancelled")

    def _remove(self, sequence: SequenceState, phase: Phase) -> None:
        sequence.enter_phase(phase)
        sequence.is_done = True
        del self.live[sequence.id]
        self._constraints.close(sequence)
        if sequence in self._queues:
            self._queues.remove(sequence)
        elif sequence.run.row >= 0 and sequence.run.inflight == 0:
            self.release(sequence)

    def release(self, sequence: SequenceState) -> None:
        """Return row and pages of a scheduled sequence that no step computes."""
        run = sequence.run
        has_released = self._leases.release(run)
        self.scheduled.remove(sequence)
        if len(self.members) > 1:
            self.members[run.group].remove(sequence)
        del self.by_lease[run.lease_id]
        self.free_rows.append(run.row)
        run.row = -1
        sequence.tenant.scheduled -= 1
        if has_released:
            self.on_pages_released()

    # -------------------------------------------------------------- preemption

    def preempt(self, sequence: SequenceState) -> None:
        """Back to the queue, without row and pages, as soon as no step computes the scheduled, live sequence.

        It is computed again from its tokens, which produces the same tokens after them.
        """
        sequence.is_preempting = True
        if sequence.run.inflight:
            return
        self.release(sequence)
        self._outbox.add_event(sequence, "preempted", tokens=sequence.outputs)
        sequence.reset()
        if sequence.phase is not Phase.PENDING:
            sequence.enter_phase(Phase.PENDING)
        self._queues.push(sequence)

    # -------------------------------------------------------------- gateways

    def reattach(self, gateway: bytes, frame: Submit) -> bool:
        """A live id is submitted again: True if the running sequence serves the submission, from now on to `gateway`.

        A gateway that restarts thus loses nothing that was computed meanwhile.  It must be the same request, its
        forced tokens must agree with the known output, and it must not want logprobs or scores (they are not kept).
        """
        sequence = self.live[frame.sequence]
        tokens, split = sequence.run.tokens, sequence.prompt_len
        forced = array("i")
        forced.frombytes(frame.forced)
        received = len(forced)
        if (
            frame.sampling.logprobs >= 0
            or frame.revision != sequence.revision
            or (frame.prompt_logprobs >= 0 and frame.scored < sequence.prompt_len)
            or tokens[:split].tobytes() != frame.prompt
            or sequence.sampling != frame.sampling
            or sequence.constraint != frame.constraint
            or sequence.max_tokens != frame.max_tokens
            or (sequence.pooled.kind if sequence.pooled is not None else "") != frame.pooling
            or sequence.stop_ids != frozenset(frame.stop_ids)
            or tokens[split : split + received] != forced
            or received > sequence.outputs
        ):
            return False
        sequence.gateway = gateway
        sequence.has_emitted = False
        self._outbox.add_event(sequence, "reattached", tokens=sequence.outputs)
        if sequence.phase is not Phase.PENDING:
            self._outbox.add_started(sequence)
        if received < sequence.outputs:
            self._outbox.add_tokens(sequence, received, tuple(tokens[split + received :]))
        return True

    def detach_gateway(self, gateway: bytes, now: float) -> None:
        """The gateway is disconnected: its sequences end in `REATTACH_S` unless they are submitted again."""
        for sequence in self.live.values():
            if sequence.gateway == gateway:
                sequence.gateway = b""
                sequence.detached_until = now + REATTACH_S
                self._set_timer(sequence.detached_until, sequence)
        self._outbox.drop_gateway(gateway)
        self._constraints.drop_gateway(gateway)

    # -------------------------------------------------------------- deadlines

    def _set_timer(self, when: float, sequence: SequenceState) -> None:
        self._timers += 1
        heapq.heappush(self._deadlines, (when, self._timers, sequence))

    def expire(self, now: float) -> None:
        """End the sequences whose time is over, and those that no gateway has submitted again."""
        if len(self._deadlines) > 64 + 4 * len(self.live):
            self._deadlines = [timer for timer in self._deadlines if not timer[2].is_done]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.is_done:
                continue
            if now >= sequence.deadline:
                where = "waiting" if sequence.phase is Phase.PENDING else "computing"
                self.finish(
                    sequence,
                    "timeout",
                    error="TIMEOUT",
                    message=f"the request's time was over after {now - sequence.arrived:.1f} s ({where}, "
                    f"{sequence.outputs} tokens of output)",
                )
            elif not sequence.gateway and now >= sequence.detached_until:  # later if it was detached again
                self.cancel_silently(sequence)


def _ids(sequence: SequenceState) -> dict[str, str | None]:
    """Fields of a log line about a sequence."""
    names = log_names(sequence.request, sequence.model, sequence.tenant.name, sequence.session)
    return {**names, "sequence": sequence.id}


def age(sequence: SequenceState) -> tuple[float, int]:
    """Orders scheduled sequences, the oldest first."""
    return sequence.key
