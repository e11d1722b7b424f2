"""A gateway behind proxies: whose requests its bounds and its log count."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.config.load import resolve
from pipeline.errors import ConfigError
from tests.gateway.server import Server

LONG = {"prompt": "long", "max_tokens": 290, "seed": 7, "ignore_eos": True}
PROXY, OTHER = "127.0.0.2", "127.0.0.1"  # addresses that connect


@pytest.fixture(scope="module")
def server(homes: Callable[[], Path]) -> Iterator[Server]:
    running = Server(homes(), server={"trusted_proxies": [PROXY], "max_concurrent_per_tenant": 1})
    running.wait_ready()
    yield running
    assert running.close() == 0


def send(server: Server, stack: ExitStack, peer: str, headers: dict[str, str]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60, source_address=(peer, 0))
    stack.callback(connection.close)
    connection.request("POST", "/v1/generate", json.dumps(LONG), {"Content-Type": "application/json", **headers})
    return connection


def n_running(server: Server) -> int:
    return server.peers.do(lambda: len(server.peers.generator.running))


def test_bounds_apply_to_the_client_behind_the_proxy_and_to_nothing_that_is_forged(server: Server) -> None:
    server.peers.do(lambda: setattr(server.peers, "is_stepping", False))
    with ExitStack() as stack:
        held = [send(server, stack, PROXY, {"X-Forwarded-For": "9.9.9.9, 203.0.113.1"})]
        held += [send(server, stack, PROXY, {"Forwarded": 'for="203.0.113.2:1";proto=https'})]
        held += [send(server, stack, OTHER, {"X-Forwarded-For": "203.0.113.3"})]
        while n_running(server) != 3:
            pass
        for peer, headers in (
            (PROXY, {"X-Forwarded-For": "8.8.8.8, 203.0.113.1", "X-Forwarded-Proto": "https"}),
            (OTHER, {"X-Forwarded-For": "203.0.113.4"}),
            (OTHER, {"Forwarded": "for=203.0.113.4"}),
        ):
            assert send(server, stack, peer, headers).getresponse().status == 429
        server.peers.do(lambda: setattr(server.peers, "is_stepping", True))
        assert [connection.getresponse().status for connection in held] == [200] * 3
        for connection in held:  # the log line of a request follows the end of its answer
            connection.close()
    expected = {("203.0.113.1", None), ("203.0.113.1", "https"), ("203.0.113.2", "https"), (OTHER, None)}
    while True:
        lines = [json.loads(line) for line in server.lines if line.startswith("{")]
        if {(line.get("client"), line.get("scheme")) for line in lines if "client" in line} >= expected:
            break
        server.get("/health")
    assert not any(line.get("client") == "203.0.113.4" for line in lines)


@pytest.mark.parametrize("text", ["10.0.0.1/8", "proxy.example.org", "0.0.0.0/0", "unix"])
def test_texts_that_name_no_proxy_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.trusted_proxies"):
        resolve({"server": {"trusted_proxies": [text]}}, {})
