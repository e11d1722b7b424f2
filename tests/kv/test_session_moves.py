"""Sessions that move: whatever is lost, repeated, late or killed, one agent serves them, with all their turns."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import Conflict, InvalidRequest, ModelUnavailable, Overloaded, SessionMoved, StarlingError
from stages.kv.session_exchange import MAX_LISTED, SessionExchange, _export
from stages.kv.sessions import session_transfer as transfer
from stages.kv.sessions.model_sessions import ModelSessions
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_moves import TOMBSTONE_S, decode_sent
from stages.kv.sessions.session_store import UNSURE_S
from stages.kv.sessions.session_transfer import Ends
from stages.orchestrator.session_moves import SessionMoves
from tests.kv.moving_sessions import AGENTS, FATES, NAME, Agent, World
from tests.kv.test_sessions import ME, ROOTS, Time, raw
from tests.kv.world import PAGE_TOKENS
from tests.orchestrator.agents import DIGEST, MODEL, engine, router, view

MEMORY = "/dev/shm"  # thousands of files are written through to the disk


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_session_moves_with_all_its_tokens(world: World) -> None:
    one = world.agents["one"]
    one.turn(1, 2, 3, create=True)
    one.turn(4)
    world.round("one")
    (target,) = world.serving()
    assert target != "one" and world.bound == {NAME: target}
    assert [call.split()[1] for call in world.calls if "list" not in call] == [
        "/give_session",
        "/take_session",
        "give_up",
        "activate",
        "settle",
    ]
    world.agents[target].turn(5)
    assert world.tokens() == [1, 2, 3, 4, 5]
    with pytest.raises(SessionMoved) as moved:
        one.store.begin(ME, *NAME)
    assert moved.value.moved_to == target
    assert len(one.store) == one.store.n_moving == 0
    one.store.check()
    for agent in world.agents.values():
        agent.start()
    assert world.tokens() == [1, 2, 3, 4, 5]


def test_an_agent_that_does_not_know_of_a_copy_has_not_closed_it(world: World) -> None:
    """Only its session store knows: not an engine that is starting, nor an agent of an older release."""
    world.agents["one"].turn(1, create=True)
    fates = iter(["done", "done", "done", "not found"])
    world.fate = lambda: next(fates, "done")
    world.round("one")
    world.round()
    assert world.serving() != ["one"] and world.tokens() == [1]


def test_a_session_that_was_given_up_before_a_new_tokenizer_is_not_refused(tmp_path: Path) -> None:
    """Its copy at the target would be dropped, which is all that is left of it."""
    known, answers = ModelSessions(tmp_path, "m", Time()), []
    first, second, third = ("a" * 64, "b" * 64, "c" * 64)
    for tokenizer in (first, second):
        store = known.open(tokenizer, ROOTS, PAGE_TOKENS, SessionBounds(10, 1000))
        assert store is not None
        session = store.begin(ME, "t", tokenizer, create=True)
        store.commit(ME, "t", tokenizer, session.turn, 0, raw(1, 2))
        if tokenizer == first:
            ends = Ends(DIGEST, tokenizer, "one", "two")
            move = transfer.export(store, "t", first, ends).move
            transfer.give_up(store, "t", first, move, ends)
    calls = SimpleNamespace(call=lambda work, finish: answers.append(work(known)))
    asked = {"op": "session", "model": MODEL, "agent": "one", "target": "two", "tenant": "t", "session": first}
    for tokenizer in (second, third):
        known.open(tokenizer, ROOTS, PAGE_TOKENS, SessionBounds(10, 1000))
        pages = SimpleNamespace(tokenizer=tokenizer, digest=DIGEST)
        versions: Any = SimpleNamespace(
            find=lambda model, version, pages=pages: SimpleNamespace(pages=pages), sessions={MODEL: calls}
        )
        SessionExchange(versions).answer({**asked, "do": "refuse", "move": move})
    SessionExchange(versions).answer({**asked, "do": "refuse", "move": "another"})
    assert answers == [{"given_up": True}, {"given_up": True}, {"given_up": False}]
    assert known.n_moving == 1
    SessionExchange(versions).answer({**asked, "do": "settle", "move": move})
    assert known.n_moving == 0


def test_an_engine_that_is_starting_does_not_say_that_a_session_is_not_there() -> None:
    none: Any = SimpleNamespace(find=lambda model, version: None, sessions={})
    opening: Any = SimpleNamespace(
        find=lambda model, version: SimpleNamespace(pages=SimpleNamespace(tokenizer="")), sessions={MODEL: None}
    )
    asked = {"op": "session", "do": "activate", "model": MODEL, "agent": "two", "session": "s", "move": "m"}
    for versions in (none, opening):
        with pytest.raises(ModelUnavailable, match="no sessions here"):
            SessionExchange(versions).answer(asked)


@pytest.mark.parametrize(
    ("counts", "drains", "is_due"),
    [
        ({"sessions": 1}, True, True),
        ({"sessions_moving": 1}, True, True),  # a tombstone
        ({"sessions": 1}, False, False),
        ({"sessions_moving": 1}, False, True),
        ({}, True, False),
    ],
)
def test_agents_that_drain_or_have_moves_are_looked_after(
    world: World, counts: dict[str, Any], drains: bool, is_due: bool
) -> None:
    row = view("one", engine(moves_sessions=True, **counts), may_start=not drains)
    table = router(msgspec.structs.replace(row, is_draining=drains))
    moves = SessionMoves(world, world, table, lambda *args, **more: None, lambda *args: None)

    async def run() -> None:
        moves.begin_round()
        while moves._tasks:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert world.calls == ["one /list_sessions"] * is_due


def test_what_is_sent_is_written_into_the_file_of_the_call_alone(world: World, tmp_path: Path) -> None:
    """A call that comes late finds another file under the number of the agent's descriptor."""
    one = world.agents["one"]
    one.turn(1, create=True)
    file, other = tmp_path / "sent", tmp_path / "other"
    for path in (file, other):
        path.write_bytes(b"")
    inode = file.stat().st_ino
    found = _export(one.store, *NAME, one.ends("two"), str(file), inode)
    assert decode_sent(file.read_bytes()).move == found["move"] and file.stat().st_size == found["bytes"]
    with pytest.raises(Conflict, match="does not wait"):
        _export(one.store, *NAME, one.ends("two"), str(other), inode)
    assert other.read_bytes() == b""


