"""One tenant or address cannot use up the server: requests, connections and body bytes of the others are served."""

from __future__ import annotations

import http.client
import queue
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.fair_shares import FairShares, Refusal, address_principal
from stages.kv.sessions.session_bounds import SessionBounds
from tests.gateway.kv_peer import KvPeer
from tests.gateway.peers import MODEL
from tests.gateway.server import LONG_MINUTE, MakeServer, Server

KEYS = {"api_keys": [{"key": "sk-a", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}, {"key": "sk-o", "admin": True}]}
BODY = {"prompt": "x", "max_tokens": 3}
# A `preamble`: bodies that do not end hold their places for as long as a test needs them.
LONG_BODIES = "import stages.gateway.http.request_body as b; b.BODY_TIMEOUT_S = 600.0"
LONG_HEADS = "import stages.gateway.http.connection_gate as g; g.RESERVED_HEAD_S = 8.0"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_shares_and_reserve() -> None:
    shares = FairShares(8, 6, reserve=1)
    for _ in range(6):
        assert shares.refusal("a") is None
        shares.take("a")
    assert shares.refusal("a") is Refusal.SHARE
    shares.take("b")
    assert shares.refusal("b") is Refusal.TOTAL
    assert shares.refusal("c") is None
    shares.take("c")
    assert shares.refusal("d") is Refusal.TOTAL
    shares.give_back("a", 6)
    assert shares.refusal("b") is None
    assert (shares.held, shares.held_by("a")) == (2, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans())))
def test_what_is_held_adds_up_and_stays_within_the_bounds(operations: list[tuple[str, int, bool]]) -> None:
    shares = FairShares(20, 12, reserve=4, first=3)
    held = {"a": 0, "b": 0, "c": 0}
    for principal, amount, takes in operations:
        if takes and shares.refusal(principal, amount) is None:
            shares.take(principal, amount)
            held[principal] += amount
        elif not takes and held[principal] >= amount:
            shares.give_back(principal, amount)
            held[principal] -= amount
        assert shares.held == sum(held.values()) <= 20
        assert all(shares.held_by(name) == n <= 12 for name, n in held.items())


@pytest.mark.parametrize(
    ("address", "principal"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("local", "local"),
    ],
)
def test_the_principal_of_an_address(address: str, principal: str) -> None:
    assert address_principal(address) == principal


def slow_bodies(server: Server, count: int, stack: ExitStack, key: str = "", source: str = "127.0.0.1") -> None:
    """Open connections that send the head of a request and one byte of its body."""
    head = "POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    for _ in range(count):
        sock = stack.enter_context(
            socket.create_connection(("127.0.0.1", server.port), timeout=60, source_address=(source, 0))
        )
        sock.sendall(head.encode() + b"\r\n{")


def ask(server: Server, path: str, body: Any, headers: dict[str, str], source: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60, source_address=(source, 0))
    try:
        connection.request(
            "POST" if body is not None else "GET",
            path,
            body and str(body).replace("'", '"'),
            {"Content-Type": "application/json", **headers},
        )
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def test_slow_bodies_of_one_key_leave_the_others_and_the_probes_alone(make_server: MakeServer) -> None:
    server = make_server(auth=KEYS, preamble=LONG_BODIES)
    server.wait_ready()
    with ExitStack() as stack:
        slow_bodies(server, 300, stack, "sk-a")
        for _ in range(100):
            assert server.post("/v1/generate", BODY, bearer("sk-b")).status == 200
            assert server.ready().status == 200
            assert server.get("/v1/admin/state", bearer("sk-o")).status == 200
        refused = server.post("/v1/generate", BODY, bearer("sk-a"))
        assert (refused.status, refused.error["code"]) == (429, "OVERLOADED")
        assert "max_concurrent_per_tenant" in refused.error["message"]
        assert refused.headers["Retry-After"] == "1"


def test_without_keys_an_address_has_its_share(make_server: MakeServer) -> None:
    server = make_server(server={"max_concurrent_requests": 16}, preamble=LONG_BODIES)
    server.wait_ready()
    with ExitStack() as stack:
        slow_bodies(server, 12, stack, source="127.0.0.2")
        deadline = time.monotonic() + 60
        while "starling_requests_in_flight 12.0" not in server.get("/metrics").body.decode():
            assert time.monotonic() < deadline
        assert ask(server, "/v1/generate", BODY, {}, "127.0.0.2") == 429
        for _ in range(5):
            assert ask(server, "/v1/generate", BODY, {}, "127.0.0.1") == 200
            assert ask(server, "/health", None, {}, "127.0.0.2") == 200


