"""A client that lost its connection before it had a token: the id in the headers, and `Idempotency-Key`."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from pipeline.protocol import messages as m
from tests.gateway.http_client import Answer
from tests.gateway.peers import MODEL
from tests.gateway.server import MakeServer, Server
from tests.gateway.server_journal import ended
from tests.gateway.stream_content import joined

GENERATE: dict[str, Any] = {"prompt": "again", "max_tokens": 60, "seed": 7, "n": 2, "logprobs": 2, "ignore_eos": True}
UNSEEDED: dict[str, Any] = {"prompt": "by chance", "max_tokens": 40, "ignore_eos": True}


def key(name: str) -> dict[str, str]:
    return {"Idempotency-Key": name}


class Attempt:
    """A POST in a thread; `result()` is its answer, or the error of its connection."""

    def __init__(self, server: Server, path: str, body: Any, headers: dict[str, str]) -> None:
        self._answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self._send = lambda: server.post(path, body, headers)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._answers.put(self._send())
        except Exception as error:
            self._answers.put(error)

    def result(self) -> Answer:
        found = self._answers.get(timeout=60)
        assert isinstance(found, Answer), found
        return found

    def error(self) -> Exception:
        found = self._answers.get(timeout=60)
        assert isinstance(found, Exception), found
        return found


def until(server: Server, holds: Callable[[], bool]) -> None:
    """Wait until `holds` is true in the thread of the peers."""
    while not server.peers.do(holds):
        pass


def requests_of(server: Server) -> set[str]:
    return {frame.request for frame in server.peers.generator.submitted}


def hold(server: Server, is_held: bool = True) -> None:
    server.peers.do(lambda: setattr(server.peers, "is_stepping", not is_held))


def restart(server: Server) -> None:
    """Kill the gateway; its successor submits to a scheduler that knows nothing."""
    server.kill_and_restart()
    server.peers.do(server.peers.kill_scheduler)
    server.peers.do(server.peers.start_scheduler)


def test_a_stream_tells_its_id_before_its_first_token(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    expected = joined(server.stream("/v1/generate", GENERATE).all())
    hold(server)
    stream = server.stream("/v1/generate", GENERATE, {"X-Request-Id": "mine"})  # returns with the headers
    assert stream.response.headers["X-Request-Id"] == "mine"
    request_id = stream.response.headers["X-Starling-Request"]
    assert request_id in server.peers.do(lambda: requests_of(server))
    restart(server)
    stream.close()
    again = server.resume(f"/v1/requests/{request_id}")
    assert again.response.headers["X-Starling-Request"] == request_id
    hold(server, False)
    assert joined(again.all()) == expected


def test_a_refusal_has_its_status_until_the_request_has_left_the_queue(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    peers = server.peers
    codes = {"OVERLOADED": 429, "INSUFFICIENT_RESOURCES": 507, "CONTEXT_LENGTH_EXCEEDED": 400}
    for code, status in codes.items():
        refusal = m.Rejected("", code, "no", "prompt")
        peers.do(lambda refusal=refusal: setattr(peers.generator, "refuse", lambda f: replaced(refusal, f.sequence)))
        assert server.post("/v1/generate", {**GENERATE, "stream": True}).status == status
    peers.do(lambda: setattr(peers.generator, "refuse", lambda frame: None))
    # In the queue: no headers, so that a request which makes room for others has its status.
    hold(server)
    peers.do(lambda: setattr(peers.generator, "is_starting", False))
    attempt = Attempt(server, "/v1/generate", {**GENERATE, "stream": True}, {})
    until(server, lambda: len(peers.generator.running) == 2)
    name = server.peers.do(lambda: next(iter(peers.generator.running)))
    peers.do(lambda: peers.generator.outbox.append(m.Rejected(name, "OVERLOADED", "others need the room")))
    assert attempt.result().status == 429


def replaced(refusal: m.Rejected, sequence: str) -> m.Rejected:
    return m.Rejected(sequence, refusal.code, refusal.message, refusal.param)


def test_an_error_after_the_headers_is_an_event(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    hold(server)
    stream = server.stream("/v1/generate", {**GENERATE, "n": 1})
    peers = server.peers
    name = peers.do(lambda: next(iter(peers.generator.running)))
    late = m.SequenceTokens(name, 0, (), finish="timeout", error="TIMEOUT", message="late")
    peers.do(lambda: peers.generator.outbox.append(m.Tokens("bytes", 1, [late])))
    event, done = stream.all()
    assert (event.data["error"]["code"], done.data) == ("TIMEOUT", "[DONE]")
    assert event.data["choices"] == [{"index": 0, "finish_reason": "timeout"}]


def test_a_repeated_request_is_the_same_request_on_the_successor(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    hold(server)
    attempt = Attempt(server, "/v1/generate", UNSEEDED, key("k"))
    until(server, lambda: bool(server.peers.generator.running))
    restart(server)
    attempt.error()
    attempts = [Attempt(server, "/v1/generate", UNSEEDED, key("k")) for _ in range(3)]
    hold(server, False)
    first, *others = [attempt.result() for attempt in attempts]
    assert first.status == 200
    assert {(other.status, other.body) for other in others} == {(200, first.body)}
    assert server.peers.do(lambda: requests_of(server)) == {first.headers["X-Starling-Request"]}
    # The answer is kept, also by the next successor: it is generated again from the journal.
    assert server.post("/v1/generate", UNSEEDED, key("k")).body == first.body
    server.kill_and_restart()
    again = server.post("/v1/generate", UNSEEDED, key("k"))
    assert again.json["choices"] == first.json["choices"]
    assert again.headers["X-Starling-Request"] == first.headers["X-Starling-Request"]
    assert server.post("/v1/generate", {**UNSEEDED, "n": 2}, key("k")).status == 409


def test_reads_that_are_refused_after_a_restart_compute_nothing(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    answer = server.post("/v1/generate", UNSEEDED, key("k"))
    name = answer.headers["X-Starling-Request"]
    said_first = server.post("/v1/responses", {"model": MODEL, "input": "please say one", "seed": 1}).json
    while said_first["id"].replace("resp_", "req-") not in ended(server):
        pass
    restart(server)
    server.wait_ready()
    two_places = {"Last-Event-ID": f"{name}:1.1"}
    response = f"/v1/responses/{said_first['id']}?stream=true"
    assert server.request("HEAD", f"/v1/requests/{name}").status == 200
    assert server.get(f"/v1/requests/{name}", two_places).error["param"] == "Last-Event-ID"
    assert server.post("/v1/completions", UNSEEDED, {"Last-Event-ID": f"{name}:1"}).error["param"] == "Last-Event-ID"
    assert server.post("/v1/generate", {**UNSEEDED, "n": 2}, key("k")).status == 409
    assert server.get(response).error["param"] == "stream"
    assert server.request("HEAD", response).status == 400
    for one in (name, said_first["id"].replace("resp_", "req-")):
        assert server.request("DELETE", f"/v1/requests/{one}").status == 404  # it is not in flight
    assert server.post("/v1/generate", UNSEEDED, key("k")).json["choices"] == answer.json["choices"]


def test_a_repetition_that_fails_after_a_restart_leaves_the_answer_to_the_next_one(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    answer = server.post("/v1/generate", UNSEEDED, key("k"))
    restart(server)
    refusal = m.Rejected("", "INFERENCE", "it failed")
    server.peers.do(lambda: setattr(server.peers.generator, "refuse", lambda frame: replaced(refusal, frame.sequence)))
    assert server.post("/v1/generate", UNSEEDED, key("k")).error["code"] == "INFERENCE"
    server.peers.do(lambda: setattr(server.peers.generator, "refuse", lambda frame: None))
    again = server.post("/v1/generate", UNSEEDED, key("k"))
    assert again.json["choices"] == answer.json["choices"]
    assert again.headers["X-Starling-Request"] == answer.headers["X-Starling-Request"]


def test_a_repeated_stream_is_resumed_where_the_client_says(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    whole = server.stream("/v1/generate", GENERATE, key("k")).all()
    again = server.stream("/v1/generate", GENERATE, key("k"))
    assert again.response.headers["X-Starling-Request"] == whole[-1].id.partition(":")[0]
    assert joined(again.all()) == joined(whole)
    begun, mark = whole[:5], whole[4].id
    server.kill_and_restart()
    rest = server.stream("/v1/generate", GENERATE, {**key("k"), "Last-Event-ID": mark}).all()
    assert joined(begun + rest) == joined(whole)
    assert joined(server.stream("/v1/generate", GENERATE, key("k")).all()) == joined(whole)


def test_a_key_belongs_to_a_tenant_an_endpoint_and_a_body(make_server: MakeServer) -> None:
    keys = [{"key": f"sk-{name}", "tenant": name} for name in ("mine", "other")]
    mine, other = ({"Authorization": f"Bearer {entry['key']}", **key("k")} for entry in keys)
    server = make_server(auth={"api_keys": keys})
    server.wait_ready()
    answer = server.post("/v1/generate", UNSEEDED, mine)
    assert server.post("/v1/generate", UNSEEDED, mine).body == answer.body
    assert server.post("/v1/generate", UNSEEDED, other).json["id"] != answer.json["id"]
    assert server.post("/v1/generate", UNSEEDED | {"max_tokens": 41}, other).status == 409
    refused = server.post("/v1/completions", UNSEEDED | {"model": "bytes"}, mine)
    assert (refused.status, refused.error["param"]) == (409, "Idempotency-Key")
    assert server.post("/v1/generate", UNSEEDED, {**mine, **key("a b")}).status == 400


def test_a_failed_request_frees_its_key(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    peers = server.peers
    refusal = m.Rejected("", "OVERLOADED", "full")
    peers.do(lambda: setattr(peers.generator, "refuse", lambda frame: replaced(refusal, frame.sequence)))
    assert server.post("/v1/generate", UNSEEDED, key("k")).status == 429
    peers.do(lambda: setattr(peers.generator, "refuse", lambda frame: None))
    assert server.post("/v1/generate", {"prompt": 7}, key("k")).status == 400
    assert server.post("/v1/generate", UNSEEDED, key("k")).status == 200
    server.kill_and_restart()
    assert server.post("/v1/generate", UNSEEDED | {"max_tokens": 3}, key("k")).status == 409


def test_a_request_with_a_key_outlives_its_connection(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    hold(server)
    body = json.dumps({**UNSEEDED, "stream": True}).encode()
    head = f"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    names = [f"k{number}" for number in range(18)]
    for number, name in enumerate(names):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(f"{head}Idempotency-Key: {name}\r\n\r\n".encode() + body)
            until(server, lambda number=number: len(requests_of(server)) == number + 1)
            # A reset is noticed at once, so the connections are given up in this order.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # More than 16 of a tenant do not wait for their clients: the first ones are cancelled.
    until(server, lambda: len(server.peers.generator.cancelled) == 2)
    hold(server, False)
    for name in names[2:]:
        assert server.stream("/v1/generate", UNSEEDED, key(name)).all()[-1].data == "[DONE]"
    assert len(server.peers.do(lambda: requests_of(server))) == 18
    server.stream("/v1/generate", UNSEEDED, key(names[0])).all()
    assert len(server.peers.do(lambda: requests_of(server))) == 19
