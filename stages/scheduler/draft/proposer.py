"""The proposer: where a sequence's draft tokens come from, and whether they are worth their time.

There are three sources: the text that the client predicts (prediction.py) and prompt lookup (prompt_lookup.py), which
cost nothing, then a draft sequence on a draft model (draft_sequence.py), if the model has one.  Proposals of all are
verified in the same way, so no output depends on anything here.

A draft sequence takes time: its steps, and the delay of the target's step that waits for it.  All of it is measured
and booked on an account in units of plain decoding steps:

    a step that verifies draft tokens of the model   + tokens gained (for each sequence)
                                                     - time since the previous step, waiting included
    catching up, on the same cores                   - time that it took
    a plain step                                     + EARN

The draft model is asked while there is credit, and after that not before some credit has been earned again.  So
whatever the text and the draft model are like, plain decoding loses `EARN` of its pace in the long run, and a first
trial once.  Each sequence also has a `DraftLength` of its own.

The draft model is asked only for all running sequences at once, and only if they are few: with a larger batch,
prompts to compute or requests waiting, the time is better spent on those.
"""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple

from pipeline.models.arena_sizes import MAX_DRAFT_SEQUENCES
from stages.scheduler.constraints.constraints import Constraints
from stages.scheduler.core.sequence import Phase, SequenceState
from stages.scheduler.core.sequence_table import SequenceTable
from stages.scheduler.core.step import StepEntry
from stages.scheduler.draft.draft_pool import DraftPool
from stages.scheduler.draft.draft_sequence import DraftSequence, DraftTarget
from stages.scheduler.draft.draft_state import DraftState
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.queues import TenantQueues
from stages.scheduler.recovery.quarantine import CULPRIT_AT
from stages.scheduler.stats import Stats

NEAR = 8  # missing positions of a draft sequence up to which its target waits for it
LONG_PAUSE = 32  # a draft sequence is dismissed when its source pauses for more tokens than this
SLACK_S = 0.002  # waiting time in addition to what the draft tokens would take as plain steps

# The account, in plain steps
EARN = 0.02
INITIAL_CREDIT = 64.0  # what a first trial may cost,
INITIAL_CREDIT_S = 0.1  # or this many seconds, if that is more: a worker that has never computed is slow at first
RESUME_CREDIT = 8.0  # credit at which the draft model is asked again
MAX_CREDIT = 512.0
MAX_LOSS = 16.0  # of one step: a larger loss has another cause (another process had the cores, a worker died)


class DraftLink(NamedTuple):
    """Connection to the draft model's engine."""

    pool: DraftPool
    shares_cores: bool


