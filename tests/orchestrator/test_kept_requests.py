"""What an orchestrator keeps of requests that their clients may read again, and what a reused key does to it."""

from __future__ import annotations

import asyncio
import json

import pytest

from pipeline.api.error_response import error_response
from pipeline.api.idempotency_key import other_body
from pipeline.api.output_tokens import RELAY, relay_header
from pipeline.errors import Conflict
from stages.orchestrator import kept_requests
from stages.orchestrator.event_cutter import tokens_before
from stages.orchestrator.forward import Forward, Refusal
from stages.orchestrator.kept_requests import KEPT_S, KeptRequests
from stages.orchestrator.output_record import OutputRecord
from tests.orchestrator.agents import engine, request
from tests.orchestrator.loopback_engine import WAIT_S, Clock, LoopbackEngine, keyed, relaying, response
from tests.orchestrator.test_text_relay import Received

FIRST, OTHER = b"1" * 32, b"2" * 32
REFUSED = response(400)


def conflict(*, is_anthropic: bool = False) -> bytes:
    """What an engine answers to a key that it has had with another body."""
    shown = error_response(other_body("hash of the key"), is_anthropic=is_anthropic)
    return response(shown.status, shown.body)


async def until_asked(engine: LoopbackEngine, times: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(engine.requests) < times:
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_key_with_another_body_leaves_the_first_request_as_it_was(is_stream: bool) -> None:
    engine = LoopbackEngine(b"", conflict())
    async with relaying(engine) as world:
        relay, clock = world.relay, world.clock
        first = asyncio.ensure_future(relay.whole(keyed(FIRST)))
        await until_asked(engine, 1)
        other = keyed(OTHER, is_stream=is_stream)
        with pytest.raises(Refusal) as refused:
            await (relay.stream(other, Received()) if is_stream else relay.whole(other))
        assert refused.value.is_of_key
        clock.now += KEPT_S + 1
        relay.kept.expire()
        found = relay.kept.find("req-1")
        assert found is not None and found[0].digest == FIRST
        engine.transports[0].write(response(200, b"answer"))
        assert (await first)[2] == b"answer"
        clock.now += KEPT_S - 1
        relay.kept.expire()
        assert relay.kept.find("req-1") == found
        clock.now += 2
        relay.kept.expire()
        assert relay.kept.find("req-1") is None and relay.kept.nbytes == 0


async def test_a_repetition_that_ends_first_leaves_the_first_request_as_it_was() -> None:
    engine = LoopbackEngine(b"", response(200))
    async with relaying(engine) as world:
        relay, clock = world.relay, world.clock
        first = asyncio.ensure_future(relay.whole(keyed(FIRST)))
        await until_asked(engine, 1)
        await relay.whole(keyed(FIRST))
        clock.now += KEPT_S + 1
        relay.kept.expire()
        assert relay.kept.find("req-1") is not None
        engine.transports[0].write(response(200))
        await first
        clock.now += KEPT_S + 1
        relay.kept.expire()
        assert relay.kept.find("req-1") is None


async def test_a_key_is_refused_while_its_request_is_under_way_with_another_body() -> None:
    """Before any engine is asked: another one might not know the key."""
    engine = LoopbackEngine(b"")
    async with relaying(engine) as world:
        kept = world.relay.kept
        first = asyncio.ensure_future(world.relay.whole(keyed(FIRST)))
        await until_asked(engine, 1)
        kept.check_key("req-1", "mine", FIRST)
        kept.check_key("req-2", "mine", OTHER)
        with pytest.raises(Conflict, match="'mine' was sent with another body"):
            kept.check_key("req-1", "mine", OTHER)
        engine.transports[0].write(response(200))
        await first
        kept.check_key("req-1", "mine", OTHER)  # it may have failed, so that its engine decides


async def test_a_key_whose_request_was_refused_is_that_of_the_next_body() -> None:
    """What is read again is the request that an engine has accepted."""
    engine = LoopbackEngine(REFUSED, REFUSED, response(200, b"answer"))
    async with relaying(engine) as world:
        relay = world.relay
        for digest in (FIRST, OTHER):
            with pytest.raises(Refusal, match="400"):
                await relay.whole(keyed(digest))
        await relay.whole(keyed(OTHER))
        found = relay.kept.find("req-1")
        assert found is not None and found[0].body == keyed(OTHER).body
        assert relay.kept.nbytes == len(found[0].body) and len(relay.kept) == 1


@pytest.mark.parametrize("has_expired", [False, True])
async def test_a_corrected_body_is_read_again_before_its_head_comes(has_expired: bool) -> None:
    engine = LoopbackEngine(REFUSED, b"")
    async with relaying(engine) as world:
        relay, clock = world.relay, world.clock
        with pytest.raises(Refusal, match="400"):
            await relay.whole(keyed(FIRST))
        corrected = asyncio.ensure_future(relay.whole(keyed(OTHER)))
        await until_asked(engine, 2)
        found = relay.kept.find("req-1")
        assert found is not None and found[0].digest == OTHER
        with pytest.raises(Conflict):
            relay.kept.check_key("req-1", "mine", b"3" * 32)
        if has_expired:
            clock.now += KEPT_S + 1
            relay.kept.expire()
        engine.transports[1].write(response(200, b"answer"))
        assert (await corrected)[2] == b"answer"
        assert relay.kept.find("req-1") == found
        assert relay.kept.nbytes == len(found[0].body) and len(relay.kept) == 1
        clock.now += KEPT_S + 1
        relay.kept.expire()
        assert relay.kept.nbytes == 0 and len(relay.kept) == 0


async def test_a_corrected_body_that_is_refused_leaves_the_first_request() -> None:
    engine = LoopbackEngine(REFUSED, REFUSED)
    async with relaying(engine) as world:
        for digest in (FIRST, OTHER):
            with pytest.raises(Refusal, match="400"):
                await world.relay.whole(keyed(digest))
        found = world.relay.kept.find("req-1")
        assert found is not None and found[0].digest == FIRST
        assert world.relay.kept.nbytes == len(found[0].body) and len(world.relay.kept) == 1


@pytest.mark.parametrize("is_anthropic", [False, True])
async def test_an_answer_of_another_body_is_not_read_with_a_key(is_anthropic: bool) -> None:
    """A request that its engine may have from an earlier attempt: the engine's 409 is about the key."""
    engine = LoopbackEngine(conflict(is_anthropic=is_anthropic), response(200, b"the answer to another body"))
    async with relaying(engine) as world:
        with pytest.raises(Refusal) as refused:
            await world.relay.whole(keyed(OTHER, was_sent=True))
        assert refused.value.is_of_key and "another body" in json.loads(refused.value.body)["error"]["message"]
        assert len(engine.requests) == 1


def of_tenant(tenant: str, number: int, body: bytes = b"") -> Forward:
    """A request of a tenant."""
    headers = {RELAY: relay_header(tenant, number % 3)}
    return Forward(routed=request(f"req-{tenant}-{number}"), path="/v1/completions", body=body, headers=headers)


@pytest.mark.parametrize("bound", ["KEPT_BYTES", "KEPT_COUNT"])
def test_the_tenant_that_holds_most_loses_its_oldest_request(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_requests, bound, 60)
    body = bytes(10) if bound == "KEPT_BYTES" else b""
    n_kept = 6 if body else 60
    kept = KeptRequests(Clock())
    sent = [of_tenant("a", number, body) for number in range(2)]  # the oldest ones
    sent += [of_tenant("b", number, body) for number in range(2 * n_kept)]
    for one in sent:
        kept.put(one, "agent", engine())
    assert len(kept) == n_kept and kept.nbytes == n_kept * len(body)
    mine = n_kept - 2
    assert [one for one in sent if kept.find(one.id)] == [*sent[:2], *sent[-mine:]]
    for one in sent:
        kept.forget(one.id)
    assert len(kept) == kept.nbytes == 0 and not kept._names and not kept._bytes_of


def test_the_tokens_of_a_request_count_for_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_requests, "KEPT_BYTES", 60)
    kept = KeptRequests(Clock())
    sent = [of_tenant("a", 0, bytes(20)), of_tenant("b", 0, bytes(10)), of_tenant("b", 1, bytes(10))]
    for one in sent:
        kept.put(one, "agent", engine())
    record = OutputRecord()
    record.add(b"x" * 28)  # a comment with its end
    kept.left(sent[2], record)
    assert [one for one in sent if kept.find(one.id)] == [sent[0], sent[2]] and kept.nbytes == 60


async def test_tokens_that_a_client_gets_again_are_charged_once() -> None:
    async with relaying(LoopbackEngine(response(200))) as world:
        kept, first = world.relay.kept, keyed(FIRST)
        await world.relay.whole(first)
        again = keyed(FIRST, last_id="req-1:40.20f")
        assert tokens_before(again.last_id) == 60
        assert kept.uncharged(first, 80, is_all=True) == 80  # of which 60 arrived
        assert kept.uncharged(again, 40, is_all=False, had=60) == 20
        assert kept.uncharged(again, 40, is_all=False, had=60) == 0
        assert kept.uncharged(first, 100, is_all=True) == 0
        assert kept.uncharged(keyed(FIRST, last_id="req-1:100"), 30, is_all=False, had=100) == 30


@pytest.mark.parametrize(("last_id", "tokens"), [("", 0), ("req-1", 0), ("req-1:17.9", 26), ("req-1:17d-3.x", 17)])
def test_tokens_before_an_event(last_id: str, tokens: int) -> None:
    assert tokens_before(last_id) == tokens
