"""Requests for models that are not loaded: one load for all, bounds on who waits, and loads that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession, ClientTimeout, TCPConnector
from aiohttp.test_utils import TestServer

from pipeline.api.keys import Caller
from pipeline.config import paths
from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models.store import damaged
from pipeline.models.versions import write_failure
from pipeline.protocol import messages as m
from stages.gateway.http.app import make_app
from stages.gateway.requests.readers import FanOutSink
from tests.gateway.on_demand import ANN, BOB, Gateway, refused, with_gateway

LIMIT = ClientTimeout(60)


def test_requests_share_one_load_and_are_submitted_before_it_is_complete(tmp_path: Path) -> None:
    """As soon as the vocabulary is known they are in the journal; the scheduler queues them."""

    async def test(gateway: Gateway) -> None:
        asked = [gateway.ask("b", caller) for caller in (ANN, BOB, ANN)]
        await gateway.until(lambda: gateway.loading("b"))
        assert gateway.service.on_demand.waiting.held == 3
        gateway.report(is_ready=False)
        requests = [await task for task in asked]
        (version,) = gateway.loading("b")
        assert {request.spec.version for request in requests} == {version.id}
        for request in requests:
            request.sink = FanOutSink()
            await gateway.service.lifecycle.start(request)
        assert set(gateway.submitted.values()) == {version.id}
        assert gateway.loading("b") == [version]
        gateway.report()
        await gateway.until(lambda: gateway.catalog.serving("b"))
        assert gateway.service.on_demand.waiting.held == 0

    with_gateway(tmp_path, test)


def test_a_turn_of_a_session_waits_until_its_model_serves(tmp_path: Path) -> None:
    """The KV manager has no session of a version that is being loaded."""

    async def test(gateway: Gateway) -> None:
        task, other = gateway.ask("b", session_id=""), gateway.ask("b")
        await gateway.until(lambda: gateway.loading("b"))
        gateway.report(is_ready=False)
        assert (await other).spec.version == gateway.loading("b")[0].id
        assert gateway.service.on_demand.waiting.held == 1
        assert not task.done()
        gateway.report()
        await gateway.until(lambda: gateway.service.on_demand.waiting.held == 0)
        assert gateway.catalog.serving("b")
        task.cancel()  # there is no KV manager here

    with_gateway(tmp_path, test)


def test_who_waits_is_bounded_in_all_and_for_each_tenant(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        tasks = [gateway.ask("b", ANN), gateway.ask("b", ANN)]
        await gateway.until(lambda: gateway.service.on_demand.waiting.held == 2)
        error = await refused(gateway.ask("c", ANN), "OVERLOADED")
        assert (error.status, error.headers()) == (429, {"Retry-After": "5"})
        own = "2 of your requests wait for loads, and at most 2 may (on_demand.max_waiting_per_tenant)"
        assert error.message == f"model 'c' is not loaded; {own}; try again"
        tasks.append(gateway.ask("c", BOB))
        await gateway.until(lambda: gateway.service.on_demand.waiting.held == 3)
        error = await refused(gateway.ask("b", Caller("cid")), "OVERLOADED")
        assert "; 3 requests wait for loads, and at most 3 may (on_demand.max_waiting); " in error.message
        assert await gateway.ask("a", ANN)  # a loaded model is not concerned
        tasks[0].cancel()
        await gateway.until(lambda: gateway.service.on_demand.waiting.held == 2)
        for task in tasks[1:]:
            task.cancel()

    with_gateway(tmp_path, test, max_waiting=3, max_waiting_per_tenant=2)


def test_without_keys_each_address_has_its_share_of_the_places(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        waiting = gateway.service.on_demand.waiting
        async with (
            TestServer(make_app(gateway.config, gateway.service, None)) as server,
            ClientSession(connector=TCPConnector(local_addr=("127.0.0.1", 0))) as one,
            ClientSession(connector=TCPConnector(local_addr=("127.0.0.2", 0))) as other,
        ):

            def post(client: ClientSession) -> asyncio.Task[ClientResponse]:
                body = {"model": "b", "prompt": [1, 2, 3], "max_tokens": 4}
                return asyncio.create_task(client.post(server.make_url("/v1/generate"), json=body))

            posts = [post(one) for _ in range(3)]
            await gateway.until(lambda: waiting.held == 3)
            refusal = await post(one)
            assert (refusal.status, refusal.headers["Retry-After"]) == (429, "5")
            assert "3 of your requests wait" in (await refusal.json())["error"]["message"]
            posts.append(post(other))
            await gateway.until(lambda: waiting.held == 4)
            for one_post in posts:
                one_post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)

    with_gateway(tmp_path, test, max_waiting=4)


def test_a_session_is_closed_without_loading_its_model(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        sessions = gateway.service.sessions
        sent: list[m.Frame] = []

        def answer(frame: m.Frame) -> bool:
            sent.append(frame)
            assert isinstance(frame, m.SessionClose)
            asyncio.get_running_loop().call_soon(sessions.on_frame, m.SessionDone(frame.id, frame.session, 0))
            return True

        sessions._send_frame = answer
        gateway.service.on_kv_up(m.Hello("kv", 1, 1, 1))
        async with (
            TestServer(make_app(gateway.config, gateway.service, None)) as server,
            ClientSession(timeout=LIMIT) as client,
        ):

            async def close(model: str) -> tuple[int, dict[str, Any]]:
                body = {"model": model, "session_id": "s"}
                async with client.post(server.make_url("/v1/session/close"), json=body) as response:
                    return response.status, await response.json()

            closed = 200, {"model": "b", "session_id": "s", "closed": True}
            assert await close("b") == closed
            gateway.loader.unload("b", "change", 60.0)  # by an operator: no request loads it
            await refused(gateway.ask("b"), "MODEL_NOT_FOUND")
            assert await close("b") == await close("b:adapter") == closed
            assert not gateway.catalog.versions("b")
            status, body = await close("absent")
            assert (status, body["error"]["code"]) == (404, "MODEL_NOT_FOUND")
        assert [getattr(frame, "model", "") for frame in sent] == ["b"] * 3

    with_gateway(tmp_path, test)


def test_a_request_waits_up_to_a_limit_and_a_stream_as_long_as_it_has_time(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        whole, stream = gateway.ask("b"), gateway.ask("b", stream=True)
        await gateway.until(lambda: gateway.service.on_demand.waiting.held == 2)
        gateway.now += 31.0
        gateway.service.readiness.notify()
        error = await refused(whole)
        assert error.headers() == {"Retry-After": "5"}
        assert "was not loaded within 30 s" in error.message
        assert not stream.done()
        gateway.report()
        assert (await stream).spec.model == "b"

    with_gateway(tmp_path, test, wait_ms=30_000)


def test_a_load_fails_when_each_worker_group_has_failed(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        run_dir = paths.run_dir(gateway.config)
        run_dir.mkdir(parents=True, exist_ok=True)
        task = gateway.ask("b")
        await gateway.until(lambda: gateway.loading("b"))
        (version,) = gateway.loading("b")
        error = ConfigError("no such file")
        write_failure(run_dir, version.stage, error)
        for _ in range(20):
            gateway.tick()
            await asyncio.sleep(0.01)
        assert gateway.loading("b"), "the second group may make it ready"
        write_failure(run_dir, version.of_group(1).stage, error)
        await refused(task)
        assert not gateway.loading("b")

    with_gateway(tmp_path, test, performance={"worker_groups": 2})


def test_a_load_that_fails_while_a_prompt_is_tokenized_refuses_its_request(tmp_path: Path) -> None:
    """The tokenizer's answer may still come: the request must not be journaled, and submitted to no version."""

    async def test(gateway: Gateway) -> None:
        run_dir = paths.run_dir(gateway.config)
        run_dir.mkdir(parents=True, exist_ok=True)
        task = gateway.ask("b", prompt="text")
        await gateway.until(lambda: gateway.loading("b"))
        gateway.report(is_ready=False)
        pending = gateway.service.tokenizer._pending
        await gateway.until(lambda: any(isinstance(frame, m.Encode) for frame, _ in pending.values()))
        (name,) = [name for name, (frame, _) in pending.items() if isinstance(frame, m.Encode)]
        (version,) = gateway.loading("b")
        write_failure(run_dir, version.stage, ConfigError("no such file"))
        await gateway.until(lambda: not gateway.loading("b"))
        gateway.service.on_tokenizer(m.Encoded(name, (1, 2)))
        await refused(task)

    with_gateway(tmp_path, test)


