"""Two orchestrators of one fleet: each continues the streams of the other, and both go on without the store."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.fleet import token
from starling.cli import cli
from tests.e2e.server import poll_until
from tests.fleet.coordination_stores import remove_database
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import POLL_S, Fleet
from tests.orchestrator.streams import BODY, MINE, hold, plain, step

Pair = tuple[Fleet, Fleet]
STREAM = {**BODY, "stream": True}


@pytest.fixture(scope="module")
def pair(homes: Callable[[], Path], engines: list[Server]) -> Iterator[Pair]:
    """The agents "one" and "two" belong to the first one's object."""
    home = homes()
    sections = {"auth": {"api_keys": [{"key": "sk-mine", "tenant": "mine"}]}}
    first, second = (Fleet(home, sections, wait_ms=1000, silent_ms=600_000) for _ in range(2))
    for name, engine in zip(("one", "two"), engines):
        first.add_agent(name, engine)
    yield first, second
    for orchestrator in (second, first):
        assert orchestrator.close() == 0, "".join(orchestrator.lines)


@pytest.fixture(autouse=True)
def ready(pair: Pair, engines: list[Server]) -> Iterator[None]:
    for orchestrator in pair:
        orchestrator.wait(lambda state: [one["health"] for one in state["agents"]] == ["READY", "READY"])
    yield
    for engine in engines:
        hold(engine, False)


def begin(orchestrator: Fleet, body: Any, headers: dict[str, str] = MINE) -> Any:
    connection = orchestrator.connect()
    headers = {"Content-Type": "application/json", **headers}
    connection.request("POST", "/v1/generate", json.dumps(body).encode(), headers)
    return connection


def events(raw: bytes) -> list[bytes]:
    return [line for line in plain(raw).splitlines() if line.startswith((b"id: ", b"data: "))]


def text(raw: bytes) -> str:
    """What a stream says: another reader may get its tokens in other groups."""
    data = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    return "".join(one.get("text", "") for one in data)


def serving(orchestrator: Fleet, engines: list[Server]) -> Server:
    """The engine that has the one request under way."""
    state = orchestrator.wait(lambda state: any(one["under_way"] for one in state["agents"]))
    return engines[[bool(one["under_way"]) for one in state["agents"]].index(True)]


def test_another_orchestrator_continues_the_streams_of_a_dead_one(pair: Pair, engines: list[Server]) -> None:
    first, second = pair
    undisturbed = engines[0].post("/v1/generate", STREAM).body
    for engine in engines:
        hold(engine)
    connection = begin(first, STREAM)
    engine = serving(first, engines)
    response = connection.getresponse()
    name = response.headers["X-Starling-Request"]
    step(engine, 6)
    received = b""
    while received.count(b"data: ") < 3:
        received += response.read1(1 << 16)
    received = received[: received.rfind(b"\n\n") + 2]
    first.process.kill()
    first.process.wait()
    last = received.rpartition(b"id: ")[2].partition(b"\n")[0].decode()
    again = second.resume(f"/v1/requests/{name}", {**MINE, "Last-Event-ID": last})
    hold(engine, False)
    rest = again.response.read()
    again.close()
    connection.close()
    assert text(received + rest) == text(undisturbed) != ""
    # The engine has kept it: none of it was computed twice.
    submitted = [frame for one in engines for frame in one.peers.generator.submitted if frame.request == name]
    assert len(submitted) == 1
    # The other one leads, and the fleet's state does not depend on which one is asked.
    second.wait(lambda state: state["leader"])
    first.restart()


def test_each_answers_for_the_other(pair: Pair, engines: list[Server]) -> None:
    first, second = pair
    stream = first.stream("/v1/generate", BODY, MINE)
    name = stream.response.headers["X-Starling-Request"]
    whole = stream.response.read()
    stream.close()
    again = second.get(f"/v1/requests/{name}", MINE)
    assert again.status == 200 and text(again.body) == text(whole) != ""
    keyed = {**MINE, "Idempotency-Key": "both"}
    unseeded = {key: value for key, value in BODY.items() if key != "seed"}
    answers = [one.post("/v1/generate", unseeded, keyed) for one in (first, second, first)]
    assert answers[0].status == 200 and len({answer.body for answer in answers}) == 1
    while sum(one.state()["leader"] for one in pair) != 1:
        time.sleep(POLL_S)


def test_a_request_is_found_at_an_engine_that_gets_no_others(homes: Callable[[], Path], engines: list[Server]) -> None:
    """The download of its model has become slow. A client comes back through an orchestrator that has no record."""
    fleet = Fleet(homes())
    try:
        agent = fleet.add_agent("one", engines[0])
        answer = fleet.post("/v1/generate", {**BODY, "stream": False})
        name = answer.headers["X-Starling-Request"]
        fleet.process.kill()
        fleet.process.wait()
        agent.withdrawn.add(MODEL)
        agent.cold[MODEL] = engines[0]
        fleet.restart()
        fleet.wait(
            lambda state: (
                [m["cache_state"] for one in state["agents"] for m in one.get("loaded_models", ())] == ["DOWNLOADING"]
            )
        )
        agent.may_load.set()  # the rest is near
        again = fleet.get(f"/v1/requests/{name}")
        assert (again.status, again.body) == (200, answer.body)
    finally:
        fleet.close()


def used(orchestrator: Fleet) -> int:
    """The requests of the one key with a quota, as the store has them."""
    with contextlib.closing(sqlite3.connect(orchestrator.home / "fleet.db")) as database:
        found = database.execute("SELECT value FROM items WHERE key LIKE 'quotas/%'").fetchall()
    return sum(int(json.loads(value)["counters"]["requests/day"]["used"]) for (value,) in found)