class Proposer:
    """The proposer of one engine; implements `batch.DraftSource`."""

    def __init__(
        self, table: SequenceTable, queues: TenantQueues, cost: CostModel, stats: Stats, constraints: Constraints
    ) -> None:
        self.link: DraftLink | None = None
        self.is_allowed = True  # no other model wants the cores that the draft model computes on
        self.credit = math.nan  # until the link is used
        self._constraints = constraints
        self._table = table
        self._queues = queues
        self._cost = cost
        self._stats = stats
        self._is_exhausted = False  # the credit is used up
        self._may_ask = False  # the draft model may be asked for the step that is being composed
        self._now = 0.0
        self._waiting: list[DraftState] = []  # whose step was delayed when the last one was composed
        self._has_waited_in_vain = False
        self._last_step_at = 0.0

    def set_link(self, link: DraftLink | None) -> None:
        """From now on draft tokens come from there; None: from prompt lookup alone."""
        if link == self.link:
            return
        self.dismiss_drafts()
        self.link, self.credit, self._is_exhausted = link, math.nan, False

    def dismiss_drafts(self) -> None:
        """Drop all draft sequences; new ones are invited after the next `begin_step` at the earliest."""
        self._waiting.clear()
        for sequence in self._table.scheduled:
            if sequence.draft_state is not None:
                self._dismiss(sequence.draft_state)

    # -------------------------------------------------------------- proposing

    def begin_step(self, now: float) -> None:
        """A step is about to be composed."""
        self._now = now
        self._waiting.clear()
        self._may_ask = self.link is not None and self._can_ask(self.link)

    def is_idle(self, sequence: SequenceState) -> bool:
        """Steps may be published ahead: finding draft tokens a few tokens late costs less than waking up for each."""
        if not sequence.max_draft_tokens:
            return True
        return (self.link is None or self._is_exhausted) and self._state(sequence).is_idle(sequence.run.length)

    def expects_match(self, sequence: SequenceState) -> bool:
        """See `batch.DraftSource`."""
        state = self._state(sequence)
        if state.expects_match(sequence.run.tokens):
            return True
        return self._may_ask and self._is_near(state, sequence)

    def propose(self, sequence: SequenceState, room: int) -> tuple[int, ...] | None:
        """See `batch.DraftSource`."""
        found = self._propose(sequence, room)
        if found is None or sequence.masks is None:
            return found
        return self._constraints.allow(sequence, found, self._now)

    def _propose(self, sequence: SequenceState, room: int) -> tuple[int, ...] | None:
        state = self._state(sequence)
        found = state.propose(sequence.run.tokens, room)
        state.is_model = False
        if found or not self._may_ask or not self._is_near(state, sequence):
            return found
        return self._ask(state, sequence, room)

    def _ask(self, state: DraftState, sequence: SequenceState, room: int) -> tuple[int, ...] | None:
        draft, link = state.draft, self.link
        assert draft is not None
        assert link is not None
        known = sequence.run.length
        goal = known + min(room, state.model_length.length)
        if state.asked_at != known:
            self._book(state, sequence)
            state.asked_at = known
            # The target's own time for as many tokens: waiting longer gains nothing.
            state.deadline = self._now + 1e-6 * (goal - known) * self._plain_us(1, known) + SLACK_S
        is_following = link.pool.follow(draft, sequence.run.tokens, goal, self._now)
        if not (is_following and draft.is_complete) and self._now < state.deadline:
            self._waiting.append(state)
            return None
        state.booked_s = draft.spent_s
        draft_tokens = draft.draft_tokens[:room] if is_following else ()
        if not draft_tokens:
            self._has_waited_in_vain = True
            self._record_model(state, known, 1, 0)
            return ()
        state.is_model = True
        return draft_tokens

    def _is_near(self, state: DraftState, sequence: SequenceState) -> bool:
        """Whether a draft sequence has nearly caught up. If not, it is invited, or catches up further."""
        link, draft = self.link, state.draft
        assert link is not None
        if draft is not None and draft.is_done:
            self._dismiss(state)
            draft = None
        if draft is None:
            if state.suspicion < CULPRIT_AT:
                self._invite(link, state, sequence)
            else:
                state.model_length.resume_at = sequence.run.end  # the draft model is there for others
            return False
        run = sequence.run
        if run.length >= draft.run.end - 1:
            self._dismiss(state)
            state.model_length.resume_at = run.end  # the draft model's context ends here
            return False
        if draft.run.pages and run.length - draft.run.computed <= NEAR:
            return True
        link.pool.follow(draft, run.tokens, run.length + 1, self._now)
        self._book(state, sequence)
        return False

    def _invite(self, link: DraftLink, state: DraftState, sequence: SequenceState) -> None:
        run = sequence.run
        price_us = link.pool.catch_up_us(run.length) if link.shares_cores else 0.0
        if price_us > self.credit * self._plain_us(1, run.length):
            return
        target = DraftTarget(
            run.tokens,
            sequence.prompt_len,
            run.end,
            sequence.sampling,
            sequence.choice,
            sequence.stop_ids,
            sequence.salt,
            run.owner,
        )
        reference = weakref.ref(sequence)

        def is_wanted(draft: DraftSequence) -> bool:
            asking = reference()
            if asking is None or asking.is_done or asking.is_preempting or asking.run.row < 0:
                return False
            return asking.draft_state is not None and asking.draft_state.draft is draft

        state.draft = link.pool.invite(target, is_wanted, self._now)
        state.booked_s = 0.0
        state.asked_at = 0

    def _can_ask(self, link: DraftLink) -> bool:
        scheduled = self._table.scheduled
        if self._is_exhausted or not self.is_allowed or len(scheduled) > MAX_DRAFT_SEQUENCES or self._queues.depth:
            return False
        if not link.pool.is_available:
            return False
        if math.isnan(self.credit):
            self.credit = max(INITIAL_CREDIT, 1e6 * INITIAL_CREDIT_S / self._plain_us(1, 0))
        for sequence in scheduled:
            if sequence.is_done:
                continue
            if not sequence.max_draft_tokens or sequence.is_preempting or sequence.phase is not Phase.DECODING:
                return False
            if sequence.run.length + 1 < self._state(sequence).model_length.resume_at:
                return False
        return True

    # -------------------------------------------------------------- waiting

    def wait_s(self, now: float) -> float:
        """Seconds until waiting for draft tokens ends in any case; 0.0: no step waits."""
        return min((state.deadline - now for state in self._waiting), default=0.0)

    def is_waiting(self, now: float) -> bool:
        """Nothing can be composed now because draft tokens are still being computed."""
        link = self.link
        if not self._waiting or not self.is_allowed or link is None or not link.pool.is_available:
            return False
        return any(
            now < state.deadline and state.draft is not None and not state.draft.is_complete for state in self._waiting
        )

    # -------------------------------------------------------------- learning

    def record_verified(self, sequence: SequenceState, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` draft tokens were accepted."""
        state, stats = self._state(sequence), self._stats
        stats.drafted += drafted  # only now, so that the number of rejected ones never falls
        stats.accepted += accepted
        stats.verified[accepted] += 1
        if state.is_model:
            stats.model_drafted += drafted
            stats.model_accepted += accepted
            self._record_model(state, sequence.run.length, drafted, accepted)
        else:
            state.text.record(sequence.run.length, drafted, accepted)

    def record_step(self, entries: list[StepEntry[SequenceState]], gained: int, now: float) -> None:
        """A step of requests is acknowledged; it produced `gained` tokens."""
        since, self._last_step_at = self._last_step_at, now
        if self.link is None or math.isnan(self.credit):
            return
        n = len(entries)
        is_model = any(e.draft_tokens and self._state(e.sequence).is_model for e in entries)
        if is_model or self._has_waited_in_vain:
            self._has_waited_in_vain = False
            plain_s = self._plain_us(n, sum(e.start + 1 for e in entries)) * 1e-6
            self.credit += max(-MAX_LOSS, gained / n - (now - since) / plain_s)
        elif all(e.sequence.max_draft_tokens for e in entries):
            self.credit += EARN
        self.credit = min(self.credit, MAX_CREDIT)
        if self.credit <= 0.0 and not self._is_exhausted:
            self._is_exhausted = True
            self.dismiss_drafts()
        elif self.credit >= RESUME_CREDIT:
            self._is_exhausted = False

    def _book(self, state: DraftState, sequence: SequenceState) -> None:
        """Charge what its draft sequence has computed to catch up."""
        draft, link = state.draft, self.link
        if draft is not None and link is not None:
            if link.shares_cores:
                spent_us = 1e6 * (draft.spent_s - state.booked_s)
                self.credit -= spent_us / self._plain_us(1, sequence.run.length)
            state.booked_s = draft.spent_s

    def _record_model(self, state: DraftState, known: int, drafted: int, accepted: int) -> None:
        state.model_length.record(known, drafted, accepted)
        if state.model_length.resume_at - known > LONG_PAUSE:
            self._dismiss(state)

    def _dismiss(self, state: DraftState) -> None:
        # The draft engine also checks by itself whether its draft sequences are still wanted.
        draft, state.draft = state.draft, None
        if draft is not None:
            state.suspicion += draft.suspicion
            if self.link is not None:
                self.link.pool.dismiss(draft)

    def _plain_us(self, tokens: int, positions: int) -> float:
        return self._cost.predict(tokens, positions)

    @staticmethod
    def _state(sequence: SequenceState) -> DraftState:
        if sequence.draft_state is None:
            sequence.draft_state = DraftState(sequence.max_draft_tokens, sequence.prediction, sequence.prompt_len)
        return sequence.draft_state
