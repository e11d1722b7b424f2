"""Streams of /v1/responses that fail while their model is loaded, over a socket; the stages are simulated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from pipeline.api.output_tokens import RELAY
from pipeline.api.request_name import HEADER as NAME
from pipeline.config import paths
from pipeline.errors import Conflict, ModelUnavailable
from pipeline.models.versions import write_failure
from pipeline.protocol import messages as m
from stages.gateway.http import loading_stream
from stages.gateway.http.app import make_app
from stages.gateway.requests import stored_responses
from stages.gateway.service import Service
from tests.gateway.on_demand import Gateway, with_gateway
from tests.gateway.response_bodies import parse_events
from tests.gateway.test_failed_streams import PATH

BODY = {"model": "b", "input": "Hi", "stream": True, "temperature": 0.5, "max_output_tokens": 9}
REQUEST_ID = f"req-{'a' * 24}"
OPENING = ["response.created", "response.in_progress", "response.failed"]


@pytest.fixture(autouse=True)
def comments_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the response begins before anything can fail."""
    monkeypatch.setattr(loading_stream, "QUIET_S", 0.0)
    monkeypatch.setattr(loading_stream, "INTERVAL_S", 60.0)


def with_server(home: Path, test: Callable[[Gateway, str], Awaitable[None]]) -> None:
    """Run `test` with a gateway and its URL."""

    async def run(gateway: Gateway) -> None:
        paths.run_dir(gateway.config).mkdir(parents=True, exist_ok=True)
        async with TestServer(make_app(gateway.config, gateway.service, None)) as server:
            await test(gateway, str(server.make_url("")).rstrip("/"))

    with_gateway(home, run)


async def fail_load(gateway: Gateway) -> None:
    """Let the load of model `b` fail."""
    await gateway.until(lambda: gateway.loading("b"))
    (version,) = gateway.loading("b")
    write_failure(paths.run_dir(gateway.config), version.stage, ModelUnavailable("the disk is full"))


def test_openais_client_gets_the_failure_of_a_load(tmp_path: Path) -> None:
    async def test(gateway: Gateway, url: str) -> None:
        async def read() -> list[Any]:
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
                client.responses.stream(model="b", input="Hi", temperature=0.5, max_output_tokens=9) as stream,
            ):
                return [event async for event in stream]

        reading = asyncio.create_task(read())
        await fail_load(gateway)
        await gateway.until(reading.done)
        events = reading.result()
        assert [event.type for event in events] == OPENING
        assert [event.sequence_number for event in events] == [0, 1, 2]
        begun, failed = events[0].response, events[-1].response
        assert (begun.status, begun.error, begun.model) == ("in_progress", None, "b")
        assert (failed.status, failed.output, failed.id) == ("failed", [], begun.id)
        assert (failed.temperature, failed.max_output_tokens) == (0.5, 9)
        assert failed.error.code == "server_error" and "disk is full" in failed.error.message
        assert failed.created_at == 1e9 + gateway.now

    with_server(tmp_path, test)


@pytest.mark.parametrize("is_relayed", [False, True])
def test_an_orchestrator_reads_the_code_of_the_error(tmp_path: Path, is_relayed: bool) -> None:
    """It decides whether another agent can go on; the code of the API says nothing about that."""

    async def test(gateway: Gateway, url: str) -> None:
        headers = {NAME: f"{REQUEST_ID}; created=1234; seed=77", **({RELAY: "1"} if is_relayed else {})}
        async with ClientSession() as client, client.post(url + PATH, json=BODY, headers=headers) as answer:
            await fail_load(gateway)
            reading = asyncio.create_task(answer.read())
            await gateway.until(reading.done)
            blocks = reading.result().split(b"\n\n")
            comments = [line for line in reading.result().split(b"\n") if line.startswith(b":")]
            assert comments[0].startswith(b": loading b")
            assert (b": failed MODEL_UNAVAILABLE" in comments) == is_relayed
            if is_relayed:
                assert blocks[-3] == b": failed MODEL_UNAVAILABLE", "it is before the last event"
            events = parse_events(reading.result())
            assert [event.name for event in events] == OPENING
            assert {event.data["response"]["id"] for event in events} == {f"resp_{'a' * 24}"}
            assert {(one.data["response"]["created_at"], one.data["response"]["seed"]) for one in events} == {
                (1234, 77)
            }

    with_server(tmp_path, test)


def test_a_response_that_fails_in_the_queue_of_the_loaded_model_is_the_admitted_one(tmp_path: Path) -> None:
    async def test(gateway: Gateway, url: str) -> None:
        service: Service = gateway.service
        async with ClientSession() as client, client.post(url + PATH, json={**BODY, "seed": 5}) as answer:
            await gateway.until(lambda: gateway.loading("b"))
            gateway.report()
            reading = asyncio.create_task(answer.read())
            rendering = service.tokenizer._pending
            await gateway.until(lambda: any(isinstance(frame, m.Render) for frame, _ in rendering.values()))
            (name,) = [name for name, (frame, _) in rendering.items() if isinstance(frame, m.Render)]
            service.on_tokenizer(m.Encoded(name, (1, 2)))
            await gateway.until(lambda: service.relay.requests)
            (state,) = service.relay.requests.values()
            assert not state.is_started
            service.recovery.cancel(state, Conflict("it is cancelled"))
            await gateway.until(reading.done)
            events = parse_events(reading.result())
            assert [event.name for event in events] == OPENING
            failed = events[-1].data["response"]
            assert (failed["seed"], failed["id"]) == (5, state.id.replace("req-", "resp_"))
            assert failed["error"] == {"code": "invalid_prompt", "message": "it is cancelled"}

    with_server(tmp_path, test)


@pytest.mark.parametrize("is_in_background", [False, True])
def test_a_failed_response_in_the_background_can_be_read(tmp_path: Path, is_in_background: bool) -> None:
    """Its stream has given the client the id."""

    async def test(gateway: Gateway, url: str) -> None:
        body = {**BODY, "background": is_in_background}
        async with ClientSession() as client, client.post(url + PATH, json=body) as answer:
            await fail_load(gateway)
            async with asyncio.timeout(60):
                data = await answer.read()
            failed = parse_events(data)[-1].data["response"]
            async with asyncio.timeout(60), client.get(f"{url}{PATH}/{failed['id']}") as found:
                assert found.status == (200 if is_in_background else 404)
                assert not is_in_background or await found.json() == failed
            async with asyncio.timeout(60), client.get(f"{url}{PATH}/{failed['id']}/input_items") as found:
                assert found.status == (200 if is_in_background else 404)
                assert not is_in_background or len((await found.json())["data"]) == 1
        gateway.service.responses.store.close(timeout_s=60)

    with_server(tmp_path, test)


def test_a_failure_that_cannot_be_stored_ends_the_stream(tmp_path: Path) -> None:
    """The file does not answer, and as many calls wait for it as may."""

    async def test(gateway: Gateway, url: str) -> None:
        store, may_go_on = gateway.service.responses.store, threading.Event()
        async with ClientSession() as client, client.post(url + PATH, json={**BODY, "background": True}) as answer:
            await gateway.until(lambda: gateway.loading("b"))
            stalled = [store.calls.add(lambda: may_go_on.wait(60)) for _ in range(stored_responses.MIN_CALLS)]
            await fail_load(gateway)
            async with asyncio.timeout(60):
                assert b"response.failed" in await answer.read()
            assert len(store.calls) == len(stalled)
        may_go_on.set()
        await store.flushed()
        store.close(timeout_s=60)

    with_server(tmp_path, test)
