"""The orchestrator's process in front of two engines: the same API, and streams that outlive their engine."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.api.output_tokens import RELAY, relay_header
from pipeline.fleet import token
from starling.cli import cli
from tests.e2e.server import poll_until
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet, TestAgent
from tests.orchestrator.streams import BODY, MINE, OTHER, SAID, hold, plain, step

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": SAID}],
    "max_tokens": 30,
    "seed": 7,
    "ignore_eos": True,
}
REQUESTS = [
    ("/v1/generate", {**BODY, "n": 2}),
    ("/v1/completions", {**BODY, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", {name: value for name, value in CHAT.items() if name != "ignore_eos"}),
]


def whole(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "stream_options"}


CONNECTIONS: list[http.client.HTTPConnection] = []


def opened(fleet: Fleet) -> http.client.HTTPConnection:
    """A connection that is closed after the test."""
    CONNECTIONS.append(fleet.connect())
    return CONNECTIONS[-1]


@pytest.fixture(autouse=True)
def running(engines: list[Server]) -> Iterator[None]:
    """Engines that a test has held go on after it."""
    yield
    while CONNECTIONS:
        CONNECTIONS.pop().close()
    for engine in engines:
        engine.peers.generator.is_starting = True
        hold(engine, False)


def engine_of(fleet: Fleet, engines: list[Server], request_id: str) -> int:
    """The engine that was sent the request last."""
    answer = fleet.get(f"/v1/fleet/why/{request_id}", token.authorization(fleet.secret))
    assert answer.status == 200, answer.body
    return ["one", "two"].index(answer.json["choices"][-1]["agent_id"])


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
def test_answers_are_the_engines(fleet: Fleet, engines: list[Server], path: str, body: dict[str, Any]) -> None:
    direct = engines[0].post(path, whole(body))
    answer = fleet.post(path, whole(body), MINE)
    assert (answer.status, plain(answer.body)) == (200, plain(direct.body)), answer.body
    assert answer.headers["X-Starling-Request"].startswith("req-")
    streamed = engines[1].post(path, {**body, "stream": True})
    answer = fleet.post(path, {**body, "stream": True}, MINE)
    assert (answer.status, plain(answer.body)) == (200, plain(streamed.body)), answer.body
    assert answer.headers["Content-Type"] == streamed.headers["Content-Type"]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
def test_a_stream_outlives_its_engine(fleet: Fleet, engines: list[Server], path: str, body: dict[str, Any]) -> None:
    body = {**body, "stream": True}
    undisturbed = engines[0].post(path, body).body
    fleet.wait(lambda state: all(one["loaded_models"] and one["health"] == "READY" for one in state["agents"]))
    for engine in engines:
        hold(engine)
    connection = opened(fleet)
    connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json", **MINE})
    response = connection.getresponse()
    request_id = response.headers["X-Starling-Request"]
    first = engine_of(fleet, engines, request_id)
    victim, successor = engines[first], engines[1 - first]
    received = b""
    while received.count(b"data: ") < 12:
        step(victim, 1)
        received += response.read1(1 << 16)
    victim.process.kill()
    hold(successor, False)
    received += response.read()
    assert engine_of(fleet, engines, request_id) == 1 - first
    victim.kill_and_restart()
    hold(victim, False)
    victim.wait_ready()
    assert plain(received) == plain(undisturbed)
    # The successor has computed none of the tokens again.
    forced = [frame.forced for frame in successor.peers.generator.submitted if frame.request == request_id]
    assert forced and all(forced)
    assert b"starling_fleet_continued_tokens_total 0" not in fleet.get("/metrics").body
    # What it has is the whole answer, under the same id.
    relayed = {RELAY: relay_header("mine", 0)}
    assert successor.get(f"/v1/requests/{request_id}", relayed).status == 200


def test_a_whole_answer_outlives_its_engine(fleet: Fleet, engines: list[Server]) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    undisturbed = engines[0].post("/v1/generate", BODY)
    for engine in engines:
        hold(engine)
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(fleet.post("/v1/generate", BODY, MINE)))
    client.start()
    fleet.wait(lambda state: any(one["under_way"] for one in state["agents"]))
    busy = [one["agent_id"] for one in fleet.state()["agents"] if one["under_way"]]
    victim = engines[["one", "two"].index(busy[0])]
    victim.process.kill()
    for engine in engines:
        hold(engine, False)
    client.join()
    victim.kill_and_restart()
    victim.wait_ready()
    assert answers[0].status == 200 and plain(answers[0].body) == plain(undisturbed.body)


@pytest.mark.parametrize("n_tokens", [0, 3])
def test_a_stream_leaves_an_agent_whose_lease_has_ended(fleet: Fleet, engines: list[Server], n_tokens: int) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    undisturbed = engines[0].post("/v1/generate", {**BODY, "stream": True}).body
    for engine in engines:
        hold(engine)
        # Without tokens: while its prompt waits, so that its response has not begun.
        engine.peers.generator.is_starting = bool(n_tokens)
    connection = opened(fleet)
    headers = {"Content-Type": "application/json", **MINE}
    connection.request("POST", "/v1/generate", json.dumps({**BODY, "stream": True}).encode(), headers)
    received = b""
    state = fleet.wait(lambda state: any(one["under_way"] for one in state["agents"]))
    name = next(one["agent_id"] for one in state["agents"] if one["under_way"])
    first = ["one", "two"].index(name)
    if n_tokens:
        response = connection.getresponse()
        step(engines[first], n_tokens)
        received = response.read1(1 << 16)
    else:
        poll_until(lambda: engines[first].peers.generator.running)
    fleet.write(f"agents/{name}", None)
    fleet.wait(lambda state: [one["agent_id"] for one in state["agents"]] == [("one", "two")[1 - first]])
    hold(engines[1 - first], False)
    if not n_tokens:
        response = connection.getresponse()
    received += response.read()
    # The engine that was left stops computing.
    poll_until(lambda: not engines[first].peers.generator.running)
    hold(engines[first], False)
    fleet.register(fleet.agents[name])
    assert plain(received) == plain(undisturbed)


def test_a_client_continues_its_stream(fleet: Fleet, engines: list[Server]) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    stream = fleet.stream("/v1/generate", BODY, MINE)
    request_id = stream.response.headers["X-Starling-Request"]
    events = stream.all()
    texts = "".join(one.data.get("text", "") for one in events if one.data != "[DONE]")
    path, last = f"/v1/requests/{request_id}", events[4].id
    assert fleet.get(path, OTHER).status == 404
    rest = fleet.get(path, {**MINE, "Last-Event-ID": last}).body
    data = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith(b"data: {")]
    begun = "".join(one.data.get("text", "") for one in events[:5])
    assert begun + "".join(one.get("text", "") for one in data) == texts
    assert fleet.post("/v1/generate", {**BODY, "stream": True}, {**OTHER, "Last-Event-ID": last}).status == 404
    # HEAD has no body, which would be read as the next answer on its connection.
    connection = opened(fleet)
    connection.connect()
    for method, fields in (("HEAD", ""), ("GET", "Connection: close\r\n")):
        fields += "".join(f"{name}: {value}\r\n" for name, value in MINE.items())
        connection.sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n".encode())
    with connection.sock.makefile("rb") as received:
        _, head, body = received.read().split(b"HTTP/1.1 200 OK\r\n")
    assert head.endswith(b"\r\n\r\n") and b"\r\nContent-Type: text/event-stream" in b"\r\n" + head
    assert request_id.encode() in head and body.count(b"data: [DONE]") == 1
    # With a key, a repetition is the same request, whichever engine has it.
    keyed = {**MINE, "Idempotency-Key": "mine"}
    unseeded = {name: value for name, value in BODY.items() if name != "seed"}
    first, second = (fleet.post("/v1/generate", unseeded, keyed) for _ in range(2))
    assert first.status == 200 and first.body == second.body
    assert fleet.post("/v1/generate", BODY, keyed).status == 409


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
def test_a_key_with_another_body_is_named(fleet: Fleet, path: str, body: dict[str, Any]) -> None:
    """Not by the hash under which engines have it."""
    keyed = {**MINE, "Idempotency-Key": f"named{path}"}
    first = fleet.post(path, whole(body), keyed)
    assert first.status == 200, first.body
    refused = fleet.post(path, {**whole(body), "max_tokens": 7}, keyed)
    assert refused.status == 409
    assert f"Idempotency-Key 'named{path}' was sent with another body" in refused.json["error"]["message"]
    assert fleet.post(path, whole(body), keyed).body == first.body


def test_a_key_with_another_body_does_not_touch_the_stream_of_the_first_one(
    fleet: Fleet, engines: list[Server]
) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    undisturbed = engines[0].post("/v1/generate", {**BODY, "stream": True}).body
    for engine in engines:
        hold(engine)
    connection = opened(fleet)
    headers = {"Content-Type": "application/json", **MINE, "Idempotency-Key": "under-way"}
    connection.request("POST", "/v1/generate", json.dumps({**BODY, "stream": True}).encode(), headers)
    fleet.wait(lambda state: any(one["under_way"] for one in state["agents"]))
    response = connection.getresponse()
    for more in ({"stream": True}, {}):
        refused = fleet.post("/v1/generate", {**BODY, "max_tokens": 7, **more}, headers)
        assert (refused.status, refused.error["param"]) == (409, "Idempotency-Key")
    for engine in engines:
        hold(engine, False)
    assert plain(response.read()) == plain(undisturbed)


def test_a_cold_model_is_loaded_once(fleet: Fleet, cold_agent: TestAgent) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    agent = cold_agent
    body = {**BODY, "model": "cold"}
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(fleet.post("/v1/generate", {**body, "stream": True}, MINE)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    assert agent.loading.wait(60)
    fleet.wait(lambda state: [one["waiting"] for one in state["loads"]] == [6])
    connection = opened(fleet)
    headers = {"Content-Type": "application/json", **MINE}
    connection.request("POST", "/v1/generate", json.dumps({**body, "stream": True}).encode(), headers)
    assert connection.getresponse().readline().startswith(b": loading cold")
    agent.may_load.set()
    for thread in threads:
        thread.join()
    assert agent.loads == ["cold"]
    # The engine serves it under another name, so that it refuses: in the stream, whose head was sent already.
    assert len(answers) == 6
    assert all(one.status in (200, 404) and b"MODEL_NOT_FOUND" in one.body for one in answers)


def test_a_model_whose_agents_are_full_is_loaded_on_an_idle_one(
    homes: Callable[[], Path], engines: list[Server]
) -> None:
    fleet = Fleet(homes(), max_per_agent=1, silent_ms=600_000)
    fleet.add_agent("one", engines[0])
    idle = fleet.agents["two"] = TestAgent("two", fleet.secret)
    idle.cold[MODEL] = engines[1]
    fleet.register(idle)
    expected = plain(engines[1].post("/v1/generate", BODY).body)
    operator = token.authorization(fleet.secret)

    def occupy() -> threading.Thread:
        """Agent one gets a request, and cannot answer."""
        hold(engines[0])
        return begin([])

    def begin(answers: list[Any]) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(fleet.post("/v1/generate", BODY)))
        thread.start()
        return thread

    def causes(answer: Any) -> list[tuple[str, str]]:
        why = fleet.get(f"/v1/fleet/why/{answer.headers['X-Starling-Request']}", operator).json
        return [(one["cause"], one["agent_id"]) for one in why["choices"]]

    answers: list[Any] = []
    threads = [occupy()]
    fleet.wait(lambda state: state["agents"][0]["under_way"] == 1)
    threads.append(begin(answers))
    assert idle.loading.wait(60)
    fleet.wait(lambda state: [(one["agent"], one["waiting"]) for one in state["loads"]] == [("two", 1)])
    hold(engines[0], False)  # agent one has room before the copy is loaded
    for thread in threads:
        thread.join()
    assert [plain(one.body) for one in answers] == [expected]
    assert causes(answers.pop()) == [("overloaded", "two"), ("new", "one")]
    threads = [occupy()]
    fleet.wait(lambda state: state["agents"][0]["under_way"] == 1)
    threads.append(begin(answers))  # joins the load, which has gone on
    fleet.wait(lambda state: [one["waiting"] for one in state["loads"]] == [1])
    idle.may_load.set()
    threads[1].join()
    assert [plain(one.body) for one in answers] == [expected] and idle.loads == [MODEL]
    assert causes(answers.pop()) == [("overloaded", "two"), ("new", "two")]
    hold(engines[0], False)
    threads[0].join()
    assert fleet.close() == 0, "".join(fleet.lines)


def test_bad_requests_are_refused_with_the_reason(fleet: Fleet) -> None:
    assert fleet.post("/v1/generate", BODY).error["code"] == "INVALID_API_KEY"
    assert fleet.post("/v1/generate", {**BODY, "model": "missing"}, MINE).error["code"] == "MODEL_NOT_FOUND"
    assert fleet.post("/v1/generate", {"prompt": "x"}, MINE).error["param"] == "model"
    assert fleet.post("/v1/generate", {**BODY, "stream": "yes"}, MINE).error["param"] == "stream"
    assert "duplicate" in fleet.post("/v1/generate", b'{"duplicate":1,"duplicate":2}', MINE).error["message"]
    # What only an engine can know is the engine's answer.
    refused = fleet.post("/v1/generate", {**BODY, "prompt": [1 << 30]}, MINE)
    assert (refused.status, refused.error["param"]) == (400, "prompt")
    assert fleet.get("/v1/nothing", MINE).error["code"] == "NOT_FOUND"
    wrong = fleet.get("/v1/generate", MINE)
    assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")
    assert fleet.post("/v1/messages", {**CHAT, "model": "missing"}, MINE).json["type"] == "error"


def test_the_fleet_can_be_read_and_changed(fleet: Fleet) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    (model,) = fleet.get("/v1/models", MINE).json["data"]
    assert (model["id"], model["ready"], model["agents"]) == (MODEL, True, ["one", "two"])
    assert fleet.get(f"/v1/models/{MODEL}", MINE).json == model
    assert fleet.get("/ready").json["ready"] is True and fleet.get("/health").status == 200
    fleet.wait(lambda state: state["leader"])
    metrics = fleet.get("/metrics").body
    assert b'starling_fleet_agents{health="ready"} 2.0' in metrics
    assert b"starling_fleet_leader 1.0" in metrics and b"starling_fleet_store_up 1.0" in metrics
    assert fleet.get("/v1/fleet", MINE).status == 403
    admin = {"Authorization": "Bearer sk-admin"}
    answer = fleet.post("/v1/generate", BODY, MINE)
    why = fleet.get(f"/v1/fleet/why/{answer.headers['X-Starling-Request']}", admin).json
    (choice,) = why["choices"]
    assert {one["agent_id"] for one in choice["scores"]} == {"one", "two"}
    assert set(choice["scores"][0]["terms"]) == {"cache_level_s", "kv_hit_s", "queue_s", "transfer_s"}
    assert fleet.post("/v1/fleet/cordon", {"agent": "none", "cordoned": True}, admin).status == 404
    assert fleet.post("/v1/fleet/cordon", {"agent": "one", "cordoned": True}, admin).status == 200
    fleet.wait(lambda state: state["agents"][0]["cordoned"])
    for _ in range(3):
        request_id = fleet.post("/v1/generate", BODY, MINE).headers["X-Starling-Request"]
        assert fleet.get(f"/v1/fleet/why/{request_id}", admin).json["choices"][0]["agent_id"] == "two"
    assert fleet.post("/v1/fleet/cordon", {"agent": "one", "cordoned": False}, admin).status == 200
    fleet.wait(lambda state: not state["agents"][0]["cordoned"])
    assert fleet.post("/v1/fleet/place", {"model": "missing", "replicas": 1}, admin).status == 404
    kinds = {event["kind"] for event in fleet.get("/v1/fleet/events", admin).json["events"]}
    for after in ("x", "-1", "%C2%B2", "1" * 19):  # the third is a superscript two: a digit, and no number
        assert fleet.get(f"/v1/fleet/events?after={after}", admin).error["param"] == "after"
    assert {"agent-joined", "agent-ready", "cordoned", "uncordoned"} <= kinds


def test_the_commands_of_an_operator(fleet: Fleet) -> None:
    def command(*words: str, code: int = 0) -> Any:
        environment = {"STARLING_HOME": str(fleet.home), "STARLING_CONFIG": str(fleet.home / "starling.yaml")}
        url = f"http://127.0.0.1:{fleet.port}"
        done = CliRunner().invoke(cli, ["fleet", *words, "--url", url], env=environment)
        assert done.exit_code == code, (words, done.output, done.exception)
        return json.loads(done.output) if "--json" in words else done.output

    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    request_id = fleet.post("/v1/generate", BODY, MINE).headers["X-Starling-Request"]
    assert [one["agent_id"] for one in command("status", "--json")["agents"]] == ["one", "two"]
    assert [one["id"] for one in command("models", "--json")] == [MODEL]
    assert command("place", MODEL, "--replicas", "2", "--json") == {"model": MODEL, "replicas": 2, "ready": 2}
    assert command("place", MODEL, "--replicas", "0", "--json")["replicas"] == 0
    assert command("cordon", "one", "--json") == {"agent": "one", "cordoned": True, "drain": False}
    assert command("drain", "one", "--json")["drain"] is True
    fleet.wait(lambda state: state["agents"][0]["draining"])
    assert "draining" in command("agents")
    command("uncordon", "one")
    fleet.wait(lambda state: not state["agents"][0]["cordoned"])
    assert command("why", request_id, "--json")["choices"][0]["agent_id"] in ("one", "two")
    assert "kv hit" in command("why", request_id) and MODEL in command("status") and "one" in command("models")
    assert "agent-joined" in command("events") and command("events", "--after", "999999", "--json") == []
    command("why", "req-unknown", code=1)


def test_the_line_of_a_request_has_the_ids_and_names_also_of_a_refused_one(fleet: Fleet) -> None:
    def line(body: dict[str, Any], name: str) -> dict[str, Any]:
        fleet.post("/v1/generate", body, {**MINE, "X-Request-Id": name})
        deadline = time.monotonic() + 60
        while True:
            for text in list(fleet.lines):
                if name in text and (found := json.loads(text))["event"] == "request":
                    return found
            assert time.monotonic() < deadline
            time.sleep(0.01)

    for _ in range(200):  # more than an event's budget of lines: looking at the fleet takes none of the requests'
        fleet.state()
    for body, name, expected in (
        ({**BODY, "n": 99}, "name-1", (400, "INVALID_REQUEST", "n", MODEL, None)),
        ({**BODY, "n": 99, "session_id": "s-1"}, "name-2", (400, "INVALID_REQUEST", "n", MODEL, "s-1")),
        (BODY, "name-3", (200, None, None, MODEL, None)),
    ):
        found = line(body, name)
        assert tuple(found[key] for key in ("status", "error", "param", "model", "session_id")) == expected
        assert found["request_id"].startswith("req-")
        assert (found["client_request_id"], found["tenant"]) == (name, "mine")
