"""Conversations that orchestrators change at once, and what is left when one of them dies at any operation."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.api.conversation_object import TooLargeError
from pipeline.api.response_context import KeptResponse
from pipeline.errors import NotFound, ResourceError, StarlingError, StorageUnavailable
from stages.orchestrator.responses import conversation_store, keeper, use
from stages.orchestrator.responses.conversation_store import MAX_LARGE_READS
from stages.orchestrator.responses.heads import HEADS
from stages.orchestrator.responses.tenant_blobs import ABANDONED_S
from stages.orchestrator.responses.use import folder_of
from tests.orchestrator.conversations import (
    check_counts,
    completed,
    ids,
    ids_of,
    item,
    put,
    response,
    settle,
)
from tests.orchestrator.mortal import NEVER, DeathError, World
from tests.properties import examples


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conversation_store, use):
        monkeypatch.setattr(module, "TRY_PAUSE_S", 0.0)
    monkeypatch.setattr(use, "PAUSE_S", 0.0)


# ---------------------------------------------------------------- any order


WORKS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["put", "put", "item", "delete"]), st.integers(0, 2)))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(WORKS.filter(lambda works: 1 <= len(works) <= 5), st.randoms(use_true_random=False), st.integers(0, 90))
def test_no_change_is_lost_whatever_the_order_and_whoever_dies(
    works: list[tuple[int, str, int]], choices: Any, dies_at: int
) -> None:
    """Two orchestrators; the first dies after some operation, or not at all, and the second one repeats its work."""

    async def run() -> None:
        world = World()
        pair = [world.orchestrator() for _ in range(2)]
        last = world.orchestrator()
        made = await last.shared.conversations.create("a", b"{}", [item("msg_first")])
        other = await last.shared.conversations.create("b", b"{}", [item("msg_other")])
        pair[0].dies_after = dies_at or NEVER

        def work(index: int, kind: str, number: int, position: int) -> Any:
            conversations = pair[index].shared.conversations
            if kind == "put":
                return put(pair[index], "a", response(number), made.id)
            if kind == "item":
                return conversations.add("a", made.id, [item(f"own_{position}")])
            return conversations.delete_item("a", made.id, "msg_first")

        jobs = [work(*one, position) for position, one in enumerate(works)]
        results = await world.order.run(jobs, choices.randrange)
        stored = {number for number in range(3) if await last.shared.store.get("a", response(number))}
        found = await ids(last, "a", made.id)
        for number in stored:  # what clients can read has its items in the conversation
            assert [name for name in found if response(number)[5:] in name] == ids_of(response(number))
        n_deleted = 0
        for (_, kind, number), (position, result) in zip(works, enumerate(results)):
            if isinstance(result, DeathError):
                if kind == "put":
                    await put(last, "a", response(number), made.id)  # its stream is read again
                continue
            if kind == "delete":
                n_deleted += result is not None and not isinstance(result, NotFound)
                continue
            assert result is None, result
            if kind == "item":
                assert found.count(f"own_{position}") == 1
        assert n_deleted <= 1
        found = await ids(last, "a", made.id)
        assert len(set(found)) == len(found)
        for number in {number for _, kind, number in works if kind == "put"}:
            first, second = ids_of(response(number))
            assert found.index(second) == found.index(first) + 1
            assert await last.shared.store.get("a", response(number)) is not None
        assert await ids(last, "b", other.id) == ["msg_other"]
        await check_counts(world, "a", "b", is_exact=not pair[0].is_dead)
        await settle(world, last)
        assert await ids(last, "a", made.id) == found
        await check_counts(world, "a", "b")
        assert len(await world.blobs.scan(folder_of("a"))) == 1 + len(stored | {n for _, k, n in works if k == "put"})

    asyncio.run(run())


@pytest.mark.parametrize("is_after", [False, True])
async def test_a_death_at_any_operation_leaves_the_items_once(is_after: bool) -> None:
    """Every operation of storing a response: the next orchestrator finds all or nothing, and completes it."""
    number = 0
    while True:
        number += 1
        world = World()
        first, second = world.orchestrator(), world.orchestrator()
        made = await second.shared.conversations.create("a", b"{}", [item("msg_first")])
        if is_after:
            first.dies_after = number
        else:
            first.dies_before = number
        try:
            await put(first, "a", response(1), made.id)
        except DeathError:
            found = await ids(second, "a", made.id)
            assert found in (["msg_first"], ["msg_first", *ids_of(response(1))])
            if await second.shared.store.get("a", response(1)) is not None:
                assert len(found) == 3
            await check_counts(world, "a", is_exact=False)
            await put(second, "a", response(1), made.id)
        assert await ids(second, "a", made.id) == ["msg_first", *ids_of(response(1))]
        assert await second.shared.store.get("a", response(1)) is not None
        await settle(world, second)
        await check_counts(world, "a")
        assert len(await world.blobs.scan(folder_of("a"))) == 2
        if not first.is_dead:
            break
    assert number > 10


# ---------------------------------------------------------------- what ends


async def test_a_response_that_was_cancelled_or_has_failed_adds_nothing() -> None:
    for status in ("cancelled", "failed"):
        world = World()
        first, second = world.orchestrator(), world.orchestrator()
        made = await first.shared.conversations.create("a", b"{}", [])
        ended = msgspec.json.encode({"id": response(1), "status": status})
        await second.shared.store.put("a", response(1), ended, b"\x90", b"[]")
        await put(first, "a", response(1), made.id)  # the engine has completed it meanwhile
        assert await ids(second, "a", made.id) == []
        await put(second, "a", response(1), made.id)
        assert await ids(second, "a", made.id) == []
        await put(first, "a", response(2), made.id)
        assert await ids(second, "a", made.id) == ids_of(response(2))


async def test_what_a_client_has_deleted_does_not_come_back() -> None:
    world = World()
    first, second = world.orchestrator(), world.orchestrator()
    made = await first.shared.conversations.create("a", b"{}", [])
    await put(first, "a", response(1), made.id)
    for name in ids_of(response(1)):
        await second.shared.conversations.delete_item("a", made.id, name)
    await put(first, "a", response(1), made.id)
    assert await ids(second, "a", made.id) == []
    await second.shared.conversations.delete("a", made.id)
    await put(first, "a", response(2), made.id)  # it is stored, and there is no conversation
    assert await second.shared.store.get("a", response(2)) is not None
    for call in (
        first.shared.conversations.get("a", made.id),
        first.shared.conversations.delete("a", made.id),
        first.shared.conversations.add("a", made.id, [item("x")]),
    ):
        with pytest.raises(NotFound):
            await call
    await check_counts(world, "a")
    assert not (await world.store.scan(HEADS))[0]


async def test_a_response_that_is_not_stored_adds_its_items() -> None:
    world = World()
    one = world.orchestrator()
    made = await one.shared.conversations.create("a", b"{}", [])
    await one.shared.keeper.put("a", *completed(response(1), made.id, is_stored=False))
    assert await ids(one, "a", made.id) == ids_of(response(1))
    assert await one.shared.store.get("a", response(1)) is None


async def test_tenants_do_not_reach_each_others_conversations() -> None:
    world = World()
    one = world.orchestrator()
    made = await one.shared.conversations.create("a", b"{}", [item("x")])
    conversations = one.shared.conversations
    for call in (
        conversations.get("b", made.id),
        conversations.add("b", made.id, [item("y")]),
        conversations.set_metadata("b", made.id, b"{}"),
        conversations.delete_item("b", made.id, "x"),
        conversations.delete("b", made.id),
        conversations.get("b", f"../{folder_of('a')}/{made.id}"),
        conversations.get("a", f"{made.id}/x"),
    ):
        with pytest.raises(NotFound):
            await call
    await put(one, "b", response(1), made.id)
    assert await ids(one, "a", made.id) == ["x"]


# ---------------------------------------------------------------- bounds


async def test_the_least_recently_used_leave_and_a_change_does_not_end_its_own_conversation() -> None:
    world = World(tenant_mb=1, max_mb=4)
    one = world.orchestrator()
    made = []
    for _ in range(3):
        world.wall.now += 1
        made.append((await one.shared.conversations.create("a", b"{}", [item("x", 250_000)])).id)
    world.wall.now += 1
    await one.shared.conversations.add("a", made[0], [item("y", 150_000)])  # the oldest, at the bound
    assert await ids(one, "a", made[0]) == ["x", "y"]
    with pytest.raises(NotFound):
        await one.shared.conversations.get("a", made[1])
    assert await ids(one, "a", made[2]) == ["x"]
    for number in range(2):
        world.wall.now += 1
        body, kept = completed(response(number), made[0])
        await one.shared.keeper.put("a", body, KeptResponse(kept.conversation + b"\xc0" * 150_000, kept.inputs))
    with pytest.raises(NotFound):
        await one.shared.conversations.get("a", made[2])
    assert await ids(one, "a", made[0]) == ["x", "y", *ids_of(response(0)), *ids_of(response(1))]
    assert await one.shared.store.get("a", response(1)) is not None
    assert len((await world.store.scan(HEADS))[0]) == 1
    await check_counts(world, "a")


async def test_a_conversation_that_is_too_large_is_refused_and_drops_nothing() -> None:
    world = World(tenant_mb=1, max_mb=4)
    one = world.orchestrator()
    made = await one.shared.conversations.create("a", b"{}", [item("x", 400_000)])
    with pytest.raises(TooLargeError, match="tenant_mb"):
        await one.shared.conversations.add("a", made.id, [item("y", 200_000)])
    body, kept = completed(response(1), made.id)
    large = KeptResponse(kept.conversation + b"\xc0" * 300_000, kept.inputs)
    with pytest.raises(StarlingError) as refused:
        await one.shared.keeper.put("a", body, large)
    assert (refused.value.code, refused.value.param) == ("INSUFFICIENT_RESOURCES", "conversation")
    assert await ids(one, "a", made.id) == ["x"]
    assert await one.shared.store.get("a", response(1)) is None
    await check_counts(world, "a")


async def test_a_conversation_expires_after_its_last_change() -> None:
    world = World(ttl_s=1000)
    one = world.orchestrator()
    made = await one.shared.conversations.create("a", b"{}", [])
    world.wall.now += 900
    await one.shared.conversations.add("a", made.id, [item("x")])
    world.wall.now += 900
    assert await ids(one, "a", made.id) == ["x"]
    world.wall.now += 101
    with pytest.raises(NotFound):
        await one.shared.conversations.get("a", made.id)
    await one.shared.place.sweep()
    assert not world.blobs.all and not (await world.store.scan(HEADS))[0]
    await check_counts(world, "a")


async def test_a_conversation_whose_blob_is_lost_is_none() -> None:
    world = World()
    one = world.orchestrator()
    made = await one.shared.conversations.create("a", b"{}", [])
    world.blobs.all.clear()
    with pytest.raises(NotFound):
        await one.shared.conversations.get("a", made.id)
    await one.shared.place.sweep()
    assert not (await world.store.scan(HEADS))[0]


async def test_a_change_that_was_stopped_for_long_does_not_end_with_a_blob_that_is_gone() -> None:
    """Its blob is taken for abandoned: then the change must fail, and begin again."""
    world = World()
    slow, other = world.orchestrator(), world.orchestrator()
    made = await other.shared.conversations.create("a", b"{}", [item("x")])
    swap = slow.shared.place.heads.swap

    async def stopped(*arguments: Any) -> bool:
        if slow.shared.place.heads.swap is stopped:
            slow.shared.place.heads.swap = swap  # type: ignore[method-assign]
            world.wall.now += ABANDONED_S + 1
            await other.shared.place.sweep()
            assert len(await world.blobs.scan(folder_of("a"))) == 1
        return await swap(*arguments)

    slow.shared.place.heads.swap = stopped  # type: ignore[method-assign]
    await slow.shared.conversations.add("a", made.id, [item("y")])
    assert await ids(other, "a", made.id) == ["x", "y"]


async def test_an_answer_of_the_store_that_is_lost_loses_no_conversation() -> None:
    """The head was swapped, or was not: the blob of either stays."""
    for is_made in (False, True):
        world = World()
        one = world.orchestrator()
        made = await one.shared.conversations.create("a", b"{}", [])
        swap = one.shared.place.heads.swap

        async def lost(*arguments: Any) -> bool:
            if is_made:  # noqa: B023
                await swap(*arguments)  # noqa: B023
            raise StorageUnavailable("the store has not answered")

        one.shared.place.heads.swap = lost  # type: ignore[method-assign]
        if is_made:  # as the record says
            await put(one, "a", response(1), made.id)
        else:
            with pytest.raises(StorageUnavailable):
                await put(one, "a", response(1), made.id)
        one.shared.place.heads.swap = swap  # type: ignore[method-assign]
        assert await ids(one, "a", made.id) == (ids_of(response(1)) if is_made else [])
        await put(one, "a", response(1), made.id)
        assert await ids(one, "a", made.id) == ids_of(response(1))
        await settle(world, one)
        await check_counts(world, "a")
        assert len(await world.blobs.scan(folder_of("a"))) == 2


# ---------------------------------------------------------------- stores that fail


async def test_items_of_a_response_that_cannot_be_stored_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are added when it can be; a short failure is not seen."""
    monkeypatch.setattr(keeper, "PUT_PAUSES_S", (0.0, 0.0))
    world = World()
    one = world.orchestrator()
    made = await one.shared.conversations.create("a", b"{}", [item("msg_first")])
    put, faults = world.blobs.put, [5]

    async def full(key: str, data: Any, *, replace: bool = False) -> None:
        if response(1) in key and faults[0]:
            faults[0] -= 1
            raise ResourceError("the disk is full")
        await put(key, data, replace=replace)

    world.blobs.put = full  # type: ignore[method-assign]
    with pytest.raises(StorageUnavailable, match="the disk is full"):
        await one.shared.keeper.put("a", *completed(response(1), made.id))
    assert await ids(one, "a", made.id) == ["msg_first"]
    await one.shared.keeper.put("a", *completed(response(1), made.id))  # at the third attempt
    assert not faults[0]
    assert await ids(one, "a", made.id) == ["msg_first", *ids_of(response(1))]
    assert await one.shared.store.get("a", response(1)) is not None
    await check_counts(world, "a")


