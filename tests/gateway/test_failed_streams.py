"""Streams that fail after they have left the queue: the events before the error, and reading them again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.server import poll_until
from tests.gateway.http_client import Stream
from tests.gateway.peers import MODEL
from tests.gateway.response_bodies import NamedEvent, parse_events, read_events, said
from tests.gateway.server import Server

PATH = "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]


def cancel(server: Server) -> str:
    """Cancel the last request; its id."""
    name: str = server.peers.generator.submitted[-1].request
    assert server.request("DELETE", f"/v1/requests/{name}").status == 200
    return name


def rest_of(stream: Stream, before: bytes = b"") -> list[NamedEvent]:
    """The events up to the end; `before`: what was read of them."""
    events = parse_events(before + stream.response.read())
    stream.close()
    return events


def joined(events: list[NamedEvent]) -> tuple[list[tuple[str, Any]], str]:
    """The events without deltas and ids, and the text of the deltas: a stream that is read again may join them."""
    text = "".join(event.data["delta"] for event in events if "delta" in event.data)
    return [(event.name, event.data) for event in events if "delta" not in event.data], text


def test_the_openai_client_gets_the_failure_of_a_response_without_text(server: Server) -> None:
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client,
        server.peers.held(),
        client.responses.stream(model=MODEL, input="Hi") as stream,
    ):
        cancel(server)
        events = list(stream)
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event.sequence_number for event in events] == [0, 1, 2]
    failed = events[-1].response
    assert (failed.status, failed.output, failed.id) == ("failed", [], events[0].response.id)
    assert failed.error is not None and "cancelled by its client" in failed.error.message


@pytest.mark.parametrize("has_text", [False, True])
def test_a_failed_response_is_read_again_after_any_event(server: Server, has_text: bool) -> None:
    with server.peers.held():
        first = server.stream(PATH, said("Hello"))
        name = server.peers.generator.submitted[-1].request
        path = f"{PATH}/{name.replace('req-', 'resp_')}?stream=true"
        early = [server.resume(where) for where in (path, f"{path}&starting_after=0", f"/v1/requests/{name}")]
        received = b""
        if has_text:
            server.peers.step(3)
        while has_text and b"delta" not in received:
            received += first.response.readline()
        cancel(server)
        events = rest_of(first, received)
        assert [rest_of(stream) for stream in early] == [events, events[1:], events]
    assert [event.name for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].name == "response.failed"
    numbers = [event.data["sequence_number"] for event in events]
    assert numbers[:2] == [0, 1] and numbers == sorted(set(numbers))
    assert (len(events) == 3) == (not has_text)
    for where in (path, f"/v1/requests/{name}"):
        assert joined(read_events(server, where)) == joined(events)
    for at, event in enumerate(events):
        rest = read_events(server, f"{path}&starting_after={event.data['sequence_number']}")
        assert joined([*events[: at + 1], *rest]) == joined(events)
        if event.id and event is not events[-1]:
            for where in (path, f"/v1/requests/{name}"):
                rest = read_events(server, where, None, {"Last-Event-ID": event.id})
                assert joined([*events[: at + 1], *rest]) == joined(events)


def test_other_streams_without_text_have_the_error_alone(server: Server) -> None:
    with server.peers.held():
        stream = server.stream("/v1/messages", {"model": MODEL, "messages": HI, "max_tokens": 5})
        cancel(server)
        assert [event.name for event in rest_of(stream)] == ["error"]
        stream = server.stream("/v1/chat/completions", {"model": MODEL, "messages": HI})
        name = cancel(server)
        error, done = stream.all()
    assert error.data["error"]["code"] == "CONFLICT" and done.data == "[DONE]"
    assert server.get(f"/v1/requests/{name}").status == 409


def test_a_stream_that_fails_in_the_queue_has_the_status_of_its_error(server: Server) -> None:
    generator = server.peers.generator
    server.peers.do(lambda: setattr(generator, "is_starting", False))
    try:
        with server.peers.held(), ThreadPoolExecutor() as executor:
            n_before = len(generator.submitted)
            answer = executor.submit(server.post, PATH, {**said("Hello"), "stream": True})
            poll_until(lambda: len(generator.submitted) > n_before)
            name = cancel(server)
            assert answer.result(60).status == 409
    finally:
        server.peers.do(lambda: setattr(generator, "is_starting", True))
    assert server.get(f"{PATH}/{name.replace('req-', 'resp_')}?stream=true").status == 409
