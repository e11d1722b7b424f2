"""Clients that read slowly and clients that leave in the middle of a stream cost no request, page or descriptor.

A few, against the server of the other tests; `make leaving-clients` takes 500 and 1,000, with room for them.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.conftest import share_caches
from tests.e2e.server import POLL_S, Server

ARE_MANY = bool(os.environ.get("STARLING_LEAVING_CLIENTS"))
pytestmark = [pytest.mark.slow, *([pytest.mark.timeout(3600)] if ARE_MANY else [])]

N_SLOW, N_LEAVING = (500, 1000) if ARE_MANY else (12, 24)
AT_ONCE = 50 if ARE_MANY else 4  # of the clients that leave
N_FIRST = 8  # requests before the others, whose answers are read
N_TOKENS = 400  # of a stream that is left: more than come while the process of the clients has no core
SETTLED_S = 300
# A server refuses what its queue would not finish in the time of a request: 50 streams of 400 tokens take more than
# the default of 300 s on two slow cores. Those that leave do not wait for their tokens.
REQUEST_TIMEOUT_MS = 3_600_000
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST


@pytest.fixture(scope="module")
def crowded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not ARE_MANY:
        yield request.getfixturevalue("demo_server")
        return
    request.getfixturevalue("demo_gguf")
    home = tmp_path_factory.mktemp("crowd")
    share_caches(home, models=True)
    limits = {
        "max_concurrent_requests": 1024,
        "max_concurrent_per_tenant": 1000,
        "request_timeout_ms": REQUEST_TIMEOUT_MS,
    }
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


def is_told(now: dict[str, Any]) -> bool:
    """Whether scheduler and kv have told their metrics: one that was killed before this test tells them in a second."""
    return bool(now["pages"]) and isinstance(now["queued"], float)


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
        assert time.monotonic() < deadline, f"{before}, now {now}"
        time.sleep(POLL_S)
    return now


@pytest.fixture(scope="module")
def before(crowded: Server) -> dict[str, Any]:
    """What the server holds after its first requests, when it is idle."""
    connections = [begin(crowded, 2, f"Once {n}") for n in range(N_FIRST)]
    for connection in connections:
        assert b"[DONE]" in read_all(connection)
    leave(crowded, [f"Twice {n}" for n in range(AT_ONCE)])
    deadline = time.monotonic() + SETTLED_S
    while not is_told(now := holdings(crowded)) or any(now[name] for name in ("running", "queued", "leased")):
        assert time.monotonic() < deadline, repr(now)
        time.sleep(POLL_S)
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


def leave(server: Server, prompts: list[str]) -> int:
    """Begin a stream for each prompt, and leave each as soon as it has sent a token. Returns the tokens received."""
    received: dict[socket.socket, bytes] = {begin(server, N_TOKENS, prompt): b"" for prompt in prompts}
    n_tokens = n_left = 0
    with selectors.DefaultSelector() as selector:
        for connection in received:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(SETTLED_S)
            assert ready, f"no byte in {SETTLED_S} s; {n_left} of {len(prompts)} clients have left"
            for key, _ in ready:
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                part = connection.recv(4096)
                data = received[connection] = received[connection] + part
                assert part and data.startswith(b"HTTP/1.1 200"[: len(data)]), data
                if not (texts := events(data)):
                    continue
                assert b"finish_reason" not in data, data[-300:]
                n_tokens += sum(len(text["tokens"]) for text in texts)
                selector.unregister(connection)
                if n_left % 2:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                connection.close()
                n_left += 1
    return n_tokens


def events(data: bytes) -> list[dict[str, Any]]:
    """The whole events of a stream so far that have text."""
    lines = data.rpartition(b"\n")[0].decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def ended(server: Server) -> dict[str, float]:
    """Sequences ended so far, by the reason that the scheduler counts."""
    counts: dict[str, float] = {}
    for labels, count in server.metrics("starling_finished_total").items():
        reason = labels.rpartition('reason="')[2].rstrip('"')
        counts[reason] = counts.get(reason, 0) + count
    return counts


def generated(server: Server) -> float:
    """Tokens that the scheduler has counted as outputs."""
    return sum(server.metrics("starling_tokens_generated_total").values())


def test_clients_that_leave_in_the_middle(crowded: Server, before: dict[str, Any]) -> None:
    """Each has received a token and not its last one. Half of them close, the others reset the connection."""
    n_received = 0
    for left in range(0, N_LEAVING, AT_ONCE):
        n_received += leave(crowded, [f"Story {n}:" for n in range(left, min(left + AT_ONCE, N_LEAVING))])
        print(f"{left + AT_ONCE} of {N_LEAVING} clients have left", flush=True)
    now = wait_settled(crowded, before)
    print(f"{N_LEAVING} clients left after {n_received} tokens; before: {before}; after: {now}")
    if ARE_MANY:  # the server has had no other requests
        check_counts(crowded)


def check_counts(server: Server) -> None:
    """What the scheduler has counted: it ended the sequences of those that left by a cancel, before their length."""
    deadline = time.monotonic() + SETTLED_S
    while sum((counts := ended(server)).values()) < N_FIRST + AT_ONCE + N_LEAVING:
        assert time.monotonic() < deadline, counts
    assert {reason: count for reason, count in counts.items() if count} == {
        "length": N_FIRST,
        "cancelled": AT_ONCE + N_LEAVING,
    }
    n_generated = generated(server)
    assert N_LEAVING <= n_generated < N_LEAVING * N_TOKENS
    print(f"ended: {counts}; tokens generated: {n_generated:.0f}")


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
        texts.add("".join(event.get("text", "") for event in events(data)))
    assert len(texts) == 1, texts
    now = wait_settled(crowded, before)
    print(f"{N_SLOW} slow readers; before: {before}; after: {now}")
