"""One suite for all coordination stores: values, leases, watches, contention of real processes, elections."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.coordination.etcd_store import EtcdStore
from pipeline.coordination.interface import Change, Condition, CoordinationStore, Event, Item
from pipeline.coordination.sqlite_store import SqliteStore
from pipeline.errors import ConfigError, InvalidRequest, StorageUnavailable
from pipeline.fleet import records
from stages.agent.lease import AgentLease
from tests.fleet.coordination_stores import LIMIT_S, Clock, Watcher, remove_database, until
from tests.fleet.peers import Etcd, compact

# ------------------------------------------------------------------ values and transactions


async def test_values_have_the_revision_of_their_transaction(store: CoordinationStore) -> None:
    assert await store.get("a") is None
    first = await store.put("a", b"1")
    second = await store.transact((), (Change("b/x", b"2"), Change("b/y", b"")))
    assert first is not None
    assert second is not None
    assert second > first
    assert await store.get("a") == Item("a", b"1", first)
    assert await store.scan("b/") == ([Item("b/x", b"2", second), Item("b/y", b"", second)], second)
    assert await store.scan("nothing") == ([], second)


async def test_a_transaction_is_applied_as_a_whole_or_not_at_all(store: CoordinationStore) -> None:
    revision = await store.put("a", b"1")
    assert revision is not None
    changes = (Change("a", None), Change("b", b"2"))
    assert await store.transact((Condition("a", revision), Condition("b", revision)), changes) is None
    assert await store.scan("") == ([Item("a", b"1", revision)], revision)
    assert await store.transact((Condition("a", revision), Condition("b", 0)), changes) == revision + 1
    assert [item.key for item in (await store.scan(""))[0]] == ["b"]


async def test_compare_and_swap(store: CoordinationStore) -> None:
    created = await store.swap("a", 0, b"1")
    assert created is not None
    assert await store.swap("a", 0, b"2") is None
    changed = await store.swap("a", created, b"3")
    assert changed is not None
    assert await store.swap("a", created, None) is None
    assert await store.swap("a", changed, None) is not None
    assert await store.get("a") is None


async def test_many_calls_at_once_wait_for_each_other(store: CoordinationStore) -> None:
    revisions = await asyncio.gather(*(store.put(f"a/{number}", b"1") for number in range(300)))
    assert len({*revisions} - {None}) == 300
    found = await asyncio.gather(*(store.get(f"a/{number}") for number in range(300)))
    assert [item and item.revision for item in found] == revisions


async def test_deleting_nothing_changes_nothing(store: CoordinationStore) -> None:
    revision = await store.put("a", b"1")
    assert await store.transact((), (Change("b", None),)) == revision


@pytest.mark.parametrize(
    "changes",
    [
        (),
        (Change("a", b""), Change("a", None)),
        (Change("", b""),),
        (Change("a//b", b""),),
        (Change("/a", b""),),
        (Change("a\0", b""),),
        (Change("x" * 513, b""),),
        (Change("a", b"x" * (256 * 1024 + 1)),),
        tuple(Change(f"k{number}", b"") for number in range(65)),
    ],
)
async def test_what_exceeds_a_bound_is_refused(store: CoordinationStore, changes: tuple[Change, ...]) -> None:
    with pytest.raises(InvalidRequest):
        await store.transact((), changes)
    with pytest.raises(InvalidRequest, match="ttl_s"):
        await store.grant(float("nan"))


# ------------------------------------------------------------------ leases


async def test_a_lease_ends_by_the_clock_and_takes_its_keys_along(timed: CoordinationStore, clock: Clock) -> None:
    lease, other = await timed.grant(10), await timed.grant(20)
    await timed.transact((), (Change("a", b"1", lease), Change("b", b"2", other), Change("c", b"3")))
    clock.now += 9.9
    assert await timed.renew(lease)
    clock.now += 9.9
    assert [item.key for item in (await timed.scan(""))[0]] == ["a", "b", "c"]
    clock.now += 0.2
    assert [item.key for item in (await timed.scan(""))[0]] == ["c"]
    assert not await timed.renew(lease)
    assert await timed.put("a", b"1", lease) is None
    assert await timed.get("a") is None


async def test_a_key_that_was_written_again_belongs_to_its_last_lease(timed: CoordinationStore, clock: Clock) -> None:
    lease = await timed.grant(10)
    await timed.put("a", b"1", lease)
    await timed.put("a", b"2")
    clock.now += 11
    item = await timed.get("a")
    assert item is not None
    assert item.value == b"2"


async def test_a_revoked_lease_is_over(store: CoordinationStore) -> None:
    lease = await store.grant(10)
    await store.put("a", b"1", lease)
    await store.revoke(lease)
    await store.revoke(lease)
    assert await store.get("a") is None
    assert not await store.renew(lease)


# ------------------------------------------------------------------ watches


async def test_a_watch_begins_with_a_snapshot_and_misses_nothing(store: CoordinationStore) -> None:
    await store.put("a/0", b"0")
    await store.put("b/0", b"0")
    watcher = Watcher(store, "a/")
    await until(lambda: bool(watcher.updates))
    assert watcher.updates[0].is_snapshot
    assert watcher.values == {"a/0": b"0"}
    for number in range(1, 8):
        await store.put(f"a/{number}", b"x")
        await store.put(f"b/{number}", b"x")
    await store.transact((), (Change("a/3", None), Change("a/9", b"last")))
    await until(lambda: "a/9" in watcher.values)
    assert sorted(watcher.values) == [f"a/{number}" for number in (0, 1, 2, 4, 5, 6, 7, 9)]
    assert not any(update.is_snapshot for update in watcher.updates[1:])
    assert [event.revision for update in watcher.updates[1:] for event in update.events] == sorted(
        event.revision for update in watcher.updates[1:] for event in update.events
    )
    await watcher.stop()


async def test_a_watch_of_an_empty_store_begins_with_an_empty_snapshot(store: CoordinationStore) -> None:
    watcher = Watcher(store, "")
    await until(lambda: bool(watcher.updates))
    await asyncio.sleep(0)
    assert [(update.events, update.is_snapshot) for update in watcher.updates] == [((), True)]
    await store.put("a", b"1")
    await until(lambda: watcher.values == {"a": b"1"})
    assert len(watcher.updates) == 2
    await watcher.stop()


async def test_a_watch_is_resumed_where_it_ended(store: CoordinationStore) -> None:
    revision = await store.put("a", b"1")
    assert revision is not None
    await store.put("b", b"2")
    await store.swap("a", revision, None)
    watcher = Watcher(store, "", after=revision)
    await until(lambda: watcher.seen == revision + 2)
    assert [event for update in watcher.updates for event in update.events] == [
        Event("b", b"2", revision + 1),
        Event("a", None, revision + 2),
    ]
    await watcher.stop()


async def test_a_watcher_that_is_too_far_behind_gets_a_snapshot(store: CoordinationStore) -> None:
    first = await store.put("a", b"0")
    assert first is not None
    for number in range(50):  # the store keeps 20 events
        last = await store.put("a", str(number).encode())
    if isinstance(store, EtcdStore):
        await compact(store, last or 0)
    watcher = Watcher(store, "", after=first)
    await until(lambda: bool(watcher.updates))
    assert watcher.updates[0].is_snapshot
    assert watcher.values == {"a": b"49"}
    # A revision that the store has not reached is of another store.
    other = Watcher(store, "", after=1_000_000)
    await until(lambda: bool(other.updates))
    assert other.updates[0].is_snapshot
    await watcher.stop()
    await other.stop()


async def test_a_watcher_learns_of_the_end_of_a_lease(timed: CoordinationStore, clock: Clock) -> None:
    lease = await timed.grant(10)
    await timed.put("a", b"1", lease)
    watcher = Watcher(timed, "")
    await until(lambda: watcher.values == {"a": b"1"})
    clock.now += 10
    await until(lambda: watcher.values == {})
    await watcher.stop()


# ------------------------------------------------------------------ etcd alone


async def test_a_lease_of_etcd_ends_and_its_watcher_learns_of_it(etcd: Etcd, tmp_path: Path) -> None:
    async with etcd.open(tmp_path.name + "/") as store:
        watcher = Watcher(store, "")
        lease = await store.grant(0.5)
        assert await store.renew(lease)
        assert await store.put("a", b"1", lease) is not None
        await until(lambda: watcher.values == {"a": b"1"})
        await until(lambda: watcher.values == {})  # nothing renews it
        assert not await store.renew(lease)
        assert await store.put("a", b"1", lease) is None
        await watcher.stop()


async def test_a_watch_survives_the_death_of_etcd(tmp_path: Path) -> None:
    """SIGKILL and a new start: the watch goes on, without a snapshot and without a gap."""
    with Etcd(tmp_path) as server:
        async with server.open("x/") as store:
            watcher = Watcher(store, "")
            await store.put("a", b"1")
            await until(lambda: watcher.values == {"a": b"1"})
            server.kill()
            with pytest.raises(StorageUnavailable):
                await store.put("b", b"1")
            server.start()
            async with asyncio.timeout(LIMIT_S):
                while True:
                    try:
                        await store.put("c", b"2")
                        break
                    except StorageUnavailable:
                        await asyncio.sleep(0.05)
            await until(lambda: "c" in watcher.values)
            assert sum(update.is_snapshot for update in watcher.updates) == 1
            await watcher.stop()


# ------------------------------------------------------------------ SQLite alone


async def test_values_survive_and_a_reboot_ends_all_leases(tmp_path: Path) -> None:
    clock = Clock()
    async with SqliteStore(tmp_path / "c.db", clock, lambda: "boot 1") as store:
        lease = await store.grant(3600)
        await store.put("leased", b"1", lease)
        await store.put("kept", b"2")
    async with SqliteStore(tmp_path / "c.db", clock, lambda: "boot 1") as store:
        assert await store.renew(lease)
        watcher = Watcher(store, "", after=1)
        await until(lambda: watcher.values == {"kept": b"2"})
        await watcher.stop()
    clock.now = 1.0  # the clock of a new boot
    async with SqliteStore(tmp_path / "c.db", clock, lambda: "boot 2") as store:
        assert [item.key for item in (await store.scan(""))[0]] == ["kept"]


async def test_two_processes_of_a_file_see_each_other(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "c.db") as one, SqliteStore(tmp_path / "c.db") as other:
        watcher = Watcher(one, "")
        await until(lambda: bool(watcher.updates))
        await other.put("a", b"1")
        await until(lambda: watcher.values == {"a": b"1"})
        await watcher.stop()


async def test_a_new_file_is_opened_while_another_process_prepares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite does not wait for a process that switches the file's mode: it fails at once."""
    other = sqlite3.connect(tmp_path / "c.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            other.execute("COMMIT")

    monkeypatch.setattr("pipeline.coordination.sqlite_store.time.sleep", sleep)
    with closing(other):
        async with SqliteStore(tmp_path / "c.db") as store:
            assert await store.put("a", b"1") == 1
    assert len(pauses) == 2


async def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_bytes(b"something else, and long enough to be one" * 100)
    with pytest.raises(ConfigError, match=r"c\.db"):
        SqliteStore(tmp_path / "c.db")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        SqliteStore(tmp_path / "file" / "c.db")


async def test_calls_are_refused_while_too_many_wait_for_the_file(tmp_path: Path) -> None:
    """Not those that keep leases: an agent would leave the fleet because of other calls."""
    path = tmp_path / "store"
    async with SqliteStore(path, max_calls=3) as store:
        lease = await store.grant(60)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # such as a process that is stopped
            puts = [asyncio.create_task(store.put(f"a/{number}", b"1")) for number in range(3)]
            await asyncio.sleep(0)
            for call in (store.get("a/0"), store.scan("a/"), store.put("b", b"1"), store.grant(60)):
                with pytest.raises(StorageUnavailable, match="3 calls wait .*; try again later, and check") as refused:
                    await call
                assert (refused.value.status, refused.value.retry_after_s) == (503, 1.0)
            renewing = asyncio.create_task(store.renew(lease))
            await asyncio.sleep(0)
            assert not any(call.done() for call in (*puts, renewing))
            other.execute("ROLLBACK")
        assert None not in await asyncio.gather(*puts) and await renewing
        assert await store.get("b") is None and await store.get("a/2") is not None


async def test_processes_go_on_with_the_file_that_has_the_name(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "c.db") as one, SqliteStore(tmp_path / "c.db") as other:
        lease = await one.grant(3600)
        for number in range(5):
            await one.put(f"a/{number}", b"1", lease)
        watcher = Watcher(other, "")
        await until(lambda: len(watcher.values) == 5)
        remove_database(tmp_path / "c.db")
        await until(lambda: not watcher.values)
        assert watcher.updates[-1].is_snapshot and not await one.renew(lease)
        assert (await one.grant(3600)) and await one.put("b", b"2")
        await until(lambda: watcher.values == {"b": b"2"})
        assert (await other.scan(""))[0] == (await one.scan(""))[0]
        (tmp_path / "c.db").unlink()  # beside what is left of it
        await until(lambda: not watcher.values)
        assert await other.put("c", b"3")
        await until(lambda: watcher.values == {"c": b"3"})
        await watcher.stop()


async def test_an_agent_registers_in_a_new_file(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "c.db") as store:
        record = records.AgentRecord(agent_id="a", url="http://h:1", incarnation="1")
        # It renews every 10 ms.
        lease = AgentLease(store, record, 60.0, "", clock=time.monotonic, sleep=lambda seconds: asyncio.sleep(0.01))
        served: list[str] = []

        async def begin() -> None:
            served.append("begin")

        async def end() -> None:
            served.append("end")

        tasks = [asyncio.create_task(lease.hold()), asyncio.create_task(lease.guard(begin, end))]
        async with asyncio.timeout(LIMIT_S):
            for _ in range(2):
                while await store.get("agents/a") is None:
                    await asyncio.sleep(0.01)
                remove_database(tmp_path / "c.db")
            while await store.get("agents/a") is None:
                await asyncio.sleep(0.01)
        assert lease.is_valid and "end" not in served
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
