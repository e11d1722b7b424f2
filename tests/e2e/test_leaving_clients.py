"""Clients that read slowly and clients that leave in the middle of a stream cost no request, page or descriptor.

A few, against the server of the other tests; `make leaving-clients` takes 500 and 1,000, with room for them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server

pytestmark = pytest.mark.slow

ARE_MANY = bool(os.environ.get("STARLING_LEAVING_CLIENTS"))
N_SLOW, N_LEAVING = (500, 1000) if ARE_MANY else (12, 24)
AT_ONCE = 50  # of the clients that leave
SETTLED_S = 300
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST


@pytest.fixture(scope="module")
def crowded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not ARE_MANY:
        yield request.getfixturevalue("demo_server")
        return
    request.getfixturevalue("demo_gguf")
    home = tmp_path_factory.mktemp("crowd")
    share_caches(home, models=True)
    limits = {"max_concurrent_requests": 1024, "max_concurrent_per_tenant": 1000}
    with Server(home, {"server": limits, "models": [{"name": DEMO_MODEL, "kv_cache_mb": 256}]}) as server:
        yield server


def begin(server: Server, max_tokens: int, prompt: str, receive_bytes: int = 0) -> socket.socket:
    """Send a request for a stream of exactly `max_tokens` tokens."""
    connection = socket.socket()
    connection.settimeout(SETTLED_S)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", server.port))
    request = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body = json.dumps(request).encode()
    head = "POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def holdings(server: Server) -> dict[str, Any]:
    """What the server holds: sequences, pages by state, and the descriptors of each process."""
    pages = server.metrics("starling_kv_cache_pages")
    leased = sum(count for labels, count in pages.items() if 'state="leased"' in labels)
    descriptors = {}
    for pid in server.pids():
        try:
            descriptors[pid] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            continue
    return {
        "requests": sum(server.metrics("starling_requests_in_flight").values()),
        "running": sum(server.metrics("starling_running_sequences").values()),
        "queued": sum(server.metrics("starling_queue_depth").values()),
        "leased": leased,
        "pages": sum(pages.values()),
        "descriptors": descriptors,
    }


def is_settled(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether nothing more is held than before: processes may have closed descriptors meanwhile, and not opened any."""
    kept = now["pages"] == before["pages"]
    kept &= all(now[name] <= before[name] for name in ("requests", "running", "queued", "leased"))
    more = {pid for pid, count in now["descriptors"].items() if count > before["descriptors"].get(pid, 0)}
    return kept and not more


def wait_settled(server: Server, before: dict[str, Any]) -> dict[str, Any]:
    """Wait until the server holds what it held before. Stages publish their metrics once per second."""
    deadline = time.monotonic() + SETTLED_S
    while not is_settled(now := holdings(server), before):
        assert time.monotonic() < deadline, (before, now)
    return now


@pytest.fixture(scope="module")
def before(crowded: Server) -> dict[str, Any]:
    """What the server holds after its first requests, when it is idle."""
    connections = [begin(crowded, 2, f"Once {n}") for n in range(8)]
    for connection in connections:
        assert b"[DONE]" in read_all(connection)
    leave(crowded, [f"Twice {n}" for n in range(8)])
    deadline = time.monotonic() + SETTLED_S
    while any((now := holdings(crowded))[name] for name in ("running", "queued", "leased")):
        assert time.monotonic() < deadline, now
    return now


def read_all(connection: socket.socket) -> bytes:
    """Read up to the end of the stream, and close."""
    data = b""
    with connection:
        while b"data: [DONE]" not in data:
            part = connection.recv(1 << 16)
            assert part, data[-300:]
            data += part
    return data


def leave(server: Server, prompts: list[str]) -> None:
    """Begin a stream for each prompt, and leave it after its first token."""
    for n, connection in enumerate([begin(server, 400, prompt) for prompt in prompts]):
        data = b""
        while b"data: " not in data:
            part = connection.recv(4096)
            assert part, data
            data += part
        if n % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()


def test_clients_that_leave_in_the_middle(crowded: Server, before: dict[str, Any]) -> None:
    """Each has received a token. Half of them close, the others reset the connection."""
    for left in range(0, N_LEAVING, AT_ONCE):
        leave(crowded, [f"Story {n}:" for n in range(left, min(left + AT_ONCE, N_LEAVING))])
    now = wait_settled(crowded, before)
    print(f"{N_LEAVING} clients left; before: {before}; after: {now}")


def test_slow_readers(crowded: Server, before: dict[str, Any]) -> None:
    """All at once, a few bytes at a time, each with a window of its own: all get the same whole stream."""
    connections = [begin(crowded, 12, "Once upon a time", 1024) for _ in range(N_SLOW)]
    received = [b""] * N_SLOW
    unread = set(range(N_SLOW))
    while unread:
        for n in sorted(unread):
            part = connections[n].recv(200)
            assert part, received[n][-300:]
            received[n] += part
            if b"data: [DONE]" in received[n]:
                unread.remove(n)
                connections[n].close()
    texts = set()
    for data in received:
        assert data.startswith(b"HTTP/1.1 200")
        lines = [line for line in data.decode().split("\n") if line.startswith("data: {")]
        texts.add("".join(json.loads(line.removeprefix("data: ")).get("text", "") for line in lines))
    assert len(texts) == 1, texts
    now = wait_settled(crowded, before)
    print(f"{N_SLOW} slow readers; before: {before}; after: {now}")
