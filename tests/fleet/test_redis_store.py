"""The store on Redis: what its server's death takes along and what not, leases without a clock of the server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipeline.coordination.election import Election
from pipeline.coordination.interface import Change, CoordinationStore, Event
from pipeline.coordination.redis_leases import SeenLeases
from pipeline.coordination.redis_store import RedisStore
from pipeline.errors import ConfigError, StorageUnavailable
from tests.fleet.coordination_stores import LIMIT_S, Clock, Watcher, until
from tests.fleet.peers import Redis


@pytest.fixture
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Redis]:
    """A server of the test alone."""
    with Redis(tmp_path, *getattr(request, "param", Redis.DURABLE)) as server:
        yield server


forgetful = pytest.mark.parametrize("own", [Redis.FORGETFUL], indirect=True)


@asynccontextmanager
async def opened(server: Redis, clock: Clock, count: int = 2) -> AsyncIterator[list[RedisStore]]:
    """Several clients, as of several processes."""
    stores = [server.open("x", clock=clock) for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


async def answering(store: CoordinationStore) -> None:
    """Wait until the server answers."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await store.scan("")
                return
            except StorageUnavailable:
                await asyncio.sleep(0.02)


# ------------------------------------------------------------------ leases


def test_a_lease_is_over_when_it_was_seen_unchanged_for_its_time() -> None:
    seen = SeenLeases()
    seen.see_all([(b"a", b"1000 0"), (b"b", b"3000 0")], 5.0, seen.serial)
    seen.see_all([(b"a", b"1000 1"), (b"b", b"3000 0")], 5.9, seen.serial)
    assert seen.over(6.8) == []
    assert seen.over(6.9) == [(b"a", b"1000 1")]
    assert sorted(seen.over(8.0)) == [(b"a", b"1000 1"), (b"b", b"3000 0")]
    seen.see_all([(b"b", b"3000 0")], 8.0, seen.serial)
    assert seen.over(8.0) == [(b"b", b"3000 0")]
    seen.forget()
    assert seen.over(100.0) == []


def test_an_answer_that_was_overtaken_changes_nothing() -> None:
    seen = SeenLeases()
    asked = seen.serial
    seen.see(b"a", b"1000 0", 5.0)
    seen.see_all([], 5.5, asked)  # from before the lease was granted
    assert seen.over(6.0) == [(b"a", b"1000 0")]


async def test_the_lease_of_a_dead_client_ends_for_the_others(redis: Redis, tmp_path: Path, clock: Clock) -> None:
    async with redis.open(tmp_path.name, clock=clock) as living:
        async with redis.open(tmp_path.name, clock=clock) as dead:
            lease = await dead.grant(10)
            await dead.put("a", b"1", lease)
        watcher = Watcher(living, "")
        await until(lambda: watcher.values == {"a": b"1"})  # and its lease was seen
        clock.now += 9.9
        assert await living.get("a") is not None
        clock.now += 0.2
        await until(lambda: watcher.values == {})
        await watcher.stop()


async def test_a_client_that_comes_later_gives_a_lease_its_whole_time(
    redis: Redis, tmp_path: Path, clock: Clock
) -> None:
    async with redis.open(tmp_path.name, clock=clock) as first:
        await first.put("a", b"1", await first.grant(10))
        clock.now += 9.0
        async with redis.open(tmp_path.name, clock=clock) as later:
            assert await later.get("a") is not None
            clock.now += 9.0
            assert await later.get("a") is not None  # the first one would end it now
            assert await first.get("a") is None


async def test_a_renewal_that_others_have_not_seen_counts(redis: Redis, tmp_path: Path, clock: Clock) -> None:
    async with redis.open(tmp_path.name, clock=clock) as holder, redis.open(tmp_path.name, clock=clock) as other:
        lease = await holder.grant(10)
        await holder.put("a", b"1", lease)
        assert await other.get("a") is not None
        clock.now += 9.0
        assert await holder.renew(lease)
        clock.now += 2.0
        assert await other.get("a") is not None
        assert await holder.renew(lease)


# ------------------------------------------------------------------ the death of the server


