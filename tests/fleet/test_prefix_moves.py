"""The prefixes that most requests shared go to another real agent when theirs drains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.api.page_owner import forwarded_salt
from stages.orchestrator.request_ids import RequestIds
from tests.fleet.two_agents import MINE, Hosts
from tests.orchestrator.fleet import Fleet

OTHER = {"Authorization": "Bearer sk-other"}
KEYS = [{"key": "sk-mine", "tenant": "mine"}, {"key": "sk-other", "tenant": "other"}]
SHARED = "once upon a time there was a lighthouse " * 8
TRIES = 4  # drains: what an agent that does not answer in time would get is left out, and computed later
ALONE = "the keeper of another tower wrote letters " * 8


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("pm"), {"auth": {"api_keys": KEYS}}) as running:
        yield running


def cached_tokens(fleet: Fleet, prompt: str, key: dict[str, str] = MINE) -> tuple[int, str]:
    """Of a request's prompt, which are in the usage; and the request's id."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    answer = fleet.post("/v1/completions", body, key)
    assert answer.status == 200, answer.body
    names = {name.lower(): value for name, value in answer.headers.items()}
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]), names["x-starling-request"]


def served_by(fleet: Fleet, request_id: str) -> str:
    headers = {"Authorization": f"Bearer {fleet.secret}"}
    found: dict[str, Any] = fleet.get(f"/v1/fleet/why/{request_id}", headers).json
    return str(found["choices"][-1]["agent_id"])


@pytest.mark.slow
def test_the_first_request_after_a_drain_finds_its_prefix(hosts: Hosts) -> None:
    fleet = hosts.fleet
    hosts.cordon("two", True)
    found = [cached_tokens(fleet, SHARED + ending) for ending in ("and a gull", "and a storm", "and a boat")]
    assert found[0][0] == 0 and min(found[1][0], found[2][0]) > 0
    assert cached_tokens(fleet, ALONE + "for years")[0] == 0
    assert {served_by(fleet, request_id) for _, request_id in found} == {"one"}
    # The engine, which knows one key, tells by the salt whose they are.
    status, listed = hosts.agents["one"].call("/list_prefixes", model_id="tiny", limit=100)
    assert status == 200, listed
    salt = RequestIds(fleet.secret, lambda: 0.0).salt("\x01mine")
    assert [forwarded_salt(one["tenant"]) for one in listed["prefixes"]] == [salt]
    hosts.cordon("two", False)
    for _ in range(TRIES):
        done = hosts.run("drain", "one", "--wait", "--timeout", "120")
        assert done.exit_code == 0, done.output
        # None if the agent has not listed its prefixes in time.
        events = [one for one in fleet.fleet_events() if one["kind"] == "prefixes-sent"]
        if events and "sent" in events[-1]["text"]:
            break
        hosts.cordon("one", False)
    assert events and events[-1]["agent"] == "one" and "1 sent" in events[-1]["text"], events
    # An agent that is slow to answer a poll meanwhile is not known to be empty until it does.
    state = fleet.wait(lambda state: any(agent["may_stop"] for agent in state["agents"]))
    (shown,) = [one for one in state["agents"] if one["agent_id"] == "one"]
    assert shown["may_stop"] and shown["left"]["prefixes"] == 0

    cached, request_id = cached_tokens(fleet, SHARED + "and a lamp")
    assert served_by(fleet, request_id) == "two"
    assert cached == found[1][0] > 0
    # Of a prefix that one request alone had, and of another tenant, nothing was sent.
    assert cached_tokens(fleet, ALONE + "and years")[0] == 0
    assert cached_tokens(fleet, SHARED + "and a lamp", OTHER)[0] == 0

    why = hosts.run("why", "one", "--json")
    assert why.exit_code == 0, why.output
    (prefix,) = json.loads(why.output)["prefixes"]
    assert (prefix["outcome"], prefix["target"], prefix["uses"]) == ("sent", "two", 3)
    assert "sent" in hosts.run("why", "one").output
    metrics = fleet.get("/metrics").body.decode()
    assert 'starling_fleet_prefix_moves_total{outcome="sent"} 1' in metrics
    assert "starling_fleet_prefix_bytes_total 0" not in metrics

    # Back again: what the other agent holds is not sent.
    hosts.cordon("one", False)
    for _ in range(TRIES):
        done = hosts.run("drain", "two", "--wait", "--timeout", "120")
        assert done.exit_code == 0, done.output
        why = hosts.run("why", "two", "--json")
        outcomes = {one["outcome"] for one in json.loads(why.output)["prefixes"]} if why.exit_code == 0 else set()
        hosts.cordon("two", False)
        if outcomes and not outcomes & {"skipped", "failed"}:
            break
    assert outcomes == {"held"}