@pytest.mark.parametrize("is_made", [False, True])
async def test_a_change_whose_answer_was_lost_is_made_once(is_made: bool) -> None:
    world = World()
    one = world.orchestrator()
    made = await one.shared.conversations.create("a", b"{}", [])
    swap, n_lost = one.shared.place.heads.swap, [1]

    async def lost(*arguments: Any) -> bool:
        if not n_lost[0] or is_made:
            done = await swap(*arguments)
        if n_lost[0]:
            n_lost[0] -= 1
            raise StorageUnavailable("the store has not answered")
        return done

    one.shared.place.heads.swap = lost  # type: ignore[method-assign]
    await one.shared.conversations.add("a", made.id, [item("x")])
    assert await ids(one, "a", made.id) == ["x"]
    await check_counts(world, "a")


@pytest.mark.parametrize("is_swept", [False, True])
async def test_a_record_that_a_power_cut_has_taken_loses_no_conversation(is_swept: bool) -> None:
    """The coordination store has the former value again, whose blob is gone."""
    world = World()
    one = world.orchestrator()
    made = await one.shared.conversations.create("a", b"{}", [item("x")])
    (record,) = (await world.store.scan(HEADS))[0]
    for name in ("y", "z"):
        world.wall.now += 1
        await one.shared.conversations.add("a", made.id, [item(name)])
    await world.store.put(record.key, record.value)
    if is_swept:
        await settle(world, one)
    assert await ids(one, "a", made.id) == ["x", "y", "z"]
    await one.shared.conversations.add("a", made.id, [item("more")])
    assert await ids(one, "a", made.id) == ["x", "y", "z", "more"]
    await check_counts(world, "a")