async def test_what_is_acknowledged_survives_the_death_of_the_server(own: Redis, clock: Clock) -> None:
    """SIGKILL and a new start: values, revisions and leases are there, and the watch has neither gap nor snapshot."""
    async with opened(own, clock) as (store, other):
        watcher = Watcher(other, "")
        lease = await store.grant(10)
        first = await store.put("a", b"1", lease)
        assert first is not None
        await until(lambda: watcher.values == {"a": b"1"})
        own.kill()
        with pytest.raises(StorageUnavailable):
            await store.put("b", b"1")
        clock.now += 100  # the lease cannot be renewed meanwhile
        own.start()
        await answering(store)
        assert await store.renew(lease)  # its time begins again
        assert await store.put("b", b"2") == first + 1
        await until(lambda: watcher.values == {"a": b"1", "b": b"2"})
        assert sum(update.is_snapshot for update in watcher.updates) == 1
        clock.now += 10
        await until(lambda: watcher.values == {"b": b"2"})
        await watcher.stop()


@forgetful
async def test_a_server_that_forgets_everything_is_noticed(own: Redis, clock: Clock) -> None:
    async with opened(own, clock) as (store, other):
        first = await store.put("a", b"1")
        assert first is not None
        watcher = Watcher(other, "")
        await until(lambda: watcher.values == {"a": b"1"})
        own.restart()
        await until(lambda: watcher.values == {})
        assert watcher.updates[-1].is_snapshot
        again = await store.put("a", b"2")
        assert again is not None and again > first  # no revision is given out twice
        await until(lambda: watcher.values == {"a": b"2"})
        await watcher.stop()


@forgetful
async def test_no_one_leads_before_a_forgotten_lease_has_ended(own: Redis, clock: Clock) -> None:
    async with opened(own, clock) as (store, other):
        elections = [Election(one, "leader", b"x", 10, clock=clock) for one in (store, other)]
        await settle(clock, store)
        term = await elections[0].campaign()
        own.restart()
        campaign = asyncio.create_task(elections[1].campaign())
        await answering(other)
        await still(campaign)
        assert term.is_valid
        clock.now += 9.9
        await still(campaign)
        assert not term.is_valid
        clock.now += 0.2
        later = await campaign
        assert later.fence > term.fence
        assert await store.transact((term.condition,), (Change("placement", b"old"),)) is None


@forgetful
async def test_the_holder_writes_its_key_again_at_once(own: Redis, clock: Clock) -> None:
    async with opened(own, clock) as (store, other):
        await settle(clock, store)
        lease = await store.grant(10)
        assert await store.put("agents/a", b"1", lease)
        own.restart()
        await answering(store)
        assert not await store.renew(lease)
        with pytest.raises(StorageUnavailable, match=r"may last for 10\.0 s"):
            await other.put("agents/a", b"2", await other.grant(10))
        again = await store.grant(10)
        assert await store.put("agents/a", b"1", again)
        assert await other.swap("agents/a", 0, b"2", await other.grant(10)) is None


@forgetful
async def test_a_server_that_forgets_its_last_writes_is_noticed(own: Redis, clock: Clock) -> None:
    """It starts from a snapshot: what came after it is lost."""
    async with opened(own, clock, 1) as (store,):
        first = await store.put("a", b"1")
        await store._client.save()
        last = await store.put("a", b"2")
        await store.put("b", b"3")
        assert first is not None and last is not None
        watcher = Watcher(store, "")
        await until(lambda: watcher.values == {"a": b"2", "b": b"3"})
        own.restart()
        await until(lambda: watcher.values == {"a": b"1"})
        item = await store.get("a")
        assert item is not None and item.revision == first
        new = await store.put("c", b"4")
        assert new is not None and new > last + 1
        await watcher.stop()