def test_connections_of_one_address_do_not_keep_out_another(make_server: MakeServer) -> None:
    server = make_server(auth=KEYS)
    server.wait_ready()
    with ExitStack() as stack:
        for _ in range(700):
            stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=60, source_address=("127.0.0.2", 0))
            )
        for _ in range(20):
            assert ask(server, "/v1/generate", BODY, bearer("sk-b"), "127.0.0.1") == 200
            assert ask(server, "/health", None, {}, "127.0.0.1") == 200


def test_the_reserve_of_connections_is_for_probes_administration_and_idle_tenants(make_server: MakeServer) -> None:
    preamble = f"{LONG_BODIES}\n{LONG_HEADS}"
    server = make_server(auth=KEYS, server={"max_connections_per_address": 2}, preamble=preamble)
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    with ExitStack() as stack:
        slow_bodies(server, 2, stack, "sk-a")
        deadline = time.monotonic() + 60
        while server.post("/v1/generate", BODY, bearer("sk-a")).status != 429:
            assert time.monotonic() < deadline
        for path in ("/health", "/metrics"):
            assert server.get(path).status == 200
        assert server.ready().status == 200
        assert server.get("/v1/admin/state", bearer("sk-o")).status == 200
        server.peers.do(lambda: setattr(server.peers, "is_stepping", True))
        served = server.post("/v1/generate", BODY, bearer("sk-b"))
        assert (served.status, served.headers["Connection"]) == (200, "close")
        silent = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        assert silent.recv(1) == b""  # closed, because it sends nothing


def shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # the server has closed it
        sock.shutdown(socket.SHUT_RDWR)


def test_bytes_of_bodies_are_bounded_for_each_tenant(make_server: MakeServer) -> None:
    server = make_server(auth=KEYS, server={"max_body_mb": 1, "body_buffer_mb": 4}, preamble=LONG_BODIES)
    server.wait_ready()
    body = b'{"model": "%b", "prompt": "' % MODEL.encode() + b"x" * 1_000_000
    head = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (
        len(body) + 100
    )
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send(sock: socket.socket) -> None:
        with suppress(OSError):  # the test's end closes those that wait
            sock.sendall(head + b"Authorization: Bearer sk-a\r\n\r\n" + body)
            answers.put(sock.recv(12))

    with ExitStack() as stack:
        clients = stack.enter_context(ThreadPoolExecutor(6))
        for _ in range(6):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            stack.callback(shut_down, sock)
            clients.submit(send, sock)
        assert [answers.get(timeout=60) for _ in range(4)] == [b"HTTP/1.1 429"] * 4
        assert answers.empty(), "the buffer holds two bodies"
        assert server.post("/v1/generate", {**BODY, "user": "y" * 500_000}, bearer("sk-b")).status in (200, 400)
    deadline = time.monotonic() + 60
    while server.post("/v1/generate", BODY, bearer("sk-a")).status != 200:
        assert time.monotonic() < deadline


def test_a_thousand_sessions_of_one_key_leave_room_for_another(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(auth=KEYS)
    model = server.config.models[0]
    per_tenant = server.config.sessions_per_tenant(model)
    bounds = SessionBounds(server.config.max_sessions(model), 4096, per_tenant, len(server.config.tenants))
    kv = KvPeer(server.config, tmp_path, bounds)
    try:
        server.wait_ready()
        connection = server.connect()
        statuses: Counter[int] = Counter()
        for _ in range(1000):
            headers = {"Content-Type": "application/json", **bearer("sk-a")}
            body = b'{"prompt": "x", "session_id": "", "max_tokens": 1}'
            connection.request("POST", "/v1/generate", body, headers)
            response = connection.getresponse()
            response.read()
            statuses[response.status] += 1
        connection.close()
        assert statuses == {200: per_tenant, 429: 1000 - per_tenant}
        assert server.post("/v1/generate", {**BODY, "session_id": ""}, bearer("sk-b")).status == 200
    finally:
        kv.stop()


def test_tokenizing_and_closing_sessions_are_charged(make_server: MakeServer) -> None:
    limits = {"requests_per_minute": 3, "tokens_per_minute": 100}
    server = make_server(auth=KEYS, rate_limits=limits, preamble=LONG_MINUTE)
    server.wait_ready()
    one, other = bearer("sk-a"), bearer("sk-b")
    assert server.post("/v1/tokenize", {"text": "é" * 160}, one).status == 200  # 320 bytes: 80 tokens
    assert server.post("/v1/detokenize", {"tokens": [65] * 20}, one).status == 200
    refused = server.post("/v1/detokenize", {"tokens": [65] * 20}, one)
    assert (refused.status, refused.error["code"]) == (429, "RATE_LIMITED")
    assert "tokens per minute" in refused.error["message"]
    refused = server.post("/v1/session/close", {"session_id": "none"}, one)
    assert (refused.status, refused.error["code"]) == (429, "RATE_LIMITED")
    assert "requests per minute" in refused.error["message"]
    assert server.post("/v1/tokenize", {"text": "x"}, other).status == 200
