"""Companions: sequences that a small model computes beside those of a large one, to draft for them.

A companion has the same tokens, seed and sampling parameters as the sequence that it drafts for (its
*target*, of another engine), and goes on from there: what the small model would answer to the same request.
Whenever more of the target is known it follows: it keeps the positions that stand and computes the others anew.

    invite --> Acquire, catching up in chunks --> follow(k more) --> k proposals --> follow ... --> dismiss

Nobody waits for a companion in its own engine: it computes in steps in which no request has anything to
compute, has rows of its own, and goes at once when pages run short.  It is no request: it stands in no queue
and no tenant's account, and is never spoken of to a gateway.  Only positions whose tokens the target has
confirmed are named to kv, so its pages hold what the prefix cache may keep.  It does not keep its
target alive, and goes when that ends or is set aside.
"""

from __future__ import annotations

import weakref
from array import array
from typing import TYPE_CHECKING

import msgspec

from pipeline.protocol.messages import Submit
from stages.scheduler.core.sequence import Sequence
from stages.scheduler.policy.batch import CHUNK_GRAIN, MIN_CHUNK, Batch, Entry
from stages.scheduler.policy.queues import Tenant

if TYPE_CHECKING:
    from stages.scheduler.core.engine import Engine

CHUNK_US = 10_000.0  # of catching up in a step: what a request that arrives meanwhile may wait for
IDLE_S = 1.0  # unused for so long: its pages are given back
NOBODY = Tenant("", 1.0)  # whose they are: of no queue, shown nowhere


class Companion(Sequence):
    """Of `target`. `base` tokens are the target's, those behind them proposals, up to `goal` in all."""

    __slots__ = ("base", "goal", "spent_s", "target", "used")

    def __init__(self, target: Sequence, lease: str, end: int, now: float) -> None:
        split = target.prompt_len
        frame = Submit(
            lease,
            target.request,
            "",
            "",
            target.tokens[:split].tobytes(),
            target.max_tokens,
            msgspec.structs.replace(target.sampling, logprobs=-1),
            target.choice,
            target.tokens[split:].tobytes(),
            tuple(target.stop_ids),
            cache_salt=target.salt,
        )
        super().__init__(frame, b"", NOBODY, now, 0)
        self.target = weakref.ref(target)
        self.end = end
        self.started = self.used = now
        self.base = self.valid_end = self.length
        self.goal = self.length + 1
        self.spent_s = 0.0  # of computing, in all steps with it

    @property
    def is_ready(self) -> bool:
        """It has proposed what it was asked for, or never will."""
        return self.is_over or self.length >= self.goal

    @property
    def proposals(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.base :])

    @property
    def is_orphan(self) -> bool:
        """Nobody will ask it any more."""
        target = self.target()
        if target is None or target.is_over or target.is_leaving or target.row < 0:
            return True
        return target.drafter is None or target.drafter.companion is not self


