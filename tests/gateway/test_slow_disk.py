"""A real gateway on a slow or failing disk: streams in flight go on, and new requests wait for their records."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from stages.gateway.requests.journal import FILE, UNREADABLE_FILE, RequestEnd, parse
from tests import live_faults
from tests.e2e.core_waits import run_queue_delay_s
from tests.gateway.http_client import Stream
from tests.gateway.server import MakeServer, Server
from tests.gateway.server_journal import ended

DELAY_S = 2.5  # of each access
GAP_S = 2.0  # less than one access: between two events of a stream in flight
BODY = {"prompt": "abc", "max_tokens": 3000, "seed": 1, "ignore_eos": True}
LONG = "x" * 4000  # a record of 16 KB


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def runnable_s(server: Server) -> float:
    """Time of the clock, in s, but for what this thread and the gateway have waited for a core."""
    own_s = run_queue_delay_s(os.getpid(), threading.get_native_id())
    return time.monotonic() - own_s - run_queue_delay_s(server.process.pid)


@contextmanager
def faults(server: Server, plan: str) -> Iterator[None]:
    live_faults.begin(server.home, plan, wait)
    yield
    live_faults.end(server.home, wait)


class Follower(threading.Thread):
    """Reads a stream; `longest_s` between two of its events, without waits for a core."""

    def __init__(self, server: Server, stream: Stream) -> None:
        super().__init__()
        self.server = server
        self.stream = stream
        self.longest_s = 0.0
        self.n_events = 0
        self.is_done = False
        self.start()

    def run(self) -> None:
        last = runnable_s(self.server)
        for _ in self.stream.events():
            now = runnable_s(self.server)
            self.longest_s, last = max(self.longest_s, now - last), now
            self.n_events += 1
            if self.is_done:
                break
        self.stream.close()

    def end(self) -> float:
        self.is_done = True
        self.join()
        return self.longest_s


def begin_stream(server: Server) -> Follower:
    server.peers.do(lambda: setattr(server.peers, "step_interval_s", 0.02))
    return Follower(server, server.stream("/v1/generate", BODY))


@pytest.mark.parametrize("point", ["journal", "journal_sync", "quotas", "quotas_sync", "logs", "keys_open"])
def test_a_slow_disk_delays_no_stream_in_flight(make_server: MakeServer, point: str) -> None:
    server = make_server(rate_limits={"requests_per_minute": 1000, "tokens_per_minute": 1_000_000})
    server.wait_ready()
    follower = begin_stream(server)
    with faults(server, f"disk:slow@{point}={DELAY_S * 1000:.0f}"):
        begin, runnable_begin = time.monotonic(), runnable_s(server)
        assert server.post("/v1/generate", {"prompt": "x", "max_tokens": 1}).status == 200
        took_s, runnable_took_s = time.monotonic() - begin, runnable_s(server) - runnable_begin
        n_events = follower.n_events
        wait(lambda: follower.n_events >= n_events + 10)  # while the disk is slow
    if point in ("journal", "quotas"):  # acknowledged after its record is written
        assert took_s >= DELAY_S * 0.9
    else:
        assert runnable_took_s < DELAY_S * 0.9
    assert follower.end() < GAP_S


def test_a_slow_rewrite_delays_no_stream_in_flight(make_server: MakeServer) -> None:
    server = make_server(server={"journal_mb": 1})
    server.wait_ready()
    file = server.home / "state" / "journal" / FILE
    inode = file.stat().st_ino
    server.peers.do(lambda: setattr(server.peers, "tokens_per_step", 5))
    sizes = [0]
    while file.stat().st_size > sizes[-1] and (1 << 20) - file.stat().st_size > 40_000:
        sizes.append(file.stat().st_size)
        assert server.post("/v1/generate", {"prompt": LONG, "max_tokens": 1}).status == 200
    follower = begin_stream(server)
    with faults(server, f"disk:slow@journal_rename={DELAY_S * 1000:.0f}"):
        begin = time.monotonic()
        for _ in range(3):
            assert server.post("/v1/generate", {"prompt": LONG, "max_tokens": 1}).status == 200
        assert time.monotonic() - begin >= DELAY_S
    assert file.stat().st_ino != inode
    assert follower.end() < GAP_S


@pytest.mark.parametrize("is_repeated", [False, True])
def test_the_journal_has_the_end_of_an_answer_with_a_key_before_its_clients(
    make_server: MakeServer, is_repeated: bool
) -> None:
    """A gateway that is killed after that leaves the answer to its successor, which has no request in flight."""
    server = make_server()
    server.wait_ready()
    key = {"Idempotency-Key": "k"}
    with server.peers.held():
        streams = [server.stream("/v1/generate", BODY, key) for _ in range(1 + is_repeated)]
        live_faults.begin(server.home, f"disk:slow@journal={DELAY_S * 1000:.0f}", wait)
    for stream in streams:
        assert stream.all()[-1].data == "[DONE]"
        assert ended(server) == {stream.response.headers["X-Starling-Request"]}
    server.kill_and_restart()
    server.wait_ready()
    assert not [line for line in server.lines if "recovering requests" in line]


def test_a_client_that_leaves_while_the_disk_is_slow_leaves_nothing(make_server: MakeServer) -> None:
    """Its record is followed by its end, its sequences are never submitted."""
    server = make_server()
    server.wait_ready()
    follower = begin_stream(server)
    with faults(server, "disk:slow@journal=5000"):
        connection = server.connect(timeout_s=2.5)  # until then the gateway has read the request
        body, kind = b'{"prompt": "x", "max_tokens": 3}', {"Content-Type": "application/json"}
        connection.request("POST", "/v1/generate", body, kind)
        with pytest.raises(TimeoutError):
            connection.getresponse()
        # A reset: after a mere end of its input a client may still read the answer.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    assert server.post("/v1/generate", {"prompt": "y", "max_tokens": 1}).status == 200
    assert server.peers.do(lambda: len(server.peers.generator.submitted)) == 2
    follower.end()
    file = server.home / "state" / "journal" / FILE
    wait(lambda: sum(isinstance(value, RequestEnd) for _, value, _ in parse(file.read_bytes())) >= 3)
    server.kill_and_restart()
    server.wait_ready()
    assert not [line for line in server.lines if "recovering requests" in line]


def test_a_request_whose_record_is_not_written_in_time(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARLING_FAULTS", "disk:slow@journal=6000")
    server = make_server(server={"request_timeout_ms": 3000})  # enough for the request to reach the journal
    server.wait_ready()
    answer = server.post("/v1/generate", {"prompt": "x", "max_tokens": 3})
    assert (answer.status, answer.error["code"]) == (503, "TIMEOUT")
    assert "journal" in answer.error["message"]
    assert server.peers.do(lambda: len(server.peers.generator.submitted)) == 0


def restart(server: Server) -> None:
    """Kill the gateway; the successor finds a scheduler without its predecessor's sequences."""
    server.kill_and_restart()
    server.peers.do(server.peers.kill_scheduler)
    server.peers.do(server.peers.start_scheduler)
    server.wait_ready()


def test_an_unreadable_journal_is_renamed(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    server.peers.do(lambda: setattr(server.peers, "step_interval_s", 0.05))
    stream = server.stream("/v1/generate", {**BODY, "max_tokens": 200})
    next(stream.events())
    directory = server.home / "state" / "journal"
    server.env["STARLING_FAULTS"] = "disk:eio@journal_read"
    restart(server)
    stream.close()
    assert (directory / UNREADABLE_FILE).stat().st_size > 0
    assert "starling_journal_unreadable_total 1.0\n" in server.get("/metrics").body.decode()
    server.peers.do(lambda: setattr(server.peers, "step_interval_s", 0.05))
    stream = server.stream("/v1/generate", {**BODY, "max_tokens": 100})
    begun = next(stream.events())
    del server.env["STARLING_FAULTS"]
    restart(server)
    stream.close()
    server.peers.do(lambda: setattr(server.peers, "step_interval_s", 0.0))
    rest = server.resume(f"/v1/requests/{begun.id.partition(':')[0]}").all()
    assert rest[-1].data == "[DONE]"
