"""Quotas of several orchestrators: no use is lost or counted twice, and limits hold within the documented bound."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.key_file import KeyLimits
from pipeline.api.quotas import DAY_S, REQUESTS
from pipeline.coordination.interface import Change, CoordinationStore, Event, Update
from pipeline.coordination.memory import MemoryStore
from pipeline.coordination.sqlite_store import SqliteStore
from stages.orchestrator.quotas import publisher
from stages.orchestrator.quotas.use_record import QUOTAS, decode, use_key
from tests.orchestrator.quotas import KEY, Clock, FaultyStore, Orchestrator

LIMIT_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """A machine under load is no store that does not answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "STORE_S", 60.0)
        yield


FAULTS = ("", "before", "after")
STEPS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 30)),
    st.tuples(st.just("publish"), st.integers(0, 2), st.sampled_from(FAULTS)),
    st.tuples(st.just("deliver"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("die"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("lose"), st.just(0), st.just(0)),
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_no_use_is_lost_or_counted_twice(steps: list[tuple[str, int, int | str]]) -> None:
    """Under lost answers, late events, and a store that is emptied: every counter has in the end what all have used."""
    own = KeyLimits(tokens_total=1_000_000, tokens_per_day=1_000_000, tokens_per_minute=1_000_000)
    clock = Clock()

    async def play() -> None:
        store = FaultyStore()
        fleet = [Orchestrator(store, clock, str(number), own) for number in range(3)]
        taken = [0, 0, 0]  # since the process started
        ended = 0  # by processes that have died, of what is published
        for n_step, (step, who, given_value) in enumerate(steps):
            one = fleet[who]
            if step == "take":
                assert isinstance(given_value, int)
                one.quotas.charge_output("a", given_value, KEY)
                taken[who] += given_value
            elif step == "publish":
                store.fault = str(given_value)
                clock.now += 2  # an orchestrator that had no answer tries again
                await one.publisher.publish()
                store.fault = ""
            elif step == "deliver":
                assert isinstance(given_value, int)
                one.deliver(store.updates, given_value)
            elif step == "die":
                await one.publisher.publish()
                ended += taken[who]
                taken[who] = 0
                fleet[who] = Orchestrator(store, clock, f"{who}-{n_step}", own)
                item = await store.get(use_key(f":{KEY}"))
                snapshot = (Event(*item),) if item is not None else ()
                fleet[who].publisher.apply(Update(1, snapshot, True))
                fleet[who].n_seen = len(store.updates)
            else:
                for one in fleet:
                    one.deliver(store.updates)  # what none of them has seen is lost
                for item in (await store.scan(QUOTAS))[0]:
                    await MemoryStore.transact(store, (), (Change(item.key, None),))
                for one in fleet:
                    one.publisher.apply(Update(1, (), True))
        for _ in range(2):
            clock.now += 2
            for one in fleet:
                await one.publisher.publish()
        used = ended + sum(taken)
        for one in fleet:
            one.deliver(store.updates)
            assert one.use.due() == []
            minute, *counts = one.remaining()
            assert counts == [1_000_000 - used] * 2
            assert minute >= 1_000_000 - used
        item = await store.get(use_key(f":{KEY}"))
        if used:
            assert item is not None
            record = decode(item.value)
            assert record is not None and {use.used for use in record.counters.values()} == {used}

    asyncio.run(play())


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.sampled_from(["", "publish", "deliver"])), max_size=200)
)
def test_the_fleet_exceeds_a_limit_by_one_allowance_for_each_orchestrator(steps: list[tuple[int, int, str]]) -> None:
    limit, n_orchestrators = 200, 3
    own = KeyLimits(tokens_total=limit)

    async def play() -> int:
        store, clock = FaultyStore(), Clock()
        fleet = [Orchestrator(store, clock, str(number), own) for number in range(n_orchestrators)]
        taken = 0
        for who, amount, then in steps:
            if await fleet[who].take(amount):
                taken += amount
            if then == "publish":
                await fleet[who].publisher.publish()
            elif then == "deliver":
                fleet[who].deliver(store.updates, 1)
        return taken

    assert asyncio.run(play()) <= limit + n_orchestrators * max(limit / 32, 9)


def test_a_burst_on_one_orchestrator_gets_the_whole_limit() -> None:
    """An allowance that is used up costs a transaction, not a refusal."""

    async def play() -> None:
        store, clock = FaultyStore(), Clock()
        one, other = (Orchestrator(store, clock, name, KeyLimits(tokens_per_minute=100)) for name in "ab")
        assert [await one.take(1) for _ in range(101)] == [True] * 100 + [False]
        other.deliver(store.updates)
        assert sum([await other.take(1) for _ in range(10)]) <= 100 / 32 + 1
        assert 15 < len(store.updates) < 60

    asyncio.run(play())


