"""What the orchestrators of a fleet have used of each limit: this one's share, published or not, and the others'.

    record     as the store had it last. What it has more than before, others have used: it is taken from the counters
    sending    the batch that is being written. It stays the same until it is known to be in a record, so that it counts
               once, however often it is sent
    pending    used since

A record that a store has lost (its file was removed) is made again from what is known.  A counter of a day that is more
than one ahead of this orchestrator's is of one whose clock is wrong: it is ignored and overwritten.  Pure.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import NamedTuple

from pipeline.api.quota_file import Level
from pipeline.api.quotas import DAY, DAY_S, MINUTE, Counter, Name
from pipeline.coordination.interface import MAX_CHANGES
from stages.orchestrator.quotas.use_record import Use, UseRecord, decode, encode, use_key

MAX_RECORDS = 4096  # in the store, and known here; more than the keys of a full key file
ALLOWANCE = 1 / 32  # of a limit, that one orchestrator may use before it publishes
LITTLE = 1 / 4  # of the allowance: less than this is published every LITTLE_S
LITTLE_S = 5.0
REFUSED_S = 60.0  # between two attempts to write a record for which the store had no room

Amounts = dict[str, tuple[int, float]]  # day and amount, by UNIT/PERIOD


class Offer(NamedTuple):
    """A write of a record."""

    key: str
    revision: int  # that the key must have; 0: no value
    record: UseRecord

    @property
    def value(self) -> bytes:
        """The record's bytes."""
        return encode(self.record)


class _State:
    """Of one tenant or key."""

    def __init__(self) -> None:
        self.record = UseRecord()
        self.revision = 0  # of the record in the store; 0: it has none
        self.seen = 0  # the last revision at which the key changed
        self.is_lost = False  # the store had the record and has lost it
        self.is_left_out = False  # the store had no room for the record: this orchestrator counts alone
        self.since = 0.0  # of the oldest use that is not published, or of being left out, s since 1970
        self.batch = 0  # number of `sending`, or of the last one
        self.sending: Amounts = {}
        self.pending: Amounts = {}
        self.counters: dict[str, Counter] = {}

    @property
    def is_due(self) -> bool:
        return bool(self.sending or self.pending or self.is_lost)

    def unpublished(self, short: str, day: int) -> float:
        return sum(
            amount
            for one in (self.sending, self.pending)
            for known, amount in [one.get(short, (0, 0.0))]
            if known == day
        )

    def is_due_now(self, now: float) -> bool:
        """Whether it is time to write the record. `now`: s since 1970."""
        if not self.is_due:
            return False
        age = now - self.since
        if self.is_left_out:
            return not 0 <= age < REFUSED_S  # a clock may have been set
        if self.sending or self.is_lost or not 0 <= age < LITTLE_S:
            return True
        for short, (_, amount) in self.pending.items():
            counter = self.counters.get(short)
            if counter is None or amount >= counter.limit * ALLOWANCE * LITTLE:
                return True
        return False