async def test_data_that_are_removed_are_noticed(own: Redis, clock: Clock) -> None:
    """FLUSHALL, though the server keeps everything, and though a client that knows nothing is the first one to ask."""
    async with opened(own, clock, 1) as (store,):
        lease = await store.grant(10)
        last = await store.put("a", b"1", lease)
        assert last is not None
        await store._client.flushall()
        async with own.open("x", clock=clock) as new:
            assert await new.scan("a") == ([], (await new.scan(""))[1])
            assert await store.get("a") is None
            with pytest.raises(StorageUnavailable, match="leases that it has forgotten"):
                await new.put("a", b"2", await new.grant(10))
            revision = await new.put("b", b"2")
            assert revision is not None and revision > last


# ------------------------------------------------------------------ servers that are not as they should be


async def test_a_server_that_hangs_is_unavailable(own: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own.process is not None
    async with own.open("x") as store:
        await store.put("a", b"1")
        monkeypatch.setattr("pipeline.coordination.redis_store.CALL_S", 0.3)
        os.kill(own.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StorageUnavailable):
                await store.put("a", b"2")
        finally:
            os.kill(own.process.pid, signal.SIGCONT)
        await answering(store)


@pytest.mark.parametrize("own", [(*Redis.DURABLE, "--requirepass", "secret")], indirect=True)
async def test_a_wrong_password_is_an_error_of_the_configuration(own: Redis) -> None:
    for password in ("", "wrong"):
        async with own.open("x", password=password) as store:
            with pytest.raises(ConfigError, match="Redis at"):
                await store.put("a", b"1")
    async with own.open("x", password="secret") as store:
        assert await store.put("a", b"1")


async def test_a_password_that_changes_later_makes_the_store_unavailable(own: Redis) -> None:
    """A process that serves must not end for it."""
    async with own.open("x") as store, own.open("x") as operator:
        assert await store.put("a", b"1")
        await operator.put("b", b"1")
        await operator._client.config_set("requirepass", "new")
        await operator._client.client_kill_filter(_type="normal", skipme=True)
        for _ in range(2):
            with pytest.raises(StorageUnavailable):
                await store.put("a", b"2")
        await operator._client.config_set("requirepass", "")
        await answering(store)


@pytest.mark.parametrize("own", [("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")], indirect=True)
async def test_a_server_that_removes_keys_is_refused(own: Redis) -> None:
    async with own.open("x") as store:
        with pytest.raises(ConfigError, match="set noeviction"):
            await store.get("a")


async def test_a_client_without_the_right_to_see_the_settings_trusts_no_restart(own: Redis, clock: Clock) -> None:
    async with own.open("x", clock=clock) as operator:
        rights = {"keys": ["*"], "categories": ["+@all"], "commands": ["-config"], "enabled": True, "nopass": True}
        await operator.get("a")
        await operator._client.acl_setuser("limited", **rights)
    async with own.open("y", clock=clock, username="limited", password="any") as store:
        lease = await store.grant(10)
        with pytest.raises(StorageUnavailable, match="leases that it has forgotten"):
            await store.put("a", b"1", lease)
        await settle(clock, store)
        assert await store.put("a", b"1", await store.grant(10))


async def test_events_have_a_bound_in_bytes(
    redis: Redis, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.coordination.redis_store.KEPT_BYTES", 1000)
    async with redis.open(tmp_path.name, clock=clock) as store:
        revisions = [await store.put("a", bytes(300)) for _ in range(10)]
        assert await store._client.xlen(store._keys[-1]) == 3
        behind, near = Watcher(store, "", after=revisions[5] or 0), Watcher(store, "", after=revisions[6] or 0)
        await until(lambda: bool(behind.updates and near.updates))
        assert behind.updates[0].is_snapshot and not near.updates[0].is_snapshot
        assert [event.revision for event in near.updates[0].events] == revisions[7:]
        assert isinstance(near.updates[0].events[0], Event)
        await behind.stop()
        await near.stop()


# ------------------------------------------------------------------ parts


async def still(task: asyncio.Task[object]) -> None:
    """A candidate that tries ten times a second has not succeeded."""
    await asyncio.wait([task], timeout=0.35)
    assert not task.done()


async def settle(clock: Clock, store: RedisStore) -> None:
    """Let so much time pass that no lease of 10 s can last from before the server's start."""
    await store.scan("")
    clock.now += 10
