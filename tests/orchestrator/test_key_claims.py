"""Which agent gets a request with a key: what orchestrators agree on, and what they ask the engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

import pytest

from pipeline.api.output_tokens import RELAY, relay_header
from pipeline.coordination.memory import MemoryStore
from pipeline.errors import StorageUnavailable
from stages.orchestrator import key_claims
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.forward import Bounds, Forward, Tries
from stages.orchestrator.key_claims import CLAIMS, KeyClaims
from stages.orchestrator.registry import Registry
from stages.orchestrator.relay import Relay
from tests.orchestrator.agents import engine, heartbeat, request, router, view
from tests.orchestrator.loopback_engine import WAIT_S, Clock, WatchedClient

NAMES = ("A", "B", "C")  # of the agents; equal ones take turns, in this order


class Orchestrator:
    """It finds agents for requests; `has`: the agents whose engines have them."""

    def __init__(self, store: MemoryStore | None, *names: str, is_up: bool = True, cordoned: str = "") -> None:
        async def poll(record: object) -> Any:
            return heartbeat("A")

        async def load(*wanted: str) -> None:
            raise NotImplementedError

        self.clock = Clock()
        self.claims = KeyClaims(store, lambda: is_up, time.monotonic)
        self.has: set[str] = set()
        self.may_answer, self.is_asking = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self.relay = Relay(
            WatchedClient(),
            router(*(view(name, engine(), may_start=name != cordoned) for name in names or NAMES)),
            Registry(poll, self.clock),
            ColdLoads(load, 1, self.clock),
            Bounds(1.0, 1000.0),
            self.clock,
            self.clock.wait,
            claims=self.claims,
        )
        self.relay.routes.locate = self.locate

    async def locate(self, forward: Forward, besides: Collection[str]) -> str:
        self.is_asking.set()
        await self.may_answer.wait()
        return next(iter(sorted(self.has - {*besides})), "")

    async def find(self, tries: Tries | None = None, pinned: str = "") -> str:
        """The agent that gets the request."""
        route = await self.relay.routes.find(forward(pinned), tries or Tries(self.clock), None)
        return route.agent_id


def forward(pinned: str = "") -> Forward:
    headers = {"Idempotency-Key": "k", RELAY: relay_header("t", 0)}
    return Forward(routed=request(pinned=pinned), path="/v1/generate", body=b"{}", headers=headers, is_stream=True)


async def test_an_orchestrator_that_reads_a_claim_asks_the_engines_itself() -> None:
    """The one that has made it may not know yet that another engine has the request."""
    store = MemoryStore()
    first, second = Orchestrator(store, "A", "B"), Orchestrator(store, "A", "B")
    first.has, second.has = {"B"}, {"B"}
    first.may_answer.clear()
    asking = asyncio.ensure_future(first.find())
    await first.is_asking.wait()
    assert await second.find() == "B"
    first.may_answer.set()
    assert await asking == "B"


async def test_a_repetition_asks_when_the_first_attempt_has_left_while_it_asked() -> None:
    one = Orchestrator(MemoryStore(), "A", "B")
    one.has = {"B"}
    one.may_answer.clear()
    tries = Tries(one.clock)
    asking = asyncio.ensure_future(one.find(tries=tries))
    await one.is_asking.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    one.relay.routes.left(tries)
    one.may_answer.set()
    assert await one.find() == "B"


@pytest.mark.parametrize("store", [None, MemoryStore()], ids=["no store", "a store that is down"])
async def test_without_the_store_engines_are_asked(store: MemoryStore | None) -> None:
    one = Orchestrator(store, "A", "B", is_up=False)
    one.has = {"B"}
    assert await one.find() == "B"


async def test_an_agent_that_has_failed_a_request_is_no_reason_to_send_it_there_again() -> None:
    """Another orchestrator has claimed it for another agent meanwhile."""
    store = MemoryStore()
    first, second = Orchestrator(store, "A", "B"), Orchestrator(store, "B")
    tries = Tries(first.clock)
    sent = forward()
    route = await first.relay.routes.find(sent, tries, None)
    assert route.agent_id == "A" and route.engine is not None
    first.relay.kept.put(sent, "A", route.engine)  # where it was sent, and failed
    first.relay.routes.left(tries)
    first.relay.kept.left(sent)
    while await store.get(CLAIMS + "req-1"):
        await asyncio.sleep(0)
    assert await second.find() == "B"
    assert await first.find(pinned="A") == "B"  # as an orchestrator prefers the agent of the attempt before


async def test_two_streams_of_a_key_go_to_their_successors_at_once() -> None:
    """Their agent drains, and each has warmed another one."""
    one = Orchestrator(None)
    both = [Tries(one.clock) for _ in range(2)]
    assert [await one.find(tries=tries) for tries in both] == ["A", "A"]
    begun = one.clock.now
    for tries, successor in zip(both, "BC"):
        tries.failed("A")
        tries.successor = successor
    assert [await one.find(tries=tries) for tries in both] == ["B", "C"]
    assert one.clock.now == begun and not both[1].unreached


@pytest.mark.parametrize(("names", "cordoned"), [("B", ""), ("AB", "A")], ids=["it is gone", "it is cordoned"])
async def test_no_time_is_lost_with_an_agent_that_cannot_get_the_request(names: str, cordoned: str) -> None:
    store = MemoryStore()
    first, second = Orchestrator(store, "A"), Orchestrator(store, *names, cordoned=cordoned)
    assert await first.find() == "A"
    assert (await second.find(), second.clock.now) == ("B", 0.0)


async def test_what_was_written_for_a_request_that_has_left_is_removed() -> None:
    class SlowStore(MemoryStore):
        """It answers a transaction when the test says so."""

        def __init__(self) -> None:
            super().__init__()
            self.may_answer, self.has_applied = asyncio.Event(), asyncio.Event()

        async def transact(self, *given: Any) -> int | None:
            revision = await super().transact(*given)
            self.has_applied.set()
            await self.may_answer.wait()
            return revision

    store = SlowStore()
    one = Orchestrator(store)
    tries = Tries(one.clock)
    finding = asyncio.ensure_future(one.find(tries=tries))
    await store.has_applied.wait()
    finding.cancel()
    await asyncio.gather(finding, return_exceptions=True)
    one.relay.routes.left(tries)
    store.may_answer.set()
    assert await store.get(CLAIMS + "req-1") is not None
    async with asyncio.timeout(key_claims.LEASE_S / 2):
        while await store.get(CLAIMS + "req-1"):
            await asyncio.sleep(0)
    assert not one.claims.count


async def test_the_removal_of_a_claim_removes_none_of_a_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read the record, which was then removed: another orchestrator could claim the request for another agent."""

    class SlowStore(MemoryStore):
        """It removes a value when the test says so."""

        def __init__(self) -> None:
            super().__init__()
            self.may_remove, self.is_removing = asyncio.Event(), asyncio.Event()

        async def transact(self, conditions: Any, changes: Any, *given: Any) -> int | None:
            if any(change.value is None for change in changes):
                self.is_removing.set()
                await self.may_remove.wait()
            return await super().transact(conditions, changes, *given)

    monkeypatch.setattr(key_claims, "REMOVE_S", 0.0)
    store = SlowStore()
    claims = KeyClaims(store, lambda: True, time.monotonic)
    claim = claims.enter("req-1", "t")
    assert await claims.take(claim, "A", ()) == "A"
    claims.leave(claim)
    await store.is_removing.wait()
    again = claims.enter("req-1", "t")
    taking = asyncio.ensure_future(claims.take(again, "B", ()))
    for _ in range(10):
        await asyncio.sleep(0)
    store.may_remove.set()
    agent = await taking
    while claims._removing is not None and not claims._removing.done():
        await asyncio.sleep(0)
    item = await store.get(CLAIMS + "req-1")
    assert item is not None and item.value.decode() == agent
    claims.leave(again)
    while claims.count:
        await asyncio.sleep(0)
    assert await store.get(CLAIMS + "req-1") is None and not claims._of_tenant


