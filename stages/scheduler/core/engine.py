"""One model: frames and acknowledged steps in, published steps and frames out. No I/O, no clock of its own.

The step loop: `complete` what the worker has acknowledged, `plan` the next step, publish it.  Two
steps are unacknowledged (short ones: more): one computes, the other stands ready behind it, composed before
the first one's samples are known (shm/step_ring.py says why that works).  What was computed past a
stop or a cancel is discarded; a row and its pages go only when no step names them.

    submit --> queue --(row, Acquire)--> held --(Granted)--> steps --> finish
                 ^                                    |
                 `------------- set aside ------------'   pages ran out: the youngest goes

Frames for kv gather in `leases.frames`, for the gateways in `roster.moved` and `roster.rejected`.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.protocol.messages import Denied, Granted, KvReady, KvState, Logprob, ModelState
from shm.step_ring import SLOTS
from stages.scheduler.core.leases import BadTableError, Leases
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.sequence import Sequence, State
from stages.scheduler.core.sequence_table import Roster
from stages.scheduler.core.submission_queue import UNAVAILABLE_S, Door
from stages.scheduler.draft.draft_sequence import Companion, Companions
from stages.scheduler.draft.proposer import Drafts
from stages.scheduler.policy.admission import Limits, Refusal, misfit
from stages.scheduler.policy.batch import Batch, Budget, Entry, compose, positions_of
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.prefix_dedup import leader_of
from stages.scheduler.policy.queues import Queues
from stages.scheduler.recovery import quarantine
from stages.scheduler.stats import Stats

PREFETCH = 2  # sequences that get pages before a place in the batch is free
SPARE_SAMPLES = 64  # places for draft tokens in a step, beyond one sample for each entry
LEAD_S = 0.003  # the next step is published at least this long before the one under way should end
MAX_LEAD_S = 0.1  # where steps end before that, because we wake late or they vary
FAR = SLOTS // 2 - 1  # most unacknowledged steps, of companions alone and of short ones
AHEAD_S = 0.015  # short steps follow while less is unacknowledged: about so long streams wait for a word,
AHEAD_STREAMS = 8  # as many of them at most; of more, each of whom a word is to be passed on to, in proportion,
WORD_S = 0.040  # and never longer
SHORT_S = 0.010  # steps that take less are followed up at once
COMMIT_LATE = 16  # positions beyond a full page before kv is told of it: others' pages fill meanwhile


_EARLY = (State.PENDING, State.PREFILLING)


def word_s(streams: int) -> float:
    """How long so many streams wait for a word while nobody waits for anything else."""
    return min(WORD_S, AHEAD_S * max(1.0, streams / AHEAD_STREAMS))


def follows(steps: int, expected_s: float, streams: int) -> bool:
    """Another one behind `steps` steps that take `expected_s` in all, of so many streams?"""
    return steps < FAR and expected_s < word_s(streams)


class Settings(NamedTuple):
    """Of one model, from the configuration."""

    model: str
    max_batch_size: int
    max_queue_depth: int = 1000
    max_tenant_depth: int = 0
    max_step_tokens: int = 512
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0
    batch_timeout_s: float = 0.0
    speculate: int = 0  # most draft tokens of a sequence that says 0; less than 0: off
    run_ahead: bool = True
    companions: int = 0  # most sequences that it computes as drafts for other models
    prefix_cache: bool = True  # kv shares pages among prompts that begin alike

    @property
    def n_rows(self) -> int:
        """Twice the batch: tenants that come late find rows while another's streams fill it."""
        return 2 * self.max_batch_size + 8 + self.companions

    @property
    def max_samples(self) -> int:
        return self.max_batch_size + SPARE_SAMPLES


@dataclass(slots=True)
class Step:
    """A published step."""

    number: int
    entries: list[Entry]
    tokens: int
    positions: int
    samples: int
    expected_s: float
    is_verifying: bool  # draft tokens in it: what comes after cannot be known before its end
    is_news: bool  # somebody's first token, or the last that it may have


