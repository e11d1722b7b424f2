"""Stores for the tests of coordination, and what waits for their events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from pipeline.coordination.interface import CoordinationStore, Update
from pipeline.coordination.memory import MemoryStore
from pipeline.coordination.sqlite_store import SqliteStore

LIMIT_S = 60.0


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_store(request: pytest.FixtureRequest, folder: Path, clock: Clock) -> CoordinationStore:
    if request.param == "memory":
        return MemoryStore(clock, 20)
    if request.param == "sqlite":
        return SqliteStore(folder / "c.db", clock, kept_events=20)
    if request.param == "redis":
        return request.getfixturevalue("redis").open(folder.name, clock=clock, kept_events=20)  # type: ignore[no-any-return]
    return request.getfixturevalue("etcd").open(folder.name + "/")  # type: ignore[no-any-return]


def remove_database(path: Path) -> None:
    """Remove a SQLite file and those beside it. The file itself last: who misses it makes all of them anew, at once."""
    for file in sorted(path.parent.glob(f"{path.name}*"), reverse=True):
        file.unlink()


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


class Watcher:
    """Applies updates to a map, as every user of a watch does."""

    def __init__(self, store: CoordinationStore, prefix: str, after: int = 0) -> None:
        self.seen = after
        self.values: dict[str, bytes] = {}
        self.updates: list[Update] = []
        self._task = asyncio.create_task(self._run(store, prefix, after))

    async def _run(self, store: CoordinationStore, prefix: str, after: int) -> None:
        async with aclosing(store.watch(prefix, after)) as updates:  # type: ignore[type-var]
            async for update in updates:
                assert update.revision > self.seen or update.is_snapshot
                if update.is_snapshot:
                    self.values = {}
                for key, value, _ in update.events:
                    self.values.pop(key, None)
                    if value is not None:
                        self.values[key] = value
                self.seen = update.revision
                self.updates.append(update)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