def test_a_session_comes_back(world: World) -> None:
    world.agents["one"].turn(1, create=True)
    seen = []
    for _ in range(4):
        (at,) = world.serving()
        seen.append(at)
        world.round(at, *(name for name in AGENTS[2:] if at != name))
        world.agents[world.serving()[0]].turn(len(seen) + 1)
    assert seen == ["one", "two", "one", "two"] and world.tokens() == [1, 2, 3, 4, 5]


def test_a_turn_in_progress_stays_and_one_in_between_wins(world: World) -> None:
    one, two = world.agents["one"], world.agents["two"]
    one.turn(1, create=True)
    session = one.store.begin(ME, *NAME)
    with pytest.raises(Conflict, match="turn in progress"):
        transfer.export(one.store, *NAME, one.ends("two"))
    world.round("one")
    assert not [call for call in world.calls if "give" in call]
    one.store.commit(ME, *NAME, session.turn, 1, raw(2))
    sent = transfer.export(one.store, *NAME, one.ends("two"))
    transfer.adopt(two.store, sent)
    with pytest.raises(SessionMoved) as moved:  # a request that has lost its way goes back
        two.store.begin(ME, *NAME, create=True)
    assert moved.value.moved_to == "one"
    one.turn(3)
    with pytest.raises(Conflict, match="changed"):
        transfer.give_up(one.store, *NAME, sent.move, one.ends("two"))
    world.round()
    assert world.serving() == ["one"] and two.store.find(*NAME) is None
    world.round("one", "three")
    assert world.serving() == ["two"] and world.tokens() == [1, 2, 3]


def test_after_a_death_turns_may_be_in_progress_that_nobody_has_told(world: World) -> None:
    one = world.agents["one"]
    one.turn(1, create=True)
    one.store.begin(ME, *NAME)
    one.store.drop_holder(ME)  # its gateway is killed; the successor will continue the turn
    world.round("one")
    assert world.serving() == ["one"]
    one.start()
    world.round("one")
    assert world.serving() == ["one"]
    world.clock.now += UNSURE_S
    world.round("one")
    assert world.serving() != ["one"]


def test_a_target_without_room_is_passed_over(tmp_path: Path) -> None:
    world = World(tmp_path, max_sessions=1)
    world.agents["one"].turn(1, create=True)
    for name in AGENTS[1:]:
        world.agents[name].turn(9, create=True, name=("t", "other"))
    world.round("one")
    assert world.serving() == ["one"]
    world.agents["three"].store.close("t", "other")
    world.round("one")
    assert world.serving() == ["three"]


def test_another_session_of_the_name_is_never_replaced(world: World) -> None:
    one, two = world.agents["one"], world.agents["two"]
    one.turn(1, create=True)
    two.turn(2, create=True)
    with pytest.raises(Conflict, match="held here"):
        transfer.adopt(two.store, transfer.export(one.store, *NAME, one.ends("two")))
    one.store.close(*NAME)
    assert world.tokens() == [2]


