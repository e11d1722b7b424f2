"""A session moves for its next turn if its agent is busy: which calls that makes, and when it stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pipeline.errors import Conflict, NotFound, Overloaded, StarlingError
from pipeline.fleet import bodies
from pipeline.fleet.records import AgentRecord
from shm.sent_pages import MAX_KEPT_BYTES, TENANT_SHARE
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.session_moves import PAUSE_S, SENT_S, SessionMoves
from stages.orchestrator.session_pages import SessionPages
from tests.orchestrator.agents import MODEL, engine, router, view

TOKENS = b"t" * 1000  # of a session: 0.5 s of computing at the default speed
KINDS: dict[str, Any] = {
    "/list_sessions": bodies.ListSessionsRequest,
    "/give_session": bodies.GiveSessionRequest,
    "/take_session": bodies.TakeSessionRequest,
    "/move_session": bodies.MoveSessionRequest,
    "/give_prefixes": bodies.GivePrefixesRequest,
    "/take_prefixes": bodies.TakePrefixesRequest,
}
MOVE = ["one /give_session", "two /take_session", "one give_up", "two activate", "one settle"]


class World:
    """The agents "one", which has a session and `queue` sequences, and "two"."""

    def __init__(self, queue: int = 40, tokens: bytes = TOKENS, gain_s: float = 1.0, sends: int = 0) -> None:
        """`sends`: bytes of the session's pages."""
        self.now = 0.0
        self.tokens = tokens
        self.sends = sends
        self.of_pages = 1  # of the session, of which one can be sent
        self.most = 0  # bytes that were asked for
        self.move = "a" * 40
        self.entry = bodies.SessionEntry(tenant="mine", session="s", state="held")  # as its agents list it
        self.given_up: list[str] = []
        self.owner = "mine"  # of its pages
        self.payers: list[tuple[str, str]] = []  # owner and tenant of pages that were sent
        self.checks: list[tuple[str, int]] = []  # the source and the tokens of each
        self.calls: list[str] = []
        self.bound: list[str] = []
        self.events: list[str] = []
        self.before: Callable[[str], StarlingError | None] = lambda call: None
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.views = {"one": self.row("one", running=queue), "two": self.row("two")}
        self.router = router(*self.views.values())
        self.moves = SessionMoves(self, self, self.router, self.note, self.bind, gain_s, lambda: self.now)
        self.moves.pages = SessionPages(self.moves.call, self, self.find, self.details, lambda: self.now)

    def row(self, name: str, may_start: bool = True, **fields: Any) -> NodeView:
        given = {"moves_sessions": True, "moves_prefixes": True, "page_tokens": 32, **fields}
        return view(name, engine(**given), may_start=may_start, kv_page_bytes=1 << 30)

    def set(self, name: str, **fields: Any) -> None:
        self.views[name] = self.row(name, **fields)
        self.router.update_routing_table(list(self.views.values()))

    def find(self, agent_id: str) -> AgentRecord | None:
        return AgentRecord(agent_id=agent_id, url="", incarnation="1") if agent_id in self.views else None

    def details(self, name: str) -> bodies.HeartbeatResponse | None:
        return self.views[name].details if name in self.views else None

    def note(self, kind: str, **fields: str) -> None:
        self.events.append(f"{kind} {fields['agent']}: {fields['text']}")

    def bind(self, tenant: str, session: str, agent: str) -> None:
        self.bound.append(agent)

    def speed(self, source_id: str, target_id: str) -> float:
        return 1e9

    def measured(self, source_id: str, target_id: str, nbytes: int, seconds: float) -> None:
        self.events.append(f"{nbytes} bytes {source_id} {target_id}")

    def late(self, source_id: str, target_id: str, nbytes: int, seconds: float) -> None:
        self.events.append(f"late {source_id} {target_id} {nbytes} {seconds:g}")

    def failed(self, source_id: str, target_id: str, error: StarlingError) -> None:
        self.events.append(f"failed {source_id} {target_id}: {error.message}")

    async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
        asked: Any = msgspec.json.decode(body, type=KINDS[path])
        call = f"{record.agent_id} {getattr(asked, 'step', path)}"
        self.calls.append(call)
        if path == "/take_session":
            await self.may_take.wait()
        if getattr(asked, "step", "") == "check":
            self.checks.append((asked.agent_id, asked.tokens))
        if (failure := self.before(call)) is not None:
            raise failure
        answer: msgspec.Struct = bodies.MoveSessionResponse()
        if path == "/give_session":
            tails = ("ab" * 16,) if self.sends else ()
            n = len(self.tokens) // 4
            answer = bodies.GiveSessionResponse(
                record=self.tokens, move=self.move, tokens=n, tails=tails, owner=self.owner
            )
        elif path == "/list_sessions":
            answer = bodies.ListSessionsResponse(sessions=(self.entry,))
        elif getattr(asked, "step", "") == "give_up":
            self.given_up.append(asked.move)
        elif path == "/take_session":
            answer = bodies.TakeSessionResponse(move="a" * 40)
        elif path == "/give_prefixes":
            answer = bodies.GivePagesResponse(ticket="t" * 32, pages=1, bytes=self.sends, of_pages=self.of_pages)
            self.most = asked.max_bytes
        elif path == "/take_prefixes":
            self.payers.append((asked.tenant, asked.account))
            answer = bodies.TakePagesResponse(pages=1, seconds=0.2)
        return msgspec.json.encode(answer)

    async def turn(self, session: str = "s", home: str = "one") -> str:
        return await self.moves.for_turn("req-1", "mine", session, MODEL, home)


