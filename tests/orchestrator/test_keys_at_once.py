"""A request with an Idempotency-Key that is sent several times at once is computed once, by whichever orchestrators."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import pytest

from stages.orchestrator.key_claims import CLAIMS, LEASE_S
from tests.e2e.server import poll_until
from tests.gateway.http_client import Answer
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet, Pair
from tests.orchestrator.stores import every_store
from tests.orchestrator.streams import BODY, MINE, hold

UNSEEDED: dict[str, Any] = {key: value for key, value in BODY.items() if key != "seed"}
on_every_store = pytest.mark.parametrize("pair", every_store(pytest.mark.slow), indirect=True, scope="module")
pytestmark = pytest.mark.usefixtures("released")


class Sent:
    """Requests that were sent at once; `answers` waits for them."""

    def __init__(self, orchestrators: tuple[Fleet, ...], key: str, body: dict[str, Any]) -> None:
        self._answers: list[Answer] = []
        headers = {**MINE, "Idempotency-Key": key}

        def ask(orchestrator: Fleet) -> None:
            self._answers.append(orchestrator.post("/v1/generate", body, headers))

        self._threads = [threading.Thread(target=ask, args=(one,)) for one in orchestrators]
        for thread in self._threads:
            thread.start()

    def answers(self) -> list[Answer]:
        for thread in self._threads:
            thread.join()
        return self._answers


def check_one(answers: list[Answer], engines: list[Server]) -> None:
    """All have the answer of one computation."""
    assert [one.status for one in answers] == [200] * len(answers), answers[0].body
    assert len({one.body for one in answers}) == 1
    (name,) = {one.headers["X-Starling-Request"] for one in answers}
    computed = [frame for one in engines for frame in one.peers.generator.submitted if frame.request == name]
    assert len(computed) == 1, "each agent has computed it"


def wait_removed(orchestrator: Fleet) -> None:
    """What was agreed on is removed, and long before its lease ends."""
    poll_until(lambda: not orchestrator.items(CLAIMS), timeout_s=LEASE_S / 2)


@on_every_store
def test_requests_of_one_key_at_two_orchestrators(pair: Pair, engines: list[Server]) -> None:
    first, second = pair
    for number in range(6):
        if number == 3:  # agents of equal score take turns: from now on the orchestrators prefer different ones
            assert first.post("/v1/generate", UNSEEDED, MINE).status == 200
        check_one(Sent((first, second) * 2, secrets.token_hex(8), UNSEEDED).answers(), engines)
    wait_removed(first)


def test_requests_of_one_key_at_one_orchestrator(pair: Pair, engines: list[Server]) -> None:
    for number in range(4):
        check_one(Sent((pair[number % 2],) * 3, secrets.token_hex(8), UNSEEDED).answers(), engines)


def test_requests_of_one_key_while_a_model_loads(pair: Pair, engines: list[Server]) -> None:
    """When it is loaded, both agents have it."""
    first, second = pair
    one, two = (first.agents[name] for name in ("one", "two"))
    two.cold[MODEL] = engines[1]
    two.may_load.clear()
    for agent in (one, two):
        del agent.engines[MODEL]
    try:
        for orchestrator in pair:
            orchestrator.wait(lambda state: not any(found["agents"] for found in state["models"]))
        sent = Sent((first, second) * 2, secrets.token_hex(8), UNSEEDED)
        for orchestrator in pair:
            orchestrator.wait(lambda state: [load["waiting"] for load in state["loads"]] == [2])
        one.engines[MODEL] = engines[0]
        for orchestrator in pair:
            orchestrator.wait(lambda state: any(found["agents"] == ["one"] for found in state["models"]))
        two.may_load.set()
        check_one(sent.answers(), engines)
    finally:
        two.may_load.set()
        two.cold.clear()
        one.engines[MODEL], two.engines[MODEL] = engines
        for orchestrator in pair:
            orchestrator.wait(lambda state: any(found["agents"] == ["one", "two"] for found in state["models"]))


def test_an_answer_of_before_is_found_at_its_engine(pair: Pair, engines: list[Server]) -> None:
    """Also by an orchestrator that prefers the other agent, when nothing in the store names it any more."""
    first, second = pair
    for _ in range(2):
        key = secrets.token_hex(8)
        answers = Sent((first,), key, UNSEEDED).answers()
        wait_removed(first)
        assert second.post("/v1/generate", UNSEEDED, MINE).status == 200  # it prefers another one now
        answers += Sent((second,), key, UNSEEDED).answers()
        check_one(answers, engines)


def test_a_key_goes_to_another_agent_when_its_own_fails(pair: Pair, engines: list[Server]) -> None:
    first, second = pair
    for engine in engines:
        hold(engine)
    key = secrets.token_hex(8)
    sent = Sent(pair, key, UNSEEDED)
    state = first.wait(lambda state: any(one["under_way"] for one in state["agents"]))
    index = [bool(one["under_way"]) for one in state["agents"]].index(True)
    second.wait(lambda state: [bool(one["under_way"]) for one in state["agents"]][index])
    name = ("one", "two")[index]
    agent = first.agents[name]
    first.write(f"agents/{name}", None)
    agent.is_silent = True
    try:
        hold(engines[1 - index], False)
        answers = sent.answers()
        assert [one.status for one in answers] == [200, 200] and answers[0].body == answers[1].body
        again = [
            f
            for f in engines[1 - index].peers.generator.submitted
            if f.request == answers[0].headers["X-Starling-Request"]
        ]
        assert len(again) == 1
    finally:
        agent.is_silent = False
        first.register(agent)
        for orchestrator in pair:
            orchestrator.wait(lambda state: [one["health"] for one in state["agents"]] == ["READY", "READY"])
