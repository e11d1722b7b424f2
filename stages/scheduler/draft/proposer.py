"""Where a sequence's draft tokens come from, and whether they are worth their time.

Two sources: prompt lookup (speculate.py), which costs nothing, then the companion on a draft model
(companion.py), if the model has one.  What either proposes is verified in the same way, so no output depends
on anything here.

A companion takes time: its steps, and the step of the target that waits for it.  All of it is measured, and
booked on an account in units of plain steps:

    a step that verifies proposals     + tokens that came of it (for each sequence)
                                       - time since the step before it, waiting included
    catching up, on the same cores     - time that it took
    a plain step                       + EARN

The draft model is asked while there is credit, and not again before some has come together.  So whatever the text
and the draft model are like, plain decoding loses `EARN` of its pace in the long run, and a first trial once.  Each
sequence has a `Pace` of its own besides.

It is asked only when it is asked for every running sequence, and they are few: with a larger batch, prompts
under way or requests waiting, the time is better spent on those.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from stages.scheduler.core.sequence import Sequence, State
from stages.scheduler.draft.draft_sequence import Companion, Companions
from stages.scheduler.draft.prompt_lookup import Drafter, Pace

if TYPE_CHECKING:
    from stages.scheduler.core.engine import Engine
    from stages.scheduler.policy.batch import Entry

FEW = 4  # sequences of a model that have companions, at most
NEAR = 8  # positions that a companion lacks at most when its target waits for it
LONG_SILENCE = 32  # tokens without asking: the companion is given up
SLACK_S = 0.002  # of waiting for proposals, on top of what their tokens would take without them

# The account, in plain steps
EARN = 0.02
START = 64.0  # what a first trial may cost,
START_S = 0.1  # or this long, if that is more: a worker that has never computed is slow at first
AGAIN = 8.0  # after the end of all credit
MOST = 512.0  # that can be saved for bad times
WORST = 16.0  # loss of one step: beyond that somebody else had the cores, or the draft's worker died


class Link(NamedTuple):
    """To the draft model's engine."""

    companions: Companions
    shares_cores: bool


class Guess:
    """Of one sequence: what its sources know."""

    __slots__ = ("asked", "companion", "deadline", "is_model", "lookup", "pace", "seen_s")

    def __init__(self, most: int) -> None:
        self.lookup = Drafter(most)
        self.pace = Pace(most)  # of the draft model
        self.companion: Companion | None = None
        self.is_model = False  # the drafts under verification are the companion's
        self.asked = 0  # tokens known when it was asked last
        self.deadline = 0.0  # until then the target waits
        self.seen_s = 0.0  # of `companion.spent_s`, booked


