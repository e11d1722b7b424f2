"""The client of a whole answer leaves before it comes: what was computed of it is charged, and once."""

from __future__ import annotations

import asyncio
import http.client
import json
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pipeline.api.output_tokens import RELAY, relay_header
from stages.orchestrator.forward import Forward
from stages.orchestrator.front import CHARGED_BYTES
from stages.orchestrator.prefixes import prompt_text
from stages.orchestrator.quotas.use_record import UseRecord
from stages.orchestrator.router import Route
from stages.orchestrator.unread_answers import MAX_OF_TENANT, UnreadAnswers
from starling.cli import cli
from tests.e2e.server import poll_until
from tests.gateway.server import Server
from tests.orchestrator.agents import request
from tests.orchestrator.fleet import Fleet
from tests.orchestrator.loopback_engine import LoopbackEngine, WatchedClient, response
from tests.orchestrator.pairs import serving, wait_ready
from tests.orchestrator.streams import BODY, hold, step

PROMPT = -(-len(prompt_text(BODY)) // CHARGED_BYTES)  # tokens that an orchestrator charges for it


@pytest.fixture
def mine(fleet: Fleet, engines: list[Server]) -> Iterator[dict[str, str]]:
    """The headers of a key that has had no request."""
    wait_ready(fleet)
    environment = {"STARLING_HOME": str(fleet.home), "STARLING_CONFIG": str(fleet.home / "starling.yaml")}
    words = ["keys", "add", f"k{secrets.token_hex(4)}", "--tenant", secrets.token_hex(4)]
    done = CliRunner().invoke(cli, [*words, "--tokens-per-day", "1000000", "--json"], env=environment)
    assert done.exit_code == 0, done.output
    for engine in engines:
        hold(engine)
    yield {"Authorization": f"Bearer {json.loads(done.stdout)['key']}"}
    for engine in engines:
        hold(engine, False)


def used(fleet: Fleet) -> int:
    """Tokens of the key that was used last, as the store has them."""
    records = [msgspec.json.decode(item.value, type=UseRecord) for item in fleet.items("quotas/")]
    latest = max((one for one in records if "tokens/day" in one.counters), key=lambda one: one.at, default=None)
    return int(latest.counters["tokens/day"].used) if latest is not None else 0


def n_gaps(engine: Server) -> int:
    """Gaps between tokens that its gateway has had."""
    lines = engine.get("/metrics").body.decode().splitlines()
    found = [line for line in lines if line.startswith("starling_inter_token_seconds_count")]
    return int(float(found[0].rpartition(" ")[2])) if found else 0


def begin(fleet: Fleet, headers: dict[str, str]) -> http.client.HTTPConnection:
    connection = fleet.connect()
    connection.request("POST", "/v1/generate", json.dumps(BODY), {"Content-Type": "application/json", **headers})
    return connection


def test_an_engine_says_what_it_has_computed(fleet: Fleet, engines: list[Server], mine: dict[str, str]) -> None:
    connection = begin(fleet, mine)
    engine = engines[serving(fleet)]
    before = n_gaps(engine)
    step(engine, 5)
    ((_, sent),) = engine.peers.do(lambda: list(engine.peers.generator.running.values()))
    poll_until(lambda: n_gaps(engine) == before + sent - 1)
    connection.close()
    poll_until(lambda: used(fleet) == PROMPT + sent)
    assert not engine.peers.do(lambda: bool(engine.peers.generator.running)), "nothing more is computed"


def test_a_request_with_a_key_goes_on_and_is_charged_once(
    fleet: Fleet, engines: list[Server], mine: dict[str, str]
) -> None:
    keyed = {**mine, "Idempotency-Key": secrets.token_hex(8)}
    connection = begin(fleet, keyed)
    engine = engines[serving(fleet)]
    step(engine, 5)
    connection.close()
    for one in engines:
        hold(one, False)
    poll_until(lambda: used(fleet) == PROMPT + BODY["max_tokens"])
    again = fleet.post("/v1/generate", BODY, keyed)
    assert (again.status, again.json["usage"]["completion_tokens"]) == (200, BODY["max_tokens"])
    poll_until(lambda: used(fleet) == 2 * PROMPT + BODY["max_tokens"])
    other = fleet.post("/v1/generate", BODY, {**mine, "Idempotency-Key": secrets.token_hex(8)})
    assert other.status == 200
    poll_until(lambda: used(fleet) == 3 * PROMPT + 2 * BODY["max_tokens"])


def keyed_forward(number: int) -> Forward:
    headers = {RELAY: relay_header("t", 0), "Idempotency-Key": str(number)}
    return Forward(routed=request(f"req-{number}"), path="/v1/completions", body=b"{}", headers=headers)


async def test_beyond_the_bound_of_a_tenant_the_oldest_request_ends() -> None:
    ended = response(200, json.dumps({"id": "req-0", "cancelled": True, "output_tokens": 7}).encode())
    engine, client, charged = LoopbackEngine(*[b""] * (MAX_OF_TENANT + 1), ended), WatchedClient(), list[Any]()
    unread = UnreadAnswers(client)
    has_charged = asyncio.Event()

    def charge(tokens: int) -> None:
        charged.append(tokens)
        has_charged.set()

    async with engine.listening():
        route = Route("a", "", engine.model(), 0.0, 0, 0, "")
        for number in range(MAX_OF_TENANT + 1):
            unread.begin(route, keyed_forward(number), charge)
            while len(engine.requests) <= number:
                await asyncio.sleep(0)
        await has_charged.wait()
        asked = [f"GET /v1/requests/req-{number} HTTP/1.1" for number in range(MAX_OF_TENANT + 1)]
        assert engine.requests == [*asked, "DELETE /v1/requests/req-0?unread=true HTTP/1.1"] and charged == [7]
        await unread.close()
        await client.close()
