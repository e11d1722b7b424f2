"""An agent's lease: it stops before the store forgets it, is extended while the store is silent, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from pipeline.config.load import resolve
from pipeline.config.schema import AgentConfig
from pipeline.coordination.election import MARGIN, RENEWALS
from pipeline.coordination.memory import MemoryStore
from pipeline.errors import ConfigError, StorageUnavailable
from pipeline.fleet import records
from stages.agent.engines.starling_engine import SUSPEND_S
from stages.agent.lease import AgentLease
from tests.fleet.coordination_stores import Clock

TTL_S = 10.0
LASTS_S = 8.0  # by the agent's clock
KEY = "agents/a"


class Store(MemoryStore):
    """A store that can be silent."""

    is_silent = False

    async def renew(self, lease: str) -> bool:
        if self.is_silent:
            raise StorageUnavailable("silent")
        return await super().renew(lease)

    async def grant(self, ttl_s: float) -> str:
        if self.is_silent:
            raise StorageUnavailable("silent")
        return await super().grant(ttl_s)


class Site:
    """A store, a clock, and agents."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.store = Store(clock, 100)
        self.events: list[tuple[str, float]] = []

    async def sleep(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float) -> None:
        """Move the clock in small steps; between them every task runs until it waits."""
        for _ in range(round(seconds * 8)):
            self.clock.now += 0.125
            await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def make(self, incarnation: str, previous: str = "") -> AgentLease:
        record = records.AgentRecord(agent_id="a", url="http://h:1", incarnation=incarnation)
        return AgentLease(self.store, record, TTL_S, previous, clock=self.clock, sleep=self.sleep)

    @asynccontextmanager
    async def running(self, lease: AgentLease) -> AsyncIterator[None]:
        async def begin() -> None:
            self.events.append(("begin", self.clock.now))

        async def end() -> None:
            self.events.append(("end", self.clock.now))

        tasks = [asyncio.create_task(lease.hold()), asyncio.create_task(lease.guard(begin, end))]
        await self.settle()
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def holder(self) -> str:
        item = await self.store.get(KEY)
        return records.decode(KEY, item.value).incarnation if item is not None else ""


@pytest.fixture
def here(clock: Clock) -> Site:
    return Site(clock)


async def test_it_is_kept_while_the_store_answers_and_removed_at_the_end(here: Site) -> None:
    lease = here.make("one")
    async with here.running(lease):
        await here.pass_time(10 * TTL_S)
        assert lease.is_valid
        assert not lease.is_late
        assert await here.holder() == "one"
        assert [name for name, _ in here.events] == ["begin"]
    assert await here.holder() == ""
    assert not lease.is_valid


async def test_a_silent_store_ends_it_before_the_store_forgets_it(here: Site) -> None:
    lease = here.make("one")
    async with here.running(lease):
        await here.pass_time(TTL_S)
        here.store.is_silent = True
        begun = here.clock.now
        while lease.is_valid:
            await here.pass_time(0.125)
        assert lease.is_late
        # At most one renewal before the silence counts, and the store still has the record.
        assert here.clock.now <= begun + LASTS_S
        assert here.events[-1] == ("end", here.clock.now)
        assert await here.holder() == "one"
        await here.pass_time(2 * TTL_S)
        assert await here.holder() == ""
        here.store.is_silent = False
        await here.pass_time(TTL_S)
        assert await here.holder() == "one"
        assert lease.is_valid
        assert [name for name, _ in here.events] == ["begin", "end", "begin"]


async def test_heartbeats_extend_it_while_the_store_is_silent(here: Site) -> None:
    lease = here.make("one")
    async with here.running(lease):
        assert not lease.extend()  # the store answers
        here.store.is_silent = True
        await here.pass_time(TTL_S / 2)
        for _ in range(10):
            assert lease.extend()
            await here.pass_time(LASTS_S / 2)
        assert lease.is_valid
        assert [name for name, _ in here.events] == ["begin"]
        await here.pass_time(LASTS_S)
        assert not lease.is_valid
        assert not lease.extend()  # what has ended stays ended until the store has it again
        here.store.is_silent = False
        await here.pass_time(TTL_S)
        assert lease.is_valid


async def test_the_record_of_the_agent_that_ran_here_before_is_replaced(here: Site) -> None:
    async with here.running(here.make("one")):
        second = here.make("two", previous="one")
        async with here.running(second):
            assert second.is_valid
            assert await here.holder() == "two"


async def test_an_agent_whose_name_was_taken_over_stops_and_comes_back_after_it(here: Site) -> None:
    one = here.make("one")
    async with here.running(one):
        async with here.running(here.make("two", previous="one")):
            await here.pass_time(1.5 * TTL_S / RENEWALS)
            assert not one.is_valid
            assert one.is_name_taken
            assert await here.holder() == "two"
            assert [name for name, _ in here.events] == ["begin", "begin", "end"]  # before its lease would have ended
        await here.pass_time(TTL_S)
        assert one.is_valid and not one.is_name_taken
        assert await here.holder() == "one"
        assert [name for name, _ in here.events] == ["begin", "begin", "end", "begin"]


def test_an_engine_ends_within_the_margin_of_the_shortest_lease() -> None:
    fields = [one for one in msgspec.structs.fields(AgentConfig) if one.name == "lease_ms"]
    shortest = fields[0].type.__metadata__[0].ge
    assert MARGIN * shortest / 1000 > SUSPEND_S
    with pytest.raises(ConfigError, match=str(shortest)):
        resolve({"fleet": {"agent": {"lease_ms": shortest - 1}}}, env={})


async def test_another_agent_of_the_same_id_waits(here: Site) -> None:
    second = here.make("two")
    async with here.running(here.make("one")):
        waiting = asyncio.create_task(second.hold())
        await here.pass_time(3 * TTL_S)
        assert second.is_name_taken
        assert not second.is_valid
        assert await here.holder() == "one"
    await here.pass_time(TTL_S)
    assert second.is_valid
    assert not second.is_name_taken
    assert await here.holder() == "two"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
