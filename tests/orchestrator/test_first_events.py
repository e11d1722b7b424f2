"""An agent is given up before the task of a request has seen what came first: each event is delivered once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipeline.api.response_context import failed_comment
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.engine_connection import Connection
from stages.orchestrator.forward import Bounds, Out
from stages.orchestrator.http_client import HttpClient
from stages.orchestrator.registry import Registry
from stages.orchestrator.relay import Relay
from stages.orchestrator.responses.keeping import KeepingOut
from tests.orchestrator.agents import engine, heartbeat, router, view
from tests.orchestrator.test_passing import END, HEAD, Transport, chunk, event, shown
from tests.orchestrator.test_text_relay import Clock, Received, forward

DONE = b"data: [DONE]\n\n"
REASON = "the agent's lease has ended"


class Agents:
    """Some agents whose connections the test feeds: the real client, without sockets."""

    def __init__(self, names: str) -> None:
        self.connections: list[Connection] = []
        clock = Clock()
        client = HttpClient(self._connect, lambda: clock.now)
        views = [view(name, engine(engine_url="http://e")) for name in names]
        self.router = router(*views)
        self.relay = Relay(
            client,
            self.router,
            Registry(self._poll, lambda: clock.now),
            ColdLoads(self._load, 1, lambda: clock.now),
            Bounds(1.0, 5.0),
            lambda: clock.now,
            clock.wait,
        )

    def lose_all(self) -> int:
        return sum(self.relay.lose_agent(name, REASON) for name in "ab")

    async def _connect(self, factory: Any, host: str, port: int, context: object) -> Connection:
        connection: Connection = factory()
        connection.connection_made(Transport())
        self.connections.append(connection)
        return connection

    async def _poll(self, record: object) -> Any:
        return heartbeat("a")

    async def _load(self, *wanted: str) -> None:
        raise NotImplementedError


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def _keep(*response: object) -> None:
    raise AssertionError("it is no response that is stored")


def _out_of(received: Received, is_kept: bool) -> Out:
    """`is_kept`: one that never writes at once, so that the task delivers what waits."""
    return KeepingOut(received, _keep, is_response=False) if is_kept else received


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_successor_repeats_no_event_and_leaves_none_out(is_kept: bool) -> None:
    agents, received = Agents("ab"), Received()
    events = [event(number) for number in (1, 2, 3)]
    stream = asyncio.ensure_future(agents.relay.stream(forward(is_stream=True), _out_of(received, is_kept)))
    await _settle()
    agents.connections[0].data_received(HEAD + chunk(events[0]))
    assert agents.lose_all() == 1
    while len(agents.connections) < 2:
        await _settle()
    await _settle()
    agents.connections[1].data_received(HEAD + b"".join(chunk(one) for one in events) + chunk(DONE) + END)
    await asyncio.wait_for(stream, 60)
    assert received.data == shown(range(1, 4)) + DONE


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("is_draining", [True, False])
async def test_an_answer_that_came_whole_is_the_answer(is_kept: bool, is_draining: bool) -> None:
    agents, received = Agents("ab" if is_draining else "a"), Received()
    stream = asyncio.ensure_future(agents.relay.stream(forward(is_stream=True), _out_of(received, is_kept)))
    await _settle()
    agents.connections[0].data_received(HEAD + chunk(event(1) + DONE) + END)
    if is_draining:
        assert [agents.relay.move_streams(name, "the agent is draining") for name in "ab"] == [0, 0]
    else:
        agents.lose_all()
        agents.router.update_routing_table([])
    assert await asyncio.wait_for(stream, 60) == 2
    assert received.data == shown(range(1, 2)) + DONE
    assert len(agents.connections) == 1


@pytest.mark.parametrize("error", [b'{"error":{"code":"CONFLICT"}}', b'{"type":"error","error":{}}'])
async def test_an_error_of_the_engine_ends_the_stream_as_its_api_does(error: bytes) -> None:
    agents, received = Agents("a"), Received()
    stream = asyncio.ensure_future(agents.relay.stream(forward(is_stream=True), received))
    await _settle()
    failed, end = b"data: " + error + b"\n\n", DONE if error.startswith(b'{"error"') else b""
    agents.connections[0].data_received(HEAD + chunk(event(1)) + chunk(failed + end) + END)
    await asyncio.wait_for(stream, 60)
    assert received.data == shown(range(1, 2)) + failed + end


async def test_an_error_of_the_orchestrator_ends_the_choices_that_are_open() -> None:
    agents, received = Agents("a"), Received()
    asked = forward(is_stream=True, is_bound=True, n_choices=2)
    stream = asyncio.ensure_future(agents.relay.stream(asked, received))
    await _settle()
    agents.connections[0].data_received(HEAD + chunk(b"id: r:3e.2\ndata: {}\n\n"))
    await _settle()
    agents.lose_all()
    agents.router.update_routing_table([])
    await asyncio.wait_for(stream, 60)
    assert received.data.endswith(b'"choices":[{"index":1,"finish_reason":"error"}]}\n\n')


@pytest.mark.parametrize("code", ["DRAINING", "CONFLICT"])
async def test_a_response_that_fails_before_its_text_moves_unless_its_client_is_at_fault(code: str) -> None:
    """Its opening events come with the error; one of a conversation moves only while nothing was forwarded."""
    agents, received = Agents("ab"), Received()
    stream = asyncio.ensure_future(
        agents.relay.stream(forward(is_stream=True, is_only_continued=True), _out_of(received, is_kept=False))
    )
    await _settle()
    opening = b'retry: 1000\nevent: response.created\ndata: {"o":1}\n\nid: r:0\ndata: {"o":2}\n\n'
    failed = b'id: r:0\nevent: response.failed\ndata: {"type":"response.failed","response":{"error":{}}}\n\n'
    agents.connections[0].data_received(HEAD + chunk(opening + failed_comment(code) + failed))
    if code == "CONFLICT":
        await asyncio.wait_for(stream, 60)
        assert received.data == opening + failed and len(agents.connections) == 1
        return
    async with asyncio.timeout(60):
        while len(agents.connections) < 2:
            await _settle()
    await _settle()
    agents.connections[1].data_received(HEAD + chunk(opening) + chunk(event(1)) + chunk(DONE) + END)
    await asyncio.wait_for(stream, 60)
    assert received.data == opening + shown(range(1, 2)) + DONE