async def test_a_session_moves_where_its_turn_would_be_served_sooner() -> None:
    world = World()  # 40 sequences of 0.05 s: 2 s, against 0.5 s and the move
    assert await world.turn() == "two"
    assert world.calls == MOVE and world.bound == ["two"]
    assert world.moves.outcomes == {"moved": 1} and world.events == ["session-moved one: for a turn, to two"]
    decision = world.router.decisions.find("req-1")
    assert decision is not None
    (choice,) = decision.choices
    assert (choice.agent_id, choice.cause) == ("two", "session")
    home, target = choice.scores
    assert home.score_s == pytest.approx(2.0) and home.state == "has the session"
    assert target.score_s == pytest.approx(0.55) == choice.predicted_s


@pytest.mark.parametrize(
    ("queue", "gain_s", "calls"),
    [
        (20, 1.0, 0),  # 1 s: with the move, less is gained at once
        (30, 1.0, 1),  # 1.5 s: its agent is asked, and has too many tokens of it
        (40, 0.0, 0),  # sessions never move for turns
        (0, 0.001, 0),
    ],
)
async def test_a_session_stays_for_a_smaller_gain(queue: int, gain_s: float, calls: int) -> None:
    world = World(queue, gain_s=gain_s)
    assert await world.turn() == "one"
    assert world.calls == MOVE[:calls] and world.bound == []


async def test_pages_are_sent_where_that_is_faster() -> None:
    # 50 MB at 1 GB/s are 0.05 s; 4 s would be computed.
    world = World(tokens=b"t" * 8000, sends=50_000_000)
    assert await world.turn() == "two"
    assert world.calls == [MOVE[0], "one /give_prefixes", "two /take_prefixes", *MOVE]
    assert world.events[0] == "50000000 bytes one two"
    world = World(tokens=b"t" * 8000)
    assert await world.turn() == "one" and world.calls == MOVE[:1]
    # A short session is computed sooner.
    world = World(tokens=b"t" * 10, sends=50_000_000)
    assert await world.turn() == "two" and world.calls == [MOVE[0], "one /give_prefixes", *MOVE[1:]]


async def test_turns_that_are_served_while_pages_are_sent_stop_no_move() -> None:
    """The source gives up the session only as it was given."""
    world = World(tokens=b"t" * 8000, sends=50_000_000)

    def before(call: str) -> None:
        if call == "two /take_prefixes":
            world.move = "b" * 40  # a turn has changed the session

    world.before = before
    assert await world.turn() == "two" and world.given_up == ["b" * 40]


