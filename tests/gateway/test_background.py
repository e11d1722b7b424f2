"""Responses in the background: how many, and one that is too large to be stored."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from pipeline.api.requests.generation_request import GenerationRequest, ResponseFields
from pipeline.api.response_object import response_id_of
from pipeline.config.schema import StoredResponsesConfig
from pipeline.errors import NotFound, Overloaded, StarlingError
from stages.gateway.endpoints.response_events import ResponsesFormatter
from stages.gateway.http import response_endpoints
from stages.gateway.http.block_stream import BlockStream
from stages.gateway.http.context import CALLER, PRINCIPAL, SERVICE
from stages.gateway.requests.event_cursor import ChoiceCursor, EventCursor
from stages.gateway.requests.journal import Journal, RequestEnd, parse
from stages.gateway.requests.readers import CatchUpWaiter, FanOutSink, Readers
from stages.gateway.requests.recovery import Recovery
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.responses import MAX_IN_BACKGROUND, Claim, Responses
from stages.gateway.requests.state import Outcome
from stages.gateway.requests.state_writer import StateWriter
from stages.gateway.requests.stored_responses import StoredResponse, StoredResponses
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.service import Service
from tests.gateway.on_demand import ANN, Gateway
from tests.gateway.peers import MODEL
from tests.gateway.request_states import make_state
from tests.gateway.response_bodies import parse_events

MIB = 1 << 20
IN_ALL = 2 * MAX_IN_BACKGROUND


def generation(**fields: object) -> GenerationRequest:
    response = ResponseFields(in_background=True, **fields)  # type: ignore[arg-type]
    return GenerationRequest(endpoint="responses", model=MODEL, response=response)


@pytest.fixture
def responses() -> Iterator[Responses]:
    store = StoredResponses(None, StoredResponsesConfig(tenant_mb=1), lambda: 1000.0)
    yield Responses(Relay(lambda frame: True, lambda: 0.0), store, IN_ALL)
    store.close(timeout_s=60)


def claim(responses: Responses, count: int, tenant: str = "a") -> list[Claim]:
    return [responses.claim(generation(), tenant) for _ in range(count)]


def test_requests_that_are_being_admitted_count(responses: Responses) -> None:
    claims = claim(responses, MAX_IN_BACKGROUND)
    with pytest.raises(Overloaded, match="16 requests in the background"):
        claim(responses, 1)
    claim(responses, 1, "b")
    claims[0].release()
    claims[0].release()
    claim(responses, 1)
    with pytest.raises(Overloaded):
        claim(responses, 1)


def test_requests_that_wait_for_their_model_after_a_restart_count(responses: Responses) -> None:
    found = [make_state(f"req-{number}", generation(), tenant="a") for number in range(MAX_IN_BACKGROUND)]
    responses.waiting = lambda: found
    with pytest.raises(Overloaded, match="the most of a tenant"):
        claim(responses, 1)
    found.pop()
    claim(responses, 1)


def test_all_tenants_together_have_a_bound(responses: Responses) -> None:
    claims = [claim(responses, 1, f"tenant {number}")[0] for number in range(IN_ALL - IN_ALL // 8)]
    with pytest.raises(Overloaded, match=r"server\.max_concurrent_requests"):
        claim(responses, 1, "tenant 0")  # the rest is for tenants that have none
    claims += [claim(responses, 1, f"other {number}")[0] for number in range(IN_ALL // 8)]
    with pytest.raises(Overloaded, match=r"server\.max_concurrent_requests"):
        claim(responses, 1)
    responses.claim(GenerationRequest(endpoint="responses", model=MODEL, response=ResponseFields()), "a")
    claims[0].release()
    claim(responses, 1)


async def test_one_that_is_too_large_to_be_stored_has_failed_and_cannot_be_continued(responses: Responses) -> None:
    large = [{"role": "user", "content": "x" * MIB}]
    request = make_state("req-1", generation(conversation=large), tenant="a")
    relay = responses._relay
    relay._on_end = lambda request: responses.ended(request, lambda: None)
    relay.open(request)
    assert responses.commit(request)
    while relay.requests:  # the store's thread answers
        await asyncio.sleep(0)
    while (body := await responses.store.body("a", "resp_1")) is None:
        await asyncio.sleep(0)
    shown = msgspec.json.decode(body)
    assert shown["status"] == "failed"
    assert "stored_responses.tenant_mb" in shown["error"]["message"]
    with pytest.raises(NotFound):
        await responses.join(generation(previous="resp_1", conversation=[{"role": "user", "content": "y"}]), "a")
    with pytest.raises(StarlingError, match="tenant_mb") as refused:
        await responses.join(generation(conversation=large), "a")
    assert refused.value.code == "INSUFFICIENT_RESOURCES"


async def test_the_end_of_one_that_failed_is_journaled_when_its_response_is_stored(
    responses: Responses, tmp_path: Path
) -> None:
    def now() -> float:
        return 1000.0

    journal, relay = Journal(tmp_path, MIB, now), responses._relay
    writer = StateWriter(journal)

    async def ends() -> list[str]:
        await writer.drop("req-unknown")  # after all that was written before
        return [value.id for _, value, _ in parse(journal.path.read_bytes()) if isinstance(value, RequestEnd)]

    recovery = Recovery(relay, Readers(relay, now), writer, now, now, timeout_s=300)
    recovery.store_end = responses.ended
    relay._on_end = recovery.record_end
    request = make_state("req-1", generation(), tenant="a")
    recovery.record_start(request.spec)
    relay.open(request)
    is_disk_free = threading.Event()
    responses.store.calls.add(is_disk_free.wait)
    try:
        relay.fail(request, StarlingError("TIMEOUT", "it took too long"))
        assert await ends() == []
    finally:
        is_disk_free.set()
    assert b"it took too long" in (await responses.store.body("a", "resp_1") or b"")
    assert await ends() == ["req-1"]
    writer.close()


async def cancel(service: Service, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The answer to the request that cancels the response of the request `name`."""

    async def send_body(request: object, body: bytes) -> bytes:
        return body

    monkeypatch.setattr(response_endpoints, "send_body", send_body)
    app = web.Application()
    app[SERVICE] = service
    request = make_mocked_request("POST", "/", match_info={"id": response_id_of(name)}, app=app)
    request[CALLER], request[PRINCIPAL] = ANN, "ann"
    answer: Any = await response_endpoints.cancel_response(request)
    return msgspec.json.decode(answer, type=dict[str, Any])


