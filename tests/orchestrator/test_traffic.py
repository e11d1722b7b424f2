"""What an orchestrator counts of its clients' requests: tokens, tenants and the time to the first token."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from pipeline.fleet import token
from stages.orchestrator.prefixes import prompt_text
from stages.orchestrator.read_body import CHARGED_BYTES
from tests.e2e.server import poll_until
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet
from tests.orchestrator.streams import BODY, MINE, OTHER, SAID, hold, step

FIRST = "starling_time_to_first_token_seconds"
TOKENS = "starling_tenant_request_tokens_total"
PROMPT = -(-len(prompt_text(BODY)) // CHARGED_BYTES)
EVENTS = 25 + 2  # of a stream of 25 tokens


def text_of(fleet: Fleet) -> str:
    """The metrics, with tenants."""
    return fleet.get("/metrics", token.authorization(token.for_metrics(fleet.secret))).body.decode()


def read(text: str, name: str, **labels: str) -> float:
    """A value; 0 if there is none yet."""
    shown = "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"
    found = re.search(rf"^{re.escape(name + shown)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def growth(fleet: Fleet) -> Callable[..., float]:
    """Reads by how much a value has grown since this call."""
    before = text_of(fleet)
    return lambda name, **labels: read(text_of(fleet), name, **labels) - read(before, name, **labels)


def read_gauge(text: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def is_serving(engine: Server) -> bool:
    return bool(engine.peers.do(lambda: bool(engine.peers.generator.running)))


@pytest.fixture
def held(fleet: Fleet, engines: list[Server], released: None) -> Callable[..., float]:
    """Engines that compute only what a test lets them; by how much a value has grown since then."""
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    grown = growth(fleet)
    for engine in engines:
        hold(engine)
    return grown


def test_tokens_count_for_their_tenant_and_model(fleet: Fleet) -> None:
    fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
    grown = growth(fleet)
    assert fleet.post("/v1/generate", BODY, MINE).status == 200
    assert b"[DONE]" in fleet.post("/v1/completions", {**BODY, "max_tokens": 25, "stream": True}, OTHER).body
    keyed = {**OTHER, "Idempotency-Key": "traffic"}
    for _ in range(2):  # computed and counted once
        assert fleet.post("/v1/generate", {**BODY, "max_tokens": 5}, keyed).status == 200
    assert fleet.post("/v1/generate", {**BODY, "model": "no-such-model"}, MINE).status == 404
    poll_until(lambda: grown("starling_tenant_requests_total", tenant="other") == 3)  # counted when it was answered
    assert grown("starling_tenant_requests_total", tenant="mine") == 2
    assert grown(TOKENS, kind="output", tenant="mine") == 40
    assert grown(TOKENS, kind="output", tenant="other") == EVENTS + 5
    assert grown("starling_tokens_generated_total", model=MODEL) == 40 + EVENTS + 5
    assert grown(TOKENS, kind="prompt", tenant="mine") == PROMPT, "not of the one that was refused"
    assert grown(TOKENS, kind="prompt", tenant="other") == 2 * PROMPT
    text = text_of(fleet)
    assert "no-such-model" not in text, "clients do not make series"
    # Without a key for it tenants are added up.
    public = fleet.get("/metrics").body.decode()
    assert 'tenant="mine"' not in public and f'{TOKENS}{{kind="output",tenant="all"}}' in public


def test_the_time_to_the_first_token_includes_the_wait_for_it(
    fleet: Fleet, engines: list[Server], held: Callable[..., float]
) -> None:
    body = {name: value for name, value in BODY.items() if name != "prompt"}
    body |= {"stream": True, "messages": [{"role": "user", "content": SAID}]}
    with closing(fleet.connect()) as connection:
        headers = {"Content-Type": "application/json", **MINE}
        connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
        fleet.wait(lambda state: any(one["under_way"] for one in state["agents"]))
        assert read_gauge(text_of(fleet), "starling_requests_in_flight") == 1
        begun = time.monotonic()
        poll_until(lambda: any(map(is_serving, engines)))
        waited = time.monotonic() - begun
        (serving,) = filter(is_serving, engines)
        step(serving, 1)
        hold(serving, False)
        assert b"[DONE]" in connection.getresponse().read()
    poll_until(lambda: held(f"{FIRST}_count", model=MODEL) == 1)
    assert held(f"{FIRST}_sum", model=MODEL) >= waited


def test_the_prompt_of_an_answer_that_is_read_again_counts_once(
    fleet: Fleet, engines: list[Server], held: Callable[..., float]
) -> None:
    """Its client left after a part, and reads it from its beginning."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": "left", **OTHER}
    with closing(fleet.connect()) as connection:
        body = {**BODY, "max_tokens": 25, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
        poll_until(lambda: any(map(is_serving, engines)))
        (serving,) = filter(is_serving, engines)
        step(serving, 3)
        with connection.getresponse() as response:
            path = f"/v1/requests/{response.headers['X-Starling-Request']}"
            while not response.readline().startswith(b"data: "):
                assert not response.isclosed()
    poll_until(lambda: held(TOKENS, kind="output", tenant="other") > 0)
    begun = held(TOKENS, kind="output", tenant="other")
    assert held(TOKENS, kind="prompt", tenant="other") == PROMPT
    hold(serving, False)
    assert b"[DONE]" in fleet.get(path, OTHER).body
    poll_until(lambda: held(TOKENS, kind="output", tenant="other") > begun)
    assert held(TOKENS, kind="prompt", tenant="other") == PROMPT
