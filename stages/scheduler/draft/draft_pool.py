"""The draft sequences that one engine computes for the sequences of other engines.

    invite --> Acquire, catch up in chunks --> follow(k more) --> k draft tokens --> follow ... --> dismiss

No request waits for a draft sequence in its own engine: draft sequences compute only in steps in which no request has
anything to compute, have rows of their own, and are dismissed when pages run short.  They are in no queue and in no
tenant's account, and gateways never receive anything about them.  Only positions whose tokens the target has
confirmed are committed to kv, so the prefix cache stays correct.  A draft sequence does not keep its target alive,
and is dismissed when the target ends or is preempted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec

from pipeline.api.adapter_salt import without_adapter
from pipeline.protocol.messages import Granted
from stages.scheduler.core.leases import BadTableError, Leases
from stages.scheduler.core.sequence_table import SequenceTable
from stages.scheduler.core.settings import Settings
from stages.scheduler.core.step import Batch, StepEntry, attention_positions
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.draft.draft_sequence import DraftSequence, DraftTarget
from stages.scheduler.policy.admission import Limits
from stages.scheduler.policy.batch import CHUNK_GRAIN, MIN_PROMPT_CHUNK, Budget
from stages.scheduler.policy.cost import CostModel

IDLE_S = 1.0  # a draft sequence that is unused for so long is dismissed


class DraftPool:
    """At most `Settings.max_draft_sequences` draft sequences. Rows and pages are those of the engine."""

    def __init__(
        self,
        settings: Settings,
        worker: WorkerLink,
        leases: Leases,
        table: SequenceTable,
        limits: Limits,
        budget: Budget,
        cost: CostModel,
    ) -> None:
        self.sequences: list[DraftSequence] = []
        self._settings = settings
        self._worker = worker
        self._leases = leases
        self._table = table
        self._limits = limits
        self._budget = budget
        self._cost = cost
        self._count = 0
        self._has_new_work = False

    # -------------------------------------------------------------- called by the target's engine

    @property
    def is_available(self) -> bool:
        """The engine can compute and has no requests."""
        return self._worker.is_attached and self._leases.is_up and not self._table.live

    def invite(
        self, target: DraftTarget, is_wanted: Callable[[DraftSequence], bool], now: float
    ) -> DraftSequence | None:
        """A draft sequence that starts to catch up with `target`; None if there is no place or no use for one."""
        limits, rows, ring = self._limits, self._table.free_rows, self._worker.ring
        positions = limits.kv_pages // self._leases.groups.n_groups * limits.page_tokens
        bounds = (target.end, limits.context_length, positions + 1 if positions else 0)
        end = min(bound for bound in bounds if bound)
        is_full = len(self.sequences) >= self._settings.max_draft_sequences or not rows
        if is_full or ring is None or not self.is_available or len(target.tokens) + 1 >= end:
            return None
        self._count += 1
        # Lease ids of requests begin with a request id, never with a slash.
        draft = DraftSequence(f"/draft/{self._settings.model}/{self._count}", target, end, is_wanted, now)
        run = draft.run
        run.row = rows.popleft()
        self.sequences.append(draft)
        sampling = msgspec.structs.replace(target.sampling, logprobs=-1)
        ring.write_row(run.row, run.tokens, target.prompt_len, sampling, target.choice, tuple(target.stop_ids))
        # No adapter computes it, whatever computes its target: its pages are those of the same salt without one.
        self._leases.acquire(run, without_adapter(target.salt)[0])
        return draft

    def follow(self, draft: DraftSequence, tokens: array[int], goal: int, now: float) -> bool:
        """The target's known tokens are `tokens`: propose up to `goal` tokens in all.

        False: a published step computes the draft sequence, call again later.
        """
        draft.used_at = now
        run = draft.run
        known = len(tokens)
        if draft.base == known:
            if goal > draft.goal and run.tokens[-1] not in draft.stop_ids:
                draft.goal = min(goal, run.end)
                self._has_new_work = True
            return True
        if run.inflight or draft.is_done:
            return False
        ring, own = self._worker.ring, run.tokens
        assert ring is not None
        same, most = draft.base, min(known, len(own))
        while same < most and own[same] == tokens[same]:
            same += 1
        del own[same:]
        own.extend(tokens[same:])
        ring.write_tokens(run.row, same, own[same:])
        # Its last position is computed in any case: the first draft token is sampled there.
        run.computed = run.planned = min(run.computed, same, known - 1)
        run.length = draft.base = run.valid_end = known
        draft.goal = min(goal, run.end)
        page_tokens = self._leases.page_tokens
        if run.pages and run.computed // page_tokens > run.committed // page_tokens:
            self._leases.commit(run)
        self._has_new_work = True
        return True

    def dismiss(self, draft: DraftSequence) -> None:
        """Return its row and pages as soon as no step computes it. Idempotent."""
        if not draft.is_done:
            draft.is_done = True
            draft.run.computed = min(draft.run.computed, draft.base)
            if not draft.run.inflight:
                self._release(draft)

    def take_new_work(self) -> bool:
        """Whether there is something new to compute since the last call."""
        has_new_work, self._has_new_work = self._has_new_work, False
        return has_new_work

    def catch_up_us(self, length: int) -> float:
        """Expected cost of computing the first `length` positions."""
        return self._cost.predict(length, attention_positions(0, length))

    # -------------------------------------------------------------- called by its own engine

    @property
    def has_work(self) -> bool:
        """Some draft sequence has something to compute."""
        return any(draft.has_work for draft in self.sequences)

    def find(self, lease_id: str) -> DraftSequence | None:
        """The draft sequence with that lease."""
        return next((draft for draft in self.sequences if draft.run.lease_id == lease_id), None)

    def compose(self) -> Batch[DraftSequence]:
        """A step of draft sequences. Changes nothing."""
        budget, cost = self._budget, self._cost
        entries: list[StepEntry[DraftSequence]] = []
        tokens = positions = 0
        left_us = budget.pacing.draft_chunk_us
        for draft in self.sequences:
            if len(entries) >= budget.max_entries or not draft.has_work:
                continue
            run = draft.run
            start = run.planned
            todo = run.known - start
            most = min(todo, run.leased - start, budget.max_tokens - tokens)
            count = min(most, max(MIN_PROMPT_CHUNK, cost.chunk(left_us, start, most)))
            if CHUNK_GRAIN <= count < most:
                count -= count % CHUNK_GRAIN
            if count < 1:
                continue
            attended = attention_positions(start, count)
            left_us -= cost.token_us * count + cost.position_us * attended
            tokens += count
            positions += attended
            entries.append(StepEntry(draft, start, count, 1 if count == todo else 0))
        return Batch(entries, tokens, positions)

    def store_pages(self, draft: DraftSequence, frame: Granted, is_first: bool) -> None:
        """Pages from kv. With the first pages, some positions may be computed already."""
        run, ring = draft.run, self._worker.ring
        assert ring is not None
        before = len(run.pages)
        try:
            self._leases.store_table(run, frame)
        except BadTableError:
            self.dismiss(draft)
            return
        ring.write_table(run.row, before, run.pages[before:])
        if is_first:
            run.computed = run.planned = run.committed = frame.cached_tokens

    def complete(self, entry: StepEntry[DraftSequence], token: int, took_s: float) -> None:
        """A step with it is acknowledged; `token` is the sampled one, if `entry` has a sample."""
        draft = entry.sequence
        run = draft.run
        run.inflight -= 1
        draft.spent_s += took_s
        if draft.is_done:
            if not run.inflight:
                self._release(draft)
            return
        run.computed = entry.start + entry.count
        if not entry.samples:
            return
        run.ahead -= 1
        if token < 0:  # logits that are not finite
            self.dismiss(draft)
            return
        run.tokens.append(token)
        run.length += 1
        if token in draft.stop_ids:  # no token follows it
            draft.goal = min(draft.goal, run.length)

    def dismiss_unused(self, now: float) -> None:
        """Dismiss those whose target is gone or has not used them for `IDLE_S`. Called in each round."""
        for draft in list(self.sequences):
            if not draft.is_wanted(draft) or now - draft.used_at > IDLE_S:
                self.dismiss(draft)

    def dismiss_all(self) -> None:
        """A request needs their pages, or their pages have lost their contents."""
        for draft in list(self.sequences):
            self.dismiss(draft)

    def drop_pages(self) -> None:
        """kv's arena has other contents: the pages are not ours any more."""
        for draft in self.sequences:
            draft.run.pages = ()
        self.dismiss_all()

    def void_steps(self) -> None:
        """The worker is detached, and unacknowledged steps are void: dismiss all."""
        for draft in list(self.sequences):
            draft.run.inflight = 0
            if draft.is_done:
                self._release(draft)
            self.dismiss(draft)

    def _release(self, draft: DraftSequence) -> None:
        has_released = self._leases.release(draft.run)
        self.sequences.remove(draft)
        self._table.free_rows.append(draft.run.row)
        draft.run.row = -1
        if has_released:
            self._table.on_pages_released()