class Engine:
    """Everything about one model but its sockets. `ring` is set before `attach`."""

    def __init__(self, settings: Settings, now: float, weight_of: Callable[[str], float] = lambda _: 1.0) -> None:
        s = self.settings = settings
        self.stats = Stats()
        self.cost = CostModel()
        self.leases = Leases(s.model)
        self.queues = Queues(s.max_queue_depth, s.max_tenant_depth, weight_of)
        self.roster = Roster(self.queues, self.leases, self.stats, s.n_rows)
        self.roster.on_freed = self.pages_may_be_free
        self.door = Door(self)
        self.drafts = Drafts(self)
        self.companions = Companions(self)
        self.limits = Limits(s.max_prompt_tokens, s.max_output_tokens)
        self.budget = Budget(s.max_batch_size, max(s.max_step_tokens, s.max_batch_size), s.max_samples)
        self.depth = 2 if s.run_ahead else 1  # most unacknowledged steps
        self.allowed = self.depth  # of them now: fewer while others want the same cores, see sharing.py
        self.ring: Ring | None = None
        self.is_attached = False
        self.unacknowledged: deque[Step] = deque()
        self.detached_since = now
        self._kv_generation = -1
        self._is_short = False  # kv has denied a first lease: no new ones until pages come back
        self._suspects = False
        self._has_waits = False  # held sequences that have not asked for pages yet, see siblings.py
        self._began = now  # when the worker began the first unacknowledged step
        self.lead_s = LEAD_S
        self._is_holding = False  # the next step could be published, and waits for the end of the one under way
        self._has_stalled = False  # streams stand still in the step composed last
        self._is_late = False  # it still waited when that one ended

    # ================================================================== the step loop

    def turn(self, now: float) -> int:
        """Take in what is acknowledged, publish what can be. Returns the number of steps published."""
        published = 0
        self.complete(now)
        if self.companions.held:
            self.companions.sweep(now)
        # Before there is room in the ring: pages are granted while a step computes.
        self.take_up(now)
        while self.plan(now):
            published += 1
        return published

    def plan(self, now: float) -> bool:
        """Compose and publish the next step, if there is room in the ring and work for it."""
        if not self.is_attached:
            return False
        if len(self.unacknowledged) >= min(self.depth, self.allowed):
            return self._plan_further(now)
        if self.unacknowledged:
            if self.unacknowledged[-1].is_verifying or self._suspects:
                return False
            self._is_holding = self.waits_for_end(now) > 0
            if self._is_holding:
                return False
        else:
            self._began = now
        batch = self._suspect_batch() if self._suspects else None
        if batch is None:
            self._relieve()
            self.drafts.begin(now)
            batch = compose(self.roster.held, self.budget, self.cost, self.drafts, not self._has_stalled)
            self._has_stalled = batch.stalls
            if not batch.entries and self.companions.held:
                batch = self.companions.compose()
        is_late, self._is_late = self._is_late, False
        if not batch.entries:
            return False
        if is_late:  # the worker stands still: the lead was too short
            self.lead_s = min(MAX_LEAD_S, 2 * self.lead_s)
        self._publish(batch, now)
        return True

    def _plan_further(self, now: float) -> bool:
        """Beyond the usual depth: short steps follow each other without a word from here, a few at a time.

        A request that arrives waits for them, and what stops is computed on.  Each word costs about as much as
        a short step: on a machine whose cores all compute, it is time in which nobody does.
        """
        steps = self.unacknowledged
        if self.allowed < self.depth or self.depth < 2 or len(steps) >= FAR or self._suspects:
            return False
        expected_s = sum(step.expected_s for step in steps)
        if self.companions.held:
            if self.roster.live or expected_s > SHORT_S:
                return False
            batch = self.companions.compose()
        else:
            if not follows(len(steps), expected_s, len(steps[-1].entries)) or not self._is_steady:
                return False
            self.drafts.begin(now)
            batch = compose(self.roster.held, self.budget, self.cost, self.drafts)
        if batch.entries:
            self._publish(batch, now)
        return bool(batch.entries)

    @property
    def _is_steady(self) -> bool:
        """Streams go on, a token each; nobody waits for anything else."""
        held = self.roster.held
        return not self.queues.depth and all(s.state not in _EARLY and self.drafts.is_idle(s) for s in held)

    @property
    def wake_at(self) -> int:
        """The step whose end must be heard of: there must be one, and the worker has another behind it then."""
        steps = self.unacknowledged
        if len(steps) > 2 and not (self.queues.depth or self.companions.held):
            news = (step.number for step in steps if step.is_news)
            return min(next(news, steps[-2].number), steps[-2].number)
        return steps[0].number

    def _publish(self, batch: Batch, now: float) -> None:
        ring = self.ring
        assert ring is not None
        rows: list[tuple[int, int, int, int]] = []
        samples = 0
        is_verifying = is_news = is_growing = False
        for entry in batch.entries:
            sequence, start, count = entry.sequence, entry.start, entry.count
            if entry.drafts:
                ring.write_tokens(sequence.row, start + 1, array("i", entry.drafts))
                sequence.drafts = entry.drafts
                is_verifying = True
                self.drafts.published(entry)
            elif entry.samples:
                sequence.ahead += 1
                known = sequence.outputs + sequence.ahead
                is_news = is_news or known == 1 or count > 1 or known == sequence.max_tokens
            if not sequence.started:
                sequence.started = now
                self.stats.waited_s.add(now - sequence.arrived)
            sequence.planned = start + count
            sequence.inflight += 1
            tenant = sequence.tenant
            tenant.served += count * tenant.inverse
            tenant.computed += count
            samples += entry.samples
            rows.append((sequence.row, start, count, entry.samples))
            if sequence.planned > sequence.extend_at and not sequence.ask:
                self.leases.extend(sequence)
                is_growing = True
        if is_growing:
            self._extend_others()
        number = ring.publish(rows)
        expected_s = self.cost.predict(batch.tokens, batch.positions) * 1e-6
        step = Step(number, batch.entries, batch.tokens, batch.positions, samples, expected_s, is_verifying, is_news)
        self.unacknowledged.append(step)
        self.stats.steps += 1
        self.stats.batch.add(len(rows))
        self.queues.settle(batch.left)

    def _extend_others(self) -> None:
        """Who will need pages soon asks with the one that needs them now: kv and we are woken once for both."""
        soon = self.leases.stride * self.leases.page_tokens // 2
        for sequence in self.roster.held:
            is_near = sequence.planned > sequence.extend_at - soon
            if is_near and not (sequence.ask or sequence.is_starved or sequence.is_leaving or sequence.is_over):
                self.leases.extend(sequence)

    def complete(self, now: float) -> None:
        """Take in every acknowledged step."""
        if not self.unacknowledged or self.ring is None:
            return
        done = self.ring.done
        began, predicted_s = self._began, 0.0
        while self.unacknowledged and self.unacknowledged[0].number <= done:
            step, known = self.unacknowledged.popleft(), self.stats.generated
            predicted_s += step.expected_s
            self._complete(step, self.ring)
            self.drafts.stepped(step.entries, self.stats.generated - known, now)
            self._began = now
            self._is_late, self._is_holding = self._is_holding, False
            self.lead_s = max(LEAD_S, 0.99 * self.lead_s)
        if predicted_s:
            self.cost.passed(predicted_s, now - began)

    def waits_for_end(self, now: float) -> float:
        """Seconds until the step under way is near enough its end to publish the one after it.

        A step that is composed late takes in what has arrived meanwhile; one that is composed early
        makes it wait for two.
        """
        if len(self.unacknowledged) != 1 or self.depth < 2:
            return 0.0
        step = self.unacknowledged[0]
        expected = step.expected_s
        if expected < SHORT_S or (expected < word_s(len(step.entries)) / 2 and self._is_steady):
            return 0.0
        return max(0.0, self._began + expected - self.lead_s - now)

    def delay(self, now: float) -> float:
        """Seconds until `turn` may have something to do without any event; inf: never."""
        waits = (self.waits_for_company(now), self.waits_for_end(now), self.drafts.wait_s(now))
        return min((wait for wait in waits if wait > 0), default=math.inf)

    def _complete(self, step: Step, ring: Ring) -> None:
        took_us = ring.took_us(step.number)
        if took_us > 0:
            self.stats.step_s.add(took_us * 1e-6)
            self.cost.learn(step.tokens, step.positions, took_us)
        sampled = ring.outputs(step.number, step.samples)
        base = 0
        is_due = False
        for entry in step.entries:
            sequence = entry.sequence
            sequence.inflight -= 1
            sequence.strikes = 0
            n = entry.samples
            if isinstance(sequence, Companion):
                token = sampled[base] if n else 0
                self.companions.completed(sequence, entry, token, took_us * 1e-6 / len(step.entries))
            elif sequence.is_over:
                self.stats.discarded += n
                if not sequence.inflight:
                    self.roster.let_go(sequence)
            else:
                was_prompt = sequence.state is State.PREFILLING
                if sequence.computed < sequence.prompt_len:
                    self.stats.prompt_computed += min(entry.count, sequence.prompt_len - sequence.computed)
                if n:
                    self._sampled(sequence, entry, ring, step.number, base, sampled)
                else:
                    sequence.computed = entry.start + entry.count
                if not sequence.is_over:
                    page = self.leases.page_tokens
                    behind = sequence.computed - (sequence.committed // page + 1) * page
                    if not was_prompt:
                        is_due = is_due or behind >= COMMIT_LATE
                    elif behind >= 0:
                        self.leases.commit(sequence)  # others want prompts at once
                    if sequence.is_leaving and not sequence.inflight:
                        self.roster.set_aside(sequence)
            base += n
        if is_due:
            self._commit_outputs()
        if self._suspects:
            self._suspects = any(quarantine.is_suspect(s) for s in self.roster.held)

    def _commit_outputs(self) -> None:
        """Of all streams that have filled a page, not of the one that is due: kv is woken once for them."""
        page = self.leases.page_tokens
        for sequence in self.roster.held:
            is_stream = sequence.state is State.DECODING and not sequence.is_over
            if is_stream and sequence.computed // page > sequence.committed // page:
                self.leases.commit(sequence)

    def _sampled(self, sequence: Sequence, entry: Entry, ring: Ring, step: int, base: int, sampled: Items[int]) -> None:
        """Samples of one entry: tokens of the output up to a stop, the limit, or a draft that was wrong."""
        if sequence.state is State.PREFILLING:
            sequence.move(State.DECODING)
        first = sequence.outputs
        drafts = entry.drafts
        tokens: list[int] = []
        finish = ""
        for i in range(entry.samples):
            token = sampled[base + i]
            if token < 0:
                break
            tokens.append(token)
            if token in sequence.stop_ids:
                finish = "stop"
            elif sequence.length + len(tokens) >= sequence.end:
                finish = "length"
            if finish or (drafts and i < len(drafts) and drafts[i] != token):
                break
        n = len(tokens)
        sequence.tokens.extend(tokens)
        sequence.length += n
        self.stats.generated += n
        logprobs: tuple[Logprob, ...] = ()
        top = sequence.sampling.logprobs
        if top >= 0:
            logprobs = tuple(ring.logprob(step, base + i, top) for i in range(n))
        if drafts:
            self._verified(sequence, entry, ring, n)
        else:
            sequence.computed = entry.start + entry.count
            sequence.ahead -= 1
        if finish:
            self.roster.finish(sequence, finish, start=first, tokens=tuple(tokens), logprobs=logprobs)
            return
        if tokens:
            self.roster.emit(sequence, first, tuple(tokens), logprobs)
        if n < entry.samples and sampled[base + n] < 0:
            self.roster.fail(sequence, "INFERENCE", "the model computed logits that are not finite")

    def _verified(self, sequence: Sequence, entry: Entry, ring: Ring, n: int) -> None:
        """`n` tokens came of a verification: all but the last were drafts, and their positions hold."""
        accepted = max(0, n - 1)
        sequence.drafts = ()
        sequence.accepted += accepted
        sequence.computed = sequence.planned = entry.start + max(1, n)
        if n and sequence.length < sequence.end:
            ring.write_tokens(sequence.row, sequence.length - 1, sequence.tokens[-1:])
        self.drafts.verified(sequence, len(entry.drafts), accepted)

    # ================================================================== choosing

    def take_up(self, now: float) -> None:
        """Give rows to waiting sequences and ask for their pages, within bounds and by share."""
        roster, queues, bounds = self.roster, self.queues, self.settings
        if self._has_waits:
            self._end_waits()
        if not queues.depth or not self.is_attached or not self.leases.is_up or self._is_short:
            return
        if self.waits_for_company(now) > 0 or any(s.is_starved or s.is_leaving for s in roster.held):
            return
        while queues.depth and roster.free_rows:
            places = bounds.max_batch_size + PREFETCH - len(roster.held)
            tenant = queues.next_tenant(places, bounds.max_batch_size)
            if tenant is None:
                return
            sequence = queues.take(tenant)
            refusal = misfit(sequence, self.limits)
            if refusal is not None:
                if sequence.outputs:
                    roster.fail(sequence, refusal.code, refusal.message)
                else:
                    roster.reject(sequence, refusal)
                continue
            assert self.ring is not None
            roster.hold(sequence)
            self.ring.write_row(
                sequence.row,
                sequence.tokens,
                sequence.prompt_len,
                sequence.sampling,
                sequence.choice,
                tuple(sequence.stop_ids),
            )
            # One that goes on after a recovery had its prompt computed: kv has it, nobody is to wait for it.
            if bounds.prefix_cache and not sequence.outputs:
                sequence.wait = leader_of(sequence, roster.held, self.leases.page_tokens)
            if sequence.wait is None:
                self.leases.acquire(sequence)
            else:
                self._has_waits = True

    def _end_waits(self) -> None:
        """Those whose common beginning has been computed, or will not be, ask for their pages."""
        waiting = [s for s in self.roster.held if s.wait is not None and not s.is_over]
        for sequence in waiting:
            if sequence.wait is not None and sequence.wait.is_over:
                sequence.wait = None
                self.leases.acquire(sequence)
        self._has_waits = bool(waiting)

    def waits_for_company(self, now: float) -> float:
        """Seconds that an idle model still waits for more sequences before it starts a batch."""
        timeout = self.settings.batch_timeout_s
        if not timeout or self.roster.held or not self.queues.depth:
            return 0.0
        if self.queues.depth >= min(self.settings.max_batch_size, self.queues.max_depth, self.queues.max_tenant_depth):
            return 0.0
        return max(0.0, min(s.arrived for s in self.queues) + timeout - now)

    def _suspect_batch(self) -> Batch | None:
        """A step of one suspect, see retry.py."""
        sequence = quarantine.alone(self.roster.held)
        if sequence is None:
            return None
        start = sequence.planned
        todo = sequence.length + sequence.ahead - start
        count = min(todo, sequence.leased - start, self.budget.max_tokens)
        entry = Entry(sequence, start, count, 1 if count == todo else 0)
        return Batch([entry], count, positions_of(entry), [])

    # ================================================================== pages

    def granted(self, frame: Granted) -> None:
        """Pages from kv."""
        answered = self.leases.answered(frame.id)
        if answered is None or self.ring is None:
            self.stats.late += 1
            return
        sequence, is_first = answered
        have = len(sequence.pages)
        try:
            self.leases.take(sequence, frame)
        except BadTableError as error:
            if isinstance(sequence, Companion):
                self.companions.dismiss(sequence)
            else:
                self.roster.fail(sequence, "CACHE", f"page table refused: {error}")
            return
        self.ring.write_table(sequence.row, have, sequence.pages[have:])
        if is_first:
            sequence.computed = sequence.planned = sequence.committed = frame.cached_tokens
            if not sequence.outputs and not sequence.is_announced:
                sequence.cached_tokens = min(frame.cached_tokens, sequence.prompt_len)
                self.stats.granted(sequence.prompt_len, sequence.cached_tokens)
            sequence.move(State.PREFILLING)

    def denied(self, frame: Denied) -> None:
        """No pages from kv: not now, or never."""
        if not frame.id:
            self._lost_lease(frame.sequence)
            return
        answered = self.leases.answered(frame.id)
        if answered is None:
            self.stats.late += 1
            return
        sequence, is_first = answered
        if isinstance(sequence, Companion):
            self.companions.dismiss(sequence)
            return
        if not is_first and self.leases.is_early(sequence):
            self.leases.ask_later(sequence)
            return
        # Nobody who asked for an answer waits for pages that a guess has.
        self.companions.dismiss_all()
        if not frame.fits:
            self.roster.fail(
                sequence,
                "INSUFFICIENT_RESOURCES",
                f"needs {frame.needed_pages} KV pages, the arena has {frame.total_pages}: raise kv_cache_mb",
            )
        elif is_first:
            self.roster.set_aside(sequence)
            self._is_short = True
        else:
            sequence.is_starved = True

    def kv_state(self, frame: KvState) -> None:
        """How kv stands, with each of its heartbeats."""
        self.leases.room(frame.free + frame.cached, len(self.roster.held))
        self.pages_may_be_free()

    def pages_may_be_free(self) -> None:
        """Ask again for what was denied."""
        self._is_short = False
        for sequence in self.roster.held:
            if sequence.is_starved and not sequence.ask and not sequence.is_over:
                sequence.is_starved = False
                self.leases.extend(sequence)

    def _relieve(self) -> None:
        """If a sequence stands still for want of pages, set the youngest one aside."""
        held = self.roster.held
        if not any(s.is_starved and s.planned >= s.leased for s in held):
            return
        holders = [s for s in held if s.pages]
        if any(s.is_leaving or s.is_over for s in holders) or len(holders) < 2:
            return  # pages are about to come back; or the last one waits for kv to find some
        youngest = holders[-1]
        self.stats.preemptions += 1
        youngest.is_leaving = True
        if not youngest.inflight:
            self.roster.set_aside(youngest)

    def _lost_lease(self, lease: str) -> None:
        for companion in list(self.companions.held):
            if companion.lease == lease:
                self.companions.dismiss(companion)
        for sequence in list(self.roster.held):
            if sequence.lease == lease and not sequence.is_over:
                self._put_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        sequence.is_leaving = True
        if not sequence.inflight:
            self.roster.set_aside(sequence)

    # ================================================================== kv's and the worker's life

    def kv_ready(self, frame: KvReady) -> bool:
        """kv has the arena. True: its contents are others than before, the worker must attach anew."""
        is_new = self._kv_generation not in (-1, frame.generation)
        self._kv_generation = frame.generation
        if is_new:
            for sequence in list(self.roster.held):
                sequence.pages = ()
                if not sequence.is_over:
                    self._put_back(sequence)
            for companion in self.companions.held:
                companion.pages = ()
            self.companions.dismiss_all()
        self.limits = self.limits._replace(kv_positions=frame.pages * frame.page_tokens, page_tokens=frame.page_tokens)
        self.leases.up(frame, [*self.roster.held, *self.companions.held])
        self._is_short = False
        return is_new

    def kv_down(self) -> None:
        self.leases.down()
        self.companions.dismiss_all()

    def attach(self, context_length: int, vocab_size: int) -> None:
        """The worker has let go of everything before and looks at the ring from now on."""
        self.limits = self.limits._replace(context_length=context_length, vocab_size=vocab_size)
        self.is_attached = True

    def detached(self, now: float, strikes: int = 0) -> None:
        """The worker is in no step any more, and what it has not acknowledged is void.

        `strikes`: it ended in the step under way, which counts so much against who was in it (retry.py).
        """
        self.complete(now)
        culprit = None
        if self.unacknowledged:
            self.stats.repeated += 1
            members = [e.sequence for e in self.unacknowledged[0].entries if not isinstance(e.sequence, Companion)]
            if strikes:
                culprit = quarantine.strike((s for s in members if not s.is_over), strikes)
        self.unacknowledged.clear()
        self.drafts.forget()
        self.companions.detached()
        for sequence in list(self.roster.held):
            sequence.inflight = 0
            sequence.planned = sequence.computed
            sequence.ahead = 0
            sequence.drafts = ()
            if sequence.is_over:
                self.roster.let_go(sequence)
            elif sequence.is_leaving:
                self.roster.set_aside(sequence)
        if culprit is not None:
            self.stats.convicted += 1
            message = "the worker died or stood still each time it computed this request"
            self.roster.fail(culprit, "INFERENCE", message)
        self._suspects = any(quarantine.is_suspect(s) for s in self.roster.held)
        self.halt(now)

    def halt(self, now: float) -> None:
        """Nothing more is published, nothing given back; the worker may still be in a step."""
        if self.is_attached:
            self.detached_since = now
        self.is_attached = False

    # ================================================================== time and state

    def tick(self, now: float) -> None:
        """Call about every 100 ms."""
        self.roster.expire(now)
        self.queues.forget_idle()
        if not self.is_attached and now - self.detached_since > UNAVAILABLE_S:
            refusal = Refusal("MODEL_UNAVAILABLE", "no worker became ready in time", "model", 5.0)
            for sequence in list(self.roster.live.values()):
                self.roster.reject(sequence, refusal)

    @property
    def is_busy(self) -> bool:
        return bool(self.roster.live or self.unacknowledged)

    def has_work(self, now: float) -> bool:
        """A step is under way, or could be: not while all that there is waits for proposals."""
        if self.unacknowledged or self.companions.has_work:
            return True
        return bool(self.roster.live) and not self.drafts.is_waiting(now)

    @property
    def is_ready(self) -> bool:
        return self.is_attached and self.leases.is_up

    def state(self, digest: str, reason: str, kv_free: int) -> ModelState:
        """What the gateways show of the model. `reason`: why it is not ready, "" when it is."""
        return ModelState(
            self.settings.model,
            digest,
            not reason,
            reason,
            self.queues.depth,
            len(self.roster.held),
            self.settings.max_batch_size,
            kv_free,
            self.leases.total_pages,
        )
