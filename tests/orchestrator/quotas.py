"""Orchestrators' quotas on a store that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pipeline.api.key_file import KeyLimits
from pipeline.api.quotas import DAY_S, TOKENS, Quotas
from pipeline.config.schema import RateLimitsConfig
from pipeline.coordination.interface import Change, Condition, CoordinationStore, Event, Update
from pipeline.coordination.memory import MemoryStore
from pipeline.errors import RateLimited, StorageUnavailable
from stages.orchestrator.quotas.publisher import QuotaPublisher
from stages.orchestrator.quotas.shared_use import SharedUse

KEY = "k"


class Clock:
    def __init__(self) -> None:
        self.now = 20 * DAY_S

    def __call__(self) -> float:
        return self.now


class FaultyStore(MemoryStore):
    """Keeps every update, and fails as the test wishes: before a transaction, after it, or without an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[Update] = []
        self.calls: list[list[str]] = []  # the keys of each transaction
        self.fault = ""

    async def transact(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> int | None:
        self.calls.append([change.key for change in changes])
        await asyncio.sleep(0)
        if self.fault == "hang":
            await asyncio.Event().wait()
        if self.fault == "before":
            raise StorageUnavailable("no answer")
        revision = await super().transact(conditions, changes)
        if revision is not None:
            events = tuple(Event(change.key, change.value, revision) for change in changes)
            self.updates.append(Update(revision, events, False))
        if self.fault == "after":
            raise StorageUnavailable("no answer")
        return revision


class Orchestrator:
    """The quotas of one orchestrator."""

    def __init__(
        self, store: CoordinationStore, clock: Clock, name: str, own: KeyLimits, max_records: int = 100
    ) -> None:
        self.use = SharedUse(name, clock, max_records)
        self.publisher = QuotaPublisher(store, self.use, clock)
        self.quotas = Quotas(RateLimitsConfig(), clock, None, clock, lambda key_id: own, self.use)
        self.n_seen = 0

    async def take(self, amount: int, key: str = KEY) -> bool:
        await self.publisher.publish_if_needed(self.quotas, TOKENS, "a", key, amount)
        try:
            self.quotas.take_prompt("a", amount, key)
        except RateLimited:
            return False
        return True

    def remaining(self, key: str = KEY) -> list[float]:
        return [counter.remaining for _, counter in self.quotas.counters(TOKENS, "a", key)]

    def deliver(self, updates: list[Update], count: int = 1000) -> None:
        for update in updates[self.n_seen : self.n_seen + count]:
            self.publisher.apply(update)
            self.n_seen += 1
