"""Downloads on a disk that is full, and one download for all who want it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from pathlib import Path

import pytest

from pipeline.blobs.folder import FolderStore
from pipeline.catalog import pulled
from pipeline.catalog.publish import publish
from pipeline.errors import Overloaded, ResourceError, StorageUnavailable
from shm.checkpoint import PIECE_BYTES
from stages.agent.cache.eviction import Bounds
from stages.agent.cache.model_cache import lock_path
from stages.agent.downloads.model import download_model
from stages.agent.downloads.queue import DownloadQueue
from tests.fleet.checkpoints import write_checkpoint
from tests.fleet.site import Site

# ------------------------------------------------------------------ room


async def test_a_full_disk_ends_the_download_and_keeps_what_has_arrived(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.agent.downloads import part_file

    real, count = part_file.write_all, iter(range(4))

    def full(fd: int, data: bytes, at: int) -> None:
        if next(count, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, data, at)

    monkeypatch.setattr(part_file, "write_all", full)
    with pytest.raises(ResourceError, match="No space left"):
        await site.pull()
    monkeypatch.undo()
    arrival = await site.pull()
    assert arrival.report is not None
    assert (
        arrival.report.received <= site.entry.weights_bytes - 4 * PIECE_BYTES + site.entry.weights_bytes % PIECE_BYTES
    )
    assert site.is_right()


async def test_a_model_that_cannot_fit_is_refused_before_a_byte_is_fetched(site: Site) -> None:
    site.bounds, site.disk_free = Bounds(0, 1 << 20), site.entry.nbytes
    with pytest.raises(ResourceError, match=r"fleet\.free_mb keeps 1,048,576"):
        await site.pull()
    assert site.unfinished == []
    site.bounds = Bounds(1 << 20, 0)
    with pytest.raises(ResourceError, match=r"fleet\.cache_mb allows 1,048,576"):
        await site.pull()
    assert not any(path.endswith(".bin") for path in site.server.requests)


async def test_the_least_recently_used_model_goes_and_pinned_and_own_ones_stay(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "many"
    entries = []
    for seed in (11, 12, 13):
        path, _ = write_checkpoint(tmp_path / "prepared", 3_000_000, seed)
        done = await publish(FolderStore(root), path, f"m{seed}", "f", 0, lambda phase, done, total: None)
        entries.append(done.entry)
    own, _ = write_checkpoint(site.models_dir, 3_000_000, 99)
    site.bounds = Bounds(2 * 3_100_000 + 500_000, 0)
    async with FolderStore(root) as store:
        for number, entry in enumerate(entries[:2]):
            await download_model(site.context(), entry, [store], lambda phase, done, total: None)
            os.utime(pulled.record_path(site.models_dir, entry.name), (1000 + number, 1000 + number))
        pulled.touch(site.models_dir, entries[0].name)
        arrival = await download_model(site.context(), entries[2], [store], lambda phase, done, total: None)
        assert arrival.evicted == [entries[1].digest]
        pinned: list[str] = []
        get = store.get

        async def pinning(key: str, offset: int, nbytes: int) -> bytes:
            pinned[:] = [entries[0].digest, entries[2].digest]  # the models are placed meanwhile
            return await get(key, offset, nbytes)

        monkeypatch.setattr(store, "get", pinning)
        with pytest.raises(ResourceError, match="are in use"):
            await download_model(
                site.context(), entries[1], [store], lambda phase, done, total: None, pinned=lambda: tuple(pinned)
            )
    left = sorted(path.stem for path in site.models_dir.glob("*.bin"))
    assert left == sorted([entries[0].digest, entries[2].digest, own.stem])
    assert sorted(record.entry.name for record, _ in pulled.read_all(site.models_dir)) == ["m11", "m13"]


async def test_a_model_whose_files_get_their_places_is_not_evicted(site: Site) -> None:
    await site.pull()
    cache = site.context().cache
    assert [(item.key, item.is_pinned) for item in cache.items()] == [(site.entry.digest, False)]
    with open(lock_path(site.models_dir, site.entry.digest), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as another process does that only looks
        assert not cache.items()[0].is_pinned
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cache.items()[0].is_pinned


async def test_a_checkpoint_that_was_prepared_here_is_never_evicted(site: Site, tmp_path: Path) -> None:
    path, _ = write_checkpoint(site.models_dir, 3_000_000, 21)
    done = await publish(FolderStore(tmp_path / "b"), path, "own", "f", 0, lambda phase, done, total: None)
    async with FolderStore(tmp_path / "b") as store:
        assert (await download_model(site.context(), done.entry, [store], lambda p, d, t: None)).report is None
    assert site.context().cache.items() == []


# ------------------------------------------------------------------ the queue


async def test_one_download_serves_all_who_want_it_and_ends_when_none_does() -> None:
    queue: DownloadQueue[int] = DownloadQueue(at_once=1, most=2)
    started: list[str] = []
    gates = {name: asyncio.Event() for name in "abc"}
    ended: list[str] = []

    async def work(name: str) -> int:
        started.append(name)
        try:
            await gates[name].wait()
            return len(name)
        finally:
            ended.append(name)

    async def want(name: str) -> int:
        return await queue.wait_for(name, lambda: work(name))

    callers = [asyncio.create_task(want("a")) for _ in range(3)]
    other = asyncio.create_task(want("b"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert started == ["a"]
    with pytest.raises(Overloaded):
        await want("c")
    callers[0].cancel()
    await asyncio.wait([callers[0]])
    assert ended == []  # two callers are left
    for task in callers[1:]:
        task.cancel()
    await asyncio.wait(callers)
    assert ended == ["a"]
    gates["b"].set()
    assert await other == 1
    assert len(queue) == 0


async def test_an_error_reaches_every_caller_and_the_next_one_starts_anew() -> None:
    queue: DownloadQueue[int] = DownloadQueue(at_once=1)
    attempts = 0

    async def fail() -> int:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(0)
        raise StorageUnavailable("no")

    results = await asyncio.gather(*(queue.wait_for("a", fail) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [StorageUnavailable] * 3
    assert attempts == 1
    with pytest.raises(StorageUnavailable):
        await queue.wait_for("a", fail)
    assert attempts == 2