class Companions:
    """Those that an engine computes for other engines' sequences; at most `Settings.companions`."""

    def __init__(self, engine: Engine) -> None:
        self.held: list[Companion] = []
        self._engine = engine
        self._count = 0
        self._is_asked = False

    # -------------------------------------------------------------- the target's side

    @property
    def is_open(self) -> bool:
        """The engine has nothing else to do."""
        engine = self._engine
        return engine.is_ready and not engine.roster.live

    def invite(self, target: Sequence, now: float) -> Companion | None:
        """A companion for `target`, catching up from now on; None: there is no place, or no use."""
        engine = self._engine
        limits, rows, ring = engine.limits, engine.roster.free_rows, engine.ring
        bounds = (target.end, limits.context_length, limits.kv_positions + 1 if limits.kv_positions else 0)
        end = min(bound for bound in bounds if bound)
        is_full = len(self.held) >= engine.settings.companions or not rows
        if is_full or ring is None or not self.is_open or target.length + 1 >= end:
            return None
        self._count += 1
        # No gateway gives this name: its sequences' begin with a request's id.
        companion = Companion(target, f"/draft/{engine.settings.model}/{self._count}", end, now)
        companion.row = rows.popleft()
        self.held.append(companion)
        ring.write_row(
            companion.row,
            companion.tokens,
            companion.prompt_len,
            companion.sampling,
            companion.choice,
            tuple(companion.stop_ids),
        )
        engine.leases.acquire(companion)
        return companion

    def follow(self, companion: Companion, tokens: array[int], goal: int, now: float) -> bool:
        """`tokens` are known now: propose up to `goal` of them in all. False: a step names it, ask again."""
        companion.used = now
        known = len(tokens)
        if companion.base == known:
            if goal > companion.goal and companion.tokens[-1] not in companion.stop_ids:
                companion.goal = min(goal, companion.end)
                self._is_asked = True
            return True
        if companion.inflight or companion.is_over:
            return False
        ring, own = self._engine.ring, companion.tokens
        assert ring is not None
        same, most = companion.base, min(known, len(own))
        while same < most and own[same] == tokens[same]:
            same += 1
        del own[same:]
        own.extend(tokens[same:])
        ring.write_tokens(companion.row, same, own[same:])
        # Its last token is computed in any case: the first proposal is sampled there.
        companion.computed = companion.planned = min(companion.computed, same, known - 1)
        companion.length = companion.base = companion.valid_end = known
        companion.goal = min(goal, companion.end)
        size = self._engine.leases.page_tokens
        if companion.pages and companion.computed // size > companion.committed // size:
            self._engine.leases.commit(companion)
        self._is_asked = True
        return True

    def dismiss(self, companion: Companion) -> None:
        """It goes, with its row and pages, once no step names it. Idempotent."""
        if not companion.is_over:
            companion.is_over = True
            companion.computed = min(companion.computed, companion.base)
            if not companion.inflight:
                self._let_go(companion)

    def take_asked(self) -> bool:
        """There is something new to compute, since the last call."""
        is_asked, self._is_asked = self._is_asked, False
        return is_asked

    def catch_up_us(self, length: int) -> float:
        """What a companion of that length should cost before it proposes anything."""
        return self._engine.cost.predict(length, length * (length + 1) // 2)

    # -------------------------------------------------------------- its engine's side

    @property
    def has_work(self) -> bool:
        return any(self._wants(companion) for companion in self.held)

    @staticmethod
    def _wants(companion: Companion) -> bool:
        known = companion.length + companion.ahead
        return not companion.is_over and known < companion.goal and companion.planned < companion.leased

    def compose(self) -> Batch:
        """A step of companions alone, when the requests have none. Nothing is changed."""
        budget, cost = self._engine.budget, self._engine.cost
        entries: list[Entry] = []
        tokens = positions = 0
        left_us = CHUNK_US
        for companion in self.held:
            if len(entries) >= budget.max_entries or not self._wants(companion):
                continue
            start = companion.planned
            todo = companion.length + companion.ahead - start
            most = min(todo, companion.leased - start, budget.max_tokens - tokens)
            count = min(most, max(MIN_CHUNK, cost.chunk(left_us, start, most)))
            if CHUNK_GRAIN <= count < most:
                count -= count % CHUNK_GRAIN
            if count < 1:
                continue
            seen = count * start + count * (count + 1) // 2
            left_us -= cost.token_us * count + cost.position_us * seen
            tokens += count
            positions += seen
            entries.append(Entry(companion, start, count, 1 if count == todo else 0))
        return Batch(entries, tokens, positions, [])

    def completed(self, companion: Companion, entry: Entry, token: int, took_s: float) -> None:
        """A step with it is acknowledged; `token` is what was sampled, if `entry` has a sample."""
        companion.spent_s += took_s
        if companion.is_over:
            if not companion.inflight:
                self._let_go(companion)
            return
        companion.computed = entry.start + entry.count
        if not entry.samples:
            return
        companion.ahead -= 1
        if token < 0:  # logits that are not finite
            self.dismiss(companion)
            return
        companion.tokens.append(token)
        companion.length += 1
        if token in companion.stop_ids:  # nothing follows it
            companion.goal = min(companion.goal, companion.length)

    def sweep(self, now: float) -> None:
        """Those go that have lost their target, or that it has not used for a while. Cheap: each round."""
        for companion in list(self.held):
            if companion.is_orphan or now - companion.used > IDLE_S:
                self.dismiss(companion)

    def dismiss_all(self) -> None:
        """Somebody needs what they have, or their pages are not what they were."""
        for companion in list(self.held):
            self.dismiss(companion)

    def detached(self) -> None:
        """No step is under way any more, and what was not acknowledged is void."""
        for companion in list(self.held):
            companion.inflight = 0
            if companion.is_over:
                self._let_go(companion)
            self.dismiss(companion)

    def _let_go(self, companion: Companion) -> None:
        roster = self._engine.roster
        is_freeing = self._engine.leases.release(companion)
        self.held.remove(companion)
        roster.free_rows.append(companion.row)
        companion.row = -1
        if is_freeing:
            roster.on_freed()
