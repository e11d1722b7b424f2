"""Links and hubs over real ipc sockets: frames, bounds, invalid input."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import zmq

from pipeline.errors import ConfigError
from pipeline.ipc.endpoint import BATCH_FRAMES, MAX_FRAME_BYTES
from pipeline.protocol import messages as m
from shm.arena import process_ticks
from tests.pipeline.endpoint_pair import EDGE, Pair, wait_readable

# ------------------------------------------------------------------ sending and receiving


def test_both_sides_exchange_hello(pair: Pair) -> None:
    pair.until(lambda: pair.hub.peers and pair.link.peer)
    assert sorted(pair.events) == [("hub up", 1), ("link up", 1)]
    hello = next(iter(pair.hub.peers.values()))
    me = os.getpid()
    assert (hello.stage, hello.pid, hello.start_ticks) == ("scheduler", me, process_ticks(me))
    assert pair.link.peer is not None
    assert pair.link.peer.stage == "kv"


def test_heartbeats_are_stored_and_not_delivered_as_frames(pair: Pair) -> None:
    peer = pair.meet()
    pair.until(lambda: pair.link.last_heartbeat and pair.hub.last_heartbeat)
    assert pair.link.last_heartbeat == m.Heartbeat("kv", 1, 7, True, True, sent=0)
    assert pair.hub.last_heartbeat[peer].stage == "scheduler"
    assert pair.events == []


def test_frames_arrive_in_order_both_ways(pair: Pair) -> None:
    peer = pair.meet()
    there = [m.Extend(i, "m", f"s{i}/0", i) for i in range(3000)]
    back = [m.Granted(i, f"s{i}/0", (i,)) for i in range(3000)]
    assert all(map(pair.link.send, there))
    assert all(pair.hub.send(peer, frame) for frame in back)
    pair.until(lambda: len(pair.events) == 6000)
    frames = [event[1] for event in pair.events]
    assert [f for f in frames if isinstance(f, m.Extend)] == there
    assert [f for f in frames if isinstance(f, m.Granted)] == back


def test_sending_to_an_absent_peer_is_refused(pair: Pair) -> None:
    assert not pair.link.send(m.Extend(1, "m", "s", 1))
    assert not pair.hub.send(b"absent", m.Granted(1, "s", ()))
    assert (pair.link.refused, pair.hub.refused) == (1, 1)


def test_sending_never_blocks_and_reports_a_full_queue(pair: Pair) -> None:
    peer = pair.meet()
    sent = 0
    frame = m.Granted(1, "s" * 1000, tuple(range(1000)))
    while pair.hub.send(peer, frame):
        sent += 1
        assert sent < 100_000
    assert sent > EDGE.high_water_mark // 2
    # When the reader reads again, every accepted frame arrives.
    got = 0
    while got < sent:
        wait_readable(pair.link)
        got += len(pair.link.receive())
    assert got == sent


def test_a_frame_that_is_too_large_is_refused(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    peer = pair.meet()
    caplog.clear()
    name = "x" * MAX_FRAME_BYTES
    assert not pair.link.send(m.Extend(1, "m", name, 1))
    assert not pair.hub.send(peer, m.Granted(1, name, ()))
    assert [record.message for record in caplog.records] == ["frame too large to send"] * 2
    assert pair.link.send(m.Extend(2, "m", "s", 1))
    assert pair.hub.send(peer, m.Granted(2, "s", ()))
    pair.until(lambda: len(pair.events) == 2)
    assert {type(event[1]) for event in pair.events} == {m.Extend, m.Granted}  # no peer was down in between


def test_a_socket_edge_consumed_by_sending_is_signalled_again(pair: Pair) -> None:
    """Ping-pong in which each side sends before it reads, which consumes the edge of ZeroMQ's descriptor."""
    peer = pair.meet()
    for i in range(300):
        assert pair.link.send(m.Extend(i, "m", "s", 1))
        assert pair.hub.send(peer, m.Granted(i, "s", ()))
        for _ in range(3):  # processes the socket's commands, and with them the edge
            assert pair.link.send(m.Extend(i, "m", "s", 2))
        there: list[m.Frame] = []
        back: list[m.Frame] = []
        while len(back) < 1:
            wait_readable(pair.link)
            back += pair.link.receive()
        while len(there) < 4:
            wait_readable(pair.hub)
            there += [frame for _, frame in pair.hub.receive()]


def test_a_batch_is_bounded_and_the_rest_is_signalled(pair: Pair) -> None:
    pair.meet()
    total = BATCH_FRAMES * 2 + 5
    for i in range(total):
        assert pair.link.send(m.Extend(i, "m", "s", i))
    sizes: list[int] = []
    while sum(sizes) < total:
        wait_readable(pair.hub)
        sizes.append(len(pair.hub.receive()))
    assert max(sizes) <= BATCH_FRAMES
    assert len(sizes) >= 3