def test_a_late_copy_of_an_earlier_move_replaces_nothing(world: World) -> None:
    one, two = world.agents["one"], world.agents["two"]
    one.turn(1, create=True)
    early = transfer.export(one.store, *NAME, one.ends("two"))
    one.turn(2)
    sent = transfer.export(one.store, *NAME, one.ends("two"))
    transfer.adopt(two.store, sent)
    transfer.give_up(one.store, *NAME, sent.move, one.ends("two"))
    with pytest.raises(Conflict):
        transfer.adopt(two.store, early)
    world.round()
    assert world.tokens() == [1, 2] and world.serving() == ["two"]
    # It has ended there. A copy that comes once more must not revive it.
    two.store.close(*NAME)
    transfer.adopt(two.store, sent)
    world.round()
    assert not world.serving() and two.store.find(*NAME) is None


def test_a_step_that_comes_late_after_it_was_refused_does_nothing(world: World) -> None:
    one, two = world.agents["one"], world.agents["two"]
    one.turn(1, create=True)
    sent = transfer.export(one.store, *NAME, one.ends("two"))
    transfer.adopt(two.store, sent)
    world.round()  # another orchestrator takes the copy back
    one.start()
    world.clock.now += UNSURE_S
    with pytest.raises(Conflict, match="changed"):
        transfer.give_up(one.store, *NAME, sent.move, one.ends("two"))
    assert world.serving() == ["one"]


def test_a_session_of_the_name_begins_anew_after_its_end(world: World) -> None:
    one, two = world.agents["one"], world.agents["two"]
    one.turn(1, create=True)
    sent = transfer.export(one.store, *NAME, one.ends("two"))
    transfer.adopt(two.store, sent)
    transfer.give_up(one.store, *NAME, sent.move, one.ends("two"))
    with pytest.raises(SessionMoved):  # its copy waits for it
        one.store.begin(ME, *NAME, create=True)
    world.round()
    two.store.close(*NAME)
    one.turn(2, create=True)
    assert world.tokens() == [2]


