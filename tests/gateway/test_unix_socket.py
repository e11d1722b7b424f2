"""A gateway on a Unix socket: answers, whom its bounds apply to, and what its successor finds."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.gateway.http.connection import CONTINUE
from starling.bench.connection import Sender, Target
from starling.bench.response import ClientRequest
from starling.client import address as addresses
from starling.client.answer import get_json
from tests.gateway.peers import MODEL
from tests.gateway.raw_http import raw_request, read_to_end, split_responses
from tests.gateway.server import Server
from tests.tls_files import DATA, place, trusting

WAIT_S = 60.0
LONG = {"prompt": "long", "max_tokens": 290, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(homes: Callable[[], Path]) -> Iterator[Server]:
    """On a Unix socket only."""
    home = homes()
    bounds = {"max_concurrent_requests": 4, "max_concurrent_per_tenant": 2}
    running = Server(home, server={"host": "", "unix_socket": str(home / "api.sock"), **bounds})
    running.unix_socket = home / "api.sock"
    running.wait_ready()
    yield running
    assert running.close() == 0
    assert not (home / "api.sock").exists()


def connect(server: Server) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(str(server.unix_socket))
    return sock


def wait_idle(server: Server) -> None:
    """Until no request is in flight: each counts for the user of all tests."""
    while b"starling_requests_in_flight 0.0" not in server.get("/metrics").body:
        pass


def test_answers_streams_and_half_closed_connections(server: Server) -> None:
    assert server.port == 0
    whole = server.post("/v1/generate", LONG).json["choices"][0]["text"]
    events = server.stream("/v1/generate", LONG).all()
    assert "".join(event.data.get("text", "") for event in events[:-1]) == whole
    with connect(server) as sock:
        sock.sendall(raw_request("POST", "/v1/generate", LONG))
        sock.shutdown(socket.SHUT_WR)
        received = read_to_end(sock).replace(CONTINUE, b"")  # a client that waits for long is probed
    (answer,) = split_responses(received, "POST")
    assert (answer.status, answer.is_complete) == (200, True)
    wait_idle(server)


def test_a_client_that_leaves_is_noticed(server: Server) -> None:
    def n_running() -> int:
        return server.peers.do(lambda: len(server.peers.generator.running))

    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    try:
        with connect(server) as sock:
            sock.sendall(raw_request("POST", "/v1/generate", LONG))
            while n_running() != 1:
                pass
        while n_running():
            pass
    finally:
        server.peers.do(lambda: setattr(server.peers, "is_stepping", True))
    wait_idle(server)


def test_clients_without_keys_count_by_their_user(server: Server) -> None:
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    try:
        with connect(server) as one, connect(server) as two:
            for sock in (one, two):
                sock.sendall(raw_request("POST", "/v1/generate", LONG))
            while server.peers.do(lambda: len(server.peers.generator.running)) != 2:
                pass
            refused = server.post("/v1/generate", LONG)
            assert (refused.status, refused.error["code"]) == (429, "OVERLOADED")
    finally:
        server.peers.do(lambda: setattr(server.peers, "is_stepping", True))
    wait_idle(server)
    while not any(f'"client":"uid:{os.getuid()}"' in line.replace(": ", ":") for line in server.lines):
        server.get("/health")


def test_commands_find_the_socket(server: Server) -> None:
    address = addresses.of_config(server.config)
    assert str(address) == f"unix:{server.unix_socket}"
    assert get_json(address, "/v1/models")["data"][0]["id"] == MODEL

    async def run() -> int:
        async with Sender(Target.of(address)) as sender:
            return (await sender.send(ClientRequest({**LONG, "model": MODEL}, path="/v1/generate"))).status

    assert asyncio.run(run()) == 200


def test_a_successor_replaces_the_socket_of_a_killed_gateway(server: Server) -> None:
    server.kill_and_restart()
    server.wait_ready()
    assert server.get("/health").status == 200


def test_beside_tls_that_needs_a_certificate_of_clients(homes: Callable[[], Path]) -> None:
    home = homes()
    cert, key = place(home, "one")
    tls = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(DATA / "ca.pem")}
    server = Server(home, server={**tls, "unix_socket": str(home / "api.sock")})
    try:
        server.wait_ready()
        assert get_json(addresses.of_config(server.config), "/health")["status"] == "healthy"
        server.tls = trusting()
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            server.get("/health")
        server.tls.load_cert_chain(DATA / "client.pem", DATA / "client.key")
        assert server.get("/health").status == 200
    finally:
        assert server.close() == 0
