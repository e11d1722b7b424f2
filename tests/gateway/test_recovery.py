"""Resumed streams: the parts before and after any interruption together equal the uninterrupted stream."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.http_client import Event
from tests.gateway.peers import MODEL
from tests.gateway.server import MakeServer, Server
from tests.gateway.server_journal import journaled
from tests.gateway.stream_content import joined

GENERATE = {"prompt": "again", "max_tokens": 60, "seed": 7, "n": 2, "logprobs": 2, "ignore_eos": True}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 60,
    "seed": 3,
    "ignore_eos": True,
    "stop": ["suchen"],
    "stream_options": {"include_usage": True},
}
COMPLETION = {"model": MODEL, "prompt": ["a", "bc"], "max_tokens": 40, "seed": 5, "echo": True}
PREDICTION = {"type": "content", "content": "Ein Käfig ging, keine 一只鸟 zu suchen"}
TOLD = {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "prediction": PREDICTION}
COUNTED = {"model": MODEL, "prompt": "abc", "max_tokens": 40, "seed": 5, "logprobs": 2, "ignore_eos": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
CALLED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": f"please say {CALL}{CALL}"}],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    "parallel_tool_calls": False,
    "logprobs": True,
    "seed": 5,
    "stream_options": {"include_usage": True},
}
CASES = [
    ("/v1/generate", GENERATE),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", TOLD),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", COUNTED),
    ("/v1/chat/completions", CALLED),
]


def cut(stream: Any, count: int) -> list[Event]:
    """Read the first events, then close the connection."""
    events: Iterator[Event] = stream.events()
    first = [next(events) for _ in range(count)]
    stream.sock.shutdown(socket.SHUT_RDWR)
    stream.close()
    return first


@pytest.mark.parametrize(("path", "body"), CASES)
def test_an_ended_stream_is_resumed_at_every_event(server: Server, path: str, body: Any) -> None:
    whole = server.stream(path, body).all()
    expected = joined(whole)
    request_id = whole[-1].id.partition(":")[0]
    ids = [event.id for event in whole[:-1]]
    for count in range(len(whole) - 1):
        if not ids[count]:
            continue  # of the events before the first text only the last one has an id
        rest = server.resume(f"/v1/requests/{request_id}", {"Last-Event-ID": ids[count]}).all()
        assert joined(whole[: count + 1] + rest) == expected, ids[count]
    assert joined(server.resume(f"/v1/requests/{request_id}").all()) == expected
    assert joined(whole[:3] + server.stream(path, body, {"Last-Event-ID": whole[2].id}).all()) == expected


@pytest.mark.parametrize(("path", "body"), CASES)
def test_a_stream_outlives_the_gateway(make_server: MakeServer, path: str, body: Any) -> None:
    server = make_server()
    server.wait_ready()
    peers = server.peers
    expected = joined(server.stream(path, body).all())
    stream = server.stream(path, body)
    events = stream.events()
    begun = [next(events) for _ in range(7)]
    peers.do(lambda: setattr(peers, "is_stepping", False))
    peers.do(lambda: setattr(peers, "tokens_per_step", 7))  # so that tokens are grouped differently from here on
    server.kill_and_restart()
    stream.close()
    peers.do(peers.kill_scheduler)
    peers.do(peers.start_scheduler)
    peers.do(lambda: setattr(peers, "is_stepping", True))
    request_id = begun[-1].id.partition(":")[0]
    rest = server.resume(f"/v1/requests/{request_id}", {"Last-Event-ID": begun[-1].id}).all()
    assert joined(begun + rest) == expected
    # The request has ended, and the gateway is killed before its client has read the end.
    server.kill_and_restart()
    rest = server.resume(f"/v1/requests/{request_id}", {"Last-Event-ID": begun[-1].id}).all()
    assert joined(begun + rest) == expected


def test_a_whole_response_outlives_the_gateway(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    expected = server.post("/v1/generate", GENERATE)
    request_id = expected.headers["X-Request-Id"]
    server.kill_and_restart()
    again = server.get(f"/v1/requests/{request_id}")
    assert (again.status, again.json["choices"]) == (200, expected.json["choices"])
    assert again.json["id"] == request_id


def test_a_request_can_be_read_only_by_its_tenant(make_server: MakeServer) -> None:
    keys = [{"key": f"sk-{name}", "tenant": name} for name in ("mine", "other")]
    mine, other = ({"Authorization": f"Bearer {key['key']}"} for key in keys)
    server = make_server(auth={"api_keys": keys})
    server.wait_ready()
    request_id = server.post("/v1/generate", GENERATE, mine).headers["X-Request-Id"]
    for _ in range(2):
        refused = server.get(f"/v1/requests/{request_id}", other)
        unknown = server.get("/v1/requests/req-00", mine)
        assert refused.status == unknown.status == 404
        assert refused.error["message"].replace(request_id, "req-00") == unknown.error["message"]
        assert server.get(f"/v1/requests/{request_id}", mine).status == 200
        server.kill_and_restart()


@pytest.mark.parametrize(("tenants", "is_written"), [("a", True), ("ab", False)])
def test_one_of_several_tenants_has_a_part_of_the_journal(
    make_server: MakeServer, tenants: str, is_written: bool
) -> None:
    server = make_server(
        auth={"api_keys": [{"key": f"sk-{name}", "tenant": name} for name in tenants]}, server={"journal_mb": 1}
    )
    server.wait_ready()
    prompts = [f"{number:02}" + "x" * 3998 for number in range(40)]  # 640 KB of token ids
    ids = []
    for name, prompt in ((tenants[0], prompts), (tenants[-1], ["x"])):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        answer = server.post("/v1/completions", body, {"Authorization": f"Bearer sk-{name}"})
        assert answer.status == 200, answer.body
        ids.append(answer.headers["X-Request-Id"])
    written = {spec.id for spec in journaled(server)}
    assert [one in written for one in ids] == [is_written, True]


def test_a_request_continues_while_it_has_another_reader(server: Server) -> None:
    body = {**GENERATE, "max_tokens": 290}
    expected = joined(server.stream("/v1/generate", body).all())
    first = server.stream("/v1/generate", body)
    events = first.events()
    begun = [next(events) for _ in range(4)]
    second = server.resume(f"/v1/requests/{begun[0].id.partition(':')[0]}")
    also = [next(second.events())]
    first.sock.shutdown(socket.SHUT_RDWR)
    first.close()
    assert joined(also + second.all()) == expected


def test_a_request_without_a_reader_is_cancelled(server: Server) -> None:
    generator = server.peers.generator
    with server.peers.held():
        stream = server.stream("/v1/generate", {**GENERATE, "max_tokens": 290})
        request_id = stream.response.headers["X-Request-Id"]
        names = {f"{request_id}/{choice}" for choice in range(2)}
        while not server.peers.do(lambda: generator.running.keys() >= names):
            pass
        server.peers.step(10)
        assert cut(stream, 3)[0].id.partition(":")[0] == request_id
        while server.peers.do(lambda: names & generator.running.keys()):
            pass
    assert server.get(f"/v1/requests/{request_id}").status == 404


def test_a_request_that_waits_for_its_model_can_be_cancelled(make_server: MakeServer) -> None:
    """A gateway that was restarted computes it when the tokenizer has described its version."""
    server = make_server()
    server.wait_ready()
    peers = server.peers
    peers.do(lambda: setattr(peers, "is_stepping", False))
    stream = server.stream("/v1/generate", GENERATE)
    path = f"/v1/requests/{stream.response.headers['X-Request-Id']}"
    peers.do(peers.kill_tokenizer)
    server.kill_and_restart()
    stream.close()
    submitted = peers.do(lambda: len(peers.generator.submitted))
    assert server.request("DELETE", f"{path}?unread=true").status == 404
    assert server.request("DELETE", path).json == {"id": path.rpartition("/")[2], "cancelled": True}
    assert server.request("DELETE", path).status == 404
    peers.do(peers.start_tokenizer)
    server.wait_ready()
    assert server.get(path).error["code"] == "CONFLICT"
    assert peers.do(lambda: len(peers.generator.submitted)) == submitted


@pytest.mark.parametrize("given", ["x", "req-1", "req-0a:", "req-0a:1x", "req-0a:1.", "req-0a:-1"])
def test_an_invalid_event_id_is_rejected(server: Server, given: str) -> None:
    answer = server.get("/v1/requests/req-0a", {"Last-Event-ID": given})
    assert (answer.status, answer.error["param"]) == (400, "Last-Event-ID")


def test_an_event_id_of_another_endpoint_or_number_of_choices_is_rejected(server: Server) -> None:
    request_id = server.post("/v1/generate", GENERATE).headers["X-Request-Id"]
    for path, mark in ((request_id, f"{request_id}:1"), ("req-0a", f"{request_id}:1.1")):
        answer = server.get(f"/v1/requests/{path}", {"Last-Event-ID": mark})
        assert (answer.status, answer.error["param"]) == (400, "Last-Event-ID")
    answer = server.post("/v1/completions", COMPLETION, {"Last-Event-ID": f"{request_id}:1.1"})
    assert (answer.status, answer.error["param"]) == (400, "Last-Event-ID")
