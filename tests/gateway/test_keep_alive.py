"""Every response on a connection belongs to one request: a second request that is pipelined gets its own answer."""

from __future__ import annotations

import re
import socket
import time
from typing import Any

import pytest

from tests.gateway.peers import MODEL
from tests.gateway.raw_http import exchange, raw_request, read_to_end, split_responses
from tests.gateway.server import MakeServer, Server

SHORT = {"prompt": "x", "max_tokens": 20, "seed": 1}
LAST = raw_request("GET", "/health", headers="Connection: close\r\n")

ROUTES = (
    "/v1/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/requests/{stream}",
    "/v1/requests/{whole}",
    "/v1/requests/none",
    "/v1/responses/{response}",
    "/v1/responses/{response}?stream=true",
    "/v1/responses/{response}/input_items",
    "/v1/responses/{response}/cancel",
    "/v1/responses/none?stream=true",
    "/v1/conversations",
    "/v1/conversations/{conversation}",
    "/v1/conversations/{conversation}/items",
    "/v1/conversations/{conversation}/items/{item}",
    "/v1/session/close",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/models",
    "/v1/models/bytes",
    "/v1/models/none",
    "/v1/engines",
    "/v1/engines/bytes",
    "/v1/admin/state",
    "/v1/admin/drain",
    "/health",
    "/ready",
    "/metrics",
    "/none",
)


@pytest.fixture(scope="module")
def ended(server: Server) -> dict[str, str]:
    """The ids of a request that was streamed and of one that was not, of a streamed response, and of a conversation."""
    stream = server.stream("/v1/generate", SHORT).all()
    body = {"model": MODEL, "input": "x", "seed": 1, "max_output_tokens": 20, "stream": True}
    response = re.search(rb"resp_[0-9a-f]+", server.post("/v1/responses", body).body)
    assert response
    items = {"items": [{"type": "message", "role": "user", "content": "x"}]}
    conversation = server.post("/v1/conversations", items).json["id"]
    (item,) = server.get(f"/v1/conversations/{conversation}/items").json["data"]
    return {
        "stream": stream[0].id.partition(":")[0],
        "whole": server.post("/v1/generate", SHORT).json["id"],
        "response": response[0].decode(),
        "conversation": conversation,
        "item": item["id"],
    }


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "GET", "POST", "PUT", "DELETE"])
def test_a_pipelined_request_gets_its_own_response(server: Server, ended: dict[str, str], method: str) -> None:
    for route in ROUTES:
        path = route.format(**ended)
        for body in (None, {"prompt": "x", "stream": True, "max_tokens": 5}, b"[" * 1000):
            answers = split_responses(exchange(server.port, raw_request(method, path, body), LAST), method, "GET")
            assert [a.is_complete for a in answers] == [True, True], path
            assert answers[1].status == 200, path
            assert b'"uptime_seconds"' in answers[1].body, path


def test_options_with_cors_and_a_missing_key(make_server: MakeServer) -> None:
    server = make_server(server={"enable_cors": True}, auth={"api_keys": ["sk-aaaaaaaaaaaaaaaa"]})
    for method in ("OPTIONS", "HEAD", "POST"):
        for route in ROUTES:
            first = raw_request(method, route, {"prompt": "x", "stream": True})
            answers = split_responses(exchange(server.port, first, LAST), method, "GET")
            assert [a.is_complete for a in answers] == [True, True], route
            assert b'"uptime_seconds"' in answers[1].body, route


def test_head_of_what_is_stored_has_its_headers_and_no_body(server: Server, ended: dict[str, str]) -> None:
    conversation = server.post("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": "x"}]})
    response = server.post("/v1/responses", {"model": MODEL, "input": "x"}).json["id"]
    base = f"/v1/conversations/{conversation.json['id']}"
    item = server.get(f"{base}/items").json["data"][0]["id"]
    for path in (base, f"{base}/items", f"{base}/items/{item}", f"/v1/responses/{response}"):
        sent = exchange(server.port, raw_request("HEAD", path), raw_request("GET", path), LAST)
        head, get, _ = split_responses(sent, "HEAD", "GET", "GET")
        assert (head.status, get.status) == (200, 200), path
        assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.body)), path


def test_head_of_a_stream_has_its_headers_and_no_body(server: Server, ended: dict[str, str]) -> None:
    path = f"/v1/requests/{ended['stream']}"
    head, get, last = split_responses(
        exchange(server.port, raw_request("HEAD", path), raw_request("GET", path), LAST), "HEAD", "GET", "GET"
    )
    assert (head.status, get.status, last.status) == (200, 200, 200)
    assert head.headers["content-type"] == get.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in head.headers
    assert get.body.endswith(b"data: [DONE]\n\n")


def test_http_1_0_with_keep_alive_ends_a_stream_with_the_connection(server: Server) -> None:
    first = raw_request("POST", "/v1/generate", {**SHORT, "stream": True}, "Connection: keep-alive\r\n", version="1.0")
    second = raw_request("GET", "/health", headers="Connection: keep-alive\r\n", version="1.0")
    begun = time.monotonic()
    (answer,) = split_responses(exchange(server.port, first, second), "POST", "GET")
    assert time.monotonic() - begun < 60  # the connection is kept for longer
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert "keep-alive" not in answer.headers.get("connection", "").lower()


def test_a_client_that_does_not_read_the_end_of_a_stream_is_cut_off(make_server: MakeServer) -> None:
    preamble = "import stages.gateway.http.text_endpoints as t; t.LAST_BYTES_TIMEOUT_S = 8.0\n"
    # The first client may have no core for a while; the stream goes on without it.
    preamble += "import stages.gateway.http.sinks as s; s.MAX_BACKLOG_BYTES = 1 << 28"
    server = make_server(preamble=preamble)
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "tokens_per_step", 200))
    body: dict[str, Any] = {**SHORT, "max_tokens": 2000, "n": 8, "ignore_eos": True}
    stream = server.stream("/v1/generate", {**body, "logprobs": 20})
    request_id = next(stream.events()).id.partition(":")[0]
    while stream.response.read(1 << 20):  # unparsed: this client is to be fast enough on a busy machine, too
        pass
    stream.close()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(raw_request("GET", f"/v1/requests/{request_id}") + LAST)
        line = server.wait_log("a response was cut off")
        assert line["reason"] == "the client did not read the end of its stream within 8 s"
        received = read_to_end(sock)
    (answer,) = split_responses(received, "GET", "GET")
    assert answer.status == 200
    assert not answer.is_complete
    assert server.get("/health").status == 200
    assert not any("Traceback" in line or "internal error" in line for line in server.lines)
