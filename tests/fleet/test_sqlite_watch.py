"""How the watchers of a SQLite store learn of changes: without asking the file again and again, and missing none."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from pipeline.coordination.file_changes import FileChanges
from pipeline.coordination.sqlite_store import READ_S, SqliteStore
from pipeline.runtime import file_watch

from .coordination_stores import LIMIT_S, Watcher, remove_database, until

NEVER_S = 3600.0  # a watcher that looks so rarely depends on what is reported to it
OTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from pipeline.coordination.sqlite_store import SqliteStore

async def write():
    async with SqliteStore(Path(sys.argv[1])) as store:
        while key := (await asyncio.to_thread(sys.stdin.readline)).strip():
            await store.put(key, b"1")

asyncio.run(write())
"""


async def trace(store: SqliteStore) -> list[str]:
    """The statements of the store from now on."""
    statements: list[str] = []
    await store._call(lambda: store._database.set_trace_callback(statements.append))
    return statements


async def test_an_idle_watcher_sleeps_until_a_lease_ends(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "c.db") as store, SqliteStore(tmp_path / "c.db") as other:
        watcher = Watcher(store, "")
        await until(lambda: bool(watcher.updates))
        for ttl_s in (2.0, 8.0, 32.0):  # a longer one if a busy machine has seen too little of the one before
            granted, count = time.monotonic(), len(watcher.updates)
            if await other.put("a", b"1", await other.grant(ttl_s)) is None:
                continue  # it has ended already
            await until(lambda count=count: len(watcher.updates) > count)  # type: ignore[misc]
            statements = await trace(store)
            has_seen_it = time.monotonic() < granted + ttl_s / 2
            await until(lambda: not watcher.values)
            if has_seen_it:
                break
        looks = sum("data_version" in statement for statement in statements)
        assert 1 <= looks < 7.5 * ttl_s, "every 20 ms it would be 50 in a second"
        await watcher.stop()


async def test_no_change_of_another_process_is_missed(tmp_path: Path) -> None:
    """A report may come before the change is visible; with two watchers each may read the report of the other."""
    path = tmp_path / "c.db"
    async with SqliteStore(path, check_s=NEVER_S) as store:
        watchers = [Watcher(store, ""), Watcher(store, "k")]
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", OTHER_PROCESS, str(path), stdin=asyncio.subprocess.PIPE
        )
        assert writer.stdin is not None
        for i in range(40):
            writer.stdin.write(b"k%d\n" % i)
            await until(lambda i=i: all(f"k{i}" in watcher.values for watcher in watchers))  # type: ignore[misc]
        writer.stdin.close()
        assert await asyncio.wait_for(writer.wait(), LIMIT_S) == 0
        for watcher in watchers:
            assert sum(update.is_snapshot for update in watcher.updates) == 1
            await watcher.stop()


async def test_many_changes_in_a_row_cost_few_transactions(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "c.db", check_s=NEVER_S) as store, SqliteStore(tmp_path / "c.db") as other:
        watcher = Watcher(store, "")
        await until(lambda: bool(watcher.updates))
        statements, began = await trace(store), time.monotonic()
        for i in range(300):
            await other.put(f"a/{i % 7}", b"%d" % i)
        await until(lambda: watcher.values.get(f"a/{299 % 7}") == b"299")
        reads = (time.monotonic() - began) / READ_S + 2
        assert sum("BEGIN" in statement for statement in statements) <= reads
        await watcher.stop()


async def test_another_file_of_the_name_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    async with SqliteStore(path, check_s=NEVER_S) as store:
        await store.put("a", b"1")
        watcher = Watcher(store, "")
        await until(lambda: bool(watcher.values))
        remove_database(path)
        await until(lambda: not watcher.values)
        async with SqliteStore(path) as other:
            await other.put("b", b"2")
        await until(lambda: watcher.values == {"b": b"2"})
        await watcher.stop()