def test_what_is_damaged_or_too_large_is_refused(world: World, tmp_path: Path) -> None:
    one = world.agents["one"]
    one.turn(*range(50), create=True)
    sent = transfer.export(one.store, *NAME, one.ends("two"))
    encoded = bytearray(sent.encode())
    encoded[len(encoded) // 2] ^= 1
    with pytest.raises(InvalidRequest, match="damaged"):
        decode_sent(bytes(encoded))
    for bad in ({"format": 2}, {"tokens": b"123"}, {"id": ""}, {"turns": -1}):
        with pytest.raises(InvalidRequest):
            decode_sent(msgspec.structs.replace(sent, **bad).encode())
    small = Agent("small", tmp_path, world.clock, max_tokens=49)
    with pytest.raises(InvalidRequest, match="at most 49"):
        transfer.adopt(small.store, sent)


@pytest.mark.parametrize(
    ("bounds", "held", "refusal", "numbers"),
    [
        ({"max_sessions": 3}, 3, Overloaded, "3 sessions are held"),
        ({"per_tenant": 2}, 2, Overloaded, "2 sessions are held for this API key's tenant"),
        ({"max_sessions": 4, "n_tenants": 4}, 3, Overloaded, "3 of 4 sessions are held .*, 3 of them for this tenant"),
        ({"max_bytes": 2048}, 2, Overloaded, r"2 KiB of 2 \(cache.session_mb\)"),
        ({"max_tokens": 49}, 0, InvalidRequest, "50 tokens, at most 49"),
    ],
)
def test_a_target_says_before_it_gets_a_copy_that_it_has_no_room(
    world: World, tmp_path: Path, bounds: dict[str, int], held: int, refusal: type[StarlingError], numbers: str
) -> None:
    one, full = world.agents["one"], Agent("full", tmp_path, world.clock, **bounds)
    one.turn(*range(50), create=True)
    sent = transfer.export(one.store, *NAME, one.ends("full"))
    asked = full.store, *NAME, sent.move, "one", 50
    for n in range(held):
        transfer.check(*asked)
        full.turn(*range(256), create=True, name=("t", f"s{n}"))
    with pytest.raises(refusal, match=numbers):
        transfer.check(*asked)
    with pytest.raises(refusal, match=numbers):
        transfer.adopt(full.store, sent)
    assert len(full.store.all()) == held


def test_a_target_that_has_the_copy_or_must_not_replace_a_session_says_so(world: World, tmp_path: Path) -> None:
    one, two = world.agents["one"], Agent("two", tmp_path / "small", world.clock, max_sessions=1)
    one.turn(1, create=True)
    sent = transfer.export(one.store, *NAME, one.ends("two"))
    transfer.check(two.store, *NAME, sent.move, "one", 1)
    transfer.adopt(two.store, sent)
    transfer.check(two.store, *NAME, sent.move, "one", 1)  # it came again, late
    one.turn(2)
    later = transfer.export(one.store, *NAME, one.ends("two")).move
    transfer.check(two.store, *NAME, later, "one", 2)  # in the place of the copy before
    with pytest.raises(Conflict, match="arrived here"):
        transfer.check(two.store, *NAME, later, "three", 2)
    assert transfer.activate(two.store, *NAME, sent.move)
    with pytest.raises(Conflict, match="held here"):
        transfer.check(two.store, *NAME, later, "one", 2)


def test_tombstones_end(world: World) -> None:
    one = world.agents["one"]
    for n in range(12):
        one.turn(n, create=True, name=("t", f"s{n}"))
        world.round("one")
    assert len(one.store.all()) == 11  # the bound on sessions, and the one that was not complete yet
    world.clock.now += TOMBSTONE_S
    one.store.expire()
    assert not one.store.all() and not list(one.store.files.directory.iterdir())


def test_long_lists_come_in_parts(tmp_path: Path) -> None:
    world = World(tmp_path, max_sessions=1000)
    one = world.agents["one"]
    names = [("t", f"s{n}") for n in range(MAX_LISTED + 1)]
    for name in names:
        one.turn(1, create=True, name=name)
    world.round("one")
    assert all(len(world.serving(name)) == 1 for name in names) and len(one.store) == 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_order_of_deaths_losses_and_delays_loses_or_doubles_a_session(data: st.DataObject) -> None:
    """Orchestrators move a session about while its client continues it; nothing but the calls' fates differs."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        world = World(Path(folder), lambda: data.draw(st.sampled_from(FATES)))
        expected: list[int] = [0]
        world.agents["one"].turn(0, create=True)
        for n in range(1, data.draw(st.integers(2, 8))):
            action = data.draw(st.sampled_from(["drain", "drain", "look", "turn", "late", "restart"]))
            if action == "drain":
                world.round(data.draw(st.sampled_from(AGENTS)))
            elif action == "look":
                world.round()
            elif action == "late" and world.late:
                with contextlib.suppress(StarlingError):
                    world.late.pop(data.draw(st.integers(0, len(world.late) - 1)))()
            elif action == "restart":
                world.agents[data.draw(st.sampled_from(AGENTS))].start()
                world.clock.now += UNSURE_S
            serving = world.serving()
            assert len(serving) <= 1, "two agents serve the session"
            if action == "turn" and serving:
                world.agents[serving[0]].turn(n)
                expected.append(n)
        # Whatever is left, one orchestrator brings to its end when the agents answer.
        world.fate = lambda: "done"
        late, world.late = world.late, []
        for call in late:
            with contextlib.suppress(StarlingError):
                call()
        world.round()
        assert len(world.serving()) == 1, "the session is lost"
        assert world.tokens() == expected
        assert all(agent.store.n_moving == 0 for agent in world.agents.values())
        for agent in world.agents.values():
            agent.store.check()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_session_that_was_closed_stays_closed(data: st.DataObject) -> None:
    """Its agent dies, or an orchestrator, or answers are lost, before, while and after it moves."""
    fates = [fate for fate in FATES if fate not in ("late", "twice")]
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        world = World(Path(folder), lambda: data.draw(st.sampled_from(fates)))
        world.agents["one"].turn(0, create=True)
        world.round("one")
        world.round("two")
        for at in world.serving():
            world.agents[at].store.close(*NAME)
            world.round(data.draw(st.sampled_from(AGENTS)))
            world.fate = lambda: "done"
            world.round()
            assert not world.serving()
            assert not [one for agent in world.agents.values() for one in agent.store.all() if one.tokens]


def test_moves_are_bounded_until_they_are_complete(tmp_path: Path) -> None:
    world = World(tmp_path, max_sessions=2)
    one = world.agents["one"]
    for n in range(2):
        one.turn(n, create=True, name=("t", f"s{n}"))
        sent = transfer.export(one.store, "t", f"s{n}", one.ends("two"))
        transfer.give_up(one.store, "t", f"s{n}", sent.move, one.ends("two"))
    one.turn(3, create=True, name=("t", "s3"))
    sent = transfer.export(one.store, "t", "s3", one.ends("two"))
    with pytest.raises(Overloaded, match="not complete"):
        transfer.give_up(one.store, "t", "s3", sent.move, one.ends("two"))
