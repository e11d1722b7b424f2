"""Completion: the sampled tokens of an acknowledged step become output, and filled pages are committed."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.protocol.messages import Logprob
from shm.step_ring import NO_MASK
from stages.scheduler.constraints.constraints import Constraints
from stages.scheduler.core.leases import Leases
from stages.scheduler.core.outbox import Outbox
from stages.scheduler.core.phase_points import PhasePoints
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.sequence import Phase, SequenceState
from stages.scheduler.core.sequence_table import SequenceTable
from stages.scheduler.core.step import Step, StepEntry
from stages.scheduler.core.step_log import StepLog
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.draft.draft_pool import DraftPool
from stages.scheduler.draft.proposer import Proposer
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.pacing import PacingPolicy
from stages.scheduler.stats import Stats


class StepCompletion:
    """Processes the acknowledged steps of one worker group."""

    def __init__(
        self,
        pacing: PacingPolicy,
        table: SequenceTable,
        leases: Leases,
        outbox: Outbox,
        proposer: Proposer,
        drafts: DraftPool,
        cost: CostModel,
        stats: Stats,
        constraints: Constraints,
        step_log: StepLog,
        worker: WorkerLink,
    ) -> None:
        self._worker = worker
        self._constraints = constraints
        self._step_log = step_log
        self._phases = PhasePoints()
        self._commit_delay = pacing.commit_delay_tokens
        self._table = table
        self._leases = leases
        self._outbox = outbox
        self._proposer = proposer
        self._drafts = drafts
        self._cost = cost
        self._stats = stats

    def complete(self, step: Step, ring: Ring, now: float) -> None:
        """Process one step; steps must come in their order."""
        took_us = ring.took_us(step.number)
        if self._step_log.is_enabled:
            self._step_log.add(step, ring.generation, took_us, self._worker.pid, now)
        if took_us > 0:
            self._stats.step_s[step.phase].add(took_us * 1e-6)
            self._cost.learn(step.tokens, step.positions, took_us)
        sampled = ring.outputs(step.number, step.samples)
        if step.draft_entries:
            self._complete_drafts(step, sampled, took_us * 1e-6)
            return
        if step.pooled:
            self._add_pooled(step, ring)
        known = self._stats.generated
        self._complete_requests(step, ring, sampled, took_us, now)
        self._proposer.record_step(step.entries, self._stats.generated - known, now)

    def _complete_drafts(self, step: Step, sampled: Sequence[int], took_s: float) -> None:
        base = 0
        for entry in step.draft_entries:
            self._drafts.complete(entry, sampled[base] if entry.samples else 0, took_s / len(step.draft_entries))
            base += entry.samples

    def _complete_requests(self, step: Step, ring: Ring, sampled: Sequence[int], took_us: float, now: float) -> None:
        base = 0
        is_commit_due = False
        for entry in step.entries:
            sequence = entry.sequence
            run = sequence.run
            run.inflight -= 1
            sequence.suspect_count = 0
            if sequence.is_done:
                self._stats.discarded += entry.samples
                if not run.inflight:
                    self._table.release(sequence)
            else:
                was_prompt = sequence.phase is Phase.PREFILLING
                if was_prompt:
                    self._record_chunk(step, entry, took_us, now)
                if run.computed < sequence.prompt_len:
                    self._stats.prompt_computed += min(entry.count, sequence.prompt_len - run.computed)
                if entry.samples:
                    self._append_samples(entry, ring, step.number, base, sampled)
                elif entry.scored:
                    run.computed = entry.start + entry.count
                    self._send_scores(entry, ring, step.number, base)
                else:
                    run.computed = entry.start + entry.count
                    if sequence.pooled is not None and run.computed == sequence.prompt_len:
                        self._table.finish_pooled(sequence)
                if not sequence.is_done:
                    page_tokens = self._leases.page_tokens
                    past_page = run.computed - (run.committed // page_tokens + 1) * page_tokens
                    if not was_prompt:
                        is_commit_due = is_commit_due or past_page >= self._commit_delay
                    elif past_page >= 0 and (sequence.pooled is None or self._leases.window):
                        self._leases.commit(run)  # at once: prompts with the same prefix wait for it
                    if sequence.is_preempting and not run.inflight:
                        self._table.preempt(sequence)
            base += entry.scored + entry.samples
        if is_commit_due:
            self._commit_outputs()

    def _record_chunk(self, step: Step, entry: StepEntry[SequenceState], took_us: float, now: float) -> None:
        """For the timeline of the request: a chunk of its prompt is computed."""
        self._outbox.add_event(
            entry.sequence,
            "prefill",
            now,
            pid=self._worker.pid,
            begin=entry.start,
            end=entry.start + entry.count,
            ms=took_us / 1000,
            step=step.number,
            batch=len(step.entries),
            samples=entry.samples,
        )

    def _send_scores(self, entry: StepEntry[SequenceState], ring: Ring, step: int, base: int) -> None:
        """Send the scores of prompt tokens of one entry, whose first output is `base`."""
        sequence, scores = entry.sequence, entry.sequence.scores
        assert scores is not None
        packed = ring.scores(step, base, entry.scored, scores.top)
        if packed is None:
            self._table.fail(sequence, "INFERENCE", "the model computed logits that are not finite")
            return
        first = scores.part(entry.start, entry.count)[0] + 1
        scores.scored = first + entry.scored
        self._outbox.add_scores(sequence, first, packed)
        if scores.is_complete and not sequence.max_tokens:
            self._phases.finishing(sequence)
            self._table.finish(sequence, "length")

    def _add_pooled(self, step: Step, ring: Ring) -> None:
        """Add the sums of a step to their sequences', before one of these ends or is preempted."""
        for place, part in enumerate(step.pooled):
            sequence = step.entries[part.entry].sequence
            if sequence.is_done or sequence.pooled is None:
                continue
            sums = ring.pooled_sums(step.number, place, part.n)
            if sums is None:
                self._table.fail(sequence, "INFERENCE", "the model computed hidden states that are not finite")
            else:
                sequence.pooled.add(sums, part.n)

    def _commit_outputs(self) -> None:
        """Commit all streams that have filled a page, not only the one that is due: kv is woken once for them."""
        page_tokens = self._leases.page_tokens
        for sequence in self._table.scheduled:
            run = sequence.run
            is_stream = sequence.phase is Phase.DECODING and not sequence.is_done
            if is_stream and run.computed // page_tokens > run.committed // page_tokens:
                self._leases.commit(run)

    def _append_samples(
        self, entry: StepEntry[SequenceState], ring: Ring, step: int, base: int, sampled: Sequence[int]
    ) -> None:
        """Samples of one entry: output tokens up to a stop, the limit, or a draft token that was not accepted."""
        sequence = entry.sequence
        run, draft_tokens, stop_ids = sequence.run, entry.draft_tokens, sequence.stop_ids
        if sequence.constraint is not None and sampled[base] == NO_MASK:
            self._leave_void(entry)
            return
        if sequence.phase is Phase.PREFILLING:
            sequence.enter_phase(Phase.DECODING)
        first = sequence.outputs
        tokens: list[int] = []
        finish = ""
        is_finite = True
        for i in range(entry.samples):
            token = sampled[base + i]
            if token < 0:
                is_finite = token == NO_MASK
                break
            tokens.append(token)
            if token in stop_ids:
                finish = "stop"
            elif run.length + len(tokens) >= run.end:
                finish = "length"
            if finish or (draft_tokens and i < len(draft_tokens) and draft_tokens[i] != token):
                break
        n = len(tokens)
        run.tokens.extend(tokens)
        run.length += n
        self._stats.generated += n
        if sequence.sampling.ignore_eos:
            self._stats.endless += n
        logprobs: tuple[Logprob, ...] = ()
        top = sequence.sampling.logprobs
        if top >= 0:
            logprobs = tuple(ring.logprob(step, base + i, top) for i in range(n))
        if draft_tokens:
            self._accept_drafts(entry, ring, n)
        else:
            run.computed = entry.start + entry.count
            run.ahead -= 1
        if finish:
            self._phases.finishing(sequence)
            self._table.finish(
                sequence, finish, start=first, tokens=tuple(tokens), logprobs=logprobs, attachment=ring.generation
            )
            return
        if tokens:
            self._outbox.add_tokens(sequence, first, tuple(tokens), logprobs)
        if sequence.constraint is not None:
            self._constraints.advance(sequence)
        if not is_finite:
            self._table.fail(sequence, "INFERENCE", "the model computed logits that are not finite")

    def _leave_void(self, entry: StepEntry[SequenceState]) -> None:
        """The first sample of the entry had no token mask in time: its position is computed again later.

        The same holds for the steps behind it, which are published already.
        """
        sequence = entry.sequence
        run = sequence.run
        if entry.draft_tokens:
            sequence.draft_tokens = ()
            self._proposer.record_verified(sequence, len(entry.draft_tokens), 0)
        else:
            run.ahead -= 1
        run.computed = min(run.length - 1, entry.start + entry.count - 1)
        if not run.inflight:
            run.planned = run.computed
        self._constraints.mark_void(sequence)

    def _accept_drafts(self, entry: StepEntry[SequenceState], ring: Ring, n: int) -> None:
        """A verification produced `n` tokens: all but the last were draft tokens, whose positions are computed."""
        sequence = entry.sequence
        run = sequence.run
        accepted = max(0, n - 1)
        sequence.draft_tokens = ()
        sequence.accepted += accepted
        run.computed = run.planned = entry.start + max(1, n)
        if n and run.length < run.end:
            ring.write_tokens(run.row, run.length - 1, run.tokens[-1:])
        self._proposer.record_verified(sequence, len(entry.draft_tokens), accepted)