def test_an_idle_model_stays_loaded_while_a_request_waits_until_it_is_ready(tmp_path: Path) -> None:
    """Also for one that only tokenizes, which counts for no version until then."""

    async def test(gateway: Gateway) -> None:
        await gateway.use("b")
        readiness = gateway.service.readiness
        readiness.plugin_problem = lambda: "it restarts"
        task = asyncio.ensure_future(gateway.service.admission.ensure_loaded("b", ANN, ANN.tenant, 30.0))
        await asyncio.sleep(0)
        gateway.now += 2.0
        gateway.tick()
        assert gateway.catalog.serving("b") and not task.done()
        readiness.plugin_problem = lambda: ""
        gateway.state(is_ready=True)
        readiness.notify()
        await task
        gateway.tick()
        assert not gateway.catalog.serving("b")

    with_gateway(tmp_path, test, keep_alive=1)


def test_a_model_that_is_unloaded_while_requests_wait_for_it_stays_unloaded(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        first, second = await gateway.start("a"), await gateway.start("b")
        task = gateway.ask("c", stream=True)
        await gateway.until(lambda: "has requests" in gateway.service.on_demand.progress("c"))
        gateway.loader.unload("c", "change", 60.0)
        await refused(task, "MODEL_NOT_FOUND")
        await gateway.until(lambda: not gateway.loader.phase("c"))
        gateway.end(second)
        gateway.tick()
        assert gateway.loaded == {"a", "b"}
        assert not gateway.loading("c")
        gateway.end(first)

    with_gateway(tmp_path, test)


def test_a_failure_is_repeated_for_seconds_without_another_attempt(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        path = tmp_path / "model.gguf"
        path.rename(tmp_path / "gone")
        error = await refused(gateway.ask("b"))
        assert str(tmp_path) not in error.message
        (tmp_path / "gone").rename(path)
        assert (await refused(gateway.ask("b"))).headers() == {"Retry-After": "5"}
        gateway.now += 6.0
        await gateway.use("b")

    with_gateway(tmp_path, test)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_requests_of_a_load_that_fails_get_no_path_of_the_server(tmp_path: Path, is_damaged: bool) -> None:
    """Neither the one that is submitted already nor a later one. No waiting helps with a file that is damaged."""
    problem = f"has SHA-256 {'1' * 64}, expected {'2' * 64}"
    reason = damaged(ModelConfig(name="b@1"), problem) if is_damaged else ConfigError(f"{tmp_path} is not a model")
    expected = (
        ("MODEL_DAMAGED", 500, {"x-should-retry": "false"})
        if is_damaged
        else ("MODEL_UNAVAILABLE", 503, {"Retry-After": "5"})
    )

    async def test(gateway: Gateway) -> None:
        task = gateway.ask("b")
        await gateway.until(lambda: gateway.loading("b"))
        gateway.report(is_ready=False)
        request = await task
        request.sink = FanOutSink()
        await gateway.service.lifecycle.start(request)
        (version,) = gateway.loading("b")
        run_dir = paths.run_dir(gateway.config)
        run_dir.mkdir()
        write_failure(run_dir, version.stage, reason)
        await gateway.until(lambda: request.error)
        for error in (request.error, await refused(gateway.ask("b"), expected[0])):
            assert error is not None
            assert (error.code, error.status, error.headers()) == expected
            assert str(tmp_path) not in error.message
            for part in (f"model 'b': its stored file {problem}", "`starling verify b`", "another `starling pull`"):
                assert (part in error.message) == is_damaged
        assert not gateway.catalog.versions("b")

    with_gateway(tmp_path, test)


def test_what_a_request_asks_for_holds_if_it_ends_before_its_version_serves(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        task = gateway.ask("b", keep_alive=0)
        await gateway.until(lambda: gateway.loading("b"))
        gateway.report(is_ready=False)
        request = await task
        request.sink = FanOutSink()
        await gateway.service.lifecycle.start(request)
        gateway.end(request)
        gateway.report()
        await gateway.until(lambda: not gateway.loading("b"))
        gateway.tick()
        assert "b" not in gateway.loaded

    with_gateway(tmp_path, test)


def test_the_server_is_ready_without_any_loaded_model(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        assert not gateway.catalog.all
        assert gateway.service.readiness.report(0)["ready"]
        assert gateway.catalog.resolve("") == "a"
        await gateway.use("a")
        assert gateway.loaded == {"a"}

    with_gateway(tmp_path, test, a={"preload": False})


def test_without_models_on_demand_only_loaded_ones_are_known(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        await refused(gateway.ask("b"), "MODEL_NOT_FOUND")
        assert gateway.catalog.known_names() == ["a"]
        gateway.now += 1e6
        gateway.tick()
        assert gateway.loaded == {"a"}

    with_gateway(tmp_path, test, enabled=False)
