"""Models of other engines in a fleet of real processes: an orchestrator and two agents, each with a stand-in."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import poll_until
from tests.fleet.agent_process import Agent
from tests.fleet.engine_hosts import KEYS, MINE, OTHER, Hosts, texts
from tests.fleet.stand_in_engine import expected
from tests.fleet.test_other_engines import TOOLS, set_control, write_program
from tests.orchestrator.fleet import Fleet

BODY = {"model": "m", "prompt": "once upon a time", "max_tokens": 12, "stream": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12, "stream": True}


class Host(Agent):
    """An agent whose model is in a directory of its own, so that a test controls its engine."""

    def __init__(self, folder: Path, name: str, secret: str, store: Path, **fields: Any) -> None:
        """`fields`: of its engine."""
        home = folder / name
        self.model = home / "model-files"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text("{}")  # the same on each host, and so is the digest
        (home / "fleet-token").write_text(secret)
        (home / "fleet-token").chmod(0o600)
        engine = {"model": "m", "engine": "vllm", "path": str(self.model), "program": str(write_program(home))}
        engine.update(fields)
        # A lease that outlasts any pause of a busy machine: with a shorter one an agent refuses what it is asked for.
        agent = {"id": name, "engines": [engine], "lease_ms": 600_000}
        config = {"fleet": {"store": f"sqlite:{store}", "agent": agent}}
        super().__init__(home, config)

    def control(self, word: str) -> None:
        set_control(self.model, word)

    def requests(self) -> list[dict[str, Any]]:
        path = self.model.with_name(self.model.name + ".requests")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def hosts(homes: Callable[[], Path]) -> Iterator[Hosts[Host]]:
    base = homes()
    fleet = Fleet(base / "orchestrator", {"auth": {"api_keys": KEYS}})
    agents = {name: Host(base, name, fleet.secret, base / "orchestrator" / "fleet.db") for name in ("one", "two")}
    try:
        for agent in agents.values():
            agent.start()
        for agent in agents.values():
            agent.wait_ready()
            assert agent.call("/load_model", model_id="m")[0] == 200
        yield Hosts(fleet, agents)
    finally:
        for agent in agents.values():
            agent.stop()
        assert fleet.close() == 0, "".join(fleet.lines)


@pytest.fixture(scope="module")
def homes() -> Iterator[Callable[[], Path]]:
    """New directories with paths short enough for sockets."""
    base = Path(tempfile.mkdtemp(prefix="oe-"))
    count = iter(range(1000))
    yield lambda: base / str(next(count))
    shutil.rmtree(base)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("death", ["die", "nonsense"])
def test_a_stream_goes_on_from_its_text(hosts: Hosts[Host], path: str, body: dict[str, Any], death: str) -> None:
    hosts.ready()
    for agent in hosts.agents.values():
        agent.control("hold")
    connection, response = hosts.open(path, {**body, "stream_options": {"include_usage": True}})
    received = b""
    while len(texts(received)) < 3:
        received += response.read1(1 << 16)
    victim, successor = hosts.serving(response.headers["X-Starling-Request"])
    before = {agent: len(agent.requests()) for agent in (victim, successor)}
    successor.control("")
    victim.control(death)
    received += response.read()
    connection.close()
    prompt = body.get("prompt") or body["messages"][0]["content"]
    assert "".join(texts(received)) == expected(prompt, 12)
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert len({(one["id"], one["created"]) for one in events}) == 1
    # More than one if the successor was not ready at once, on a busy machine: then the victim was asked again.
    before_last, n_replays = (one.get("starling_replayed", 0) for one in events[-2:])
    assert before_last == n_replays >= 1
    assert not any("starling_replayed" in one for one in events[:-2])
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert received.count(b": starling_replayed") == n_replays and received.endswith(b"data: [DONE]\n\n")
    # No token was computed again. A victim that sends nonsense gives three tokens each time that it is asked.
    sent = [one["max_tokens"] for agent, n in before.items() for one in agent.requests()[n:]]
    assert sent and sorted(sent, reverse=True) == [9, 6, 3][: len(sent)]
    victim.control("")


def test_a_call_ends_with_its_engine_and_a_whole_one_is_asked_for_again(hosts: Hosts[Host]) -> None:
    hosts.ready()
    for agent in hosts.agents.values():
        agent.control("hold")
    connection, response = hosts.open("/v1/chat/completions", {**CHAT, "tools": TOOLS})
    received = b""
    while received.count(b"tool_calls") < 3:
        received += response.read1(1 << 16)
    victim, _ = hosts.serving(response.headers["X-Starling-Request"])
    before = sum(len(agent.requests()) for agent in hosts.agents.values())
    victim.control("nonsense")
    received += response.read()
    connection.close()
    for agent in hosts.agents.values():
        agent.control("")
    assert received.count(b"tool_calls") == 3 and b"starling_replayed" not in received
    error = json.loads(received.split(b"\n\n")[-3].partition(b"data: ")[2])["error"]
    assert error["code"] == "MODEL_UNAVAILABLE" and "send the request again" in error["message"]
    assert sum(len(agent.requests()) for agent in hosts.agents.values()) == before
    hosts.ready()
    for agent in hosts.agents.values():
        agent.control("die")  # each engine kills itself once
    answer = hosts.fleet.post("/v1/chat/completions", {**CHAT, "tools": TOOLS, "stream": False}, MINE)
    for agent in hosts.agents.values():
        agent.control("")
    assert answer.status == 200, answer.body
    (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": expected("hello there", 12)[1:]}
    assert answer.json["usage"]["completion_tokens"] == 12


def test_a_whole_answer_outlives_its_engine(hosts: Hosts[Host]) -> None:
    hosts.ready()
    for agent in hosts.agents.values():
        agent.control("die")  # each engine kills itself once
    answer = hosts.fleet.post("/v1/completions", {**BODY, "stream": False}, MINE)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["text"] == expected(str(BODY["prompt"]), 12)
    for agent in hosts.agents.values():
        agent.control("")


def test_the_fleet_shows_the_engine_and_enforces_keys(hosts: Hosts[Host]) -> None:
    hosts.ready()
    (model,) = hosts.fleet.get("/v1/models", MINE).json["data"]
    assert (model["id"], model["engine"], model["ready"]) == ("m", "vllm", True)
    assert hosts.fleet.post("/v1/completions", BODY, {"Authorization": "Bearer sk-no"}).status == 401
    refused = hosts.fleet.post("/v1/completions", {**BODY, "stream": False, "suffix": "x"}, MINE)
    assert (refused.status, refused.json["error"]["param"]) == (400, "suffix")
    # Two tenants, one prompt: the engine gets different salts.
    before = {name: len(agent.requests()) for name, agent in hosts.agents.items()}
    for key in (MINE, OTHER):
        assert hosts.fleet.post("/v1/completions", {**BODY, "stream": False}, key).status == 200
    sent = [one for name, agent in hosts.agents.items() for one in agent.requests()[before[name] :]]
    assert len({one["cache_salt"] for one in sent}) == 2


def test_a_request_loads_the_model(hosts: Hosts[Host]) -> None:
    hosts.ready()
    for agent in hosts.agents.values():
        assert agent.call("/unload_model", model_id="m", drop_cached=True)[0] == 200
        assert (agent.model / "config.json").exists()  # the files are the operator's
    hosts.fleet.wait(lambda state: not any(one["loaded_models"] for one in state["agents"]))
    answer = hosts.fleet.post("/v1/completions", {**BODY, "stream": False}, MINE)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["text"] == expected(str(BODY["prompt"]), 12)
    for agent in hosts.agents.values():
        assert agent.call("/load_model", model_id="m")[0] == 200


def test_requests_follow_what_was_sent_where(hosts: Hosts[Host]) -> None:
    """The engines publish no prefixes: the orchestrator remembers what it sent to which one."""
    hosts.ready()
    chosen = []
    for topic in ("a", "b"):
        long = {**BODY, "prompt": topic * 4000, "stream": False, "max_tokens": 1}
        for _ in range(3):
            answer = hosts.fleet.post("/v1/completions", long, MINE)
            assert answer.status == 200, answer.body
            chosen.append(hosts.serving(answer.headers["X-Starling-Request"])[0])
    assert len(set(chosen[:3])) == len(set(chosen[3:])) == 1


def test_by_configuration_a_stream_ends_with_an_error(hosts: Hosts[Host], homes: Callable[[], Path]) -> None:
    """A second orchestrator of the same fleet replays nothing."""
    hosts.ready()
    shared = hosts.fleet.home
    bounds = {"poll_ms": 50, "lost_text": "error"}
    section = {"store": f"sqlite:{shared}/fleet.db", "token": str(shared / "fleet-token"), "orchestrator": bounds}
    second = Hosts(Fleet(homes(), {"fleet": section, "auth": {"api_keys": KEYS}}), hosts.agents)
    second.fleet.secret = hosts.fleet.secret
    try:
        second.ready()
        for agent in hosts.agents.values():
            agent.control("nonsense")
        connection, response = second.open("/v1/completions", BODY)
        received = response.read()
        connection.close()
        assert "".join(texts(received)) == expected(str(BODY["prompt"]), 3), received
        last = json.loads(received.split(b"\n\n")[-3].partition(b"data: ")[2])
        assert last["error"]["code"] == "MODEL_UNAVAILABLE" and "same answer" in last["error"]["message"]
    finally:
        for agent in hosts.agents.values():
            agent.control("")
        assert second.fleet.close() == 0, "".join(second.fleet.lines)


def test_a_caller_of_infer_that_leaves_frees_its_place(homes: Callable[[], Path]) -> None:
    base = homes()
    with Host(base, "three", "t" * 40 + "\n", base / "fleet.db", max_requests=1) as agent:
        assert agent.call("/load_model", model_id="m")[0] == 200
        agent.control("hold")
        body = {**CHAT, "stream": False}
        caller = HTTPConnection("127.0.0.1", int(agent.url.rpartition(":")[2]))
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {agent.token}"}
        caller.request("POST", "/infer", json.dumps(body), headers)
        poll_until(lambda: len(agent.requests()) == 1)
        caller.close()
        poll_until(lambda: agent.call("/infer", **{**body, "max_tokens": 1})[0] == 200)  # which is not held