async def test_a_tenant_has_a_bounded_number_of_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_claims, "MAX_OF_TENANT", 2)
    store = MemoryStore()
    claims = KeyClaims(store, lambda: True, time.monotonic)
    mine = [claims.enter(f"req-{number}", "t") for number in range(3)]
    other = claims.enter("req-3", "u")
    for claim in (*mine, other):
        assert await claims.take(claim, "A", ()) == "A"
    assert {item.key for item in (await store.scan(CLAIMS))[0]} == {CLAIMS + f"req-{n}" for n in (0, 1, 3)}
    for claim in (*mine, other):
        claims.leave(claim)
    while claims.count:
        await asyncio.sleep(0)
    assert not (await store.scan(CLAIMS))[0]
    assert await claims.take(claims.enter("req-9", "t"), "A", ()) == "A"
    assert await store.get(CLAIMS + "req-9") is not None


class GrantingStore(MemoryStore):
    """It grants a lease when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.n_grants = 0
        self.may_grant, self.is_granting = asyncio.Event(), asyncio.Event()
        self.failures: list[StorageUnavailable] = []

    async def grant(self, ttl_s: float) -> str:
        self.n_grants += 1
        self.is_granting.set()
        await self.may_grant.wait()
        if self.failures:
            raise self.failures.pop()
        return await super().grant(ttl_s)


async def test_requests_that_wait_for_a_lease_share_one() -> None:
    store = GrantingStore()
    claims = KeyClaims(store, lambda: True, time.monotonic, store_s=WAIT_S)
    made = [claims.enter(f"req-{number}", "t") for number in range(100)]
    taking = [asyncio.ensure_future(claims.take(claim, "A", ())) for claim in made]
    await store.is_granting.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    store.may_grant.set()
    assert await asyncio.gather(*taking) == ["A"] * 100
    assert store.n_grants == 1 and len((await store.scan(CLAIMS))[0]) == 100
    await store.revoke(claims._lease)  # as after a loss of the store's data
    assert await asyncio.gather(*(claims.take(claim, "B", {"A"}) for claim in made)) == ["B"] * 100
    assert store.n_grants == 2 and len((await store.scan(CLAIMS))[0]) == 100
    await claims.close()


async def test_a_request_that_learns_late_of_a_lost_lease_ends_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = GrantingStore()
    store.may_grant.set()
    claims = KeyClaims(store, lambda: True, time.monotonic, store_s=WAIT_S)
    zero, one, two = (claims.enter(f"req-{number}", "t") for number in range(3))
    assert await claims.take(zero, "A", ()) == "A"
    await store.revoke(claims._lease)
    get, is_reading, may_read = store.get, asyncio.Event(), asyncio.Event()

    async def slow(key: str) -> Any:
        if key == CLAIMS + "req-2":
            is_reading.set()
            await may_read.wait()
        return await get(key)

    monkeypatch.setattr(store, "get", slow)
    late = asyncio.ensure_future(claims.take(two, "A", ()))
    await is_reading.wait()
    assert await claims.take(one, "A", ()) == "A"
    may_read.set()
    assert await late == "A"
    assert store.n_grants == 2 and len((await store.scan(CLAIMS))[0]) == 2
    await claims.close()


async def test_a_request_that_ends_leaves_the_lease_to_those_that_wait_for_it() -> None:
    """Also the one that has asked for it."""
    store = GrantingStore()
    claims = KeyClaims(store, lambda: True, time.monotonic)
    waiting = [asyncio.ensure_future(claims._current_lease(store)) for _ in range(3)]
    await store.is_granting.wait()
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    store.may_grant.set()
    assert await asyncio.gather(*waiting[1:]) == [claims._lease] * 2
    assert waiting[0].cancelled() and store.n_grants == 1


async def test_a_lease_that_was_not_granted_is_asked_for_again() -> None:
    store = GrantingStore()
    store.failures = [StorageUnavailable("no answer")]
    store.may_grant.set()
    claims = KeyClaims(store, lambda: True, time.monotonic, store_s=WAIT_S)
    for name in ("req-1", "req-2"):
        assert await claims.take(claims.enter(name, "t"), "A", ()) == "A"
    assert store.n_grants == 2 and [item.key for item in (await store.scan(CLAIMS))[0]] == [CLAIMS + "req-2"]
    await claims.close()


async def test_a_lease_that_is_not_granted_ends_with_the_claims() -> None:
    store = GrantingStore()
    claims = KeyClaims(store, lambda: True, time.monotonic)
    waiting = asyncio.ensure_future(claims._current_lease(store))
    await store.is_granting.wait()
    await claims.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
