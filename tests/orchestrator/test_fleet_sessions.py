"""Sessions of a fleet: a turn is served by the agent that holds its session, also while that agent is cordoned."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.fleet import token
from stages.kv.sessions import session_transfer as transfer
from stages.kv.sessions.session_transfer import Ends
from tests.gateway.http_client import Answer
from tests.gateway.kv_peer import KvPeer
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet
from tests.orchestrator.streams import MINE, hold
from tests.starling.command_runner import Commands

NAMES = ("one", "two")
SECTIONS = {"auth": {"api_keys": [{"key": "sk-mine", "tenant": "mine"}]}}


@pytest.fixture(scope="module")
def kvs(engines: list[Server], homes: Callable[[], Path]) -> Iterator[list[KvPeer]]:
    """The sessions of each engine."""
    peers = [KvPeer(engine.config, homes()) for engine in engines]
    yield peers
    for peer in peers:
        peer.stop()


@pytest.fixture(scope="module")
def fleet(homes: Callable[[], Path], engines: list[Server], kvs: list[KvPeer]) -> Iterator[Fleet]:
    running = Fleet(homes(), SECTIONS, wait_ms=2000, silent_ms=600_000)
    for name, engine in zip(NAMES, engines):
        running.add_agent(name, engine)
    yield running
    assert running.close() == 0, "".join(running.lines)


@pytest.fixture(autouse=True)
def afterwards(fleet: Fleet, kvs: list[KvPeer]) -> Iterator[None]:
    """No cordons and no sessions."""
    yield
    for name in NAMES:
        cordon(fleet, name, False)
    for kv in kvs:
        for session in held(kv):
            fleet.post("/v1/session/close", {"model": MODEL, "session_id": session}, MINE)
    assert not any(held(kv) for kv in kvs)


def held(kv: KvPeer) -> list[str]:
    found: list[str] = kv.do(lambda: [one.id for one in kv.sessions.all()] if kv.sessions else [])
    return found


def turn(fleet: Fleet, session: str, **more: Any) -> Answer:
    body = {"model": MODEL, "prompt": "say more", "max_tokens": 3, "session_id": session, "ignore_eos": True, **more}
    return fleet.post("/v1/generate", body, MINE)


def cordon(fleet: Fleet, name: str, cordoned: bool, drain: bool = False) -> None:
    body = {"agent": name, "cordoned": cordoned, "drain": drain}
    assert fleet.post("/v1/fleet/cordon", body, token.authorization(fleet.secret)).status == 200
    fleet.wait(lambda state: all(one["cordoned"] is cordoned for one in state["agents"] if one["agent_id"] == name))


def holder_of(kvs: list[KvPeer], session: str) -> int:
    (index,) = [index for index, kv in enumerate(kvs) if session in held(kv)]
    return index


@pytest.mark.parametrize("drain", [False, True])
def test_turns_are_served_where_the_session_is_though_its_agent_is_cordoned(
    fleet: Fleet, kvs: list[KvPeer], drain: bool
) -> None:
    name = turn(fleet, "").json["session_id"]
    holder = holder_of(kvs, name)
    before = len(kvs[holder].held(name, "mine"))
    cordon(fleet, NAMES[holder], True, drain)
    answer = turn(fleet, name)
    assert answer.status == 200, answer.body
    streamed = fleet.stream("/v1/generate", {"model": MODEL, "prompt": "x", "session_id": name, "max_tokens": 2}, MINE)
    assert streamed.all()[-2].data["session_id"] == name
    assert len(kvs[holder].held(name, "mine")) > before
    # New sessions go elsewhere.
    assert holder_of(kvs, turn(fleet, "").json["session_id"]) == 1 - holder
    assert holder_of(kvs, turn(fleet, "named", create_session=True).json["session_id"]) == 1 - holder


def test_another_orchestrator_finds_the_session_of_a_cordoned_agent(fleet: Fleet, kvs: list[KvPeer]) -> None:
    """It has never seen the session, and asks all agents."""
    name = turn(fleet, "").json["session_id"]
    holder = holder_of(kvs, name)
    cordon(fleet, NAMES[holder], True)
    other = another(fleet)
    try:
        answer = turn(other, name)
        assert answer.status == 200, answer.body
        assert turn(other, "sess-unknown").status == 404
    finally:
        assert other.close() == 0, "".join(other.lines)


@pytest.mark.parametrize("is_cordoned", [False, True])
def test_a_session_that_exists_is_not_begun_twice(fleet: Fleet, kvs: list[KvPeer], is_cordoned: bool) -> None:
    """`create_session` at an orchestrator that does not know where the session is."""
    for number in range(3):
        name = f"mine-{number}"
        first = turn(fleet, name, create_session=True).json
        holder = holder_of(kvs, name)
        cordon(fleet, NAMES[holder], is_cordoned)
        other = another(fleet)
        try:
            answer = turn(other, name, create_session=True)
        finally:
            assert other.close() == 0, "".join(other.lines)
        cordon(fleet, NAMES[holder], False)
        assert answer.status == 200 and answer.json["usage"]["prompt_tokens"] > first["usage"]["total_tokens"], (
            answer.body
        )
        assert holder_of(kvs, name) == holder
        assert fleet.post("/v1/session/close", {"model": MODEL, "session_id": name}, MINE).status == 200


def test_a_session_is_not_begun_twice_while_its_model_is_not_loaded(
    fleet: Fleet, kvs: list[KvPeer], engines: list[Server]
) -> None:
    """Its agent has unloaded the model, or restarts: it is loaded there again for the next turn."""
    first = turn(fleet, "unloaded", create_session=True).json
    holder = holder_of(kvs, "unloaded")
    agent = fleet.agents[NAMES[holder]]
    agent.cold[MODEL] = agent.engines.pop(MODEL)
    agent.may_load.set()
    try:
        fleet.wait(lambda state: [len(one["loaded_models"]) for one in state["agents"]].count(0) == 1)
        answer = turn(fleet, "unloaded", create_session=True)
    finally:
        agent.engines[MODEL] = engines[holder]
        agent.cold.clear()
        fleet.wait(lambda state: all(one["loaded_models"] for one in state["agents"]))
    assert holder_of(kvs, "unloaded") == holder and agent.loads == [MODEL]
    assert answer.json["usage"]["prompt_tokens"] > first["usage"]["total_tokens"], answer.body


def move(kvs: list[KvPeer], session: str, source: int, named: str) -> None:
    """The other agent has the session, and the tombstone at its source names an agent."""
    stores: list[Any] = [kv.sessions for kv in (kvs[source], kvs[1 - source])]
    ends = Ends("d", "t", NAMES[source], named)
    sent = kvs[source].do(lambda: transfer.export(stores[0], "mine", session, ends))
    kvs[1 - source].do(lambda: transfer.adopt(stores[1], sent))
    kvs[source].do(lambda: transfer.give_up(stores[0], "mine", session, sent.move, ends))
    kvs[1 - source].do(lambda: transfer.activate(stores[1], "mine", session, sent.move))
    kvs[source].do(lambda: transfer.settle(stores[0], "mine", session, sent.move))


def test_a_tombstone_that_names_an_agent_that_has_left(fleet: Fleet, kvs: list[KvPeer]) -> None:
    """The session may have moved on since; if no agent has it, it may return with that one."""
    first = turn(fleet, "on", create_session=True).json
    holder = holder_of(kvs, "on")
    move(kvs, "on", holder, "left")
    answer = turn(fleet, "on")
    assert answer.status == 200, answer.body
    assert answer.json["usage"]["prompt_tokens"] > first["usage"]["total_tokens"]
    other = kvs[1 - holder]
    other.do(lambda: other.sessions.close("mine", "on"))  # type: ignore[union-attr]
    for create in (False, True):
        assert turn(fleet, "on", create_session=create).status == 503
    assert not held(other)
    source = kvs[holder].sessions
    kvs[holder].do(lambda: [source.drop(one) for one in source.all()])  # type: ignore[union-attr]


def test_two_first_turns_at_once_begin_one_session(fleet: Fleet, kvs: list[KvPeer], engines: list[Server]) -> None:
    for engine in engines:
        hold(engine)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    threads = [threading.Thread(target=lambda: answers.put(turn(fleet, "both", create_session=True))) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        refused = answers.get(timeout=30)  # by the engine that has the other one
    finally:
        for engine in engines:
            hold(engine, False)
        for thread in threads:
            thread.join()
    assert (refused.status, refused.error["code"]) == (409, "CONFLICT")
    assert answers.get().status == 200 and holder_of(kvs, "both") in (0, 1)


def test_an_agent_may_be_stopped_when_nothing_is_left(fleet: Fleet, engines: list[Server], kvs: list[KvPeer]) -> None:
    name = turn(fleet, "").json["session_id"]
    holder = NAMES[holder_of(kvs, name)]
    fleet.agents[holder].sessions = 1
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(fleet.home),
        "STARLING_HOME": str(fleet.home),
        "STARLING_CONFIG": str(fleet.home / "starling.yaml"),
        "STARLING_FLEET__ORCHESTRATOR__PORT": str(fleet.port),
    }
    state = fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    assert {one["may_stop"] for one in state["agents"]} == {False} and "a drain" in state["agents"][0]["stop_waits_for"]
    with Commands(environment) as run:
        late = run("fleet", "drain", holder, "--wait", "--timeout", "3")
        assert late.code == 1 and "1 sessions" in late.errors and f"{holder}: draining" in late.output
        fleet.agents[holder].sessions = 0
        done = run("fleet", "drain", holder, "--wait", "--json")
        assert (done.code, done.errors) == (0, ""), done
        assert json.loads(done.output)["may_stop"] is True
        fleet.agents[holder].running[MODEL] = 2
        state = fleet.wait(lambda state: any("2 requests" in one["stop_waits_for"] for one in state["agents"]))
        fleet.agents[holder].running.clear()
        assert run("fleet", "drain", "nothing", "--wait").code == 2


def another(fleet: Fleet) -> Fleet:
    """Another orchestrator, which has just started, before the same agents."""
    other = Fleet(fleet.home, SECTIONS, wait_ms=2000, silent_ms=600_000)
    other.wait(lambda state: [one["health"] for one in state["agents"]] == ["READY", "READY"])
    return other
