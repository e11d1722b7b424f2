"""One response at a time continues a conversation, and a key makes one response, whichever orchestrator dies."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from pipeline.api.requests.readers import READERS
from pipeline.api.response_context import KeptResponse
from pipeline.api.response_object import response_id_of
from pipeline.errors import Conflict
from stages.orchestrator.responses.turns import END_S, LEFT_S, TURNS
from tests.orchestrator.conversations import (
    completed,
    ids_of,
    job,
    response,
    service,
)
from tests.orchestrator.mortal import World


async def test_one_response_at_a_time_continues_a_conversation() -> None:
    """At two orchestrators; a request may be repeated, and one in the background counts until it has ended."""
    world, name = World(), f"conv_{1:048x}"
    pair = [world.orchestrator().shared for _ in range(2)]
    first, second = pair
    turn = await first.turns.take("a", name, "req-1")
    for one in pair:
        with pytest.raises(Conflict, match="in progress"):
            await one.turns.take("a", name, "req-2")
        await (await one.turns.take("a", name, "req-1")).end()  # which ends no turn
        await (await one.turns.take("b", name, "req-2")).end()
        with pytest.raises(Conflict):
            await one.turns.take("a", name, "req-2")
    await turn.end()
    running = job("req-3", name)
    assert await first.jobs.add(running, await first.jobs.write(running))
    for one in pair:
        with pytest.raises(Conflict, match="in progress"):
            await one.turns.take("a", name, "req-2")
        await (await one.turns.take("a", name, running.request_id)).end()
    await first.jobs.end(running.request_id)
    await second.turns.take("a", name, "req-2")
    await first.turns.end_of("a", name, "req-1")
    with pytest.raises(Conflict):
        await first.turns.take("a", name, "req-5")
    await first.turns.end_of("a", name, "req-2")  # which the other one has forwarded, before it died
    await (await first.turns.take("a", name, "req-5")).end()
    await second.turns.take("a", name, "req-2")
    await second.turns.close()  # the process ends
    await (await first.turns.take("a", name, "req-4")).end()
    assert [item.key for item in (await world.store.scan(TURNS))[0]] == []


async def test_a_client_that_leaves_at_any_moment_leaves_no_turn() -> None:
    """The task that takes a turn is cancelled after each number of steps."""
    name, n_steps = f"conv_{1:048x}", 0
    while True:
        n_steps += 1
        world = World()
        one = world.orchestrator().shared
        transact = one.turns._store.transact

        async def late(*arguments: Any) -> int | None:
            made = await transact(*arguments)  # noqa: B023
            await asyncio.sleep(0)  # the store has the record, and the answer is on its way
            return made

        one.turns._store.transact = late  # type: ignore[method-assign]
        taking = asyncio.ensure_future(one.turns.take("a", name, "req-1"))
        for _ in range(n_steps):
            await asyncio.sleep(0)
        if taking.done():
            break
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        async with asyncio.timeout(END_S):  # before a lease would end
            while (await world.store.scan(TURNS))[0]:
                await asyncio.sleep(0)
            await (await one.turns.take("a", name, "req-2")).end()
    assert n_steps > 3


async def test_a_turn_that_is_ended_twice_ends() -> None:
    """The second end does not interrupt the first one, which waits for the store."""
    world, name = World(), f"conv_{1:048x}"
    one = world.orchestrator().shared
    turn = await one.turns.take("a", name, "req-1")
    world.order.is_on = True
    ending = [asyncio.ensure_future(turn.end())]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ending.append(asyncio.ensure_future(turn.end()))
    await world.order.run(ending, lambda count: 0)
    assert not (await world.store.scan(TURNS))[0]


async def test_the_next_request_waits_for_a_turn_that_the_store_is_slow_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has its answer, and sends the next request to the same orchestrator."""
    monkeypatch.setattr("stages.orchestrator.responses.turns.END_S", 0.0)
    world, name = World(), f"conv_{1:048x}"
    one = world.orchestrator().shared
    revoke, may_end = one.turns._store.revoke, asyncio.Event()

    async def late(lease: str) -> None:
        one.turns._store.revoke = revoke  # type: ignore[method-assign]
        await may_end.wait()
        await revoke(lease)

    turn = await one.turns.take("a", name, "req-1")
    one.turns._store.revoke = late  # type: ignore[method-assign]
    await turn.end()
    await asyncio.sleep(0)
    assert (await world.store.scan(TURNS))[0]
    taking = asyncio.ensure_future(one.turns.take("a", name, "req-2"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not taking.done()
    may_end.set()
    await (await taking).end()


async def test_a_stored_response_in_the_background_is_not_in_progress() -> None:
    """Its clients see it completed before its request is removed."""
    world = World()
    one = world.orchestrator().shared
    made = await one.conversations.create("a", b"{}", [])
    running = job("req-" + response(3)[5:], made.id)
    assert await one.jobs.add(running, await one.jobs.write(running))
    with pytest.raises(Conflict):
        await one.turns.take("a", made.id, "req-2")
    await one.keeper.put("a", *completed(running.name, made.id))
    await (await one.turns.take("a", made.id, "req-2")).end()


async def test_a_key_with_another_body_is_refused_while_its_request_is_in_progress() -> None:
    world, name = World(), f"conv_{1:048x}"
    first, second = (world.orchestrator().shared for _ in range(2))
    turn = await first.turns.take("a", name, "req-1", b"d" * 32, "k")
    await (await second.turns.take("a", name, "req-1", b"d" * 32, "k")).end()
    with pytest.raises(Conflict, match="'k' was sent with another body"):
        await second.turns.take("a", name, "req-1", b"e" * 32, "k")
    await turn.end()


async def test_a_turn_lasts_until_the_items_are_there_although_the_client_has_left() -> None:
    world = World()
    one, responses, ids = service(world)
    made = await one.shared.conversations.create("a", b"{}", [])
    request_id = ids.new("a")
    turn = await one.shared.turns.take("a", made.id, request_id)
    world.order.is_on = True
    keeping = asyncio.ensure_future(responses.keep("a", *completed(response_id_of(request_id), made.id), turn=turn))
    for _ in range(4):
        await asyncio.sleep(0)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    await turn.end()  # as for a client that has left
    assert (await world.store.scan(TURNS))[0]

    async def next_one() -> None:
        while (await world.store.scan(TURNS))[0]:
            await asyncio.sleep(0)

    await world.order.run([next_one()], lambda count: 0)
    assert len((await one.shared.conversations.get("a", made.id)).items) == 2


async def test_a_repetition_ends_the_turn_of_an_orchestrator_that_has_died() -> None:
    world = World()
    (first, _, _), (second, responses, ids) = service(world), service(world)
    made = await first.shared.conversations.create("a", b"{}", [])
    request_id = ids.of_key("a", "key")
    await first.shared.turns.take("a", made.id, request_id, b"d" * 32, "key")
    first.dies_before = first.n_operations + 1
    again = await second.shared.turns.take("a", made.id, request_id, b"d" * 32, "key")
    assert not again.holds
    body, kept = completed(response_id_of(request_id), made.id)
    kept = KeptResponse(kept.conversation, kept.inputs, b"d" * 32)
    await responses.keep("a", body, kept, digest=b"e" * 32, turn=again)
    await (await second.shared.turns.take("a", made.id, ids.new("a"))).end()
    stored = await second.shared.store.get("a", response_id_of(request_id))
    assert stored is not None and stored.digest == b"d" * 32  # the first attempt's, as its engine says


async def test_a_key_makes_another_response_when_its_failed_one_was_deleted() -> None:
    world = World()
    one, responses, ids = service(world)
    made = await one.shared.conversations.create("a", b"{}", [])
    name = response_id_of(ids.of_key("a", "key"))
    body, kept = completed(name, made.id)
    failed = msgspec.json.encode({**msgspec.json.decode(body), "status": "failed"})
    await one.shared.store.put("a", name, failed, b"\x90", b"[]", b"d" * 32)
    await one.shared.keeper.withdraw_if_ended("a", name, made.id)
    await responses.delete("a", name)
    await responses.keep("a", body, kept, digest=b"d" * 32)
    assert [found.id for found in (await one.shared.conversations.get("a", made.id)).items] == ids_of(name)
    assert await one.shared.store.get("a", name) is not None


async def test_a_key_whose_response_is_not_stored_has_one_body() -> None:
    """Also when no engine has the request any longer."""
    world = World()
    one, responses, ids = service(world)
    made = await one.shared.conversations.create("a", b"{}", [])
    request_id = ids.of_key("a", "key")
    await responses.keep("a", *completed(response_id_of(request_id), made.id, is_stored=False), digest=b"d" * 32)
    generation = READERS["responses"]({"model": "m", "input": "x", "conversation": made.id})
    await responses.join(generation, "a", "", request_id, "key", b"d" * 32)
    with pytest.raises(Conflict, match="'key' was sent with another body"):
        await responses.join(generation, "a", "", request_id, "key", b"e" * 32)


async def test_a_turn_lasts_while_an_engine_goes_on_without_its_client() -> None:
    """Until a repetition has its response."""
    world, name = World(), f"conv_{1:048x}"
    first, second = (world.orchestrator().shared for _ in range(2))
    turn = await first.turns.take("a", name, "req-1", b"d" * 32, "k")
    with pytest.raises(Conflict) as refused:
        await second.turns.take("a", name, "req-2")
    assert "Retry-After" not in refused.value.headers()  # how long it takes is not known
    await turn.leave()
    await turn.end()
    await first.turns.close()  # its process ends, too
    world.wall.now += 15
    with pytest.raises(Conflict, match="may repeat it with its Idempotency-Key for 45 s") as refused:
        await second.turns.take("a", name, "req-2")
    assert refused.value.headers() == {"Retry-After": str(int(LEFT_S) - 15)}
    with pytest.raises(Conflict, match="'k' was sent with another body"):
        await second.turns.take("a", name, "req-1", b"e" * 32, "k")
    assert not (await second.turns.take("a", name, "req-1")).holds
    await second.turns.end_of("a", name, "req-1")
    turn = await second.turns.take("a", name, "req-2")
    await turn.end()
    await turn.leave()  # it has ended before
    assert not (await world.store.scan(TURNS))[0]
