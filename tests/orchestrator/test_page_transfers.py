"""When the KV pages of a stream that moves are sent, and when they are computed: no failure stops the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pipeline.api.output_tokens import RELAY, relay_header
from pipeline.errors import (
    InvalidRequest,
    ModelUnavailable,
    NotFound,
    Overloaded,
    ResourceError,
    StarlingError,
    StorageUnavailable,
    TooLarge,
)
from pipeline.fleet.bodies import GivePagesRequest, GivePagesResponse, TakePagesRequest, TakePagesResponse
from pipeline.fleet.records import AgentRecord
from stages.orchestrator import page_transfers
from stages.orchestrator.decisions import Choice, DecisionLog, PageTransfer
from stages.orchestrator.forward import Forward
from stages.orchestrator.page_transfers import FIXED_S, MAX_OF_TENANT, MOST_S, PAUSE_S, SPEED_S, PageTransfers
from stages.orchestrator.rates import Rates
from stages.orchestrator.router import Route
from tests.orchestrator.agents import MODEL, engine, heartbeat, request

NAMES = ("one", "two")
SLOW = 0.001  # s for a byte of a prompt


class World:
    """Two agents, whose answers a test sets."""

    def __init__(self) -> None:
        self.details = {
            name: heartbeat(name, engine(publishes_prefixes=True), exchanges_kv_pages=True) for name in NAMES
        }
        self.records = {name: AgentRecord(agent_id=name, url=f"http://{name}", incarnation="1") for name in NAMES}
        self.calls: list[tuple[str, str, Any, float]] = []
        self.bodies: list[dict[str, Any]] = []
        self.while_taking: Callable[[int, float], None] | None = None  # (timeout_ms, timeout_s)
        self.given: GivePagesResponse | StarlingError | bytes = GivePagesResponse(
            ticket="t" * 32, pages=60, bytes=20_000_000
        )
        self.taken: TakePagesResponse | StarlingError | bytes = TakePagesResponse(pages=60, seconds=0.25)
        self.now = 0.0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.events: list[str] = []
        self.rates = Rates()
        for name in NAMES:
            self.rates.measured(name, MODEL).prefill_s_per_byte.value = SLOW
        self.decisions = DecisionLog()
        self.transfers = PageTransfers(self, self, self.rates, self.decisions, self.note, lambda: self.now)

    def find(self, agent_id: str) -> AgentRecord | None:
        return self.records.get(agent_id)

    def answer_of(self, agent_id: str) -> Any:
        return self.details.get(agent_id)

    def note(self, kind: str, **fields: str) -> None:
        self.events.append(f"{kind} {fields['agent']}: {fields['text']}")

    async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
        kind: Any = GivePagesRequest if path == "/give_pages" else TakePagesRequest
        asked = msgspec.json.decode(body, type=kind)
        self.calls.append((record.agent_id, path, asked, timeout_s))
        self.bodies.append(msgspec.json.decode(body))
        await self.may_answer.wait()
        if self.while_taking is not None and path == "/take_pages":
            self.while_taking(asked.timeout_ms, timeout_s)
        answer = self.given if path == "/give_pages" else self.taken
        if isinstance(answer, StarlingError):
            raise answer
        return answer if isinstance(answer, bytes) else msgspec.json.encode(answer)

    async def bring(
        self, new_bytes: int = 4000, name: str = "req-1", tenant: str = "", prompt_bytes: int = 0
    ) -> PageTransfer | None:
        forward = Forward(
            routed=request(name, prompt_bytes=prompt_bytes or new_bytes),
            path="/v1/completions",
            body=b"",
            headers={RELAY: relay_header(tenant, 0)},
        )
        choice = Choice(agent_id="two", at=0.0, cause="warm", predicted_s=0.0, scores=())
        self.decisions.add(name, MODEL, choice)
        route = Route("two", "http://two", engine(), 0.0, 0, new_bytes, "")
        await self.transfers.bring("one", route, forward, "req-copy", 100)
        decision = self.decisions.find(name)
        assert decision is not None
        return decision.transfers[-1] if decision.transfers else None


async def test_pages_are_sent_where_that_is_faster() -> None:
    world = World()
    made = await world.bring(tenant="mine")
    assert made is not None
    assert (made.outcome, made.pages, made.bytes) == ("sent", 60, 20_000_000)
    assert made.computing_s == pytest.approx(4400 * SLOW)  # with 100 tokens of output
    assert made.sending_s == pytest.approx(FIXED_S + 0.1)
    (one, give, ask, _), (two, take, told, timeout_s) = world.calls
    assert (one, give, two, take) == ("one", "/give_pages", "two", "/take_pages")
    assert (ask.request_id, ask.agent_id) == ("req-1", "two")
    assert (told.request_id, told.source.agent_id, told.bytes, told.tenant) == ("req-copy", "one", 20_000_000, "mine")
    assert 1000 * timeout_s > told.timeout_ms > 0 and timeout_s < MOST_S + 2
    assert world.transfers.outcomes == {"sent": 1} and world.transfers.nbytes == 20_000_000
    assert world.events == ["kv-pages two: 60 pages, 20000000 bytes from one: sent"]
    # The speed of the link was measured: 20 MB in 0.225 s.
    again = await world.bring()
    assert again is not None and again.sending_s > made.sending_s
    world.transfers.keep_only({"two"})
    again = await world.bring()
    assert again is not None and again.sending_s == made.sending_s


async def test_pages_are_computed_where_that_is_faster() -> None:
    world = World()
    world.rates.measured("two", MODEL).prefill_s_per_byte.value = 1e-5
    made = await world.bring(400)
    assert made is not None and made.outcome == "computed"
    assert not world.calls  # a few tokens need no question
    world.rates.measured("two", MODEL).prefill_s_per_byte.value = 0.12 / 4400
    made = await world.bring()
    assert made is not None and made.outcome == "computed"
    assert [path for _, path, _, _ in world.calls] == ["/give_pages"]
    assert world.transfers.outcomes == {"computed": 2} and not world.events


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (ModelUnavailable("it has not answered"), None),
        (b"nonsense", None),
        (b'{"ticket": 1}', None),
        (None, StorageUnavailable("the connection has ended")),
        (None, InvalidRequest("these pages are of another version")),
        (None, b""),
    ],
)
async def test_what_fails_is_computed(given: Any, taken: Any) -> None:
    world = World()
    world.given, world.taken = given or world.given, world.taken if taken is None else taken
    made = await world.bring()
    assert made is not None and made.outcome == "failed" and made.reason
    assert world.transfers.nbytes == 0 and len(world.events) == 1
    world.given, world.taken = World().given, World().taken
    # Further streams do not wait for the same failure.
    n_calls = len(world.calls)
    made = await world.bring(tenant="other")
    assert made is not None and made.outcome == "computed" and "failed" in made.reason
    assert len(world.calls) == n_calls
    world.now += PAUSE_S
    world.transfers.keep_only(set(NAMES))
    made = await world.bring()
    assert made is not None and made.outcome == "sent"


@pytest.mark.parametrize("at", ["give", "take"])
@pytest.mark.parametrize("kind", [NotFound, Overloaded, TooLarge, ResourceError])
async def test_what_concerns_one_transfer_stops_no_other_one(at: str, kind: type[StarlingError]) -> None:
    """A tenant that asks for too much takes the pages from no other tenant."""
    world = World()
    if at == "give":
        world.given = kind("this one cannot be")
    else:
        world.taken = kind("this one cannot be")
    made = await world.bring(tenant="mine")
    assert made is not None and (made.outcome, made.reason) == ("failed", "this one cannot be")
    world.given, world.taken = World().given, World().taken
    made = await world.bring(tenant="other")
    assert made is not None and made.outcome == "sent"


@pytest.mark.parametrize("who", ["target", "call"])
async def test_the_speed_of_a_link_is_learnt_from_transfers_that_take_too_long(who: str) -> None:
    world = World()
    world.rates.measured("two", MODEL).prefill_s_per_byte.value = SLOW

    def too_late(timeout_ms: int, timeout_s: float) -> None:
        world.now += timeout_ms / 1000 if who == "target" else timeout_s

    world.while_taking = too_late
    world.taken = StorageUnavailable("the KV pages have not come")
    made = await world.bring()
    assert made is not None and made.outcome == "failed"
    world.while_taking, world.taken = None, World().taken
    world.now += PAUSE_S
    made = await world.bring()
    # 20 MB took more than 5 s, computing 4.4 s: it is not tried again soon, and it is tried again later.
    assert made is not None and made.outcome == "computed" and made.sending_s >= 5.0
    world.now += SPEED_S
    world.transfers.keep_only(set(NAMES))
    made = await world.bring()
    assert made is not None and made.outcome == "sent"


async def test_a_transfer_that_fails_early_says_nothing_of_the_speed() -> None:
    world = World()
    world.taken = StorageUnavailable("the connection has ended")
    await world.bring()
    world.taken = World().taken
    world.now += PAUSE_S
    made = await world.bring()
    assert made is not None and made.sending_s == pytest.approx(FIXED_S + 0.1)


@pytest.mark.parametrize(
    ("n_pages", "new_bytes", "saved_bytes"),
    [
        (60, 4000, 4400),
        (30, 4000, 2200),  # half of prompt and output
        (30, 3000, 1200),  # of which the other agent has a thousand bytes
        (6, 3000, 0),  # it has all that would come
    ],
)
async def test_a_part_of_the_pages_is_compared_with_computing_that_part(
    n_pages: int, new_bytes: int, saved_bytes: int
) -> None:
    world = World()
    world.given = GivePagesResponse(ticket="t" * 32, pages=n_pages, bytes=1_000_000, of_pages=60)
    made = await world.bring(new_bytes, prompt_bytes=4000)
    assert made is not None and made.computing_s == pytest.approx(saved_bytes * SLOW)
    assert made.outcome == ("sent" if saved_bytes else "computed")


async def test_a_few_pages_of_many_are_not_sent() -> None:
    world = World()
    # Sending takes 0.15 s, computing all of it 0.44 s, and what the pages save 0.11 s.
    world.rates.measured("two", MODEL).prefill_s_per_byte.value = SLOW / 10
    world.given = GivePagesResponse(ticket="t" * 32, pages=15, bytes=20_000_000, of_pages=60)
    made = await world.bring(prompt_bytes=4000)
    assert made is not None and made.outcome == "computed"
    assert [path for _, path, _, _ in world.calls] == ["/give_pages"]


async def test_no_more_is_given_than_the_other_agent_takes() -> None:
    world = World()
    for name, most in (("one", 9_000_000), ("two", 5_000_000)):
        world.details[name] = heartbeat(
            name, engine(publishes_prefixes=True), exchanges_kv_pages=True, kv_page_bytes=most
        )
    await world.bring()
    assert world.calls[0][2].max_bytes == 5_000_000
    # An agent of an older release does not know the field, and gives too much.
    world = World()
    world.details["two"] = heartbeat(
        "two", engine(publishes_prefixes=True), exchanges_kv_pages=True, kv_page_bytes=5_000_000
    )
    made = await world.bring()
    assert "max_bytes" not in world.bodies[0]
    assert made is not None and made.outcome == "computed" and "5000000" in made.reason
    assert len(world.calls) == 1


@pytest.mark.parametrize(("sizes", "is_asked"), [((32, 32), True), ((16, 32), False), ((0, 32), True), ((16, 0), True)])
async def test_engines_with_pages_of_other_sizes_exchange_none(sizes: tuple[int, int], is_asked: bool) -> None:
    """0: an agent of an older release does not say."""
    world = World()
    for name, tokens in zip(NAMES, sizes):
        running = engine(publishes_prefixes=True, page_tokens=tokens)
        world.details[name] = heartbeat(name, running, exchanges_kv_pages=True)
    made = await world.bring()
    assert bool(world.calls) == is_asked
    assert (made is not None) == is_asked


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lacks", ["release", "engine", "model", "answer", "record"])
async def test_agents_that_cannot_exchange_pages_are_not_asked(name: str, lacks: str) -> None:
    world = World()
    if lacks == "record":
        del world.records[name]
    elif lacks == "answer":
        del world.details[name]
    else:
        able = lacks != "release"
        models = () if lacks == "model" else (engine(publishes_prefixes=lacks != "engine"),)
        world.details[name] = heartbeat(name, *models, exchanges_kv_pages=able)
    assert await world.bring() is None
    assert not world.calls


async def test_a_tenant_has_few_transfers_at_once_and_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfers, "MOST_S", 60.0)  # of a turn, on a machine that may be loaded
    world = World()
    world.rates.measured("two", MODEL).prefill_s_per_byte.value = 1.0
    world.may_answer.clear()
    running = [asyncio.create_task(world.bring(name=f"req-{n}", tenant="mine")) for n in range(MAX_OF_TENANT)]
    while len(world.calls) < MAX_OF_TENANT:
        await asyncio.sleep(0)
    waiting = asyncio.create_task(world.bring(name="req-more", tenant="mine"))
    leaving = asyncio.create_task(world.bring(name="req-left", tenant="mine"))
    other = asyncio.create_task(world.bring(name="req-other", tenant="other"))
    while len(world.calls) == MAX_OF_TENANT:
        await asyncio.sleep(0)
    assert [ask.request_id for _, _, ask, _ in world.calls] == ["req-0", "req-1", "req-other"]
    running[0].cancel()  # their streams have ended
    leaving.cancel()
    world.may_answer.set()
    found = await asyncio.gather(*running, waiting, leaving, other, return_exceptions=True)
    assert [isinstance(one, PageTransfer) for one in found] == [False, True, True, False, True]
    assert world.transfers.outcomes == {"sent": 3}
    for n in range(MAX_OF_TENANT):
        made = await world.bring(name=f"req-again-{n}", tenant="mine")
        assert made is not None and made.outcome == "sent"


async def test_a_stream_waits_for_its_turn_no_longer_than_computing_takes() -> None:
    world = World()
    world.rates.measured("two", MODEL).prefill_s_per_byte.value = 0.06 / 4400
    world.may_answer.clear()
    running = [asyncio.create_task(world.bring(name=f"req-{n}", tenant="mine")) for n in range(MAX_OF_TENANT)]
    while len(world.calls) < MAX_OF_TENANT:
        await asyncio.sleep(0)
    made = await world.bring(name="req-more", tenant="mine")
    assert made is not None and made.outcome == "computed" and "tenant" in made.reason
    world.may_answer.set()
    await asyncio.gather(*running)
