"""Stored responses: bounds by age, by tenant and in all, a restart, and a damaged file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pipeline.api.item_pages import Page
from pipeline.config.schema import StoredResponsesConfig
from pipeline.errors import StarlingError
from stages.gateway.requests.stored_responses import StoredResponse, StoredResponses

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def run(use: Callable[[StoredResponses, Clock], Coroutine[Any, Any, None]], path: Path | None, **config: int) -> None:
    clock = Clock()
    store = StoredResponses(path, StoredResponsesConfig(**config), clock)
    try:
        asyncio.run(use(store, clock))
    finally:
        store.close(timeout_s=60)


async def put(store: StoredResponses, name: str, size: int = 10, tenant: str = "a") -> StarlingError | None:
    done: asyncio.Future[StarlingError | None] = asyncio.get_running_loop().create_future()
    messages = [{"role": "user", "content": name}]
    store.put(StoredResponse(tenant, name, b"x" * size, messages), done.set_result)
    return await done


async def names(store: StoredResponses, *wanted: str, tenant: str = "a") -> list[str]:
    return [name for name in wanted if await store.body(tenant, name) is not None]


def test_a_response_is_found_by_its_tenant_until_it_is_deleted(tmp_path: Path) -> None:
    async def use(store: StoredResponses, clock: Clock) -> None:
        assert await put(store, "r1") is None
        assert await store.body("a", "r1") == b"x" * 10
        assert await store.conversation("a", "r1") == [{"role": "user", "content": "r1"}]
        assert await store.body("b", "r1") is None
        assert not await store.delete("b", "r1")
        assert await store.delete("a", "r1")
        assert not await store.delete("a", "r1")
        assert await store.conversation("a", "r1") is None

    run(use, tmp_path / "responses.db")


def test_a_response_that_is_stored_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    async def use(store: StoredResponses, clock: Clock) -> None:
        for name, size in (("other", 10), ("r1", 10), ("r1", 20)):
            assert await put(store, name, size) is None
        assert await names(store, "other", "r1") == ["other", "r1"]
        assert await store.body("a", "r1") == b"x" * 20

    run(use, tmp_path / "responses.db")


def test_it_expires() -> None:
    async def use(store: StoredResponses, clock: Clock) -> None:
        await put(store, "old")
        clock.now += 50
        await put(store, "new")
        assert await names(store, "old", "new") == ["old", "new"]
        clock.now += 20
        assert await names(store, "old", "new") == ["new"]

    run(use, None, ttl_s=60)


def test_a_tenant_keeps_its_latest() -> None:
    async def use(store: StoredResponses, clock: Clock) -> None:
        await put(store, "other", MIB // 2, "b")
        for number in range(5):
            await put(store, f"r{number}", MIB // 3)
        assert await names(store, *(f"r{number}" for number in range(5))) == ["r3", "r4"]
        assert await names(store, "other", tenant="b") == ["other"]
        error = await put(store, "huge", MIB)
        assert isinstance(error, StarlingError)
        assert (error.code, error.param) == ("INSUFFICIENT_RESOURCES", "store")
        assert await names(store, "huge", "r3", "r4") == ["r3", "r4"]

    run(use, None, tenant_mb=1)


def test_a_response_larger_than_the_bound_of_all_is_refused() -> None:
    async def use(store: StoredResponses, clock: Clock) -> None:
        await put(store, "r1", tenant="b")
        assert isinstance(await put(store, "huge", MIB), StarlingError)
        assert await names(store, "r1", tenant="b") == ["r1"]

    run(use, None, tenant_mb=8, max_size_mb=1)


def test_a_failed_response_is_stored_beside_a_full_conversation() -> None:
    """It adds nothing to the conversation."""

    async def use(store: StoredResponses, clock: Clock) -> None:
        done: asyncio.Future[StarlingError | None] = asyncio.get_running_loop().create_future()
        conversation = "conv_" + "0" * 32
        store.put(StoredResponse("a", "r1", b"x" * (MIB - 100), [], added_to=conversation), done.set_result)
        assert await done is None
        assert await names(store, "r1") == ["r1"]

    run(use, None, tenant_mb=1)


def test_after_the_end_nothing_is_stored_and_that_is_said() -> None:
    said: list[StarlingError | None] = []
    store = StoredResponses(None, StoredResponsesConfig(), Clock())

    async def use() -> None:
        store.close(timeout_s=60)
        store.put(StoredResponse("a", "r1", b"x", []), said.append)

    asyncio.run(use())
    assert [error.code for error in said if error is not None] == ["STORAGE_UNAVAILABLE"]


def test_the_tenant_with_the_most_makes_room() -> None:
    async def use(store: StoredResponses, clock: Clock) -> None:
        await put(store, "small", MIB // 4, "b")
        for number in range(4):
            await put(store, f"r{number}", MIB // 3)
        assert await names(store, "small", tenant="b") == ["small"]
        assert await names(store, *(f"r{number}" for number in range(4))) == ["r2", "r3"]

    run(use, None, tenant_mb=8, max_size_mb=1)


def test_a_successor_has_them_and_a_damaged_file_is_renamed(tmp_path: Path) -> None:
    path = tmp_path / "state" / "responses.db"

    async def begin(store: StoredResponses, clock: Clock) -> None:
        assert await put(store, "r1") is None

    async def find(store: StoredResponses, clock: Clock) -> None:
        assert await names(store, "r1") == ["r1"]

    async def find_none(store: StoredResponses, clock: Clock) -> None:
        assert await names(store, "r1") == []
        assert await put(store, "r2") is None

    run(begin, path)
    run(find, path)
    path.write_bytes(b"no database at all" * 100)
    run(find_none, path)
    assert path.with_name("responses.db.unreadable").exists()


def test_a_disk_that_takes_nothing_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def use(store: StoredResponses, clock: Clock) -> None:
        error = await put(store, "r1")
        assert isinstance(error, StarlingError)
        assert (error.code, error.param) == ("STORAGE_UNAVAILABLE", "store")

    run(use, tmp_path / "file" / "responses.db")  # its directory is a file


@pytest.mark.parametrize(
    ("name", "more"),
    [("has", ()), ("body", ()), ("conversation", ()), ("delete", ()), ("inputs", (Page("", 1, True),))],
)
def test_a_file_that_cannot_be_used_is_reported_to_readers(tmp_path: Path, name: str, more: tuple[Any, ...]) -> None:
    (tmp_path / "file").write_text("")

    async def use(store: StoredResponses, clock: Clock) -> None:
        with pytest.raises(StarlingError, match=r"server\.state_dir") as refused:
            await getattr(store, name)("a", "r1", *more)
        assert (refused.value.code, store.errors) == ("STORAGE_UNAVAILABLE", 1)

    run(use, tmp_path / "file" / "responses.db")


@pytest.mark.parametrize("size", [0, 100_000])
def test_contents_are_kept_as_they_are(size: int) -> None:
    async def use(store: StoredResponses, clock: Clock) -> None:
        await put(store, "r1", size)
        assert await store.body("a", "r1") == b"x" * size

    run(use, None)
