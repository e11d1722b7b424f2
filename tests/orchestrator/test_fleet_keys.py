"""Keys of `starling keys` at the orchestrator, and tokens of agents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.fleet import host_token
from pipeline.fleet.records import agent_key
from starling.cli import cli
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet, TestAgent
from tests.orchestrator.streams import BODY


def keys(fleet: Fleet, *words: str) -> Any:
    environment = {"STARLING_HOME": str(fleet.home), "STARLING_CONFIG": str(fleet.home / "starling.yaml")}
    done = CliRunner().invoke(cli, ["keys", *words], env=environment)
    assert done.exit_code == 0, done.output
    return json.loads(done.output) if "--json" in words else None


def test_a_key_has_its_limits_and_its_tenant(fleet: Fleet, engines: list[Server]) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    made = keys(fleet, "add", "alice", "--tenant", "team", "--priority", "5", "--requests-per-day", "2", "--json")
    mine = {"Authorization": f"Bearer {made['key']}"}
    answer = fleet.post("/v1/generate", BODY, mine)
    assert answer.status == 200, answer.body
    name = answer.headers["X-Starling-Request"]
    (sent,) = [one for engine in engines for one in engine.peers.generator.submitted if one.request == name]
    assert (sent.tenant, sent.priority) == ("team", 5)
    assert fleet.get(f"/v1/requests/{name}", mine).body == answer.body
    assert fleet.post("/v1/generate", BODY, mine).status == 200
    refused = fleet.post("/v1/generate", BODY, mine)
    assert (refused.status, refused.error["code"]) == (429, "RATE_LIMITED")
    assert fleet.get("/v1/fleet", mine).status == 403
    operator = keys(fleet, "add", "ops", "--scope", "admin", "--json")
    header = {"Authorization": f"Bearer {operator['key']}"}
    assert fleet.get("/v1/fleet", header).status == 200
    assert fleet.post("/v1/generate", BODY, header).status == 403
    keys(fleet, "revoke", "alice")
    assert fleet.post("/v1/generate", BODY, mine).error["code"] == "INVALID_API_KEY"


@pytest.fixture
def third(fleet: Fleet) -> Iterator[TestAgent]:
    """An agent without engines, which is not registered yet."""
    agent = TestAgent("three", fleet.secret)
    yield agent
    fleet.write(agent_key("three"), None)
    fleet.write(host_token.TOKENS + "three", None)
    fleet.wait(lambda state: len(state["agents"]) == 2)
    agent.close()


def reason(fleet: Fleet, holds: Callable[[str], bool]) -> str:
    """Why the third agent is not ready."""
    found = ""

    def is_found(state: dict[str, Any]) -> bool:
        nonlocal found
        found = next((one["reason"] for one in state["agents"] if one["agent_id"] == "three"), "")
        return holds(found)

    fleet.wait(is_found)
    return found


def test_an_agent_has_a_token_of_its_own_until_it_is_renewed(fleet: Fleet, third: TestAgent) -> None:
    environment = {"STARLING_HOME": str(fleet.home), "STARLING_CONFIG": str(fleet.home / "starling.yaml")}

    def issue(*words: str) -> Any:
        done = CliRunner().invoke(cli, ["fleet", "token", "three", "--json", *words], env=environment)
        assert done.exit_code == 0, done.output
        return json.loads(done.output)

    issued = issue()
    assert issued == issue() and issued["token"] == host_token.make(fleet.secret, "three", 1)
    third.token, third.token_number = issued["token"], issued["number"]
    fleet.register(third)
    # The token operates nothing but its own agent.
    assert fleet.get("/v1/fleet", {"Authorization": f"Bearer {issued['token']}"}).status == 401
    renewed = issue("--renew")
    assert renewed["number"] == 2 and renewed["token"] != issued["token"]
    assert "token 2 has replaced it" in reason(fleet, lambda text: "replaced" in text)
    third.token, third.token_number, third.incarnation = renewed["token"], 2, "2"
    fleet.register(third)


@pytest.mark.parametrize("number", [0, 1])
def test_an_agent_that_cannot_prove_its_token_gets_no_request(fleet: Fleet, third: TestAgent, number: int) -> None:
    third.is_impostor, third.token, third.token_number = True, host_token.make(fleet.secret, "another", 1), number
    fleet.register(third, "UNKNOWN")
    assert "does not prove" in reason(fleet, lambda text: "prove" in text)
    assert third.polls


def test_a_request_that_is_relayed_is_refused(fleet: Fleet, third: TestAgent) -> None:
    """An agent compares the URL that was signed with its own."""
    third.signed_url = "http://10.0.0.1:1"
    fleet.register(third, "UNKNOWN")
    assert reason(fleet, bool)
    assert not third.polls
