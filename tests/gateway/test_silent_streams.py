"""Streams without text: their clients get comments, in the queue and while the prompt is computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai._streaming
import pytest

from tests.gateway.http_client import Stream
from tests.gateway.peers import MODEL
from tests.gateway.response_bodies import parse_events
from tests.gateway.server import Server

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": HI, "max_tokens": 20, "seed": 7},
    "/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 20},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 20},
}

FAILED = ["response.created", "response.in_progress", "response.failed"]


@pytest.fixture(scope="module")
def server(homes: Callable[[], Path]) -> Iterator[Server]:
    running = Server(homes(), server={"sse_ping_interval_s": 1})
    running.wait_ready()
    yield running
    assert running.close() == 0


@pytest.fixture
def in_queue(server: Server) -> Iterator[None]:
    """Requests stay in the queue until their first token."""
    generator = server.peers.generator
    server.peers.do(lambda: setattr(generator, "is_starting", False))
    yield
    server.peers.do(lambda: setattr(generator, "is_starting", True))


def read_until(stream: Stream, begin: bytes) -> bytes:
    """Read up to a line that begins so."""
    received = b""
    while line := stream.response.readline():
        received += line
        if line.startswith(begin):
            return received
    raise AssertionError(received)


def data_of(received: bytes) -> list[str]:
    """The data of the events, as OpenAI's client finds them."""
    return [event.data for event in openai._streaming.SSEDecoder().iter_bytes(iter([received]))]


def test_comments_come_before_and_between_events(server: Server) -> None:
    path = "/v1/chat/completions"
    with server.peers.held():
        stream = server.stream(path, BODIES[path])
        received = read_until(stream, b":\n")
        server.peers.step(5)
        received += read_until(stream, b"data: ")
        received += read_until(stream, b":\n")
    received += stream.response.read()
    stream.close()
    *events, done = data_of(received)
    assert done == "[DONE]" and len(events) > 2
    assert all(json.loads(event)["choices"] for event in events)


@pytest.mark.usefixtures("in_queue")
def test_a_stream_in_the_queue_begins_with_comments(server: Server) -> None:
    path = "/v1/chat/completions"
    with server.peers.held():
        stream = server.stream(path, BODIES[path])
        assert stream.response.headers["X-Starling-Request"] == server.peers.generator.submitted[-1].request
        received = read_until(stream, b": waiting for bytes (") + read_until(stream, b": waiting")
    received += stream.response.read()
    stream.close()
    *events, done = data_of(received)
    assert done == "[DONE]" and json.loads(events[-1])["choices"][0]["finish_reason"]


@pytest.mark.usefixtures("in_queue")
@pytest.mark.parametrize("path", BODIES)
def test_an_error_after_the_comments_is_an_event(server: Server, path: str) -> None:
    with server.peers.held():
        stream = server.stream(path, BODIES[path])
        received = read_until(stream, b": waiting")
        name = stream.response.headers["X-Starling-Request"]
        assert server.request("DELETE", f"/v1/requests/{name}").status == 200
        received += stream.response.read()
        stream.close()
    if path == "/v1/chat/completions":
        error, done = data_of(received)
        assert json.loads(error)["error"]["code"] == "CONFLICT" and done == "[DONE]"
        return
    names = [event.name for event in parse_events(received)]
    assert names == (["error"] if path == "/v1/messages" else FAILED)
