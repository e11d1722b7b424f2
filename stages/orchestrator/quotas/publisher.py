"""Publishes this orchestrator's use of quotas, about every half second, and before it exceeds its allowance.

A request whose limit has an allowance's worth of use that is not published waits until it is, which takes a transaction
of the store.  Between two publications an orchestrator therefore admits at most its allowance, or one request, that the
others do not know of: all together exceed a limit by at most that, once for each orchestrator.  Output, whose length is
not known before, comes on top, as in one server.

While the store does not answer, no request waits for it: each orchestrator goes on with its own count, and publishes it
when the store is back.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from pipeline.api.quotas import Quotas
from pipeline.coordination.interface import MAX_CHANGES, Change, Condition, CoordinationStore, Update
from pipeline.errors import StarlingError
from stages.orchestrator.quotas.shared_use import Offer, SharedUse
from stages.orchestrator.quotas.use_record import QUOTAS

log = logging.getLogger("starling.orchestrator")

PUBLISH_S = 0.5  # between two publications
ALLOWANCE = 1 / 32  # of a limit, that one orchestrator may use before it publishes
STORE_S = 1.0  # for the store to answer, and between two attempts while it does not
TRIES = 8  # of a record that other orchestrators change at the same time


class QuotaPublisher:
    """One per orchestrator. `clock`: monotonic, s."""

    def __init__(self, store: CoordinationStore, use: SharedUse, clock: Callable[[], float]) -> None:
        self._store = store
        self._use = use
        self._clock = clock
        self._lock = asyncio.Lock()
        self._down_until = float("-inf")
        self._has_failed = False

    @property
    def is_down(self) -> bool:
        """Whether the store has just not answered."""
        return self._clock() < self._down_until

    async def run(self) -> None:
        """Publish without end."""
        while True:
            await asyncio.sleep(PUBLISH_S * random.uniform(0.75, 1.25))  # two orchestrators do not stay in step
            if not self.is_down:
                await self.publish()

    async def settle(self, quotas: Quotas, unit: str, tenant: str, key_id: str, amount: float) -> None:
        """Wait until `amount` can be taken within this orchestrator's allowance."""
        deadline = self._clock() + STORE_S
        while not self.is_down and self._exceeds(quotas, unit, tenant, key_id, amount) and self._clock() < deadline:
            await self.publish()

    def _exceeds(self, quotas: Quotas, unit: str, tenant: str, key_id: str, amount: float) -> bool:
        for name, counter in quotas.counters(unit, tenant, key_id):
            unpublished = self._use.unpublished(name, counter)
            if unpublished and unpublished + amount > counter.limit * ALLOWANCE and not counter.wait_s(amount):
                return True
        return False

    def apply(self, update: Update) -> None:
        """Changes of the store, of which those of quotas are used."""
        events = [event for event in update.events if event.key.startswith(QUOTAS)]
        if update.is_snapshot:
            self._use.only({event.key for event in events})
        for event in events:
            self._use.received(event.key, event.value, event.revision)

    async def publish(self) -> None:
        """Write all use that is not published. Returns early if the store does not answer."""
        async with self._lock:
            try:
                for _ in range(2):  # a batch whose fate was unknown, and what was used since
                    due = self._use.due()
                    for begin in range(0, len(due), MAX_CHANGES):
                        async with asyncio.timeout(STORE_S):
                            await self._write(due[begin : begin + MAX_CHANGES])
            except (StarlingError, TimeoutError) as error:
                self._down_until = self._clock() + STORE_S
                log.log(
                    logging.DEBUG if self._has_failed else logging.WARNING,
                    "the use of quotas is not published",
                    extra={"reason": str(error) or f"no answer within {STORE_S:g} s"},
                )
                self._has_failed = True
            else:
                self._has_failed = False

    async def _write(self, keys: list[str]) -> None:
        offers = [offer for key in keys if (offer := self._use.offer(key)) is not None]
        if not offers:
            return
        if any(not offer.revision for offer in offers):
            await self._make_room(offers)
        revision = await self._store.transact(
            [Condition(offer.key, offer.revision) for offer in offers],
            [Change(offer.key, offer.value) for offer in offers],
        )
        if revision is not None:
            for offer in offers:
                self._use.written(offer, revision)
            return
        for offer in offers:
            await self._write_one(offer.key)

    async def _write_one(self, key: str) -> None:
        """After a conflict: with what the store has now."""
        for _ in range(TRIES):
            item = await self._store.get(key)
            if item is None:
                self._use.received(key, None, 0, is_current=True)
            else:
                self._use.received(key, item.value, item.revision, is_current=True)
            offer = self._use.offer(key)
            if offer is None:
                return
            revision = await self._store.swap(key, offer.revision, offer.value)
            if revision is not None:
                self._use.written(offer, revision)
                return

    async def _make_room(self, offers: list[Offer]) -> None:
        for _ in offers:
            leaving = self._use.leaving({offer.key for offer in offers})
            if leaving is None:
                return
            key, revision = leaving
            await self._store.swap(key, revision, None)
            self._use.received(key, None, 0, is_current=True)
