"""Stored responses while their file does not answer: what is refused, and what waits."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout
from aiohttp.test_utils import TestServer

from pipeline.api.item_pages import Page
from pipeline.config.schema import StoredResponsesConfig
from pipeline.errors import StarlingError
from stages.gateway.http.app import make_app
from stages.gateway.requests import stored_responses
from stages.gateway.requests.stored_responses import StoredResponse, StoredResponses
from tests.gateway.on_demand import Gateway, with_gateway
from tests.gateway.test_failed_streams import PATH

BODY = {"model": "b", "input": "Hi"}


NORMAL_BOUNDS = stored_responses.call_bounds


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "call_bounds", lambda max_requests: (4, 2))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoredResponses]:
    found = StoredResponses(tmp_path / "responses.db", StoredResponsesConfig(), lambda: 1000.0)
    yield found
    found.close(timeout_s=60)


def put(store: StoredResponses, tenant: str, name: str) -> asyncio.Future[StarlingError | None]:
    done: asyncio.Future[StarlingError | None] = asyncio.get_running_loop().create_future()
    store.put(StoredResponse(tenant, name, name.encode(), []), done.set_result)
    return done


async def test_calls_beyond_a_bound_are_refused_and_no_computed_response_is(
    store: StoredResponses, tmp_path: Path
) -> None:
    assert await put(store, "a", "first") is None
    with contextlib.closing(sqlite3.connect(tmp_path / "responses.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # as a predecessor of the gateway that has not ended
        puts = [put(store, "a", f"r{number}") for number in range(2)]
        for call in (
            store.body("a", "first"),
            store.has("a", "first"),
            store.inputs("a", "first", Page("", 20, False)),
            store.delete("a", "first"),
            store.transact(lambda db, now: None, "a"),
            store.transact(lambda db, now: None, caller="a"),
        ):
            with pytest.raises(StarlingError, match="2 calls wait .*, the most of a tenant; try again later") as error:
                await call
            assert (error.value.code, error.value.status) == ("OVERLOADED", 429)
        with pytest.raises(StarlingError, match="the most of a tenant"):
            store.check_room("a")
        reads = [asyncio.create_task(store.body(tenant, "first")) for tenant in "bc"]
        await asyncio.sleep(0)
        with pytest.raises(StarlingError, match="4 calls wait .*, the most in all"):
            store.check_room("d")
        puts += [put(store, tenant, "more") for tenant in "abcd"]
        assert not any(one.done() for one in (*puts, *reads))
        other.execute("ROLLBACK")
    assert await asyncio.gather(*puts, *reads) == [None] * 8
    assert [await store.body(tenant, "more") for tenant in "abcd"] == [b"more"] * 4
    store.check_room("a")


@pytest.mark.parametrize("max_requests", [1, 256, 1000])
def test_all_requests_that_a_gateway_admits_find_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, max_requests: int
) -> None:
    """Of one tenant, each with a read and a response to be stored; others have as much."""
    monkeypatch.setattr(stored_responses, "call_bounds", NORMAL_BOUNDS)

    async def test(gateway: Gateway) -> None:
        calls, may_go_on = gateway.service.responses.store.calls, threading.Event()
        try:
            for tenant in "ab":
                for _ in range(2 * max_requests):
                    calls.check(tenant)
                    calls.add(lambda: may_go_on.wait(60), tenant)
        finally:
            may_go_on.set()
            await gateway.service.responses.store.flushed()
            gateway.service.responses.store.close(timeout_s=60)

    with_gateway(tmp_path, test, server={"max_concurrent_requests": max_requests})


def test_requests_whose_response_would_be_stored_are_refused_before_they_are_computed(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        store, may_go_on = gateway.service.responses.store, threading.Event()
        stalled = [store.calls.add(lambda: may_go_on.wait(60)) for _ in range(4)]
        try:
            async with (
                TestServer(make_app(gateway.config, gateway.service, None)) as server,
                ClientSession(timeout=ClientTimeout(60)) as client,
            ):

                async def refusal(method: str, path: str, body: Any = None) -> str:
                    async with client.request(method, server.make_url(path), json=body) as answer:
                        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
                        error = (await answer.json())["error"]
                        assert (error["code"], error["param"]) == ("OVERLOADED", "store")
                        return str(error["message"])

                for method, path, body in (
                    ("POST", PATH, BODY),
                    ("POST", PATH, {**BODY, "stream": True}),
                    ("GET", f"{PATH}/resp_{'a' * 24}", None),
                    ("POST", "/v1/conversations", {}),
                ):
                    message = await refusal(method, path, body)
                    assert "check the disk of server.state_dir" in message
                assert not gateway.loading("b"), "nothing is computed for them"
                posting = asyncio.create_task(client.post(server.make_url(PATH), json={**BODY, "store": False}))
                await gateway.until(lambda: gateway.loading("b"))
                posting.cancel()
                await asyncio.gather(posting, return_exceptions=True)
        finally:
            may_go_on.set()
            await asyncio.gather(*map(asyncio.wrap_future, stalled))
            store.close(timeout_s=60)

    with_gateway(tmp_path, test)
