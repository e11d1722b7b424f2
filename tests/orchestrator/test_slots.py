"""What goes on when its client has left counts as the client's request until it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from pipeline.api.fair_shares import FairShares
from pipeline.api.held_bytes import UNCOUNTED_BYTES, answer_shares, body_shares
from pipeline.api.json_body import to_json
from pipeline.api.keys import Caller
from pipeline.api.response_object import response_id_of
from pipeline.config.schema import ServerConfig
from pipeline.errors import Overloaded
from stages.orchestrator import conversation_routes, response_routes
from stages.orchestrator.http_app import CALLER, FRONT, PRINCIPAL
from stages.orchestrator.responses.turns import TURNS
from stages.orchestrator.slots import RequestSlots, hold_answer, hold_body, to_its_end
from tests.orchestrator.conversations import completed, service
from tests.orchestrator.loopback_engine import LoopbackEngine, keyed, relaying, response
from tests.orchestrator.mortal import World


async def left(slots: RequestSlots, work: Callable[[], Awaitable[object]]) -> None:
    """A client sends a request that does the work, and leaves when the work waits for the store."""

    async def handle() -> None:
        with slots.counted("a"):
            await work()

    handling = asyncio.ensure_future(handle())
    for _ in range(4):
        await asyncio.sleep(0)
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handling


async def until_free(slots: RequestSlots) -> None:
    while slots.held:
        await asyncio.sleep(0)


async def test_a_response_that_is_being_stored_counts_although_its_client_has_left() -> None:
    world = World()
    one, responses, ids = service(world)
    slots = RequestSlots(8, 1, lambda principal: 1)
    name = response_id_of(ids.new("a"))
    world.order.is_on = True
    await left(slots, lambda: responses.keep("a", *completed(name, "")))
    assert slots.held == 1
    with pytest.raises(Overloaded, match="1 requests can be in flight for one client"), slots.counted("a"):
        pass
    with slots.counted("b"):  # which has a share of its own
        assert slots.held == 2
    await world.order.run([until_free(slots)], lambda count: 0)
    assert await one.shared.store.get("a", name) is not None
    with slots.counted("a"):
        assert slots.held == 1
    assert slots.held == 0


async def test_a_turn_that_is_taken_or_ended_counts_although_its_client_has_left() -> None:
    world, name = World(), f"conv_{1:048x}"
    one = world.orchestrator().shared
    slots = RequestSlots(8, 2, lambda principal: 2)
    world.order.is_on = True
    await left(slots, lambda: one.turns.take("a", name, "req-1"))
    assert slots.held == 1
    await world.order.run([until_free(slots)], lambda count: 0)
    turn = await one.turns.take("a", name, "req-2")
    world.order.is_on = True
    await left(slots, turn.end)
    assert slots.held == 1
    await world.order.run([until_free(slots)], lambda count: 0)
    assert not (await world.store.scan(TURNS))[0]


MIB = 1 << 20


def bodies_of(total_mb: int) -> FairShares:
    return body_shares(ServerConfig(max_body_mb=1, body_buffer_mb=total_mb))


async def test_bytes_of_bodies_are_bounded_for_a_client_and_in_all() -> None:
    bodies, may_end = bodies_of(4), asyncio.Event()
    slots = RequestSlots(8, 8, lambda principal: 8, bodies)

    async def handle(principal: str) -> None:
        with slots.counted(principal):
            hold_body(MIB)
            await may_end.wait()

    handling = [asyncio.ensure_future(handle(principal)) for principal in "aaabbcd"]
    await asyncio.sleep(0)
    # The last one of "b" would take the room for a client that has nothing.
    is_refused = [False, False, True, False, True, False, True]
    assert [one.done() for one in handling] == is_refused and bodies.held == 4 * MIB
    with pytest.raises(Overloaded, match=r"server.body_buffer_mb\): at most 2 MiB for one client, 4 MiB in all"):
        await handling[2]
    may_end.set()
    done = await asyncio.gather(*handling, return_exceptions=True)
    assert [isinstance(one, Overloaded) for one in done] == is_refused and bodies.held == 0


async def test_a_body_is_held_with_the_slot_of_its_request() -> None:
    bodies, may_end = bodies_of(4), asyncio.Event()
    slots = RequestSlots(8, 1, lambda principal: 1, bodies)

    async def work() -> None:
        hold_body(3)
        hold_body(4)
        await to_its_end(may_end.wait())

    await left(slots, work)
    assert bodies.held == bodies.held_by("a") == 7
    may_end.set()
    await until_free(slots)
    assert bodies.held == 0
    hold_body(5)  # without a slot, as an operator's
    assert bodies.held == 0


async def test_bytes_of_large_answers_are_bounded_until_their_requests_have_ended() -> None:
    answers = answer_shares(ServerConfig(response_buffer_mb=4))
    slots = RequestSlots(8, 8, lambda principal: 8, answers=answers)
    large, small = bytes(3 * MIB // 2), bytes(UNCOUNTED_BYTES)
    engine = LoopbackEngine(*(response(200, one) for one in (large, large, small)))
    async with relaying(engine) as world:

        async def answer() -> bytes:
            with slots.counted("a"):
                return (await world.relay.whole(keyed()))[2]

        with slots.counted("a"):
            assert (await world.relay.whole(keyed()))[2] == large
            assert answers.held_by("a") == len(large)
            with pytest.raises(Overloaded, match=r"server.response_buffer_mb\): at most 2 MiB for one client, 4 MiB"):
                await asyncio.ensure_future(answer())
            assert answers.held == len(large)
            assert await asyncio.ensure_future(answer()) == small
        assert answers.held == 0


class Stored:
    """What is stored of a conversation or a response: large."""

    item = body = bytes(MIB)
    inputs = to_json([{"id": "x", "text": "x" * MIB}])

    def page_body(self, page: object) -> bytes:
        return bytes(MIB)

    def find(self, item_id: str) -> Stored:
        return self


class Read(dict[Any, Any]):
    """A request of "a" for it. `held`: the requests and the bytes that count while it is sent."""

    method = "GET"

    def __init__(self, slots: RequestSlots, answers: FairShares) -> None:
        async def get(*names: object) -> Stored:
            return Stored()

        conversations = SimpleNamespace(get=get)
        responses = SimpleNamespace(conversations=conversations, find=get, request_of=lambda *names: "req-1")
        super().__init__({CALLER: Caller("a"), PRINCIPAL: "a"})
        self.app = {FRONT: SimpleNamespace(counted=slots.counted, responses=responses, take_request=get)}
        self.match_info, self.query = {"id": "x", "item": "x"}, dict[str, str]()
        self.held: Callable[[], tuple[int, int]] = lambda: (slots.held, answers.held // MIB)
        self.sent = (0, 0)

    async def send(self, response: web.Response) -> None:
        self.sent = self.held()


@pytest.mark.parametrize(
    "handle",
    [
        conversation_routes._list_items,
        conversation_routes._get_item,
        response_routes._get,
        response_routes._input_items,
    ],
)
async def test_a_stored_answer_counts_while_it_is_sent(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> None:
    answers = answer_shares(ServerConfig(response_buffer_mb=4))
    request = Read(RequestSlots(8, 8, lambda principal: 8, answers=answers), answers)
    await handle(cast(web.Request, request))
    assert request.sent == (1, 1) and request.held() == (0, 0)


async def test_an_answer_that_begins_anew_is_counted_once() -> None:
    answers = answer_shares(ServerConfig(response_buffer_mb=4))
    slots = RequestSlots(8, 8, lambda principal: 8, answers=answers)
    with slots.counted("a"):
        for size in (UNCOUNTED_BYTES, MIB, 2 * MIB, MIB, 3 * MIB):
            hold_answer(size)
        assert answers.held == 3 * MIB
    assert answers.held == 0


async def test_work_that_begins_after_its_request_does_not_count() -> None:
    """As that of a request in the background, whose task began in a client's request."""
    world = World()
    _, responses, ids = service(world)
    bodies, may_begin = bodies_of(4), asyncio.Event()
    slots = RequestSlots(8, 1, lambda principal: 1, bodies)

    async def work() -> None:
        await may_begin.wait()
        hold_body(5)
        await responses.keep("a", *completed(response_id_of(ids.new("a")), ""))

    with slots.counted("a"):
        task = asyncio.ensure_future(work())
    may_begin.set()
    world.order.is_on = True
    for _ in range(4):
        await asyncio.sleep(0)
    assert not task.done() and slots.held == bodies.held == 0
    await world.order.run([task], lambda count: 0)


def test_a_refusal_names_the_bound_that_holds() -> None:
    shares = {"key 1": 2, "a": 3}
    slots = RequestSlots(8, 6, shares.__getitem__)
    for principal, bound in (("key 1", "2 requests .* with this API key"), ("a", "3 requests .* for one client")):
        with ExitStack() as held:
            for _ in range(shares[principal]):
                held.enter_context(slots.counted(principal))
            with pytest.raises(Overloaded, match=bound):
                slots.counted(principal)
