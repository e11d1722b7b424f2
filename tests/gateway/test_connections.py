"""Half-closed connections, heads that do not end, and clients that do not read, on raw sockets."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from stages.gateway.http.connection import CONTINUE, MAX_HEAD_BYTES
from tests.gateway.raw_http import raw_request, read_to_end, split_responses
from tests.gateway.server import MakeServer, Server

SHORT: dict[str, Any] = {"prompt": "x", "max_tokens": 20, "seed": 1, "ignore_eos": True}
WAIT_S = 60.0


def connect(server: Server, receive_buffer: int = 0) -> socket.socket:
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", server.port))
    return sock


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pause(server: Server, is_paused: bool = True) -> None:
    server.peers.do(lambda: setattr(server.peers, "is_stepping", not is_paused))


def n_running(server: Server) -> int:
    return server.peers.do(lambda: len(server.peers.generator.running))


def wait_reset(sock: socket.socket) -> None:
    """Wait until the server has aborted the connection; nothing is read."""
    poll = select.poll()
    poll.register(sock, 0)
    assert poll.poll(WAIT_S * 1000)


# ---------------------------------------------------------------- half-closed connections


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_sends_no_more_gets_its_whole_answer(server: Server, stream: bool, version: str) -> None:
    expected = server.post("/v1/generate", SHORT).json["choices"]
    with connect(server) as sock:
        sock.sendall(raw_request("POST", "/v1/generate", {**SHORT, "stream": stream}, version=version))
        sock.shutdown(socket.SHUT_WR)
        (answer,) = split_responses(read_to_end(sock), "POST")
    assert answer.status == 200
    assert answer.is_complete
    if stream:
        assert answer.body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(answer.body)["choices"] == expected


def test_it_gets_the_answers_to_all_requests_that_it_has_sent(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(raw_request("POST", "/v1/generate", SHORT) * 2 + raw_request("GET", "/health"))
        sock.shutdown(socket.SHUT_WR)
        answers = split_responses(read_to_end(sock), "POST", "POST", "GET")
    assert [(answer.status, answer.is_complete) for answer in answers] == [(200, True)] * 3
    assert answers[-1].headers["connection"] == "close"


def test_an_idle_connection_closes_with_its_client(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(raw_request("GET", "/health"))
        sock.recv(1 << 16)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""


def test_a_body_that_will_not_come_ends_its_request(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        wait_until(lambda: server.get("/metrics").body.count(b"starling_requests_in_flight 1.0") == 1)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    wait_until(lambda: b"starling_requests_in_flight 0.0" in server.get("/metrics").body)


def test_a_waiting_client_is_probed_with_bytes_that_it_skips(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    pause(server)
    with connect(server) as sock:
        sock.sendall(raw_request("POST", "/v1/generate", SHORT))
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(len(CONTINUE)) == CONTINUE
        pause(server, False)
        (answer,) = split_responses(read_to_end(sock), "POST")
    assert (answer.status, answer.is_complete) == (200, True)


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_of_a_client_that_has_left_is_cancelled(make_server: MakeServer, stream: bool) -> None:
    server = make_server(server={"journal_mb": 0})
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "step_interval_s", 0.05))
    with connect(server) as sock:
        sock.sendall(raw_request("POST", "/v1/generate", {**SHORT, "max_tokens": 4000, "stream": stream}))
        wait_until(lambda: n_running(server) == 1)
        if stream:
            assert sock.recv(4).startswith(b"HTTP")
        pause(server)  # nothing more is sent
        while stream and select.select([sock], [], [], 0.2)[0]:
            sock.recv(1 << 16)  # what is not read would make the client's host reset the connection
    wait_until(lambda: n_running(server) == 0)


# ---------------------------------------------------------------- heads


def test_a_head_of_many_bytes_is_refused(server: Server) -> None:
    line = b"X-Filler: " + b"x" * 4000 + b"\r\n"
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n" + line * (2 * MAX_HEAD_BYTES // len(line))
    with connect(server) as sock:
        for at in range(0, len(head), 10_000):
            with suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(head[at : at + 10_000])
        received = read_to_end(sock)  # nothing, where the reset overtakes the response
    assert not received or received.startswith(b"HTTP/1.1 431 ")
    assert server.get("/health").status == 200


def test_a_head_that_arrives_with_its_connection_is_refused(server: Server) -> None:
    """The first bytes can arrive before aiohttp waits for them."""
    line = b"X-Filler: " + b"x" * 4000 + b"\r\n"
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n" + line * (2 * MAX_HEAD_BYTES // len(line))
    with ExitStack() as stack:
        sockets = [stack.enter_context(connect(server)) for _ in range(20)]
        for sock in sockets:
            with suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(head)
        for sock in sockets:
            received = read_to_end(sock)
            assert not received or received.startswith(b"HTTP/1.1 431 ")


def test_large_bodies_and_many_requests_are_no_large_heads(server: Server) -> None:
    body = {"text": "x" * 300_000}
    with connect(server) as sock:
        for _ in range(3):
            sock.sendall(raw_request("POST", "/v1/tokenize", body) + raw_request("GET", "/health"))
        sock.sendall(raw_request("GET", "/health", headers="X-Filler: " + "x" * 8000 + "\r\n") * 40)
        sock.sendall(raw_request("GET", "/health", headers="Connection: close\r\n"))
        answers = split_responses(read_to_end(sock), *["POST", "GET"] * 3, *["GET"] * 41)
    assert [answer.status for answer in answers] == [200] * 47


def test_many_header_lines_are_refused(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 1000 + b"\r\n")
        assert b" 400 " in sock.recv(100)


def test_malformed_http_is_refused_in_the_form_of_all_errors(server: Server) -> None:
    long_line = raw_request("GET", "/health", headers="X-Filler: " + "x" * 9000 + "\r\n")
    for request, reason in ((long_line, "more than 8190 bytes"), (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", "HTTP")):
        with connect(server) as sock:
            sock.sendall(request)
            (answer,) = split_responses(read_to_end(sock), "GET")
        assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
        error = json.loads(answer.body)["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "INVALID_REQUEST", None)
        assert reason in error["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/tokenize", "/nothing"])
def test_an_unknown_expectation_is_refused_in_the_form_of_all_errors(server: Server, path: str) -> None:
    method = "POST" if path == "/v1/tokenize" else "GET"
    with connect(server) as sock:
        sock.sendall(raw_request(method, path, headers="Expect: foo\r\n"))
        sock.sendall(raw_request("GET", "/health", headers="Connection: close\r\n"))
        answer, after = split_responses(read_to_end(sock), method, "GET")
    assert (answer.status, answer.headers["content-type"]) == (417, "application/json")
    assert json.loads(answer.body)["error"] == {
        "message": "the header Expect is 'foo', expected '100-continue'; correct it or leave it out",
        "type": "invalid_request_error",
        "code": "INVALID_REQUEST",
        "param": None,
    }
    assert after.status == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_an_unknown_expectation_is_refused_in_the_form_of_anthropic(server: Server, path: str) -> None:
    with connect(server) as sock:
        sock.sendall(raw_request("POST", path, headers="Expect: foo\r\nConnection: close\r\n"))
        (answer,) = split_responses(read_to_end(sock), "POST")
    assert (answer.status, answer.headers["content-type"]) == (417, "application/json")
    assert json.loads(answer.body) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "the header Expect is 'foo', expected '100-continue'; correct it or leave it out",
        },
        "request_id": answer.headers["request-id"],
    }


def test_malformed_http_is_a_warning_without_what_was_sent(make_server: MakeServer) -> None:
    """It is the client's error, and one of its headers may have a key."""
    server = make_server()
    server.wait_ready()
    header = b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-\x00secret\r\n\r\n"
    chunk = raw_request("POST", "/v1/generate", headers="Transfer-Encoding: chunked\r\n") + b"secret\r\n"
    for request in (header, chunk):
        with connect(server) as sock:
            sock.sendall(request)
            assert b" 400 " in read_to_end(sock)
        line = server.wait_log("a client sent malformed HTTP")
        assert (line["level"], line["client"], line["kind"]) == ("warning", "127.0.0.1", "BadHttpMessage")
    assert "secret" not in "".join(server.lines)
    lines = [json.loads(line) for line in server.lines]
    assert {line["level"] for line in lines} == {"info", "warning"}
    assert sum("malformed" in line["event"] for line in lines) == 2


