"""Publishes this orchestrator's use of quotas: about every 0.5 s (little use every 5 s), and before it exceeds its
allowance.

A request whose limit has an allowance's worth of use that is not published waits until it is, which takes a transaction
of the store.  Between two publications an orchestrator therefore admits at most its allowance, or one request, that the
others do not know of: all together exceed a limit by at most that, once for each orchestrator.  Output, whose length is
not known before, comes on top, as in one server.

    urgent      keys for which requests wait
    later       keys that `publish` writes
    batch       at most one is being written, by one task for which all wait: the urgent keys first, then the others.  A
                request that no longer waits does not end it

A request waits at most STORE_S.  After an attempt that the store has not answered no request waits, until `publish` has
written all that it has to: each orchestrator goes on with its own count.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from itertools import chain, islice
from typing import TypeVar

from pipeline.api.quotas import Quotas
from pipeline.coordination.interface import MAX_CHANGES, Change, Condition, CoordinationStore, Update
from pipeline.errors import StarlingError
from stages.orchestrator.quotas.shared_use import ALLOWANCE, Offer, SharedUse
from stages.orchestrator.quotas.use_record import QUOTAS, use_key

log = logging.getLogger("starling.orchestrator")

PUBLISH_S = 0.5  # between two publications
STORE_S = 1.0  # for the store to answer a call, and between two attempts while it does not
TRIES = 8  # of a record that other orchestrators change at the same time
WARN_S = 60.0  # between two warnings that the store has no room

T = TypeVar("T")


class QuotaPublisher:
    """One per orchestrator. `clock`: monotonic, s."""

    def __init__(self, store: CoordinationStore, use: SharedUse, clock: Callable[[], float]) -> None:
        self._store = store
        self._use = use
        self._clock = clock
        self._urgent: dict[str, None] = {}  # in order of arrival
        self._later: dict[str, None] = {}
        self._batch: frozenset[str] = frozenset()  # what is being written
        self._writing: asyncio.Task[bool] | None = None
        self._is_down = False
        self._warned = float("-inf")

    @property
    def is_down(self) -> bool:
        """Whether the last attempt had no answer."""
        return self._is_down

    async def run(self) -> None:
        """Publish without end."""
        while True:
            period_s = STORE_S if self._is_down else PUBLISH_S
            await asyncio.sleep(period_s * random.uniform(0.75, 1.25))  # two orchestrators do not stay in step
            await self.publish(is_all=False)

    async def publish_if_needed(self, quotas: Quotas, unit: str, tenant: str, key_id: str, amount: float) -> None:
        """Wait until `amount` can be taken within this orchestrator's allowance, at most STORE_S."""
        deadline = 0.0
        while not self._is_down and (keys := self._exceeded(quotas, unit, tenant, key_id, amount)):
            deadline = deadline or self._clock() + STORE_S
            self._urgent.update(dict.fromkeys(keys))
            writing = self._write_batch()
            done, _ = await asyncio.wait({writing}, timeout=max(0.0, deadline - self._clock()))
            if not done:
                return
            writing.result()  # raises what it did not expect

    def _exceeded(self, quotas: Quotas, unit: str, tenant: str, key_id: str, amount: float) -> list[str]:
        """The store's keys of the limits of which more than the allowance would not be published."""
        found = []
        for name, counter in quotas.counters(unit, tenant, key_id):
            unpublished = self._use.unpublished(name, counter)
            if unpublished and unpublished + amount > counter.limit * ALLOWANCE and not counter.wait_s(amount):
                found.append(use_key(name[2]))
        return found

    def apply(self, update: Update) -> None:
        """Changes of the store, of which those of quotas are used."""
        events = [event for event in update.events if event.key.startswith(QUOTAS)]
        if update.is_snapshot:
            self._use.begin_snapshot({event.key for event in events})
        for event in events:
            self._use.received(event.key, event.value, event.revision)

    async def publish(self, *, is_all: bool = True) -> None:
        """Write the use that is not published. Returns early if the store does not answer.

        `is_all`: also what is so little that it can be published later.
        """
        for _ in range(2):  # a batch whose fate was unknown, and what was used since
            due = self._use.due() if is_all else self._use.due_now()
            if not due:
                return
            self._later.update(dict.fromkeys(due))
            while not (self._batch.isdisjoint(due) and self._later.keys().isdisjoint(due)):
                writing = self._write_batch()
                await asyncio.wait({writing})
                if not writing.result():
                    return
            self._is_down = False

    # ---------------------------------------------------------------- the task

    def _write_batch(self) -> asyncio.Task[bool]:
        """The task that writes, or a new one."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_next())
        return self._writing

    async def _write_next(self) -> bool:
        """Write the next batch; whether the store has answered."""
        keys = list(islice(dict.fromkeys(chain(self._urgent, self._later)), MAX_CHANGES))
        for key in keys:
            self._urgent.pop(key, None)
            self._later.pop(key, None)
        self._batch = frozenset(keys)
        try:
            await self._write(keys)
        except (StarlingError, TimeoutError) as error:
            self._urgent.clear()  # `publish` finds them again
            self._later.clear()
            log.log(
                logging.DEBUG if self._is_down else logging.WARNING,
                "the use of quotas is not published",
                extra={"reason": str(error) or f"no answer within {STORE_S:g} s"},
            )
            self._is_down = True
            return False
        finally:
            self._batch = frozenset()
        return True

    async def _write(self, keys: list[str]) -> None:
        """In one transaction; after a conflict with what the store has now, and after another one by halves."""
        for number in range(2 if len(keys) > 1 else TRIES):
            if number:
                await self._read(keys)
            offers = [offer for key in keys if (offer := self._use.offer(key)) is not None]
            offers = await self._with_room(offers)
            if not offers:
                return
            conditions = [Condition(offer.key, offer.revision) for offer in offers]
            changes = [Change(offer.key, offer.value) for offer in offers]
            revision = await _answer(self._store.transact(conditions, changes))
            if revision is not None:
                for offer in offers:
                    self._use.written(offer, revision)
                return
        if half := len(keys) // 2:
            await self._write(keys[:half])
            await self._write(keys[half:])

    async def _read(self, keys: list[str]) -> None:
        """What the store has now."""
        items = await asyncio.gather(*(_answer(self._store.get(key)) for key in keys), return_exceptions=True)
        for key, item in zip(keys, items, strict=True):
            if isinstance(item, BaseException):
                raise item
            if item is None:
                self._use.received(key, None, 0, is_current=True)
            else:
                self._use.received(key, item.value, item.revision, is_current=True)

    async def _with_room(self, offers: list[Offer]) -> list[Offer]:
        """The offers for which the store has room, after other records have left it for new ones."""
        new = [offer for offer in offers if not offer.revision]
        if not new:
            return offers
        is_refused = True  # what has no room now
        leaving = self._use.leaving({offer.key for offer in offers})
        if leaving:
            conditions = [Condition(key, revision) for key, revision in leaving]
            changes = [Change(key, None) for key, _ in leaving]
            deleted = await _answer(self._store.transact(conditions, changes))
            if deleted is None:  # another orchestrator has used one of them
                await self._read([key for key, _ in leaving])
                is_refused = False
            else:
                for key, _ in leaving:
                    self._use.received(key, None, deleted)
        left_out = new[max(0, self._use.n_free) :]
        if left_out and is_refused:
            self._refuse(left_out)
        without = {offer.key for offer in left_out}
        return [offer for offer in offers if offer.key not in without]

    def _refuse(self, offers: list[Offer]) -> None:
        for offer in offers:
            self._use.leave_out(offer.key)
        if self._clock() - self._warned >= WARN_S:
            self._warned = self._clock()
            log.warning(
                "the store has no room for the use of more tenants and keys: each orchestrator counts these alone",
                extra={"count": len(offers), "max_records": self._use.max_records},
            )


async def _answer(call: Awaitable[T]) -> T:
    async with asyncio.timeout(STORE_S):
        return await call