async def test_a_response_that_is_being_stored_is_not_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items are added to its conversation by then: it has ended."""
    gateway, may_store = Gateway(tmp_path), threading.Event()
    service = gateway.service
    (version,) = gateway.catalog.versions("a")
    name = "req-" + "1" * 24
    state = make_state(name, generation(), tenant=ANN.tenant, model="a", version=version.id)
    state.sink = FanOutSink()
    service.relay.open(state)
    service.responses.store.calls.add(may_store.wait)
    gateway.end(state)
    assert state.outcome is Outcome.OPEN
    cancelling = asyncio.ensure_future(cancel(service, name, monkeypatch))
    await asyncio.sleep(0)
    may_store.set()
    shown = await cancelling
    assert shown["status"] == "incomplete"
    stored = await service.responses.store.body(ANN.tenant, response_id_of(name))
    assert stored is not None and msgspec.json.decode(stored) == shown
    service.responses.store.close(timeout_s=60)


@pytest.mark.parametrize("is_disk_full", [False, True])
async def test_a_request_that_fails_while_its_response_is_being_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_disk_full: bool
) -> None:
    """The items are added to the conversation in the same transaction: the response stays what they say."""
    gateway, may_store = Gateway(tmp_path), threading.Event()
    service, store = gateway.service, gateway.service.responses.store
    (version,) = gateway.catalog.versions("a")
    name = "req-" + "1" * 24
    state = make_state(name, generation(), tenant=ANN.tenant, model="a", version=version.id)
    state.sink = FanOutSink()
    service.relay.open(state)
    store.calls.add(may_store.wait)
    gateway.end(state)
    really_put, n_put = store._put, itertools.count(1)

    def put(response: StoredResponse) -> None:
        if next(n_put) == 1 and is_disk_full:
            raise OSError("no space left")
        really_put(response)

    monkeypatch.setattr(store, "_put", put)
    service.relay.fail(state, StarlingError("CONFLICT", "the request was cancelled by its client"))
    may_store.set()
    for _ in range(2):  # that of the failure is put when the first one has failed
        await store.flushed()
        await asyncio.sleep(0)
    stored = msgspec.json.decode(await store.body(ANN.tenant, response_id_of(name)) or b"{}")
    assert stored["status"] == ("failed" if is_disk_full else "incomplete")
    assert not service.responses._storing
    store.close(timeout_s=60)


async def test_the_readers_of_a_response_that_is_cancelled_get_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(tmp_path)
    service = gateway.service
    (version,) = gateway.catalog.versions("a")
    name = "req-" + "1" * 24
    state = make_state(name, generation(), tenant=ANN.tenant, model="a", version=version.id)
    stream = BlockStream(state, ResponsesFormatter(state, TokenBytes()), lambda reason: None)
    stream.started()
    waiter = CatchUpWaiter(state, EventCursor(name, (ChoiceCursor(9),)))
    state.sink = FanOutSink(stream, waiter)
    service.relay.open(state)
    shown = await cancel(service, name, monkeypatch)
    assert (shown["status"], shown["error"]) == ("cancelled", None)
    stored = await service.responses.store.body(ANN.tenant, response_id_of(name))
    assert stored is not None and msgspec.json.decode(stored) == shown
    assert stream.over.done() and waiter.over.done()
    *before, event = parse_events(b"".join(stream._pending))
    assert [one.name for one in before] == ["response.created", "response.in_progress"]
    assert event.name == "response.failed"
    assert "cancelled by its client" in event.data["response"]["error"]["message"]
    service.responses.store.close(timeout_s=60)