@pytest.mark.parametrize("cause", ["no descriptor", "link"])
async def test_a_watcher_looks_often_where_nothing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    path = tmp_path / "c.db"
    if cause == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere" / "c.db")
    else:
        monkeypatch.setattr(file_watch._libc, "inotify_init1", lambda flags: -1)
    async with SqliteStore(path, check_s=NEVER_S) as store, SqliteStore(path) as other:
        watcher = Watcher(store, "")
        await until(lambda: bool(watcher.updates))
        await other.put("a", b"1")
        await until(lambda: watcher.values == {"a": b"1"})
        await watcher.stop()


async def test_reads_wait_for_no_writer(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    async with SqliteStore(path) as store:
        revision = await store.put("a", b"1")
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        try:
            item = await store.get("a")
            assert item is not None and item.value == b"1"
            assert await store.scan("") == ([item], revision)
        finally:
            writer.close()


async def test_watchers_read_at_different_times(tmp_path: Path) -> None:
    shares = iter([0.0, 1e6])  # of the pause after a report: the second watcher waits for hours
    path = tmp_path / "c.db"
    async with SqliteStore(path, check_s=NEVER_S, jitter=lambda: next(shares)) as store, SqliteStore(path) as other:
        watchers = [Watcher(store, ""), Watcher(store, "")]
        await until(lambda: all(watcher.updates for watcher in watchers))
        await other.put("a", b"1")
        await until(lambda: any(watcher.values for watcher in watchers))
        assert sorted(len(watcher.values) for watcher in watchers) == [0, 1]
        for watcher in watchers:
            await watcher.stop()


async def test_a_watcher_learns_of_another_directory_from_the_arming_of_another_one(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    changes = FileChanges(folder / "c.db")
    assert changes.arm()
    first = asyncio.create_task(changes.wait(changes.serial, NEVER_S))
    await asyncio.sleep(0)  # it waits
    folder.rename(tmp_path / "old")
    folder.mkdir()
    # As in the thread of the store, while the loop has not read yet what the kernel has reported.
    assert changes.arm()
    assert await asyncio.wait_for(first, LIMIT_S)
    changes.close()


def test_an_exchanged_directory_is_reported_once(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    watch = file_watch.FileWatch(folder / "c.db")
    assert watch.arm()
    assert not watch.has_changed()
    folder.rename(tmp_path / "old")
    folder.mkdir()
    assert watch.arm()
    assert [watch.has_changed() for _ in range(2)] == [True, False]
    watch.close()


async def test_a_closed_store_gives_its_descriptor_back(tmp_path: Path) -> None:
    def instances() -> int:
        links = (os.readlink(f"/proc/self/fd/{fd}") for fd in fds())
        return sum("inotify" in link for link in links)

    def fds() -> list[str]:
        with os.scandir("/proc/self/fd") as entries:
            found = [entry.name for entry in entries]
        return [fd for fd in found if os.path.islink(f"/proc/self/fd/{fd}")]  # without that of the listing

    before = instances()
    store = SqliteStore(tmp_path / "c.db")
    watcher = Watcher(store, "")
    await until(lambda: bool(watcher.updates))
    assert instances() == before + 1
    await store.close()
    assert instances() == before
    await store.close()
    await watcher.stop()


@pytest.mark.parametrize("has_descriptor", [True, False])
async def test_a_store_says_once_that_it_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_descriptor: bool
) -> None:
    caplog.set_level(logging.INFO, "starling.coordination")
    if not has_descriptor:
        monkeypatch.setattr(file_watch._libc, "inotify_init1", lambda flags: -1)
    async with SqliteStore(tmp_path / "c.db") as store:
        watchers = [Watcher(store, ""), Watcher(store, "k")]
        await until(lambda: all(watcher.updates for watcher in watchers))
        for watcher in watchers:
            await watcher.stop()
    assert len(caplog.records) == (0 if has_descriptor else 1)
