"""Tenants of one server: what one sends, or does not read, is nothing that another one notices."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from pipeline.observe.status import read_all
from pipeline.procfs import children, memory_bytes
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, poll_until
from tests.gateway.raw_http import raw_request

pytestmark = pytest.mark.slow

PAGE_TOKENS = 32
CONNECTIONS = 512
RESPONSE_MB = 64  # the bound for answers that wait to be read
MAX_GROWTH_MB = 160  # of the gateway; 512 answers of 0.5 MB would take 250


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_gguf: Path) -> Iterator[Server]:
    """Tenants a and b; c and d share their caches."""
    home = tmp_path_factory.mktemp("tenants")
    share_caches(home, models=True)
    keys = [{"key": f"sk-{name}", "tenant": name, "share_cache": name in "cd"} for name in "abcd"]
    models = [{"name": DEMO_MODEL, "kv_cache_mb": 64}]
    with Server(
        home, {"models": models, "auth": {"api_keys": keys}, "server": {"response_buffer_mb": RESPONSE_MB}}
    ) as server:
        yield server
        server.stop()


def ask(server: Server, tenant: str, tokens: list[int]) -> tuple[int, str]:
    """Generate; returns the number of cached prompt tokens, and the text."""
    body = {"prompt": tokens, "max_tokens": 12, "temperature": 0}
    status, answer, _ = server.request("POST", "/v1/generate", body, {"Authorization": f"Bearer sk-{tenant}"})
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]


def test_cached_tokens_tell_nothing_of_other_tenants(server: Server) -> None:
    secret = random.Random(1).choices(range(100, 40_000), k=10 * PAGE_TOKENS + 5)
    first, text = ask(server, "a", secret)
    assert first == 0
    assert ask(server, "a", secret) == (10 * PAGE_TOKENS, text)
    assert ask(server, "b", secret) == (0, text)  # another tenant's first time is like the first time of any other
    assert ask(server, "b", secret) == (10 * PAGE_TOKENS, text)
    assert ask(server, "c", secret) == (0, text)
    assert ask(server, "d", secret) == (10 * PAGE_TOKENS, text)  # shares by its own configuration


def gateway_mb(server: Server) -> float:
    """Resident memory of the gateway and its parsers."""
    (gateway,) = (record for record in read_all(server.home / "run") if record.stage == "gateway")
    pids = (gateway.pid, *children(gateway.pid))
    return sum(memory_bytes(pid) for pid in pids) / (1 << 20)


def test_answers_that_nobody_reads_take_nothing_from_other_tenants(server: Server) -> None:
    """512 connections of one tenant ask for large answers, and read none of them."""
    body: dict[str, Any] = {"text": "x y " * 6_000}
    data = raw_request("POST", "/v1/tokenize", body, "Authorization: Bearer sk-a\r\n")
    alone = ask(server, "b", [100, 200, 300])[1]
    before = most = gateway_mb(server)
    statuses: Counter[bytes] = Counter()
    with ExitStack() as stack:
        for i in range(CONNECTIONS):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(120)
            try:
                sock.connect(("127.0.0.1", server.port))
                sock.sendall(data)
                statuses[sock.recv(12)] += 1
            except ConnectionError:
                statuses[b"closed"] += 1
            if i % 64 == 63:
                most = max(most, gateway_mb(server))
                assert ask(server, "b", [100, 200, 300])[1] == alone
                poll_until(lambda: server.request("GET", "/ready")[0] == 200)
        report = f"{json.dumps({key.decode(): n for key, n in statuses.items()})}, {before:.0f} to {most:.0f} MB"
    print(report)
    assert statuses[b"HTTP/1.1 200"] > 0, report
    assert set(statuses) <= {b"HTTP/1.1 200", b"HTTP/1.1 429", b"HTTP/1.1 503", b"closed"}, report
    assert most - before < MAX_GROWTH_MB, report
