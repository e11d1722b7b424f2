"""A session moves for its turn between real agents if its own is busy, and the turn has the same bytes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.two_agents import MINE, SECTIONS, Hosts
from tests.orchestrator.fleet import Fleet

STREAMS = 24
TRIES = 6  # sessions: a turn does not wait for a move that takes long, as it may on a busy machine
MOVED = [("session", "two"), ("new", "two")]  # causes and agents of such a turn
PROMPTS = ("once upon a time there was a keeper " * 6, " there was", " and then")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    # What a sequence ahead costs is measured, and little with so small a model: the weight makes up for it.
    with Hosts(tmp_path_factory.mktemp("st"), SECTIONS, session_gain_ms=1, gamma=1000.0) as running:
        yield running


def turn(fleet: Fleet, session: str, number: int) -> tuple[str, str]:
    """What a client sees of a turn but for its names; and the request's id."""
    body = {"model": "tiny", "prompt": PROMPTS[number], "session_id": session, "create_session": number == 0}
    answer = fleet.post(
        "/v1/generate", {**body, "max_tokens": 6, "seed": 7, "temperature": 1.0, "ignore_eos": True}, MINE
    )
    assert answer.status == 200, answer.body
    seen = json.dumps([answer.json["choices"], answer.json["usage"]["prompt_tokens"]])
    return seen, answer.headers["X-Starling-Request"]


@pytest.mark.slow
def test_a_session_leaves_a_busy_agent_for_its_turn(hosts: Hosts) -> None:
    fleet = hosts.fleet
    hosts.cordon("two", True)
    unmoved = [turn(fleet, "unmoved", number)[0] for number in range(3)]
    sessions = [f"s-{number}" for number in range(TRIES)]
    for session in sessions:
        assert [turn(fleet, session, number)[0] for number in range(2)] == unmoved[:2]
        assert hosts.holders(session) == ["one"]
    for session in sessions:
        with streams(fleet):  # of their own for each try: those of the one before may have ended
            hosts.cordon("two", False)
            seen, request_id = turn(fleet, session, 2)
        assert seen == unmoved[2]
        choices = choices_of(fleet, request_id)
        made = [(one["cause"], one["agent_id"]) for one in choices]
        if made == MOVED:
            break
        hosts.cordon("two", True)
    assert made == MOVED, choices
    scores = {one["agent_id"]: one["score_s"] for one in choices[0]["scores"]}
    assert scores["two"] < scores["one"]
    assert hosts.holders(session) == ["two"] and hosts.holders("unmoved") == ["one"]
    assert {one["agent"] for one in fleet.fleet_events() if one["kind"] == "session-moved"} == {"one"}
    assert fleet.post("/v1/session/close", {"model": "tiny", "session_id": session}, MINE).status == 200


@contextlib.contextmanager
def streams(fleet: Fleet) -> Iterator[None]:
    """Keep the one agent busy that takes new requests."""
    with contextlib.ExitStack() as stack:
        body = {"model": "tiny", "max_tokens": 1900, "ignore_eos": True}
        for number in range(STREAMS):
            stream = fleet.stream("/v1/completions", {**body, "prompt": f"stream {number}"}, MINE)
            stack.callback(stream.close)
            next(iter(stream.events()))
        yield


def choices_of(fleet: Fleet, request_id: str) -> list[dict[str, Any]]:
    """Where a request was sent, and why."""
    headers = {"Authorization": f"Bearer {fleet.secret}"}
    found: list[dict[str, Any]] = fleet.get(f"/v1/fleet/why/{request_id}", headers).json["choices"]
    return found