@pytest.mark.parametrize("fails", ["two /take_session", "two /take_prefixes"])
async def test_pages_of_a_session_that_cannot_move_are_sent_once(fails: str) -> None:
    world = World(tokens=b"t" * 8000, sends=50_000_000)
    world.before = lambda call: NotFound("no room") if call in (fails, "two /take_session") else None
    world.views["one"] = msgspec.structs.replace(world.views["one"], is_draining=True)
    world.router.update_routing_table(list(world.views.values()))
    for _ in range(3):
        await world.moves.run("one", MODEL, is_draining=True)
    assert world.calls.count("two /take_prefixes") == world.calls.count("one /give_prefixes") == 1
    assert world.calls.count("two /take_session") == 3
    world.now += SENT_S
    await world.moves.run("one", MODEL, is_draining=True)
    assert world.calls.count("two /take_prefixes") == 2


async def test_an_agent_without_room_gets_no_pages() -> None:
    """It refuses the session before its pages are sent; for a turn, and in a drain."""
    full = Overloaded("10 of 10 sessions are held (max_sessions)")
    world = World(tokens=b"t" * 8000, sends=50_000_000)
    world.set("two", checks_sessions=True)
    world.before = lambda call: full if call in ("two check", "two /take_session") else None
    assert await world.turn() == "one" and world.bound == []
    assert world.calls == [MOVE[0], "one /give_prefixes", "two check"]
    assert world.checks == [("one", 2000)] and world.moves.outcomes == {"failed": 1}
    world.calls.clear()
    world.views["one"] = msgspec.structs.replace(world.views["one"], is_draining=True)
    world.router.update_routing_table(list(world.views.values()))
    await world.moves.run("one", MODEL, is_draining=True)
    assert world.calls == ["one /list_sessions", MOVE[0], "two check"]


async def test_pages_follow_when_an_agent_has_said_that_it_has_room() -> None:
    world = World(tokens=b"t" * 8000, sends=50_000_000)
    world.set("two", checks_sessions=True)
    assert await world.turn() == "two"
    assert world.calls == [MOVE[0], "one /give_prefixes", "two check", "two /take_prefixes", *MOVE]
    # A session without pages to send is refused as early without it.
    world = World()
    world.set("two", checks_sessions=True)
    assert await world.turn() == "two" and world.calls == MOVE


@pytest.mark.parametrize("counts", [True, False])
async def test_pages_of_a_session_count_as_its_tenants(counts: bool) -> None:
    world = World(tokens=b"t" * 8000, sends=50_000_000)
    world.owner = f"fleet\0{'1' * 32}"
    details = msgspec.structs.replace(world.views["two"].details, counts_page_tenants=counts)
    world.views["two"] = msgspec.structs.replace(world.views["two"], details=details)
    world.router.update_routing_table(list(world.views.values()))
    assert await world.turn() == "two"
    assert world.payers == [(world.owner, "mine") if counts else ("fleet", "")]


@pytest.mark.parametrize("lost", ["one /give_prefixes", "two /take_prefixes"])
async def test_pages_that_do_not_come_stop_no_move(lost: str) -> None:
    world = World(sends=50_000_000)
    world.before = lambda call: NotFound("they are gone") if call == lost else None
    assert await world.turn() == "two" and world.bound == ["two"]


async def test_pages_that_are_a_part_count_as_that_part() -> None:
    world = World(tokens=b"t" * 8000, sends=50_000_000)
    world.of_pages = 10  # 3.6 s are computed in any case: more than the queue of 2 s
    assert await world.turn() == "one" and world.calls == [MOVE[0], "one /give_prefixes"]
    # 0.05 s and the fixed cost, for a tenth of 0.5 s of computing.
    world = World(sends=50_000_000)
    world.of_pages = 10
    assert await world.turn() == "two" and "two /take_prefixes" not in world.calls
    assert world.most == MAX_KEPT_BYTES // TENANT_SHARE  # the target's engine keeps no more


async def test_what_is_not_sent_pauses_the_link_and_lowers_its_speed() -> None:
    world = World(tokens=b"t" * 8000, sends=50_000_000)

    def before(call: str) -> StarlingError | None:
        if call != "two /take_prefixes":
            return None
        world.now += 6.0
        return NotFound("lost")

    world.before = before
    assert await world.turn() == "two"
    assert world.events[:2] == ["failed one two: lost", "late one two 50000000 6"]


async def test_an_agent_that_refuses_the_copy_counts_as_a_failure() -> None:
    world = World()
    world.before = lambda call: NotFound("the model is not loaded") if call == "two /take_session" else None
    assert await world.turn() == "one" and world.moves.outcomes == {"failed": 1}


