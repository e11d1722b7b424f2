"""Edges over real TCP sockets: only processes with the server's keys exchange frames."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pipeline.errors import ConfigError
from pipeline.ipc import edge_keys
from pipeline.ipc.curve import LOG_EVERY_S
from pipeline.ipc.endpoint import Hub, Link
from pipeline.protocol import messages as m
from tests.pipeline.endpoint_pair import EDGE, HEARTBEAT_MS, LONG_S, Pair
from tools.ports import free_port

HELLO = m.encode(m.Hello("scheduler", 99, 1, 1))
FRAME = m.encode(m.Extend(1, "m", "injected", 1))


def free_address(host: str = "127.0.0.1") -> str:
    return f"tcp://{host}:{free_port(host.strip('[]'))}"


@pytest.fixture
def tcp_pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, free_address())
    yield pair
    pair.close()


def exchange(pair: Pair) -> None:
    """A frame each way."""
    peer = pair.meet()
    there, back = m.Extend(1, "m", "s", 1), m.Granted(2, "s", (1,))
    assert pair.link.send(there)
    assert pair.hub.send(peer, back)
    pair.until(lambda: ("frame", there) in pair.events and ("frame", back) in pair.events)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_frames_pass_both_ways(tmp_path: Path, host: str) -> None:
    address = free_address("127.0.0.1" if host == "localhost" else host).replace("127.0.0.1", host)
    pair = Pair(tmp_path, address)
    exchange(pair)
    assert pair.hub.refused_connections == pair.link.refused_connections == 0
    pair.close()


def test_frames_are_encrypted(tmp_path: Path) -> None:
    """What crosses the wire, read by a relay between the two sides, has no part of a frame's text."""
    text = "a text that no other process may read"
    address = free_address()
    pair = Pair(tmp_path, address)
    pair.link.close(0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        pair.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        pair.link = pair.open_link(2)
        relay = Relay(listener, int(address.rpartition(":")[2]))
        pair.until(lambda: relay.step() and pair.hub.peers and pair.link.peer)
        assert pair.link.send(m.Extend(1, "m", text, 1))
        pair.until(lambda: relay.step() and ("frame", m.Extend(1, "m", text, 1)) in pair.events)
        assert len(relay.seen) > 500
        assert text.encode() not in relay.seen
        assert b"scheduler" not in relay.seen
        relay.close()
        pair.close()


class Relay:
    """Copies the bytes of one connection and keeps them."""

    def __init__(self, listener: socket.socket, port: int) -> None:
        self.listener, self.port, self.seen = listener, port, b""
        self.ends: list[socket.socket] = []

    def step(self) -> bool:
        """Copy what has arrived; True."""
        if not self.ends:
            try:
                accepted, _ = self.listener.accept()
            except BlockingIOError:
                return True
            self.ends = [accepted, socket.create_connection(("127.0.0.1", self.port))]
            for end in self.ends:
                end.setblocking(False)
        for source, target in (self.ends, self.ends[::-1]):
            try:
                data = source.recv(65536)
            except BlockingIOError:
                continue
            self.seen += data
            target.sendall(data)
        return True

    def close(self) -> None:
        for end in self.ends:
            end.close()


# ------------------------------------------------------------------ strangers


Prepare = Callable[["zmq.Socket[bytes]", edge_keys.EdgeKeys], None]


def no_keys(raw: zmq.Socket[bytes], keys: edge_keys.EdgeKeys) -> None:
    pass


def plain_password(raw: zmq.Socket[bytes], keys: edge_keys.EdgeKeys) -> None:
    raw.setsockopt(zmq.PLAIN_USERNAME, b"scheduler")
    raw.setsockopt(zmq.PLAIN_PASSWORD, b"x")


def keys_of_another_server(raw: zmq.Socket[bytes], keys: edge_keys.EdgeKeys) -> None:
    with_keys(raw, edge_keys.generate())


def a_key_of_its_own(raw: zmq.Socket[bytes], keys: edge_keys.EdgeKeys) -> None:
    """It knows the binder's public key."""
    with_keys(raw, edge_keys.EdgeKeys(keys.binder, edge_keys.generate().connector))


def the_connectors_public_key(raw: zmq.Socket[bytes], keys: edge_keys.EdgeKeys) -> None:
    """It knows both public keys, and no secret."""
    stranger = edge_keys.generate().connector
    with_keys(raw, edge_keys.EdgeKeys(keys.binder, edge_keys.KeyPair(keys.connector.public, stranger.secret)))


def with_keys(raw: zmq.Socket[bytes], keys: edge_keys.EdgeKeys) -> None:
    raw.setsockopt(zmq.CURVE_SERVERKEY, keys.binder.public.encode())
    raw.setsockopt(zmq.CURVE_PUBLICKEY, keys.connector.public.encode())
    raw.setsockopt(zmq.CURVE_SECRETKEY, keys.connector.secret.encode())


@pytest.mark.parametrize(
    "prepare", [no_keys, plain_password, keys_of_another_server, a_key_of_its_own, the_connectors_public_key]
)
def test_a_stranger_gets_nothing_and_injects_nothing(
    tcp_pair: Pair, prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    pair = tcp_pair
    pair.meet()
    assert pair.keys is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        prepare(raw, pair.keys)
        raw.connect(pair.address)
        raw.send(HELLO)  # queued until the connection exists, and sent again at each attempt
        raw.send(FRAME)
        pair.until(lambda: pair.hub.refused_connections > 0)
        exchange(pair)  # the edge goes on
        assert not raw.poll(0)
    assert not any(event == ("hub up", 99) for event in pair.events)
    assert not any(isinstance(event[1], m.Extend) and event[1].sequence == "injected" for event in pair.events)
    assert pair.hub.dropped == 0
    refused = [record for record in caplog.records if record.message.startswith("connection refused")]
    assert len(refused) == 1  # however often the stranger tries
    assert refused[0].__dict__["edge"] == EDGE.name


def test_bytes_that_are_no_handshake_are_refused(tcp_pair: Pair) -> None:
    pair = tcp_pair
    pair.meet()
    port = int(pair.address.rpartition(":")[2])
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200, b"\xff" * 8 + b"\1" + b"\x7f" * 300):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.settimeout(LONG_S)
            with contextlib.suppress(OSError):  # it may be closed before all is sent
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):  # its greeting, then the end
                    pass
    exchange(pair)
    assert pair.hub.dropped == 0


