"""Sessions move between real agents when one drains; whatever is killed meanwhile, turns have the same bytes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from starling.cli import cli
from tests.e2e.conftest import share_caches
from tests.fleet.agent_process import Agent, publish_tiny
from tests.orchestrator.fleet import Fleet

NAMES = ("one", "two")
SECTIONS = {"auth": {"api_keys": [{"key": "sk-mine", "tenant": "mine"}]}}
MINE = {"Authorization": "Bearer sk-mine"}
PROMPTS = ("once upon a time", " there was", " and then")
# How far a move has come when something dies.
STEPS = ("given", "taken", "given-up", "activated")


class Host(Agent):
    """An agent, and the calls with which an orchestrator moves sessions."""

    def move(self, session: str, step: str, move: str, other: str) -> None:
        body = {"tenant": "mine", "session": session, "step": step, "move": move, "agent_id": other}
        status, answer = self.call("/move_session", model_id="tiny", **body)
        assert status == 200, answer

    def sessions(self) -> dict[str, str]:
        """States by id."""
        status, answer = self.call("/list_sessions", model_id="tiny")
        assert status == 200, answer
        return {one["session"]: one["state"] for one in answer["sessions"]}

    def kill(self) -> None:
        """The agent, with which its engine ends; then a successor, with its model."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.start().wait_ready()
        status, answer = self.call("/load_model", model_id="tiny")
        assert status == 200, answer


class Hosts:
    """An orchestrator and two agents with a model."""

    def __init__(self, base: Path) -> None:
        blobs = base / "blobs"
        publish_tiny(base, blobs)
        self.fleet = Fleet(
            base / "o", {**SECTIONS, "fleet": {"blobs": str(blobs), "orchestrator": {"poll_ms": 50, "wait_ms": 60_000}}}
        )
        self.agents: dict[str, Host] = {}
        for name in NAMES:
            home = base / name
            home.mkdir()
            share_caches(home)
            (home / "fleet-token").write_text(self.fleet.secret)
            (home / "fleet-token").chmod(0o600)
            store = f"sqlite:{self.fleet.home / 'fleet.db'}"
            agent = {"id": name, "lease_ms": 20_000}
            config = {"cache": {"max_size_mb": 32}, "fleet": {"store": store, "blobs": str(blobs), "agent": agent}}
            self.agents[name] = Host(home, config)

    def __enter__(self) -> Hosts:
        for agent in self.agents.values():
            agent.start()
        for agent in self.agents.values():
            agent.wait_ready()
            status, answer = agent.call("/load_model", model_id="tiny")
            assert status == 200, answer
        self.wait_ready(self.fleet)
        return self

    def __exit__(self, *exc: object) -> None:
        self.fleet.process.kill()
        self.fleet.process.wait()
        for agent in self.agents.values():
            agent.stop()

    def wait_ready(self, fleet: Fleet) -> None:
        fleet.wait(
            lambda state: (
                [
                    one["health"] == "READY" and [model["cache_state"] for model in one["loaded_models"]] == ["READY"]
                    for one in state["agents"]
                ]
                == [True, True]
            )
        )

    def cordon(self, name: str, cordoned: bool, drain: bool = False) -> None:
        headers = {"Authorization": f"Bearer {self.fleet.secret}"}
        body = {"agent": name, "cordoned": cordoned, "drain": drain}
        assert self.fleet.post("/v1/fleet/cordon", body, headers).status == 200
        self.fleet.wait(
            lambda state: all(one["cordoned"] is cordoned for one in state["agents"] if one["agent_id"] == name)
        )

    def run(self, *words: str) -> Any:
        environment = {"STARLING_HOME": str(self.fleet.home), "STARLING_CONFIG": str(self.fleet.home / "starling.yaml")}
        url = f"http://127.0.0.1:{self.fleet.port}"
        return CliRunner().invoke(cli, ["fleet", *words, "--url", url], env=environment)

    def holders(self, session: str) -> list[str]:
        return [name for name, agent in self.agents.items() if agent.sessions().get(session) == "held"]


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
    other = Fleet(fleet.home, {**SECTIONS, "fleet": {"orchestrator": {"poll_ms": 50, "wait_ms": 60_000}}})
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
        (shown,) = [one for one in fleet.state()["agents"] if one["agent_id"] == "one"]
        assert shown["may_stop"] and shown["left"] == {"streams": 0, "sessions": 0}
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