def test_a_head_that_does_not_end_is_cut_off(make_server: MakeServer) -> None:
    server = make_server(preamble="import stages.gateway.http.idle_connections as i; i.HEAD_S = 3.0")
    server.wait_ready()
    with ExitStack() as stack:
        first, later = stack.enter_context(connect(server)), stack.enter_context(connect(server))
        first.sendall(b"GET /health HT")
        later.sendall(raw_request("GET", "/health"))
        assert later.recv(1 << 16).startswith(b"HTTP/1.1 200")
        later.sendall(b"GET /health HTTP/1.1\r\nHo")
        assert first.recv(1) == b""
        assert later.recv(1) == b""


# ---------------------------------------------------------------- clients that do not read

LARGE = {"text": "x" * 1_000_000}  # an answer of 20 MB
KEYS = {"api_keys": [{"key": "sk-a", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}]}
QUICK = "import stages.gateway.http.whole_response as w; w.WRITE_TIMEOUT_S, w.MIN_BYTES_PER_S = 15.0, 1 << 40"


def ask(sock: socket.socket, key: str) -> bytes:
    sock.sendall(raw_request("POST", "/v1/tokenize", LARGE, f"Authorization: Bearer {key}\r\n"))
    return sock.recv(12)


def test_answers_that_are_not_read_are_bounded_in_bytes_and_time(make_server: MakeServer) -> None:
    server = make_server(server={"response_buffer_mb": 64, "max_concurrent_requests": 4}, auth=KEYS, preamble=QUICK)
    server.wait_ready()
    headers = {"Authorization": "Bearer sk-a"}
    with ExitStack() as stack:
        held = stack.enter_context(connect(server, 4096))
        assert ask(held, "sk-a") == b"HTTP/1.1 200"
        assert b"starling_requests_in_flight 1.0" in server.get("/metrics").body  # until its answer is sent
        refused = server.post("/v1/tokenize", LARGE, headers)
        assert (refused.status, refused.error["code"]) == (429, "OVERLOADED")
        assert "server.response_buffer_mb" in refused.error["message"]
        assert server.post("/v1/generate", SHORT, headers).status == 200
        other = server.post("/v1/tokenize", LARGE, {"Authorization": "Bearer sk-b"})
        assert (other.status, other.json["count"]) == (200, 1_000_000)
        wait_reset(held)
        while not (cut_off := [line for line in server.lines if "a response was cut off" in line]):
            server.get("/health")  # the reset may arrive before the line in the log
        (cut_off,) = cut_off
        assert f"the client did not read its response of {len(other.body)} bytes within 15 s" in cut_off
        assert server.post("/v1/tokenize", LARGE, headers).json["count"] == 1_000_000


def test_small_answers_that_are_not_read_are_cut_off(make_server: MakeServer) -> None:
    server = make_server(preamble="import stages.gateway.http.connection_watch as c; c.STALL_S = 0.5")
    server.wait_ready()
    with connect(server, 4096) as sock:
        sock.settimeout(0.2)
        with suppress(TimeoutError):
            sock.sendall(raw_request("GET", "/metrics") * 2000)
        wait_reset(sock)
    assert server.get("/health").status == 200
