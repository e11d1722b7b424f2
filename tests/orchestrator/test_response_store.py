"""Stored responses of a fleet: bounds, isolation, and what processes that die leave behind. Real stores, on a disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.blobs.folder import FolderStore
from pipeline.config.schema import StoredResponsesConfig
from pipeline.coordination.sqlite_store import SqliteStore
from pipeline.errors import ConfigError, ResourceError, StarlingError, StorageUnavailable
from stages.orchestrator.responses import use as response_use
from stages.orchestrator.responses.heads import Heads
from stages.orchestrator.responses.store import ResponseStore
from stages.orchestrator.responses.tenant_blobs import ENTRY_BYTES, SETTLED_S, TenantBlobs
from stages.orchestrator.responses.use import ALL, USE, ResponseUse, Use, folder_of

MIB = 1 << 20


class Wall:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Blobs(FolderStore):
    """Files have the time of the test's clock. `fault` is raised instead of the next put."""

    def __init__(self, root: Path, wall: Wall) -> None:
        super().__init__(root)
        self._wall = wall
        self.fault: Exception | None = None
        self.is_lost = False  # after a fault nothing answers

    async def size(self, key: str) -> int:
        if self.is_lost:
            raise StorageUnavailable("the link is broken")
        return await super().size(key)

    async def put(self, key: str, data: bytes | memoryview, *, replace: bool = False) -> None:
        if self.fault is not None:
            raise self.fault
        await super().put(key, data, replace=replace)
        os.utime(self.path(key), (self._wall.now, self._wall.now))


class Orchestrators:
    """Two that share everything."""

    def __init__(self, path: Path, tenant_mb: int = 1, max_mb: int = 2, ttl_s: int = 3600) -> None:
        self.wall = Wall()
        self.stores = [SqliteStore(path / "fleet.db") for _ in range(2)]
        self.blobs = Blobs(path / "responses", self.wall)
        self.config = StoredResponsesConfig(tenant_mb=tenant_mb, max_size_mb=max_mb, ttl_s=ttl_s)
        self.uses = [ResponseUse(store, tenant_mb * MIB, max_mb * MIB, self.wall) for store in self.stores]
        self.places = [
            TenantBlobs(self.blobs, use, Heads(store), self.config, self.wall)
            for use, store in zip(self.uses, self.stores)
        ]
        self.first, self.second = (ResponseStore(place, self.wall) for place in self.places)

    async def put(self, store: ResponseStore, tenant: str, name: str, nbytes: int = 100) -> None:
        self.wall.now += 1
        await store.put(tenant, name, b"{}", msgspec.msgpack.encode([{"role": "user"}]), b"[]" + b" " * nbytes)

    async def counted(self, tenant: str) -> tuple[int, int]:
        item = await self.stores[0].get(USE + folder_of(tenant))
        found = msgspec.json.decode(item.value, type=Use) if item is not None else Use()
        return found.bytes, found.count

    async def there(self, tenant: str) -> list[str]:
        return [blob.key.rpartition("/")[2] for blob in await self.blobs.scan(folder_of(tenant))]

    async def close(self) -> None:
        for store in self.stores:
            await store.close()


@pytest.fixture
async def both(tmp_path: Path) -> Iterator[Orchestrators]:  # type: ignore[misc]
    made = Orchestrators(tmp_path)
    yield made
    await made.close()


async def test_both_find_what_either_has_stored(both: Orchestrators) -> None:
    await both.put(both.first, "a", "resp_1")
    found = await both.second.get("a", "resp_1")
    assert found is not None and (found.body, found.messages, found.inputs.rstrip()) == (
        b"{}",
        [{"role": "user"}],
        b"[]",
    )
    assert await both.second.get("b", "resp_1") is None
    assert not await both.second.delete("b", "resp_1")
    assert await both.second.delete("a", "resp_1")
    assert not await both.first.delete("a", "resp_1")
    assert await both.first.get("a", "resp_1") is None
    assert await both.counted("a") == (0, 0)


async def test_a_response_is_stored_once(both: Orchestrators) -> None:
    await asyncio.gather(*(both.put(store, "a", "resp_1") for store in (both.first, both.second, both.first)))
    assert await both.counted("a") == (ENTRY_BYTES, 1)
    assert await both.there("a") == ["resp_1"]


async def test_many_responses_that_end_together_are_all_stored(both: Orchestrators) -> None:
    names = [f"resp_{number:03d}" for number in range(160)]
    stores = [both.first, both.second] * 80
    await asyncio.gather(*(both.put(store, "a", name) for store, name in zip(stores, names)))
    assert await both.counted("a") == (160 * ENTRY_BYTES, 160)
    assert sorted(await both.there("a")) == names


async def test_the_oldest_of_a_tenant_leave_for_new_ones(both: Orchestrators) -> None:
    await both.put(both.first, "b", "resp_b")
    for number in range(12):
        await both.put((both.first, both.second)[number % 2], "a", f"resp_{number:02d}", 200_000)
        nbytes, count = await both.counted("a")
        assert nbytes <= MIB and count == len(await both.there("a"))
    left = await both.there("a")
    assert left == [f"resp_{number:02d}" for number in range(12 - len(left), 12)] and 3 <= len(left) <= 5
    assert await both.there("b") == ["resp_b"]