def test_a_new_connection_is_greeted_without_waiting_for_a_tick(pair: Pair) -> None:
    pair.until(lambda: pair.hub.peers and pair.link.peer, ticking=False)
    pair.hub.close(0)
    pair.hub = pair.open_hub(2)
    pair.until(lambda: pair.hub.peers and pair.link.peer and pair.link.peer.epoch == 2, ticking=False)


@pytest.mark.parametrize("plan", ["wire:drop@scheduler>kv:2, wire:drop@kv>gateway:1"], indirect=True)
@pytest.mark.usefixtures("plan")
def test_a_fault_plan_loses_the_frame_it_names(pair: Pair) -> None:
    peer = pair.meet()
    for i in (1, 2, 3):
        assert pair.link.send(m.Extend(i, "m", "s", 1))
    assert pair.hub.send(peer, m.Granted(1, "s", ()))
    pair.until(lambda: len(pair.events) == 3, ticking=False)
    assert sorted(event[1].id for event in pair.events) == [1, 1, 3]
    # The next heartbeat reveals the loss; both sides start again, and no frame is missing from then on.
    pair.events.clear()
    pair.until(lambda: ("hub up", 1) in pair.events and ("link up", 1) in pair.events)
    assert sorted(pair.events) == [("hub down", 1), ("hub up", 1), ("link down", 1), ("link up", 1)]
    pair.events.clear()
    frames = [m.Extend(i, "m", "s", 1) for i in range(4, 9)]
    assert all(map(pair.link.send, frames))
    pair.until(lambda: len(pair.events) == 5)
    received: list[m.Heartbeat | None] = []  # heartbeats of the hub, each a new object

    def has_received() -> bool:
        beat = pair.link.last_heartbeat
        if not received or received[-1] is not beat:
            received.append(beat)
        return len(received) > 3

    pair.until(has_received)
    assert pair.events == [("frame", frame) for frame in frames]


@pytest.mark.parametrize("plan", ["wire:drop@scheduler>kv:1", "wire:drop@kv>scheduler:1"], indirect=True)
@pytest.mark.usefixtures("plan")
def test_a_lost_frame_is_detected_by_its_receiver(pair: Pair) -> None:
    peer = pair.meet()
    assert pair.hub.send(peer, m.Granted(1, "s", ()))
    assert pair.link.send(m.Extend(1, "m", "s", 1))
    pair.until(lambda: len(pair.events) == 1, ticking=False)
    pair.events.clear()
    pair.until(lambda: ("hub up", 1) in pair.events and ("link up", 1) in pair.events)
    assert sorted(pair.events) == [("hub down", 1), ("hub up", 1), ("link down", 1), ("link up", 1)]


# ------------------------------------------------------------------ invalid frames and addresses


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"\x92\xa1H",
        m.encode(m.Granted(1, "not of this direction", ())),
        m.encode(m.Hello("kv", 1, 1, 1, protocol=m.PROTOCOL_VERSION + 1)),
        b"\x91" * 5000,
        b"\x92\xa1H\xff" + bytes(100),
    ],
)
def test_invalid_frames_are_counted_and_dropped(pair: Pair, payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    pair.meet()
    with pair.context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(pair.address)
        for _ in range(3):
            raw.send(payload)
        pair.until(lambda: pair.hub.dropped >= 3)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert pair.events == []
    assert pair.link.send(m.Extend(1, "m", "s", 1))
    pair.until(lambda: pair.events == [("frame", m.Extend(1, "m", "s", 1))])


@pytest.mark.parametrize("pid", [-1, 0, 1 << 31, 1 << 62])
def test_a_greeting_may_name_any_process(pair: Pair, pid: int) -> None:
    pair.meet()
    with pair.context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(pair.address)
        raw.send(m.encode(m.Hello("other", 1, pid, 1)))
        pair.until(lambda: ("hub up", 1) in pair.events)
        assert "other" in {hello.stage for hello in pair.hub.peers.values()}


def test_frames_with_additional_fields_are_accepted(pair: Pair) -> None:
    pair.meet()
    with pair.context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(pair.address)
        raw.send(m.encode(m.Hello("newer", 1, os.getpid(), process_ticks(os.getpid()))))
        grown = m.encode(m.Extend(9, "m", "s", 4))
        raw.send(bytes([grown[0] + 1]) + grown[1:] + b"\xa5extra")
        pair.until(lambda: ("frame", m.Extend(9, "m", "s", 4)) in pair.events)


def test_a_hub_refuses_the_address_of_a_live_hub(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="in use by a live process"):
        pair.open_hub(2)
    pair.meet()


def test_a_hub_replaces_the_socket_of_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    pair = Pair(tmp_path)
    pair.meet()
    pair.close()
    assert not path.exists()


def test_close_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        pair = Pair(tmp_path)
        pair.meet()
        pair.close()
    assert len(os.listdir("/proc/self/fd")) == before