def test_a_quota_holds_for_both_and_survives_a_death(pair: Pair) -> None:
    first, second = pair
    environment = {"STARLING_HOME": str(first.home), "STARLING_CONFIG": str(first.home / "starling.yaml")}
    words = ["keys", "add", "bob", "--tenant", "mine", "--requests-per-day", "5", "--json"]
    made = json.loads(CliRunner().invoke(cli, words, env=environment).output)
    mine = {"Authorization": f"Bearer {made['key']}"}
    for count, orchestrator in enumerate((first, second, first, second, second), 1):
        answer = orchestrator.post("/v1/generate", BODY, mine)
        assert answer.status == 200, answer.body
        while used(first) < count:
            assert orchestrator.process.poll() is None
            time.sleep(POLL_S)
    for orchestrator in pair:
        while (refused := orchestrator.post("/v1/generate", BODY, mine)).status == 200:
            pass  # at most once: the other one's use is on its way
        assert (refused.status, refused.error["code"]) == (429, "RATE_LIMITED")
        assert used(first) <= 6
    first.process.kill()
    first.process.wait()
    first.restart()
    first.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]) and len(state["agents"]) == 2)
    assert first.post("/v1/generate", BODY, mine).status == 429


@pytest.mark.parametrize("death", ["locked", "removed"])
def test_streams_and_routing_go_on_without_the_store(pair: Pair, engines: list[Server], death: str) -> None:
    first, second = pair
    agent = first.agents["two"]
    undisturbed = engines[0].post("/v1/generate", STREAM).body
    for engine in engines:
        hold(engine)
    connection = begin(first, STREAM)
    engine = serving(first, engines)
    step(engine, 4)
    events_before = len(first.fleet_events())
    if death == "locked":
        other = sqlite3.connect(first.home / "fleet.db", isolation_level=None, timeout=60.0)
        other.execute("BEGIN IMMEDIATE")
        for orchestrator in pair:
            orchestrator.wait(lambda state: state["store"] == "down")
        # Agents that the orchestrators reach are asked to serve on, and nothing is loaded.
        poll_until(lambda: agent.is_extended)
        agent.cold["cold"] = engines[1]
        first.wait(lambda state: any(one["id"] == "cold" for one in state["models"]))
        refused = first.post("/v1/generate", {**BODY, "model": "cold"}, MINE)
        assert (refused.status, refused.error["code"]) == (503, "MODEL_UNAVAILABLE")
        assert "coordination store" in refused.error["message"] and not agent.loads
    else:
        remove_database(first.home / "fleet.db")
    for one in engines:
        hold(one, False)
    answer = second.post("/v1/generate", BODY, MINE)
    assert answer.status == 200, answer.body
    assert events(connection.getresponse().read()) == events(undisturbed)
    connection.close()
    if death == "locked":
        agent.cold.clear()
        other.execute("ROLLBACK")
        other.close()
    else:
        for one in first.agents.values():  # whose leases the new file does not have
            first.register(one)
    for orchestrator in pair:
        orchestrator.wait(lambda state: state["store"] == "up" and len(state["agents"]) == 2)
    assert not any(event["kind"] == "agent-left" for event in first.fleet_events()[events_before:])
    while sum(one.state()["leader"] for one in pair) != 1:
        time.sleep(POLL_S)


JUMPING_CLOCK = """
import os, time

_time, _time_ns = time.time, time.time_ns


def _offset():
    with open(os.environ["CLOCK_OFFSET"]) as file:
        return int(file.read())


time.time = lambda: _time() + _offset()
time.time_ns = lambda: _time_ns() + 10**9 * _offset()
"""


def test_jumps_of_the_clock_change_nothing(
    homes: Callable[[], Path], engines: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    offset = tmp_path / "offset"
    offset.write_text("0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CLOCK_OFFSET", str(offset))
    undisturbed = engines[0].post("/v1/generate", STREAM).body
    keys = [{"key": "sk-mine", "tenant": "mine"}]
    jumping = Fleet(homes(), {"auth": {"api_keys": keys}}, is_forked=False, silent_ms=600_000)
    try:
        for name, engine in zip(("one", "two"), engines):
            jumping.add_agent(name, engine)
        known = jumping.fleet_events()
        for engine in engines:
            hold(engine)
        connection = begin(jumping, STREAM)
        engine = serving(jumping, engines)
        step(engine, 4)
        for jump_s in (86_400, -86_400):
            offset.write_text(str(jump_s))
            operator = token.authorization(jumping.secret)
            assert jumping.post("/v1/fleet/cordon", {"agent": "one", "cordoned": False}, operator).status == 200
            assert abs(jumping.fleet_events()[-1]["at"] - time.time() - jump_s) < 3600  # it has jumped
            polls = [agent.polls for agent in jumping.agents.values()]
            while any(agent.polls < n + 3 for agent, n in zip(jumping.agents.values(), polls)):
                time.sleep(POLL_S)
            state = jumping.state()
            assert [one["health"] for one in state["agents"]] == ["READY", "READY"]
            assert (state["store"], state["leader"]) == ("up", True)
            step(engine, 4)
        events_since = jumping.fleet_events()[len(known) :]
        assert not [event for event in events_since if event["kind"].startswith("agent-")]
        for one in engines:
            hold(one, False)
        response = connection.getresponse()
        assert events(response.read()) == events(undisturbed)
        name = response.headers["X-Starling-Request"]
        connection.close()
        assert jumping.get(f"/v1/requests/{name}", MINE).status == 200
        assert jumping.post("/v1/generate", BODY, MINE).status == 200
        submitted = [frame for one in engines for frame in one.peers.generator.submitted if frame.request == name]
        assert len(submitted) == 1  # it was not moved
    finally:
        assert jumping.close() == 0, "".join(jumping.lines)