class SharedUse:
    """A `UseLog` (pipeline/api/quotas.py). `writer`: names this process. `wall`: s since 1970."""

    def __init__(self, writer: str, wall: Callable[[], float], max_records: int = MAX_RECORDS) -> None:
        self._writer = writer
        self._wall = wall
        self.max_records = max_records
        self._states: OrderedDict[str, _State] = OrderedDict()  # by key, the least recently changed first

    def __len__(self) -> int:
        return len(self._states)

    # ---------------------------------------------------------------- this orchestrator's use

    def restore(self, name: Name, counter: Counter) -> None:
        """A new counter: what all orchestrators have used is taken from it."""
        unit, period, whose = name
        short = f"{unit}/{period}"
        state = self._state(use_key(whose))
        state.counters[short] = counter
        use = state.record.counters.get(short)
        if use is not None:
            self._charge(counter, period, None, use)
        if own := state.unpublished(short, counter.day):
            counter.take(own)

    def taken(self, name: Name, counter: Counter, amount: float) -> None:
        """This orchestrator has taken `amount`."""
        unit, period, whose = name
        short = f"{unit}/{period}"
        state = self._state(use_key(whose))
        state.counters[short] = counter
        if not state.is_due:
            state.since = self._wall()
        day, before = state.pending.get(short, (counter.day, 0.0))
        state.pending[short] = (counter.day, amount + (before if day == counter.day else 0.0))

    def unpublished(self, name: Name, counter: Counter) -> float:
        """What this orchestrator has taken and will publish; 0 if the store has no room for it."""
        state = self._states.get(use_key(name[2]))
        if state is None or state.is_left_out:
            return 0.0
        return state.unpublished(f"{name[0]}/{name[1]}", counter.day)

    # ---------------------------------------------------------------- the store's records

    def received(self, key: str, value: bytes | None, revision: int, *, is_current: bool = False) -> None:
        """The key has this value. `is_current`: it was asked for; else an event, of which old ones are left out."""
        state = self._state(key)
        if revision <= state.seen and not is_current:
            return
        state.seen = max(state.seen, revision) if not is_current else revision
        if value is None:
            state.revision = 0
            if not (state.is_due or state.counters or is_current):
                del self._states[key]
            return
        state.revision, state.is_lost, state.is_left_out = revision, False, False
        record = decode(value)
        if record is None:
            return  # the next write replaces it
        is_applied = bool(state.sending) and record.writers.get(self._writer) == state.batch
        own = state.sending if is_applied else {}
        known = dict(state.record.counters)
        for short, use in record.counters.items():
            before = known.get(short)
            if self._is_wrong(use) or (before is not None and use.order <= before.order):
                continue
            known[short] = use
            counter = state.counters.get(short)
            if counter is not None:
                self._charge(counter, short.rpartition("/")[2], before, use, own.get(short))
        if is_applied:
            state.sending = {}
        state.record = UseRecord(counters=known, writers=record.writers, at=record.at)

    def begin_snapshot(self, keys: Collection[str]) -> None:
        """A snapshot follows: the store, perhaps a new one, has these keys and no others."""
        for key, state in self._states.items():
            state.seen = 0
            if key not in keys:
                state.is_lost |= bool(state.revision and state.record.counters)
                state.revision = 0

    def _charge(
        self, counter: Counter, period: str, before: Use | None, use: Use, own: tuple[int, float] | None = None
    ) -> None:
        """Take from the counter what the record has more than before, without this orchestrator's own."""
        if period == MINUTE and before is None:
            if use.limit and own is None:
                counter.restore(Level(use.limit, use.left, use.at))
            return
        counter.begin_day(use.day)
        if counter.day != use.day:
            return
        more = use.used - (before.used if before is not None and before.day == use.day else 0.0)
        more -= own[1] if own is not None and own[0] == use.day else 0.0
        if more > 0:
            counter.take(more)

    def _is_wrong(self, use: Use) -> bool:
        return use.day > self._wall() // DAY_S + 1

    # ---------------------------------------------------------------- publishing

    def due(self) -> list[str]:
        """Keys with use that is not published."""
        return [key for key, state in self._states.items() if state.is_due]

    def due_now(self) -> list[str]:
        """Those of `due` without the ones that have used little, and not long ago."""
        now = self._wall()
        return [key for key, state in self._states.items() if state.is_due_now(now)]

    def offer(self, key: str) -> Offer | None:
        """The next write of a key; None if there is nothing to write."""
        state = self._states.get(key)
        if state is None or not state.is_due:
            return None
        if not state.sending:
            state.sending, state.pending = state.pending, {}
            state.batch += 1
        counters = dict(state.record.counters)
        for short, (day, amount) in state.sending.items():
            before = counters.get(short)
            if before is not None and before.day > day and not self._is_wrong(before):
                continue  # yesterday's
            used = amount + (before.used if before is not None and before.day == day else 0.0)
            counters[short] = self._use(short, day, used, state.counters.get(short))
        writers = state.record.with_writer(self._writer, state.batch)
        return Offer(key, state.revision, UseRecord(counters=counters, writers=writers, at=self._wall()))

    def written(self, offer: Offer, revision: int) -> None:
        """The store has applied the write."""
        state = self._states.get(offer.key)
        if state is None or revision <= state.seen:
            return  # the watch was faster
        state.record, state.revision, state.seen = offer.record, revision, revision
        state.sending, state.is_lost, state.is_left_out = {}, False, False
        state.since = self._wall()  # of `pending`, at the earliest when the write began

    @property
    def n_free(self) -> int:
        """Of records that the store has room for; negative if it has too many."""
        return self.max_records - sum(1 for state in self._states.values() if state.revision)

    def leaving(self, besides: Collection[str]) -> list[tuple[str, int]]:
        """Keys and revisions of the records that make room in the store for those of `besides` that it does not have.

        At most MAX_CHANGES. Records with a total never leave.
        """
        n_new = sum(1 for key in besides if not self._states[key].revision)
        candidates = [
            (state.record.at, key, state.revision)
            for key, state in self._states.items()
            if state.revision and not state.is_due and not state.record.has_total and key not in besides
        ]
        n_leaving = min(n_new - self.n_free, MAX_CHANGES)
        return [(key, revision) for _, key, revision in heapq.nsmallest(n_leaving, candidates)]

    def leave_out(self, key: str) -> None:
        """The store has no room for this key's record."""
        state = self._states.get(key)
        if state is not None:
            state.is_left_out, state.since = True, self._wall()

    @staticmethod
    def _use(short: str, day: int, used: float, counter: Counter | None) -> Use:
        if short.endswith("/" + MINUTE) and counter is not None:
            level = counter.stored()
            return Use(used=used, limit=level.per_minute, left=level.level, at=level.at)
        return Use(used=used, day=day if short.endswith("/" + DAY) else 0)

    # ---------------------------------------------------------------- states

    def _state(self, key: str) -> _State:
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= 2 * self.max_records:  # the store's, and those that it has left out
                self._trim()
            state = self._states[key] = _State()
        self._states.move_to_end(key)
        return state

    def _trim(self) -> None:
        for key in [key for key, state in self._states.items() if not state.is_due and not state.revision]:
            del self._states[key]
            if len(self._states) <= self.max_records:
                return
        while len(self._states) >= 2 * self.max_records:
            self._states.popitem(last=False)
