"""When requests wait for the publication of quotas, what it writes, and which records leave a full store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from pipeline.api.key_file import KeyLimits
from pipeline.coordination.interface import MAX_CHANGES
from stages.orchestrator.quotas import publisher
from stages.orchestrator.quotas.use_record import QUOTAS, decode, use_key
from tests.orchestrator.quotas import KEY, Clock, FaultyStore, Orchestrator

LARGE = KeyLimits(tokens_total=6400)  # an allowance of 200


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """A machine under load is no store that does not answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "STORE_S", 60.0)
        yield


def make(own: KeyLimits = LARGE, max_records: int = 1000) -> tuple[FaultyStore, Clock, Orchestrator]:
    store, clock = FaultyStore(), Clock()
    return store, clock, Orchestrator(store, clock, "a", own, max_records)


async def stored(store: FaultyStore) -> dict[str, float]:
    """What the store has of each key."""
    records = {item.key: decode(item.value) for item in (await store.scan(QUOTAS))[0]}
    return {key: sum(use.used for use in record.counters.values()) for key, record in records.items() if record}


async def test_requests_wait_once_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "STORE_S", 0.05)
    store, _, one = make()
    keys = [f"key-{number}" for number in range(20)]
    for key in keys:
        assert await one.take(200, key)
    store.fault = "hang"
    assert all(await asyncio.gather(*(one.take(1, key) for key in keys)))
    assert len(store.calls) == 1  # all have waited for the same call
    assert all(await asyncio.gather(*(one.take(1, key) for key in keys)))
    assert len(store.calls) == 1
    await one.publisher.publish()
    assert len(store.calls) == 2
    assert all(await asyncio.gather(*(one.take(1, key) for key in keys)))
    assert len(store.calls) == 2  # `publish` has tried, and failed
    store.fault = ""
    monkeypatch.setattr(publisher, "STORE_S", 60.0)
    await one.publisher.publish()
    assert await stored(store) == {use_key(f":{key}"): 203 for key in keys}
    assert not one.publisher.is_down


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_requests_wait_again_once_the_store_answers(fault: str) -> None:
    store, _, one = make()
    assert await one.take(200)
    store.fault = fault
    await one.publisher.publish(is_all=False)
    assert one.publisher.is_down
    store.fault = ""
    await one.publisher.publish(is_all=False)
    assert not one.publisher.is_down
    assert await one.take(200)
    store.calls.clear()
    assert await one.take(1)
    assert len(store.calls) == 1
    assert await stored(store) == {use_key(f":{KEY}"): 400}


async def test_requests_share_a_publication() -> None:
    store, _, one = make()
    assert await one.take(200)
    assert all(await asyncio.gather(*(one.take(1) for _ in range(150))))
    assert len(store.calls) == 1
    assert one.remaining() == [6400 - 350]


async def test_a_request_that_is_cancelled_ends_no_publication() -> None:
    store, _, one = make()
    assert await one.take(200)
    first, second = (asyncio.create_task(one.take(1)) for _ in range(2))
    while not store.calls:
        await asyncio.sleep(0)
    first.cancel()
    assert await second
    assert await stored(store) == {use_key(f":{KEY}"): 200}
    assert len(store.calls) == 1


async def test_a_request_does_not_wait_for_the_use_of_others() -> None:
    store, _, one = make()
    keys = [f"key-{number}" for number in range(10 * MAX_CHANGES)]
    for key in keys:
        assert await one.take(200, key)
    publication = asyncio.create_task(one.publisher.publish())
    while not store.calls:
        await asyncio.sleep(0)
    assert await one.take(1, keys[-1])
    assert len(store.calls) <= 3
    await publication
    assert sum((await stored(store)).values()) == 200 * len(keys) + 1


async def test_a_conflict_costs_one_more_transaction() -> None:
    store, clock, one = make()
    other = Orchestrator(store, clock, "b", LARGE)
    keys = [f"key-{number}" for number in range(MAX_CHANGES)]
    for key in keys:
        one.quotas.charge_output("a", 7, key)
    other.quotas.charge_output("a", 5, keys[3])
    await other.publisher.publish()
    store.calls.clear()
    await one.publisher.publish()
    assert len(store.calls) == 2
    assert await stored(store) == {use_key(f":{key}"): 12 if key == keys[3] else 7 for key in keys}


async def test_no_record_leaves_a_store_that_has_room() -> None:
    store, clock, one = make(KeyLimits(tokens_per_day=10), max_records=5)
    names = [f"key-{number}" for number in range(5)]
    for name in names[:4]:
        clock.now += 1
        assert await one.take(1, name)
        await one.publisher.publish()
    for name in names[1:]:
        one.quotas.charge_output("a", 1, name)
    await one.publisher.publish()
    assert set(await stored(store)) == {use_key(f":{name}") for name in names}


async def test_a_total_is_never_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    store, clock, one = make(KeyLimits(tokens_total=32), max_records=3)
    for number in range(6):
        with caplog.at_level(logging.WARNING, "starling.orchestrator"):
            assert await one.take(2, f"key-{number}")
            await one.publisher.publish()
    assert await stored(store) == {use_key(f":key-{number}"): 2 for number in range(3)}
    assert [record.message for record in caplog.records if "no room" in record.message] == [
        "the store has no room for the use of more tenants and keys: each orchestrator counts these alone"
    ]
    store.calls.clear()
    assert [await one.take(10, "key-5") for _ in range(4)] == [True] * 3 + [False]  # alone, and without waiting
    assert store.calls == []
    clock.now += 60
    for item in (await store.scan(QUOTAS))[0][:2]:
        await store.swap(item.key, item.revision, None)
    one.deliver(store.updates)
    await one.publisher.publish(is_all=False)  # now there is room
    left = await stored(store)
    assert len(left) == 3 and sum(key in left for key in (use_key(f":key-{number}") for number in range(3, 6))) == 2


async def test_a_record_that_could_not_be_deleted_is_not_forgotten() -> None:
    store, clock, one = make(KeyLimits(tokens_per_day=10), max_records=3)
    other = Orchestrator(store, clock, "b", KeyLimits(tokens_per_day=10), max_records=3)
    for name in ("old", "newer", "newest"):
        clock.now += 1
        assert await one.take(1, name)
        await one.publisher.publish()
    other.deliver(store.updates)
    clock.now += 1
    assert await other.take(2, "old")
    await other.publisher.publish()
    assert await one.take(1, "last")  # and has not learned that "old" was used again
    await one.publisher.publish()
    assert await stored(store) == {use_key(":old"): 3, use_key(":newest"): 1, use_key(":last"): 1}


async def test_little_use_is_published_less_often() -> None:
    store, clock, one = make()
    for _ in range(20):  # 10 s
        one.quotas.charge_output("a", 1, KEY)
        clock.now += 0.5
        await one.publisher.publish(is_all=False)
    assert 1 <= len(store.calls) <= 2
    one.quotas.charge_output("a", 50, KEY)  # a quarter of the allowance
    store.calls.clear()
    await one.publisher.publish(is_all=False)
    assert len(store.calls) == 1
    one.quotas.charge_output("a", 1, KEY)
    await one.publisher.publish()
    assert await stored(store) == {use_key(f":{KEY}"): 71}