def test_a_link_sends_nothing_to_a_stranger_who_listens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a server that another user runs at the address, with a key of its own or with none."""
    keys = edge_keys.load_or_create(tmp_path)
    for is_curve in (True, False):
        address = free_address()
        caplog.clear()
        with zmq.Context() as context:
            raw = context.socket(zmq.ROUTER)
            raw.setsockopt(zmq.LINGER, 0)
            if is_curve:
                raw.setsockopt(zmq.CURVE_SERVER, 1)
                raw.setsockopt(zmq.CURVE_SECRETKEY, edge_keys.generate().binder.secret.encode())
            raw.bind(address)
            link = Link(EDGE, address, "scheduler", heartbeat_ms=HEARTBEAT_MS, context=context, keys=keys)
            deadline = time.monotonic() + LONG_S
            while link.refused_connections == 0:
                assert time.monotonic() < deadline
                link.tick(m.Heartbeat("scheduler", 1, 0, False, True))
                link.receive()
                assert not raw.poll(10)
            assert link.peer is None
            link.close(0)
            raw.close()
        assert [record.message for record in caplog.records if "refused" in record.message]


def test_an_edge_without_keys_is_no_tcp_edge(tmp_path: Path) -> None:
    for kind in (Hub, Link):
        with pytest.raises(ConfigError, match="needs the keys"):
            kind(EDGE, free_address(), "kv", heartbeat_ms=HEARTBEAT_MS)


def test_successors_use_the_same_keys(tcp_pair: Pair) -> None:
    """As after the death of a stage: each side in turn is replaced by a new process's."""
    pair = tcp_pair
    exchange(pair)
    pair.link.close(0)
    pair.link = pair.open_link(2)
    pair.until(lambda: ("hub up", 2) in pair.events)
    pair.hub.close(0)
    while pair.hub.epoch != 2:  # libzmq closes the port in its own thread
        with contextlib.suppress(ConfigError):
            pair.hub = pair.open_hub(2)
    pair.until(lambda: ("link up", 2) in pair.events)
    exchange(pair)


def test_a_log_line_counts_the_attempts_since_the_last_one(tcp_pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    pair = tcp_pair
    pair.meet()
    attempts = 4
    for i in range(attempts):
        with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.setsockopt(zmq.LINGER, 0)
            raw.setsockopt(zmq.RECONNECT_IVL, -1)
            raw.connect(pair.address)
            while pair.hub.refused_connections <= i:
                pair.tick()  # reads the events; the clock stands still
    pair.clock.now += LOG_EVERY_S
    pair.tick()
    lines = [record for record in caplog.records if record.message.startswith("connection refused")]
    assert len(lines) == 2
    assert sum(record.__dict__["count"] for record in lines) == pair.hub.refused_connections >= attempts