async def test_after_a_look_the_next_turns_stay_for_a_while() -> None:
    world = World(30)
    assert await world.turn() == "one" and len(world.calls) == 1
    world.set("one", running=100)
    assert await world.turn() == "one" and len(world.calls) == 1
    world.now += PAUSE_S
    assert await world.turn() == "two"


async def test_no_session_moves_for_a_turn_while_the_store_is_down() -> None:
    world = World()
    world.moves.is_store_up = lambda: False
    assert await world.turn() == "one" and world.calls == []
    world.moves.is_store_up = lambda: True
    assert await world.turn() == "two"


async def test_a_move_that_is_under_way_is_not_taken_for_one_that_has_stopped() -> None:
    """The target is slow to answer, and lists the copy meanwhile; and the other way round."""
    world = World()
    world.may_take.clear()
    turn = asyncio.create_task(world.turn())
    while MOVE[1] not in world.calls:
        await asyncio.sleep(0)
    world.entry = bodies.SessionEntry(tenant="mine", session="s", state="arrived", agent="one", move=world.move)
    await world.moves.run("two", MODEL, is_draining=False)
    world.may_take.set()
    assert await turn == "two" and world.moves.outcomes == {"moved": 1}
    assert world.calls == [*MOVE[:2], "two /list_sessions", *MOVE[2:]]
    world = World()
    world.may_take.clear()
    drain = asyncio.create_task(world.moves.run("one", MODEL, is_draining=True))
    while MOVE[1] not in world.calls:
        await asyncio.sleep(0)
    assert await world.turn() == "one"
    world.may_take.set()
    await drain
    assert world.calls == ["one /list_sessions", *MOVE] and world.bound == ["two"]


async def test_one_tenant_has_at_most_half_of_the_moves_for_turns() -> None:
    world = World()
    world.may_take.clear()
    turns = [asyncio.create_task(world.turn(f"s{n}")) for n in range(3)]
    assert await turns[2] == "one" and len(world.calls) <= 4
    turns.append(asyncio.create_task(world.moves.for_turn("req-2", "other", "s", MODEL, "one")))
    while world.calls.count("two /take_session") < 3:
        await asyncio.sleep(0)
    world.may_take.set()
    assert [await one for one in turns] == ["two", "two", "one", "two"]


@pytest.mark.parametrize("failing", MOVE[:3])
async def test_a_turn_goes_home_if_the_session_does_not_move(failing: str) -> None:
    """As when another turn has begun: the source refuses."""
    world = World()
    world.before = lambda call: Conflict("a turn is in progress", "session") if call == failing else None
    assert await world.turn() == "one"
    assert world.bound == [] and not world.moves.outcomes.total()
    assert world.calls[:3] == MOVE[: len(world.calls[:3])]
    if failing == "one give_up":  # the copy is dropped
        assert world.calls[3:] == ["one refuse", "two discard"]


@pytest.mark.parametrize(
    "fields",
    [{"may_start": False}, {"moves_sessions": False}, {"digest": "e" * 64}, {"kv_type": "f32"}, {"numerics": 0}],
)
async def test_only_agents_of_the_same_version_get_sessions(fields: dict[str, Any]) -> None:
    world = World()
    world.set("two", **fields)
    assert await world.turn() == "one" and world.calls == []


async def test_an_agent_that_drains_or_is_not_there_keeps_what_it_has() -> None:
    world = World()
    assert await world.turn(home="gone") == "gone"
    world.views["one"] = msgspec.structs.replace(world.views["one"], is_draining=True)
    world.router.update_routing_table(list(world.views.values()))
    assert await world.turn() == "one" and world.calls == []


async def test_a_turn_does_not_wait_for_a_move_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.orchestrator.session_moves.LEAST_WAIT_S", 0.01)
    world = World(40, tokens=b"t", gain_s=0.01)
    monkeypatch.setattr(world.router.rates.measured("one", MODEL).turn_s, "value", 0.002)
    world.may_take.clear()
    assert await world.turn() == "one"  # 0.08 s later, as long as the queue
    assert await world.turn() == "one" and world.calls == MOVE[:2]
    world.may_take.set()
    while not world.bound:
        await asyncio.sleep(0)
    await world.moves.close()
    assert world.bound == ["two"]
