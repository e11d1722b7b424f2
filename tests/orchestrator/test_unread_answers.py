"""The client of a whole answer leaves before it comes: what was computed of it is charged, and once."""

from __future__ import annotations

import asyncio
import http.client
import json
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pipeline.api.output_tokens import RELAY, relay_header
from stages.orchestrator.forward import Forward
from stages.orchestrator.opening import Opening, Registered
from stages.orchestrator.prefixes import prompt_text
from stages.orchestrator.quotas.use_record import UseRecord
from stages.orchestrator.read_body import CHARGED_BYTES
from stages.orchestrator.releases import Releases
from stages.orchestrator.router import Route
from stages.orchestrator.unread_answers import MAX_OF_TENANT, UnreadAnswers
from starling.cli import cli
from tests.e2e.server import poll_until
from tests.gateway.server import Server
from tests.orchestrator.agents import request
from tests.orchestrator.fleet import Fleet
from tests.orchestrator.loopback_engine import WAIT_S, LoopbackEngine, WatchedClient, response
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
    poll_until(lambda: not engine.peers.do(lambda: bool(engine.peers.generator.running)), lambda: "more is computed")


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
    again = fleet.post("/v1/generate", BODY, keyed)
    assert (again.status, again.json["usage"]["completion_tokens"]) == (200, BODY["max_tokens"])
    poll_until(lambda: used(fleet) == 2 * PROMPT + BODY["max_tokens"])
    other = fleet.post("/v1/generate", BODY, {**mine, "Idempotency-Key": secrets.token_hex(8)})
    assert other.status == 200
    poll_until(lambda: used(fleet) == 3 * PROMPT + 2 * BODY["max_tokens"])


def forward(name: str, tenant: str = "t", *, is_keyed: bool = True) -> Forward:
    headers = {RELAY: relay_header(tenant, 0), **({"Idempotency-Key": "k"} if is_keyed else {})}
    return Forward(routed=request(name), path="/v1/completions", body=b"{}", headers=headers)


def told(**fields: Any) -> bytes:
    """An engine's answer."""
    return response(200, json.dumps({"id": "req-0", "cancelled": False, "has_reader": False, **fields}).encode())


class Unread:
    """Unread answers at one engine; `charged`: what was counted of them."""

    def __init__(self, *answers: bytes, wait_s: float = 0.05) -> None:
        self.engine, self.client = LoopbackEngine(*answers), WatchedClient()
        self.unread = UnreadAnswers(self.client, wait_s)
        self.charged: list[int] = []

    async def __aenter__(self) -> Unread:
        self._listening = self.engine.listening()
        await self._listening.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.unread.close()
        await self.client.close()
        await self._listening.__aexit__(None, None, None)

    @property
    def route(self) -> Route:
        return Route("a", "", self.engine.model(), 0.0, 0, 0, "")

    def begin(self, sent: Forward) -> bool:
        return self.unread.begin(self.route, sent, self.charged.append)

    async def settled(self) -> list[str]:
        """What the engine was asked when all requests are settled."""
        async with asyncio.timeout(WAIT_S):
            while self.unread.count:
                await asyncio.sleep(0.001)
        return self.engine.requests


async def test_attempts_that_leave_take_no_places_of_readers() -> None:
    """An engine has eight for a request: however often its client leaves, the engine is asked once, and at the end."""
    async with Unread(told(cancelled=True, output_tokens=7)) as world:
        for _ in range(9):
            assert world.begin(forward("req-0"))
            assert not world.engine.requests
        assert await world.settled() == ["DELETE /v1/requests/req-0?unread=true&after_s=0 HTTP/1.1"]
        assert world.charged == [7]


async def test_the_body_of_a_request_does_not_wait_with_it() -> None:
    """A tenant may have hundreds that wait for a minute."""
    async with Unread(*[told()] * 2, wait_s=WAIT_S) as world:
        for _ in range(2):  # the second departure replaces what the first one has left
            assert world.begin(forward("req-0"))
            assert world.unread._unread["req-0"].forward.body == b""


@pytest.mark.parametrize(
    ("is_keyed", "answer", "charged"),
    [
        (True, told(output_tokens=7), [7]),
        (True, told(output_tokens=7, has_reader=True), []),
        (True, response(404), []),
        (False, told(output_tokens=7, has_reader=True), [7]),
        (False, response(200, b"[]"), []),
    ],
    ids=["complete and unread", "another reader", "read", "the connection has not closed yet", "no answer of engines"],
)
async def test_who_delivers_an_answer_charges_it(is_keyed: bool, answer: bytes, charged: list[int]) -> None:
    async with Unread(answer) as world:
        assert world.begin(forward("req-0", is_keyed=is_keyed))
        await world.settled()
        assert world.charged == charged


async def test_an_orderly_stop_charges_what_is_complete() -> None:
    async with Unread(told(output_tokens=7), wait_s=WAIT_S) as world:
        assert world.begin(forward("req-0"))
        await world.unread.close()
        assert world.engine.requests == [f"DELETE /v1/requests/req-0?unread=true&after_s={WAIT_S - 5:g} HTTP/1.1"]
        assert world.charged == [7]


async def test_beyond_the_bound_of_a_tenant_requests_are_released() -> None:
    async with Unread(*[told()] * (MAX_OF_TENANT + 2), response(200), wait_s=WAIT_S) as world:
        for number in range(MAX_OF_TENANT):
            assert world.begin(forward(f"req-{number}"))
        assert not world.begin(forward("req-more")), "its engine ends it"
        assert world.begin(forward("req-0")) and world.begin(forward("req-other", "u"))
        releases = Releases(world.client)
        more = forward("req-last", is_keyed=False)
        on_unread = partial(world.unread.begin, forward=more, charge=world.charged.append)
        opening: Registered[Opening]
        opening = Registered(
            {},
            releases,
            world.route,
            more,
            Opening(asyncio.get_running_loop().create_future()),
            lambda one: None,
            on_unread,
        )
        with pytest.raises(ConnectionError), opening:
            raise ConnectionError
        async with asyncio.timeout(WAIT_S):
            while not world.engine.requests:
                await asyncio.sleep(0)
        assert world.engine.requests == ["DELETE /v1/requests/req-last?unread=true HTTP/1.1"]
        await releases.close()