async def test_reads_of_large_conversations_wait_for_each_other() -> None:
    world = World()
    one = world.orchestrator()
    made = await one.shared.conversations.create("a", b"{}", [item("x", 600_000)])
    get, n_reading, most = world.blobs.get, 0, 0

    async def counting(key: str, offset: int, nbytes: int) -> bytes:
        nonlocal n_reading, most
        n_reading += 1
        most = max(most, n_reading)
        for _ in range(10):
            await asyncio.sleep(0)
        n_reading -= 1
        return await get(key, offset, nbytes)

    world.blobs.get = counting  # type: ignore[method-assign]
    await asyncio.gather(*(one.shared.conversations.get("a", made.id) for _ in range(3 * MAX_LARGE_READS)))
    assert most == MAX_LARGE_READS


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(1, 5), st.randoms(use_true_random=False))
def test_of_two_that_store_a_response_one_may_fail(
    monkeypatch: pytest.MonkeyPatch, n_faults: int, choices: Any
) -> None:
    """What the one takes out again is there if the other has stored the response."""
    monkeypatch.setattr(keeper, "PUT_PAUSES_S", (0.0,))

    async def run() -> None:
        world = World()
        pair = [world.orchestrator() for _ in range(2)]
        made = await pair[0].shared.conversations.create("a", b"{}", [item("msg_first")])
        write, left = world.blobs.put, [n_faults]

        async def full(key: str, data: Any, *, replace: bool = False) -> None:
            if response(1) in key and left[0]:
                left[0] -= 1
                raise ResourceError("the disk is full")
            await write(key, data, replace=replace)

        world.blobs.put = full  # type: ignore[method-assign]
        works = [put(one, "a", response(1), made.id) for one in pair]
        results = await world.order.run(works, choices.randrange)
        assert all(result is None or isinstance(result, StorageUnavailable) for result in results)
        is_stored = await pair[0].shared.store.get("a", response(1)) is not None
        assert is_stored == (None in results)
        expected = ["msg_first", *ids_of(response(1))] if is_stored else ["msg_first"]
        assert await ids(pair[0], "a", made.id) == expected
        await check_counts(world, "a")

    asyncio.run(run())
