"""Which prefixes of an agent that drains are sent, to whom, and within which bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.errors import ModelUnavailable, StarlingError
from pipeline.fleet import bodies
from pipeline.fleet.records import AgentRecord
from shm.sent_pages import HEAD_BYTES
from stages.orchestrator import prefix_moves
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.prefix_moves import LIMIT_S, MAX_BYTES, WAIT_S, PrefixMove, PrefixMoves, report
from tests.orchestrator.agents import MODEL, engine, router, view

PAGE = 1000  # bytes, with what names it
ROOM = 100 * PAGE
KINDS: dict[str, Any] = {
    "/list_prefixes": bodies.ListPrefixesRequest,
    "/give_prefixes": bodies.GivePrefixesRequest,
    "/take_prefixes": bodies.TakePrefixesRequest,
}


def packed(*names: int) -> bytes:
    return np.array(names, "<u8").tobytes()


def prefix(*names: int, tenant: str = "", uses: int = 3, idle_s: float = 1.0) -> bodies.HotPrefix:
    return bodies.HotPrefix(tail=f"{names[-1]:032x}", names=packed(*names), tenant=tenant, uses=uses, idle_s=idle_s)


class World:
    """The agents "one", which drains, "two" and "three", whose answers a test sets."""

    def __init__(self, **held: tuple[int, ...]) -> None:
        """`held`: the pages that agents publish."""
        self.prefixes: tuple[bodies.HotPrefix, ...] = ()
        self.now = 0.0
        self.calls: list[tuple[str, str, Any, float]] = []
        self.events: list[str] = []
        self.before: Callable[[str, str], StarlingError | None] = lambda agent, path: None
        self.views = {name: self.row(name, is_draining=name == "one") for name in ("one", "two", "three")}
        self.router = router()
        for name, names in held.items():
            update = bodies.PrefixUpdate(after=0, number=1, added=packed(*names))
            answer = self.views[name].details
            (model,) = answer.loaded_models
            model = msgspec.structs.replace(model, prefixes=update)
            self.router.prefixes.apply(msgspec.structs.replace(answer, loaded_models=(model,)))
        self.set_table()
        self.moves = PrefixMoves(self, self, self.router, self.note, lambda: self.now)

    def row(self, name: str, is_draining: bool = False, **fields: Any) -> NodeView:
        given = {"publishes_prefixes": True, "moves_prefixes": True, "page_tokens": 32, **fields}
        made = view(name, engine(**given), may_start=not is_draining, kv_page_bytes=ROOM)
        return msgspec.structs.replace(made, is_draining=is_draining)

    def set_table(self) -> None:
        self.router.update_routing_table(list(self.views.values()))

    def find(self, agent_id: str) -> AgentRecord | None:
        return AgentRecord(agent_id=agent_id, url=f"http://{agent_id}", incarnation="1")

    def note(self, kind: str, **fields: str) -> None:
        self.events.append(f"{kind} {fields['agent']}: {fields['text']}")

    async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
        asked = msgspec.json.decode(body, type=KINDS[path])
        self.calls.append((record.agent_id, path, asked, timeout_s))
        if (failure := self.before(record.agent_id, path)) is not None:
            raise failure
        answer: msgspec.Struct = bodies.TakePagesResponse(pages=1, seconds=0.1)
        if path == "/list_prefixes":
            shown = self.prefixes if asked.limit else ()
            answer = bodies.ListPrefixesResponse(prefixes=shown, page_bytes=PAGE)
        elif path == "/give_prefixes":
            answer = bodies.GivePagesResponse(ticket="t" * 32, pages=1, bytes=PAGE * len(asked.tails), of_pages=1)
        return msgspec.json.encode(answer)

    def drain(self) -> list[PrefixMove]:
        """A round, and what it has done."""

        async def run() -> None:
            self.moves.begin_round()
            while self.moves._tasks:
                await asyncio.sleep(0)

        asyncio.run(run())
        return self.moves.why("one") or []

    def sent(self) -> list[tuple[str, str, list[int]]]:
        """Agent, tenant and last pages of what was sent."""
        given = [asked for _, path, asked, _ in self.calls if path == "/give_prefixes"]
        taken = [(name, asked) for name, path, asked, _ in self.calls if path == "/take_prefixes"]
        return [(name, asked.tenant, [int(t, 16) for t in give.tails]) for (name, asked), give in zip(taken, given)]


def test_what_no_other_agent_holds_is_sent_and_what_it_leaves_is_nothing() -> None:
    world = World(two=(1, 2, 3), three=(7,))
    world.prefixes = (prefix(7, 8, uses=9), prefix(1, 2, 3, uses=5), prefix(1, 2, 4, uses=4))
    moves = world.drain()
    assert [(one.outcome, one.target, one.pages, one.uses) for one in moves] == [
        ("sent", "three", 2, 9),  # it holds the first page
        ("held", "two", 3, 5),
        ("sent", "two", 3, 4),
    ]
    assert world.sent() == [("three", "", [8]), ("two", "", [4])]
    assert world.moves.outcomes == {"sent": 2, "held": 1} and world.moves.nbytes == 2 * PAGE
    assert world.events == ["prefixes-sent one: 1 held, 2 sent; 5 pages"]
    lists = [asked.limit for name, path, asked, _ in world.calls if path == "/list_prefixes" and name == "one"]
    assert lists[0] > 0 == lists[-1]  # nothing is left
    # Once in a drain.
    count = len(world.calls)
    world.drain()
    assert len(world.calls) == count
    world.views["one"] = world.row("one")
    world.set_table()
    world.drain()
    world.views["one"] = world.row("one", is_draining=True)
    world.set_table()
    world.drain()
    assert len(world.calls) > count


def test_an_agent_that_drains_again_before_the_next_round_sends_what_it_has() -> None:
    """No round sees it between its two drains."""
    world = World()
    world.prefixes = (prefix(1, 2),)
    world.before = lambda agent, path: ModelUnavailable("it was lost") if path == "/take_prefixes" else None
    assert [one.outcome for one in world.drain()] == ["failed"] == [one.outcome for one in world.drain()]
    world.before = lambda agent, path: None
    world.views["one"] = msgspec.structs.replace(world.views["one"], draining_since=1.0)
    world.set_table()
    assert [one.outcome for one in world.drain()] == ["sent"]


def test_prefixes_that_begin_alike_go_to_the_same_agent_one_tenant_at_a_time() -> None:
    world = World()
    world.prefixes = tuple(prefix(first, second) for first in (10, 20) for second in (1, 2, 3))
    world.prefixes += (prefix(30, 1, tenant="mine"), prefix(30, 2, tenant="other"))
    world.drain()
    assert sum(len(tails) for _, _, tails in world.sent()) == 8
    assert {tenant for _, tenant, _ in world.sent()} == {"", "mine", "other"}
    assert len({name for name, tenant, _ in world.sent() if not tenant}) == 2  # both get some
    targets = {move.tail: move.target for move in world.moves.why("one") or ()}
    assert len(world.sent()) == len({(name, tenant) for name, tenant, _ in world.sent()})
    assert set(targets.values()) == {"two", "three"}


@pytest.mark.parametrize("fields", [{"running": 1}, {"vllm_queue_length": 1}, {"sessions": 1}, {"sessions_moving": 1}])
def test_streams_and_sessions_go_first_for_a_bounded_time(fields: dict[str, int]) -> None:
    world = World()
    world.prefixes = (prefix(1, 2),)
    world.views["one"] = world.row("one", is_draining=True, **fields)
    world.set_table()
    assert world.drain() == [] == world.calls
    world.now += WAIT_S
    assert [one.outcome for one in world.drain()] == ["sent"]


def test_an_agent_that_does_not_drain_or_answer_is_left_alone() -> None:
    world = World()
    world.prefixes = (prefix(1, 2),)
    row = world.views["one"]
    for other in (world.row("one"), msgspec.structs.replace(row, health="SUSPECT")):
        world.views["one"] = other
        world.set_table()
        assert world.drain() == [] == world.calls


@pytest.mark.parametrize(
    "fields", [{"moves_prefixes": False}, {"numerics": 2}, {"page_tokens": 64}, {"model_state": "DOWNLOADING"}]
)
def test_agents_of_other_versions_get_nothing(fields: dict[str, Any]) -> None:
    world = World()
    world.prefixes = (prefix(1, 2),)
    world.views |= {name: world.row(name, **fields) for name in ("two", "three")}
    world.set_table()
    (move,) = world.drain()
    assert move.outcome == "skipped" and "no other agent" in move.reason and world.sent() == []


def test_bytes_are_bounded_for_one_agent_and_per_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    del world.views["three"]
    world.set_table()
    long = range(1, 61)
    # 60 pages, and what names them: the first 59 of the second are the first's.  Of 60 others the first ones fit.
    world.prefixes = (prefix(*long), prefix(*long[:-1], 99), prefix(*range(100, 160)), prefix(400))
    moves = world.drain()
    n_fit = (ROOM - HEAD_BYTES) // PAGE
    assert [(one.outcome, one.pages) for one in moves] == [
        ("sent", 60),
        ("sent", 60),
        ("sent", n_fit - 61),
        ("skipped", 1),
    ]
    assert moves[2].reason == "the first of 60 pages"
    (given,) = [asked for _, path, asked, _ in world.calls if path == "/give_prefixes"]
    assert given.max_bytes == HEAD_BYTES + n_fit * PAGE <= ROOM
    monkeypatch.setattr(prefix_moves, "MAX_BYTES", 100 * PAGE)
    world = World()
    world.prefixes = tuple(
        prefix(*range(begin, begin + 40), tenant=tenant)
        for begin, tenant in ((1, "mine"), (100, "mine"), (200, "other"), (300, "third"))
    )
    # Half for a tenant, and 100 in all.
    moves = world.drain()
    assert [(one.tenant, one.pages) for one in moves if one.outcome == "sent"] == [
        ("mine", 40),
        ("mine", 10),
        ("other", 40),
        ("third", 10),
    ]
    assert MAX_BYTES > ROOM


@pytest.mark.parametrize("counts", [True, False])
def test_tenants_behind_an_orchestrator_count_by_their_names(monkeypatch: pytest.MonkeyPatch, counts: bool) -> None:
    monkeypatch.setattr(prefix_moves, "MAX_BYTES", 120 * PAGE)
    salts = {letter: letter * 32 for letter in "abef"}
    a, b, e, f = (f"fleet\0{salt}" for salt in salts.values())
    world = World()
    details = msgspec.structs.replace(world.views["two"].details, counts_page_tenants=counts)
    world.views["two"] = msgspec.structs.replace(world.views["two"], details=details)
    del world.views["three"]
    world.set_table()
    given = ((e, 50), (f, 20), ("fleet", 1), (b, 10), (a, 30), (a, 40))
    world.prefixes = tuple(
        prefix(*range(100 * n, 100 * n + pages), tenant=owner) for n, (owner, pages) in enumerate(given, 1)
    )

    async def tenants() -> dict[str, str]:
        return {salts["a"]: "mine", salts["b"]: "other"}

    world.moves.tenants = tenants
    moves = world.drain()
    taken = [(asked.tenant, asked.account) for _, path, asked, _ in world.calls if path == "/take_prefixes"]
    if counts:
        # Half for a tenant; salts of no tenant are of one together.
        sent = [(one.tenant, one.pages) for one in moves if one.outcome == "sent"]
        assert sent == [(e, 50), (f, 10), (b, 10), (a, 30), (a, 20)]
        assert taken == [(e, ""), (f, ""), (b, "other"), (a, "mine")]
    else:  # an older release tells only the owners of keys apart
        assert taken == [("fleet", "")]


def test_a_prefix_that_is_larger_than_the_bound_is_sent_in_part() -> None:
    world = World()
    world.prefixes = (prefix(*range(1, 301)),)
    (move,) = world.drain()
    assert (move.outcome, move.pages) == ("sent", (ROOM - HEAD_BYTES) // PAGE)


def test_the_longest_salt_of_a_tenant_is_taken_and_not_shown() -> None:
    world = World()
    world.prefixes = (prefix(1, 2, tenant="\x01" + "t" * 129),)
    (move,) = world.drain()
    assert move.outcome == "sent" and world.sent()[0][1] == move.tenant
    assert "tenant" not in report([move])[0]


def test_what_is_late_or_fails_is_left_out_and_nothing_stays_to_be_sent() -> None:
    world = World()
    world.prefixes = (prefix(1, 2, tenant="a"), prefix(3, 4, tenant="b"), prefix(5, 6, tenant="c"))

    def before(agent: str, path: str) -> StarlingError | None:
        if path == "/take_prefixes" and len([one for one in world.calls if one[1] == path]) == 1:
            return ModelUnavailable("it was lost")
        if path == "/take_prefixes":
            world.now += LIMIT_S
        return None

    world.before = before
    moves = world.drain()
    assert [one.outcome for one in moves] == ["failed", "sent", "skipped"]
    assert "lost" in moves[0].reason and "time" in moves[2].reason
    taken = [(asked.timeout_ms, timeout_s) for _, path, asked, timeout_s in world.calls if path == "/take_prefixes"]
    assert all(1000 * timeout_s > timeout_ms > 0 and timeout_s <= LIMIT_S + 1 for timeout_ms, timeout_s in taken)
    assert world.calls[-1][1:3] == ("/list_prefixes", bodies.ListPrefixesRequest(model_id=MODEL, limit=0))


def test_a_source_that_fails_has_no_report_of_prefixes() -> None:
    world = World()
    world.before = lambda agent, path: ModelUnavailable("it was lost")
    assert world.drain() == [] == world.events
    assert world.moves.why("two") is None