async def test_without_the_store_each_goes_on_with_its_own_count() -> None:
    store, clock = FaultyStore(), Clock()
    one, other = (Orchestrator(store, clock, name, KeyLimits(tokens_total=10)) for name in "ab")
    store.fault = "before"
    for orchestrator in (one, other):
        assert [await orchestrator.take(1) for _ in range(12)] == [True] * 10 + [False] * 2
    store.fault = ""
    clock.now += 2
    for orchestrator in (one, other):
        await orchestrator.publisher.publish()
    one.deliver(store.updates)
    assert one.remaining() == other.remaining() == [-10]


async def test_a_new_day_begins_for_all_and_a_wrong_clock_for_none() -> None:
    store, clock, wrong = FaultyStore(), Clock(), Clock()
    wrong.now += 30 * DAY_S
    own = KeyLimits(tokens_per_day=10)
    one, other, late = (Orchestrator(store, c, n, own) for c, n in ((clock, "a"), (clock, "b"), (wrong, "c")))
    assert await one.take(10)
    await one.publisher.publish()
    assert await late.take(10)
    await late.publisher.publish()
    for orchestrator in (one, other):
        orchestrator.deliver(store.updates)
        assert orchestrator.remaining() == [0]
    clock.now += DAY_S
    assert await one.take(4)
    await one.publisher.publish()
    other.deliver(store.updates)
    assert other.remaining() == [6]


async def test_the_number_of_records_is_bounded() -> None:
    store, clock = FaultyStore(), Clock()
    one = Orchestrator(store, clock, "a", KeyLimits(tokens_per_day=10), max_records=5)
    for number in range(40):
        clock.now += 1
        assert await one.take(1, f"key-{number}")
        await one.publisher.publish()
        assert len((await store.scan(QUOTAS))[0]) <= 5
    assert len(one.use) <= 11
    kept = {item.key for item in (await store.scan(QUOTAS))[0]}
    assert kept == {use_key(f":key-{number}") for number in range(35, 40)}


async def test_totals_stay_when_other_records_leave() -> None:
    store, clock = FaultyStore(), Clock()
    total = Orchestrator(store, clock, "a", KeyLimits(tokens_total=10), max_records=5)
    assert await total.take(3, "total")
    await total.publisher.publish()
    daily = Orchestrator(store, clock, "b", KeyLimits(tokens_per_day=10), max_records=5)
    daily.deliver(store.updates)
    for number in range(20):
        clock.now += 1
        assert await daily.take(1, f"key-{number}")
        await daily.publisher.publish()
    assert use_key(":total") in {item.key for item in (await store.scan(QUOTAS))[0]}


@pytest.mark.parametrize("value", [b"", b"[]", b'{"counters":{"tokens/day":{"used":-1}}}', b"\xff", b'{"counters":3}'])
async def test_a_damaged_record_is_replaced(value: bytes) -> None:
    store, clock = FaultyStore(), Clock()
    await store.put(use_key(f":{KEY}"), value)
    one = Orchestrator(store, clock, "a", KeyLimits(tokens_total=10))
    one.deliver(store.updates)
    assert await one.take(3)
    await one.publisher.publish()
    item = await store.get(use_key(f":{KEY}"))
    record = decode(item.value) if item is not None else None
    assert record is not None and record.counters["tokens/total"].used == 3


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_two_orchestrators_on_one_store(kind: str, tmp_path: Path) -> None:
    """With the store's own watch: each learns what the other one uses, and a third one what both have used."""
    store: CoordinationStore = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "fleet.db")
    clock = Clock()
    own = KeyLimits(tokens_total=1000, requests_per_day=1000)
    fleet = [Orchestrator(store, clock, name, own) for name in "ab"]

    async def follow(one: Orchestrator) -> None:
        async with aclosing(store.watch("")) as updates:  # type: ignore[type-var]
            async for update in updates:
                one.publisher.apply(update)

    async def use(one: Orchestrator) -> None:
        for _ in range(100):
            assert await one.take(3)
            one.quotas.take_request("a", KEY)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(follow(one)) for one in fleet]
    async with store, asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(use(one) for one in fleet))
        await asyncio.gather(*(one.publisher.publish() for one in fleet))
        late = Orchestrator(store, clock, "c", own)
        tasks.append(asyncio.create_task(follow(late)))
        for one in (*fleet, late):
            while one.remaining() != [400]:
                await asyncio.sleep(0.01)
            assert [counter.remaining for _, counter in one.quotas.counters(REQUESTS, "a", KEY)] == [800]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
