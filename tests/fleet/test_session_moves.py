"""Sessions move between real agents when one drains; whatever is killed meanwhile, turns have the same bytes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fleet.two_agents import MINE, NAMES, PATIENT, SECTIONS, Hosts
from tests.orchestrator.fleet import Fleet

PROMPTS = ("once upon a time", " there was", " and then")
# How far a move has come when something dies.
STEPS = ("given", "taken", "given-up", "activated")


def turn(fleet: Fleet, session: str, number: int) -> str:
    body = {"model": "tiny", "prompt": PROMPTS[number], "session_id": session, "create_session": True}
    answer = fleet.post(
        "/v1/generate", {**body, "max_tokens": 6, "seed": 7, "temperature": 1.0, "ignore_eos": True}, MINE
    )
    assert answer.status == 200, answer.body
    # All that a client sees of the turn but for its names: the session's length is in the usage.
    return json.dumps([answer.json["choices"], answer.json["usage"]["prompt_tokens"]])


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("sm")) as running:
        yield running


@pytest.fixture(scope="module")
def unmoved(hosts: Hosts) -> list[str]:
    """What the turns of a session are that stays where it is."""
    answers = [turn(hosts.fleet, "unmoved", number) for number in range(3)]
    assert hosts.fleet.post("/v1/session/close", {"model": "tiny", "session_id": "unmoved"}, MINE).status == 200
    return answers


@pytest.mark.slow
def test_a_session_moves_when_its_agent_drains(hosts: Hosts, unmoved: list[str]) -> None:
    fleet, one = hosts.fleet, hosts.agents["one"]
    hosts.cordon("two", True)
    other = Fleet(fleet.home, {**SECTIONS, "fleet": {"orchestrator": PATIENT}})
    try:
        hosts.wait_ready(other)
        for orchestrator, session in ((fleet, "s"), (other, "t"), (other, "u")):
            assert [turn(orchestrator, session, number) for number in range(2)] == unmoved[:2]
            assert hosts.holders(session) == ["one"]
        hosts.cordon("two", False)
        done = hosts.run("drain", "one", "--wait", "--timeout", "120")
        assert done.exit_code == 0, done.output
        assert "may be stopped" in done.output
        assert [hosts.holders(session) for session in "stu"] == [["two"]] * 3
        # An agent that is slow to answer a poll meanwhile is not known to be empty until it does.
        state = fleet.wait(lambda state: any(agent["may_stop"] for agent in state["agents"]))
        (shown,) = [one for one in state["agents"] if one["agent_id"] == "one"]
        assert shown["may_stop"] and shown["left"] == {"streams": 0, "sessions": 0, "prefixes": 0}
        moved = [event for event in fleet.fleet_events() + other.fleet_events() if event["kind"] == "sessions-moved"]
        assert sum(int(event["text"].split()[0]) for event in moved if event["agent"] == "one") == 3
        # An orchestrator that has not moved them believes that they are at their old agent, which says where they went.
        assert turn(fleet, "s", 2) == turn(other, "t", 2) == unmoved[2]
        # It also finds them when that agent is gone.
        other.wait(lambda state: any(agent["may_stop"] for agent in state["agents"]))
        assert one.stop(signal.SIGTERM) == 0
        for orchestrator in (fleet, other):
            orchestrator.wait(lambda state: [agent["agent_id"] for agent in state["agents"]] == ["two"])
        assert turn(other, "u", 2) == unmoved[2]
        assert [hosts.agents["two"].sessions()[session] for session in "stu"] == ["held"] * 3
    finally:
        assert other.close() == 0, "".join(other.lines)
    one.start().wait_ready()
    check(one.call("/load_model", model_id="tiny"))
    hosts.cordon("one", False)
    hosts.wait_ready(fleet)
    for session in "stu":
        assert fleet.post("/v1/session/close", {"model": "tiny", "session_id": session}, MINE).status == 200
    # A session of that name may begin again, wherever it was.
    assert turn(fleet, "s", 0) == unmoved[0]
    assert fleet.post("/v1/session/close", {"model": "tiny", "session_id": "s"}, MINE).status == 200
    assert fleet.post("/v1/session/close", {"model": "tiny", "session_id": "s"}, MINE).status == 404


@pytest.mark.slow
def test_an_agent_says_whether_it_would_take_a_session(hosts: Hosts) -> None:
    one, two = (hosts.agents[name] for name in NAMES)
    hosts.cordon("two", True)
    turn(hosts.fleet, "asked", 0)
    hosts.cordon("two", False)
    (report,) = two.call("/heartbeat")[1]["loaded_models"]
    assert report["checks_sessions"]
    status, given = one.call("/give_session", model_id="tiny", tenant="mine", session="asked", agent_id="two")
    assert status == 200 and given["tokens"] > 0
    asked = {"model_id": "tiny", "tenant": "mine", "session": "asked", "move": given["move"], "step": "check"}
    check(two.call("/move_session", **asked, agent_id="one", tokens=given["tokens"]))
    assert "asked" not in two.sessions()
    status, answer = two.call("/move_session", **asked, agent_id="one", tokens=1 << 22)
    assert status == 400 and f"{1 << 22} tokens, at most" in answer["error"]["message"], answer
    status, answer = one.call("/move_session", **asked, agent_id="two")
    assert status == 409 and "held here" in answer["error"]["message"], answer
    assert hosts.fleet.post("/v1/session/close", {"model": "tiny", "session_id": "asked"}, MINE).status == 200


def advance(hosts: Hosts, session: str, step: str) -> None:
    """What an orchestrator has done up to its death."""
    one, two = (hosts.agents[name] for name in NAMES)
    status, given = one.call("/give_session", model_id="tiny", tenant="mine", session=session, agent_id="two")
    assert status == 200, given
    calls: list[Callable[[], object]] = [
        lambda: check(two.call("/take_session", model_id="tiny", record=given["record"])),
        lambda: one.move(session, "give_up", given["move"], "two"),
        lambda: two.move(session, "activate", given["move"], "one"),
    ]
    for call in calls[: STEPS.index(step)]:
        call()


def check(answer: tuple[int, Any]) -> None:
    assert answer[0] == 200, answer[1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["orchestrator", "one", "two"])
def test_a_move_that_is_interrupted_by_a_death(hosts: Hosts, unmoved: list[str], victim: str) -> None:
    """The orchestrator dies with sessions at every step of their moves, alone or with one of the agents."""
    fleet = hosts.fleet
    hosts.cordon("two", True)
    for session in STEPS:
        assert [turn(fleet, session, number) for number in range(2)] == unmoved[:2]
        assert hosts.holders(session) == ["one"]
    hosts.cordon("two", False)
    fleet.process.kill()
    fleet.process.wait()
    for session in STEPS:
        advance(hosts, session, session)
    if victim != "orchestrator":
        hosts.agents[victim].kill()
    states = [agent.sessions() for agent in hosts.agents.values()]
    assert states == [
        {"given": "held", "taken": "held", "given-up": "moved", "activated": "moved"},
        {"taken": "arrived", "given-up": "arrived", "activated": "held"},
    ]
    fleet.restart()
    hosts.wait_ready(fleet)
    # Turns are served at once, also those of sessions whose move is not complete.
    assert turn(fleet, "given-up", 2) == turn(fleet, "taken", 2) == unmoved[2]
    end = time.monotonic() + 120
    while any(state != "held" for agent in hosts.agents.values() for state in agent.sessions().values()):
        assert time.monotonic() < end, [agent.sessions() for agent in hosts.agents.values()]
        time.sleep(0.2)
    assert [hosts.holders(session) for session in STEPS] == [["one"], ["one"], ["two"], ["two"]]
    assert turn(fleet, "given", 2) == turn(fleet, "activated", 2) == unmoved[2]
    done = hosts.run("drain", "one", "--wait", "--timeout", "120")
    assert done.exit_code == 0, done.output
    assert [hosts.holders(session) for session in STEPS] == [["two"]] * 4
    hosts.cordon("one", False)
    for session in STEPS:
        assert fleet.post("/v1/session/close", {"model": "tiny", "session_id": session}, MINE).status == 200
