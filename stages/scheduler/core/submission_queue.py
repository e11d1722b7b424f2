"""The gateways' side of a model: what they submit and cancel, and what is refused because too much waits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.protocol.messages import Cancel, Submit
from stages.scheduler.core.sequence_table import rejection
from stages.scheduler.policy.admission import Refusal, malformed, misfit
from stages.scheduler.policy.queues import QueueFullError, Tenant

if TYPE_CHECKING:
    from stages.scheduler.core.engine import Engine

MAX_DRAFT = 16  # draft tokens of a sequence in a step
UNAVAILABLE_S = 60.0  # without a worker for so long, what waits is refused


class Door:
    """Of one engine. Answers gather in its roster."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def submit(self, owner: bytes, frame: Submit, now: float) -> None:
        """A sequence for the queue, or its `Rejected`."""
        roster = self._engine.roster
        refusal = malformed(frame)
        if refusal is None and frame.sequence in roster.live:
            if roster.adopt(owner, frame):
                return
            roster.abandon(roster.live[frame.sequence])
        if refusal is None and not frame.forced:
            refusal = self._crowded(frame, now)
        if refusal is not None:
            self._engine.stats.refused += 1
            roster.rejected.append((owner, rejection(frame.sequence, refusal)))
            return
        sequence = roster.enter(owner, frame, now)
        sequence.speculate = max(0, min(frame.speculate or self._engine.settings.speculate, MAX_DRAFT))
        refusal = misfit(sequence, self._engine.limits)
        if refusal is not None:
            if frame.forced:
                roster.fail(sequence, refusal.code, refusal.message)
            else:
                roster.reject(sequence, refusal)
        elif sequence.outputs and sequence.tokens[-1] in sequence.stop_ids:
            roster.finish(sequence, "stop")
        elif sequence.length >= sequence.end:
            roster.finish(sequence, "length")
        else:
            self._engine.queues.push(sequence)

    def _crowded(self, frame: Submit, now: float) -> Refusal | None:
        """Why a new sequence cannot wait here now. One with forced tokens was accepted before."""
        if not self._engine.is_attached and now - self._engine.detached_since > UNAVAILABLE_S:
            message = f"model {frame.model} has no worker that is ready"
            return Refusal("MODEL_UNAVAILABLE", message, "model", 5.0)
        tenant = self._engine.queues.tenant(frame.tenant)
        begun: frozenset[str] = frozenset()
        if self._engine.queues.is_full(tenant):
            self._engine.take_up(now)  # who has come since the last turn waits for nothing if there are places
            begun = frozenset(sequence.request for sequence in self._engine.roster.held)
        try:
            out = self._engine.queues.room(tenant, begun)
        except QueueFullError as error:
            wait = self.wait_s(tenant)
            return Refusal("OVERLOADED", f"queue of {frame.model} is full: {error}", "", wait)
        if out is not None:
            wait = self.wait_s(out.tenant)
            message = f"queue of {frame.model} is full and most of it is yours"
            self._engine.roster.reject(out, Refusal("OVERLOADED", message, "", wait))
        if frame.deadline_ms > 0 and self._engine.stats.steps > 32:
            through_s = self.backlog_s(tenant)
            if self._engine.queues.depth:  # one that can begin at once is given the chance to stop early
                through_s += self._run_s(frame)
            if through_s * 1000 > frame.deadline_ms:
                message = f"it would be through in {through_s:.1f} s, the request's time is {frame.deadline_ms} ms"
                return Refusal("OVERLOADED", message, "", self.wait_s(tenant))
        return None

    def cancel(self, frame: Cancel) -> None:
        """Nobody wants more of it. Unknown ids are late and normal."""
        sequence = self._engine.roster.live.get(frame.sequence)
        if sequence is None:
            self._engine.stats.late += 1
            return
        if frame.at >= 0:
            sequence.valid_end = sequence.prompt_len + frame.at
        self._engine.roster.finish(sequence, "stop" if frame.at >= 0 else "cancelled")

    def wait_s(self, tenant: Tenant) -> float:
        """When to come again: what `tenant` has waiting now is through then. Whole seconds, at least 1."""
        return max(1.0, math.ceil(self.backlog_s(tenant)))

    def backlog_s(self, tenant: Tenant) -> float:
        """How long until what `tenant` has waiting now is through, by measured cost and pace and by its share."""
        n, held = self._engine.settings.max_batch_size, self._engine.roster.held
        step_us, prompt_us = self._costs()
        output_us = step_us / n * self._engine.stats.mean_output

        def work_us(t: Tenant) -> float:
            return t.waiting * output_us + t.prompt_backlog * prompt_us

        active = [t for t in self._engine.queues.tenants.values() if t.is_active]
        everything = sum(work_us(t) for t in active)
        everything += sum(max(0, s.length - s.planned) * prompt_us + output_us / 2 for s in held)
        share = tenant.weight / (sum(t.weight for t in active if t is not tenant) + tenant.weight)
        own = work_us(tenant) / share + output_us * n / 2
        return min(everything, own) * 1e-6

    def _run_s(self, frame: Submit) -> float:
        """How long it will compute in a full batch, as far as that can be told."""
        step_us, prompt_us = self._costs()
        outputs = min(frame.max_tokens, self._engine.stats.mean_output)
        return (outputs * step_us + len(frame.prompt) // 4 * prompt_us) * 1e-6

    def _costs(self) -> tuple[float, float]:
        """A step of a full batch, and a token of a prompt (of which some are cached), us."""
        n, cost, held = self._engine.settings.max_batch_size, self._engine.cost, self._engine.roster.held
        # What attention looks at: sequences as long as those that compute now.
        length = sum(s.length for s in held) / len(held) if held else self._engine.stats.mean_output / 2
        step_us = cost.predict(n, round(n * length))
        prompt_us = (cost.token_us + cost.position_us * length / 2) * self._engine.stats.mean_fresh
        return step_us * cost.pace, prompt_us * cost.pace