class Drafts:
    """Of one engine; as `batch.Guesses`."""

    def __init__(self, engine: Engine) -> None:
        self.link: Link | None = None
        self.is_allowed = True  # nobody else wants the cores that the draft model computes on
        self.credit = math.nan  # of a link that has not been used
        self._engine = engine
        self._is_off = False  # all credit is used up
        self._is_open = False  # the draft model may be asked in this round
        self._now = 0.0
        self._waits: list[Guess] = []  # whose step was held back in the last round
        self._has_waited = False  # in vain
        self._since = 0.0  # the step before was acknowledged

    def link_to(self, link: Link | None) -> None:
        """From now on the drafts come from there; None: from prompt lookup alone."""
        if link == self.link:
            return
        self.forget()
        self.link, self.credit, self._is_off = link, math.nan, False

    def forget(self) -> None:
        """No companion is asked any more, unless it is invited anew: not before the next `begin`."""
        self._waits.clear()
        for sequence in self._engine.roster.held:
            if sequence.drafter is not None:
                self._release(sequence.drafter)

    # -------------------------------------------------------------- choosing

    def begin(self, now: float) -> None:
        """A step is about to be composed."""
        self._now = now
        self._waits.clear()
        self._is_open = self.link is not None and self._can_ask(self.link)

    def is_idle(self, sequence: Sequence) -> bool:
        """Steps may follow each other: that a draft is found a few tokens late costs less than looking at each."""
        if not sequence.speculate:
            return True
        return (self.link is None or self._is_off) and self._guess(sequence).lookup.is_idle(sequence.length)

    def awaits(self, sequence: Sequence) -> bool:
        """As `Guesses`."""
        guess = self._guess(sequence)
        if guess.lookup.awaits(sequence.tokens):
            return True
        return self._is_open and self._is_near(guess, sequence)

    def draft(self, sequence: Sequence, room: int) -> tuple[int, ...] | None:
        """As `Guesses`."""
        guess = self._guess(sequence)
        found = guess.lookup.draft(sequence.tokens, room)
        guess.is_model = False
        if found or not self._is_open or not self._is_near(guess, sequence):
            return found
        return self._ask(guess, sequence, room)

    def _ask(self, guess: Guess, sequence: Sequence, room: int) -> tuple[int, ...] | None:
        companion, link = guess.companion, self.link
        assert companion is not None
        assert link is not None
        known = sequence.length
        goal = known + min(room, guess.pace.length)
        is_new = guess.asked != known
        if is_new:
            self._book(guess, sequence)
            guess.asked = known
            # What the target itself would take for as many: beyond that nothing is gained.
            guess.deadline = self._now + 1e-6 * (goal - known) * self._plain_us(1, known) + SLACK_S
        is_following = link.companions.follow(companion, sequence.tokens, goal, self._now)
        if not (is_following and companion.is_ready) and self._now < guess.deadline:
            self._waits.append(guess)
            return None
        guess.seen_s = companion.spent_s
        proposals = companion.proposals[:room] if is_following else ()
        if not proposals:
            self._has_waited = True
            self._result(guess, known, 1, 0)
            return ()
        guess.is_model = True
        return proposals

    def _is_near(self, guess: Guess, sequence: Sequence) -> bool:
        """Is there a companion that lacks little? If not, that is seen to."""
        link, companion = self.link, guess.companion
        assert link is not None
        if companion is not None and companion.is_over:
            companion = guess.companion = None
        if companion is None:
            self._invite(link, guess, sequence)
            return False
        if sequence.length >= companion.end - 1:
            self._release(guess)
            guess.pace.until = sequence.end  # its context ends here
            return False
        if companion.pages and sequence.length - companion.computed <= NEAR:
            return True
        link.companions.follow(companion, sequence.tokens, sequence.length + 1, self._now)
        self._book(guess, sequence)
        return False

    def _invite(self, link: Link, guess: Guess, sequence: Sequence) -> None:
        length = sequence.length
        price_us = link.companions.catch_up_us(length) if link.shares_cores else 0.0
        if price_us <= self.credit * self._plain_us(1, length):
            guess.companion = link.companions.invite(sequence, self._now)
            guess.seen_s = 0.0
            guess.asked = 0

    def _can_ask(self, link: Link) -> bool:
        engine = self._engine
        held = engine.roster.held
        if self._is_off or not self.is_allowed or len(held) > FEW or engine.queues.depth:
            return False
        if not link.companions.is_open:
            return False
        if math.isnan(self.credit):
            self.credit = max(START, 1e6 * START_S / self._plain_us(1, 0))
        for sequence in held:
            if sequence.is_over:
                continue
            if not sequence.speculate or sequence.is_leaving or sequence.state is not State.DECODING:
                return False
            if sequence.length + 1 < self._guess(sequence).pace.until:
                return False
        return True

    # -------------------------------------------------------------- waiting

    def wait_s(self, now: float) -> float:
        """Seconds until waiting for proposals ends in any case; 0.0: nobody waits."""
        return min((guess.deadline - now for guess in self._waits), default=0.0)

    def is_waiting(self, now: float) -> bool:
        """Nothing can be composed now but for proposals that are not there yet."""
        link = self.link
        if not self._waits or not self.is_allowed or link is None or not link.companions.is_open:
            return False
        return any(
            now < guess.deadline and guess.companion is not None and not guess.companion.is_ready
            for guess in self._waits
        )

    # -------------------------------------------------------------- learning

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` tokens were right; those after them are known not to follow."""
        guess, stats = self._guess(sequence), self._engine.stats
        stats.accepted += accepted
        if guess.is_model:
            stats.model_accepted += accepted
            self._result(guess, sequence.length, drafted, accepted)
        else:
            guess.lookup.result(sequence.length, drafted, accepted)

    def published(self, entry: Entry) -> None:
        """A step verifies its drafts."""
        stats = self._engine.stats
        stats.drafted += len(entry.drafts)
        if self._guess(entry.sequence).is_model:
            stats.model_drafted += len(entry.drafts)

    def stepped(self, entries: list[Entry], gained: int, now: float) -> None:
        """A step is acknowledged, and `gained` tokens came of it."""
        since, self._since = self._since, now
        if self.link is None or math.isnan(self.credit):
            return
        n = len(entries)
        is_model = any(e.drafts and self._guess(e.sequence).is_model for e in entries)
        if is_model or self._has_waited:
            self._has_waited = False
            plain_s = self._plain_us(n, sum(e.start + 1 for e in entries)) * 1e-6
            self.credit += max(-WORST, gained / n - (now - since) / plain_s)
        elif all(e.sequence.speculate for e in entries):
            self.credit += EARN
        self.credit = min(self.credit, MOST)
        if self.credit <= 0.0 and not self._is_off:
            self._is_off = True
            self.forget()
        elif self.credit >= AGAIN:
            self._is_off = False

    def _book(self, guess: Guess, sequence: Sequence) -> None:
        """What its companion has computed to catch up."""
        companion, link = guess.companion, self.link
        if companion is not None and link is not None:
            if link.shares_cores:
                spent_us = 1e6 * (companion.spent_s - guess.seen_s)
                self.credit -= spent_us / self._plain_us(1, sequence.length)
            guess.seen_s = companion.spent_s

    def _result(self, guess: Guess, known: int, drafted: int, accepted: int) -> None:
        guess.pace.result(known, drafted, accepted)
        if guess.pace.until - known > LONG_SILENCE:
            self._release(guess)

    def _release(self, guess: Guess) -> None:
        """Its pages are given back. The engine that computes it looks at this too."""
        companion, guess.companion = guess.companion, None
        if companion is not None and self.link is not None:
            self.link.companions.dismiss(companion)

    def _plain_us(self, tokens: int, positions: int) -> float:
        return self._engine.cost.predict(tokens, positions)

    @staticmethod
    def _guess(sequence: Sequence) -> Guess:
        if sequence.drafter is None:
            sequence.drafter = Guess(sequence.speculate)
        return sequence.drafter