async def test_the_largest_tenant_leaves_room_for_the_others(both: Orchestrators) -> None:
    for tenant, size in (("a", 300_000), ("b", 250_000), ("c", 150_000)):
        for number in range(3):
            await both.put(both.first, tenant, f"resp_{number}", size)
    item = await both.stores[0].get(ALL)
    assert item is not None
    total = msgspec.json.decode(item.value, type=Use)
    sums = [await both.counted(tenant) for tenant in "abc"]
    assert (total.bytes, total.count) == (sum(one[0] for one in sums), sum(one[1] for one in sums))
    assert total.bytes <= 2 * MIB
    assert len(await both.there("c")) == 3 and await both.there("a") == ["resp_1", "resp_2"]


async def test_a_response_that_never_fits_drops_no_other(both: Orchestrators) -> None:
    await both.put(both.first, "a", "resp_1")
    with pytest.raises(ResourceError, match="may be stored"):
        await both.put(both.first, "a", "resp_2", MIB)
    assert await both.there("a") == ["resp_1"] and await both.counted("a") == (ENTRY_BYTES, 1)


async def test_expired_responses_are_not_found_and_then_removed(both: Orchestrators) -> None:
    await both.put(both.first, "a", "resp_1")
    both.wall.now += 3600
    await both.put(both.first, "a", "resp_2")
    assert await both.second.get("a", "resp_1") is None and await both.there("a") == ["resp_1", "resp_2"]
    await both.places[1].sweep()
    assert await both.there("a") == ["resp_2"] and await both.counted("a") == (ENTRY_BYTES, 1)


async def test_what_a_death_between_count_and_blob_leaves_is_settled(both: Orchestrators) -> None:
    """The count is never too low, and correct again some time later."""
    await both.put(both.first, "a", "resp_1")

    async def put_and_break(key: str, data: bytes) -> None:
        both.blobs.is_lost = True
        raise StorageUnavailable("the link broke")  # whether the blob was written is not known

    kept, both.blobs.put = both.blobs.put, put_and_break  # type: ignore[assignment,method-assign]
    with pytest.raises(StorageUnavailable):
        await both.put(both.first, "a", "resp_2")
    both.blobs.put = kept  # type: ignore[method-assign]
    both.blobs.is_lost = False
    assert (await both.counted("a"))[1] == 2
    await both.places[1].sweep()
    assert (await both.counted("a"))[1] == 2  # it might still be written
    both.wall.now += SETTLED_S + 1
    await both.places[1].sweep()
    assert await both.counted("a") == (ENTRY_BYTES, 1)


@pytest.mark.parametrize("fault", [ConfigError, ResourceError, StorageUnavailable])
async def test_a_refused_response_is_not_counted(both: Orchestrators, fault: type[StarlingError]) -> None:
    both.blobs.fault = fault("check the disk")  # type: ignore[call-arg]
    with pytest.raises(StorageUnavailable, match="check the disk"):
        await both.put(both.first, "a", "resp_1")
    assert await both.counted("a") == (0, 0)


async def test_what_is_stored_again_drops_no_other(both: Orchestrators) -> None:
    for number in range(2):
        await both.put(both.first, "a", f"resp_{number}", 500_000)
    await both.put(both.second, "a", "resp_1", 500_000)
    assert await both.there("a") == ["resp_0", "resp_1"]


async def test_what_expires_does_not_hide_a_wrong_count(both: Orchestrators) -> None:
    await both.put(both.first, "a", "resp_1")
    await both.uses[0].reserve(folder_of("a"), ENTRY_BYTES)  # and the process dies
    both.wall.now += 3601 + SETTLED_S
    await both.places[1].sweep()
    assert await both.counted("a") == (0, 0) and await both.there("a") == []


async def test_removals_at_the_same_time_are_counted_once(both: Orchestrators) -> None:
    for number in range(4):
        await both.put(both.first, "a", f"resp_{number}")
    names = ["resp_0", "resp_0", "resp_1", "resp_0", "resp_1"]
    stores = [both.first, both.second] * 3
    done = await asyncio.gather(*(store.delete("a", name) for store, name in zip(stores, names)))
    assert sum(done) == 2 and await both.counted("a") == (2 * ENTRY_BYTES, 2)


async def test_a_damaged_blob_is_an_error_and_no_answer(both: Orchestrators) -> None:
    await both.put(both.first, "a", "resp_1")
    path = both.blobs.path(f"{folder_of('a')}/resp_1")
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageUnavailable, match="damaged"):
        await both.second.get("a", "resp_1")


async def test_the_number_of_tenants_and_of_responses_is_bounded(
    both: Orchestrators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_use, "MAX_TENANTS", 2)
    await both.put(both.first, "a", "resp_1")
    await both.put(both.first, "b", "resp_1")
    with pytest.raises(ResourceError, match="2 tenants"):
        await both.put(both.first, "c", "resp_1")
    await both.first.delete("a", "resp_1")
    await both.put(both.first, "c", "resp_1")
    assert set(await both.uses[0].tenants()) == {folder_of("b"), folder_of("c")}
    monkeypatch.setattr(response_use, "MAX_COUNT", 2)
    await both.put(both.first, "c", "resp_2")
    assert len(await both.there("b")) + len(await both.there("c")) == 2
