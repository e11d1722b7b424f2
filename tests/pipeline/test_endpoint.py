"""Links and hubs over real ipc sockets; the clock is the test's own."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pipeline.errors import ConfigError
from pipeline.ipc.endpoint import BATCH_FRAMES, DEAD_AFTER_BEATS, MAX_FRAME_BYTES, STARVED, Hub, Link
from pipeline.protocol import messages as m
from pipeline.protocol.topology import EDGES
from pipeline.runtime.timer_coalescing import IDLE_HEARTBEAT_S
from shm.arena import process_ticks

EDGE = EDGES["scheduler-kv"]
HEARTBEAT_MS = 100
LONG_S = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Pair:
    """A hub (kv) and links (scheduler) in one process, and everything that happened, in order."""

    def __init__(self, directory: Path, address: str = "") -> None:
        self.address = address or f"ipc://{directory}/x.sock"
        self.clock = Clock()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events: list[tuple[Any, ...]] = []
        self.opened: list[Link | Hub] = []
        self.is_starved = False  # who is silent waits for a core
        self.hub = self.open_hub(1)
        self.link = self.open_link(1)

    def open_hub(self, epoch: int) -> Hub:
        hub = Hub(
            EDGE,
            self.address,
            "kv",
            heartbeat_ms=HEARTBEAT_MS,
            clock=self.clock,
            context=self.context,
            epoch=epoch,
        )
        hub.on_up = lambda peer, hello: self.events.append(("hub up", hello.epoch))
        hub.on_down = lambda peer, hello: self.events.append(("hub down", hello.epoch))
        hub.is_runnable = lambda pid: self.is_starved
        self.opened.append(hub)
        return hub

    def open_link(self, epoch: int) -> Link:
        link = Link(
            EDGE,
            self.address,
            "scheduler",
            heartbeat_ms=HEARTBEAT_MS,
            clock=self.clock,
            context=self.context,
            epoch=epoch,
        )
        link.on_up = lambda hello: self.events.append(("link up", hello.epoch))
        link.on_down = lambda hello: self.events.append(("link down", hello.epoch))
        link.is_runnable = lambda pid: self.is_starved
        self.opened.append(link)
        return link

    def tick(self, *endpoints: Link | Hub) -> None:
        for endpoint in endpoints or (self.hub, self.link):
            endpoint.tick(m.Heartbeat(endpoint.stage, endpoint.epoch, 7, True, True))

    def read(self, endpoint: Link | Hub) -> list[m.Frame]:
        frames = [item[1] if isinstance(item, tuple) else item for item in endpoint.receive()]
        self.events += [("frame", frame) for frame in frames]
        return frames

    def until(self, condition: Any, ticking: bool = True) -> None:
        """Serve hub and link, waiting on their descriptors alone, until `condition()`."""
        poll = select.poll()
        for endpoint in (self.hub, self.link):
            if endpoint.fd >= 0:
                poll.register(endpoint.fd, select.POLLIN)
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < deadline, self.events[-20:]
            if ticking:
                self.clock.now += HEARTBEAT_MS / 1000
                self.tick()
            for fd, _ in poll.poll(20):
                self.read(self.hub if fd == self.hub.fd else self.link)

    def meet(self) -> bytes:
        self.until(lambda: self.hub.peers and self.link.peer)
        self.events.clear()
        return next(iter(self.hub.peers))

    def close(self) -> None:
        for endpoint in self.opened:
            endpoint.close(0)
        self.context.term()


@pytest.fixture
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault plan that a test is given by `indirect`."""
    monkeypatch.setenv("STARLING_FAULTS", request.param)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def wait_readable(endpoint: Link | Hub) -> None:
    poll = select.poll()
    poll.register(endpoint.fd, select.POLLIN)
    assert poll.poll(LONG_S * 1000)


# ------------------------------------------------------------------ meeting and speaking


def test_both_sides_learn_who_is_there(pair: Pair) -> None:
    pair.until(lambda: pair.hub.peers and pair.link.peer)
    assert sorted(pair.events) == [("hub up", 1), ("link up", 1)]
    hello = next(iter(pair.hub.peers.values()))
    me = os.getpid()
    assert (hello.stage, hello.pid, hello.start_ticks) == ("scheduler", me, process_ticks(me))
    assert pair.link.peer is not None
    assert pair.link.peer.stage == "kv"


def test_heartbeats_are_kept_and_not_handed_out(pair: Pair) -> None:
    peer = pair.meet()
    pair.until(lambda: pair.link.last_beat and pair.hub.last_beat)
    assert pair.link.last_beat == m.Heartbeat("kv", 1, 7, True, True, sent=0)
    assert pair.hub.last_beat[peer].stage == "scheduler"
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


def test_nothing_is_sent_to_one_who_is_not_there(pair: Pair) -> None:
    assert not pair.link.send(m.Extend(1, "m", "s", 1))
    assert not pair.hub.send(b"nobody", m.Granted(1, "s", ()))
    assert (pair.link.refused, pair.hub.refused) == (1, 1)


def test_sending_never_blocks_and_says_when_it_is_full(pair: Pair) -> None:
    peer = pair.meet()
    sent = 0
    frame = m.Granted(1, "s" * 1000, tuple(range(1000)))
    while pair.hub.send(peer, frame):
        sent += 1
        assert sent < 100_000
    assert sent > EDGE.high_water_mark // 2
    # The reader comes back: what was accepted arrives, all of it.
    got = 0
    while got < sent:
        wait_readable(pair.link)
        got += len(pair.link.receive())
    assert got == sent


def test_a_frame_that_would_end_the_connection_is_not_sent(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    peer = pair.meet()
    caplog.clear()
    name = "x" * MAX_FRAME_BYTES
    assert not pair.link.send(m.Extend(1, "m", name, 1))
    assert not pair.hub.send(peer, m.Granted(1, name, ()))
    assert [record.message for record in caplog.records] == ["a frame is too large to be sent"] * 2
    assert pair.link.send(m.Extend(2, "m", "s", 1))
    assert pair.hub.send(peer, m.Granted(2, "s", ()))
    pair.until(lambda: len(pair.events) == 2)
    assert {type(event[1]) for event in pair.events} == {m.Extend, m.Granted}  # nobody was down meanwhile


def test_an_edge_swallowed_by_sending_is_signalled_again(pair: Pair) -> None:
    """Ping-pong in which each side sends before it looks: the trap of ZMQ's edge-triggered descriptor."""
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


# ------------------------------------------------------------------ deaths and returns


@pytest.mark.parametrize("is_starved", [False, True])
def test_silence_is_death(pair: Pair, is_starved: bool) -> None:
    """Later for one who would speak if it got a core."""
    pair.meet()
    pair.is_starved = is_starved
    least = DEAD_AFTER_BEATS * (STARVED if is_starved else 1)
    # A frame of the greeting may still be on its way, and counts as a sign of life when it comes.
    for i in range(4 * (least + 2)):
        assert pair.link.peer is not None or i > least
        pair.clock.now += HEARTBEAT_MS / 1000
        pair.tick(pair.link)
        pair.link.receive()
        if pair.link.peer is None:
            break
    assert pair.link.peer is None
    assert pair.events == [("link down", 1)]
    assert not pair.link.send(m.Extend(1, "m", "s", 1))


def test_unread_frames_are_not_silence(pair: Pair) -> None:
    peer = pair.meet()
    assert pair.hub.send(peer, m.Granted(1, "s", ()))
    wait_readable(pair.link)
    for _ in range(DEAD_AFTER_BEATS + 5):
        pair.clock.now += HEARTBEAT_MS / 1000
        pair.tick(pair.link)
    assert pair.link.peer is not None
    assert pair.read(pair.link) == [m.Granted(1, "s", ())]


def test_time_in_which_we_did_not_run_is_not_the_peers_silence(pair: Pair) -> None:
    pair.meet()
    pair.tick()
    pair.clock.now += 3600
    pair.tick()
    assert pair.link.peer is not None
    assert pair.hub.peers


def test_a_side_that_was_given_up_hears_of_it(pair: Pair) -> None:
    """The hub loses the link (both processes live): the link must know that its state there is gone."""
    pair.meet()
    # A frame of the greeting may still be on its way, and counts as a sign of life when it comes.
    for _ in range(4 * (DEAD_AFTER_BEATS + 2)):
        pair.clock.now += HEARTBEAT_MS / 1000
        pair.tick(pair.hub)
        pair.hub.receive()
        if pair.events:
            break
    assert pair.events == [("hub down", 1)]
    assert not pair.hub.peers
    pair.until(lambda: pair.hub.peers and ("link up", 1) in pair.events)
    # A Hello of the greeting may be late, too: the hub hears it before the link hears the hub.
    assert [e for e in pair.events if e[0].startswith("hub")] == [("hub down", 1), ("hub up", 1)]
    assert [e for e in pair.events if e[0].startswith("link")] == [("link down", 1), ("link up", 1)]
    assert pair.link.send(m.Extend(1, "m", "s", 1))
    pair.until(lambda: ("frame", m.Extend(1, "m", "s", 1)) in pair.events)


def test_a_new_binder_is_down_and_up(pair: Pair) -> None:
    pair.meet()
    pair.hub.close(0)
    pair.hub = pair.open_hub(2)
    pair.until(lambda: pair.hub.peers and pair.link.peer and pair.link.peer.epoch == 2)
    assert [e for e in pair.events if e[0].startswith("link")] == [("link down", 1), ("link up", 2)]


def test_a_new_connector_replaces_the_old_before_its_silence(pair: Pair) -> None:
    pair.meet()
    old = pair.link
    pair.link = pair.open_link(2)
    pair.until(lambda: pair.link.peer is not None and ("hub up", 2) in pair.events)
    assert [e for e in pair.events if e[0].startswith("hub")] == [("hub down", 1), ("hub up", 2)]
    assert len(pair.hub.peers) == 1
    # The zombie's frames are dropped; and it does not come back while its successor is up.
    assert old.send(m.Extend(66, "m", "zombie", 1))
    before = pair.hub.dropped
    pair.until(lambda: pair.hub.dropped > before)
    old.receive()
    pair.tick(old)
    pair.until(lambda: pair.hub.dropped > before + 1)
    assert [hello.epoch for hello in pair.hub.peers.values()] == [2]
    assert all(event[0] != "frame" for event in pair.events)


def test_frames_before_a_new_hello_are_handled_before_up_and_down(pair: Pair) -> None:
    """A raw peer sends: frame, Hello of a new incarnation, frame. The stage must see them in order."""
    with pair.context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(pair.address)
        pid, ticks = os.getpid(), process_ticks(os.getpid())
        for frame in (
            m.Hello("other", 5, pid, ticks),
            m.Extend(1, "m", "old", 1),
            m.Hello("other", 6, pid, ticks),
            m.Extend(2, "m", "new", 1),
        ):
            raw.send(m.encode(frame))
        pair.until(lambda: len(pair.events) >= 5 and ("frame", m.Extend(2, "m", "new", 1)) in pair.events)
        assert [e for e in pair.events if e not in (("hub up", 1), ("link up", 1))] == [
            ("hub up", 5),
            ("frame", m.Extend(1, "m", "old", 1)),
            ("hub down", 5),
            ("hub up", 6),
            ("frame", m.Extend(2, "m", "new", 1)),
        ]


PEER = """
import os, select, sys, zmq
from pipeline.protocol.topology import EDGES
from pipeline.protocol.messages import Extend, Heartbeat
from pipeline.ipc.endpoint import Link
link = Link(EDGES["scheduler-kv"], sys.argv[1], "scheduler", heartbeat_ms=100)
poll = select.poll()
poll.register(link.fd, select.POLLIN)
while link.peer is None:
    link.tick(Heartbeat("scheduler", 1, 0, False, True))
    poll.poll(20)
    link.receive()
assert link.send(Extend(1, "m", "last words", 1))
if len(sys.argv) > 2:
    link.close()
    zmq.Context.instance().term()
    os._exit(1)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_peers_death_is_known_at_once(pair: Pair, by: signal.Signals) -> None:
    """No clock moves here: the pidfd tells."""
    pair.link.close(0)
    with subprocess.Popen(
        [sys.executable, "-c", PEER, pair.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pair.until(lambda: ("frame", m.Extend(1, "m", "last words", 1)) in pair.events, ticking=False)
        process.send_signal(by)
        process.wait(LONG_S)
        pair.until(lambda: not pair.hub.peers, ticking=False)
    assert [event[0] for event in pair.events] == ["hub up", "frame", "hub down"]


def test_last_words_are_heard_before_the_death(pair: Pair) -> None:
    pair.link.close(0)
    with subprocess.Popen([sys.executable, "-c", PEER, pair.address, "and die"]) as process:
        pair.until(lambda: pair.hub.peers, ticking=False)
        process.wait(LONG_S)
        pair.until(lambda: not pair.hub.peers, ticking=False)
    assert [event[0] for event in pair.events] == ["hub up", "frame", "hub down"]


def test_tcp_edges_live_by_heartbeats_alone(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = Pair(tmp_path, f"tcp://127.0.0.1:{port}")
    pair.meet()
    assert pair.link.send(m.Extend(1, "m", "s", 1))
    pair.until(lambda: ("frame", m.Extend(1, "m", "s", 1)) in pair.events)
    pair.link.close(0)
    pair.events.clear()
    for _ in range(DEAD_AFTER_BEATS + 2):
        pair.clock.now += HEARTBEAT_MS / 1000
        pair.tick(pair.hub)
        pair.hub.receive()
    assert pair.events == [("hub down", 1)]
    pair.close()


@pytest.mark.parametrize("plan", ["wire:drop@scheduler>kv:2, wire:drop@kv>gateway:1"], indirect=True)
@pytest.mark.usefixtures("plan")
def test_a_fault_plan_loses_the_frame_it_names(pair: Pair) -> None:
    peer = pair.meet()
    for i in (1, 2, 3):
        assert pair.link.send(m.Extend(i, "m", "s", 1))
    assert pair.hub.send(peer, m.Granted(1, "s", ()))
    pair.until(lambda: len(pair.events) == 3, ticking=False)
    assert sorted(event[1].id for event in pair.events) == [1, 1, 3]
    # The next heartbeat tells; both sides begin anew, and from then on nothing is missing.
    pair.events.clear()
    pair.until(lambda: ("hub up", 1) in pair.events and ("link up", 1) in pair.events)
    assert sorted(pair.events) == [("hub down", 1), ("hub up", 1), ("link down", 1), ("link up", 1)]
    pair.events.clear()
    frames = [m.Extend(i, "m", "s", 1) for i in range(4, 9)]
    assert all(map(pair.link.send, frames))
    pair.until(lambda: len(pair.events) == 5)
    heard: list[m.Heartbeat | None] = []  # of the hub, each a new object

    def hear() -> bool:
        beat = pair.link.last_beat
        if not heard or heard[-1] is not beat:
            heard.append(beat)
        return len(heard) > 3

    pair.until(hear)
    assert pair.events == [("frame", frame) for frame in frames]


@pytest.mark.parametrize("plan", ["wire:drop@scheduler>kv:1", "wire:drop@kv>scheduler:1"], indirect=True)
@pytest.mark.usefixtures("plan")
def test_a_frame_lost_either_way_is_noticed_by_who_misses_it(pair: Pair) -> None:
    peer = pair.meet()
    assert pair.hub.send(peer, m.Granted(1, "s", ()))
    assert pair.link.send(m.Extend(1, "m", "s", 1))
    pair.until(lambda: len(pair.events) == 1, ticking=False)
    pair.events.clear()
    pair.until(lambda: ("hub up", 1) in pair.events and ("link up", 1) in pair.events)
    assert sorted(pair.events) == [("hub down", 1), ("hub up", 1), ("link down", 1), ("link up", 1)]


# ------------------------------------------------------------------ what does not belong


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
def test_garbage_is_counted_and_dropped(pair: Pair, payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_frame_may_have_grown_fields(pair: Pair) -> None:
    pair.meet()
    with pair.context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(pair.address)
        raw.send(m.encode(m.Hello("newer", 1, os.getpid(), process_ticks(os.getpid()))))
        grown = m.encode(m.Extend(9, "m", "s", 4))
        raw.send(bytes([grown[0] + 1]) + grown[1:] + b"\xa5extra")
        pair.until(lambda: ("frame", m.Extend(9, "m", "s", 4)) in pair.events)


def test_a_hub_refuses_the_address_of_a_living_one(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="in use by a live process"):
        pair.open_hub(2)
    pair.meet()


def test_a_hub_takes_over_a_dead_ones_socket(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    pair = Pair(tmp_path)
    pair.meet()
    pair.close()
    assert not path.exists()


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        pair = Pair(tmp_path)
        pair.meet()
        pair.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------ at rest


INTERVAL_S = HEARTBEAT_MS / 1000
PERIOD = round(IDLE_HEARTBEAT_S / INTERVAL_S)  # ticks


def beats_of_a_quiet_hub(pair: Pair, edge: str) -> int:
    """In a period, once it is quiet."""
    pair.meet()
    quiet = m.Heartbeat("kv", 1, 7, False, True, idle=True)
    sent: list[float] = []
    pair.hub._beat = lambda beat: sent.append(pair.clock.now)  # type: ignore[method-assign]
    pair.hub.edge = EDGES[edge]
    pair.clock.now += INTERVAL_S
    pair.hub.tick(quiet)
    before = len(sent)
    for _ in range(PERIOD):
        pair.clock.now += INTERVAL_S
        pair.hub.tick(quiet)
    return len(sent) - before


def test_of_a_quiet_stage_the_gateway_hears_every_beat_and_others_few(pair: Pair) -> None:
    assert beats_of_a_quiet_hub(pair, "gateway-kv") == PERIOD
    assert beats_of_a_quiet_hub(pair, "scheduler-kv") == 1


def test_the_connecting_side_of_a_quiet_stage_beats_seldom_and_is_not_given_up(pair: Pair) -> None:
    peer = pair.meet()
    quiet = m.Heartbeat("scheduler", 1, 7, False, True, idle=True)
    sent: list[float] = []
    pair.link._beat = lambda beat: sent.append(pair.clock.now)  # type: ignore[method-assign]
    pair.clock.now += INTERVAL_S
    pair.link.tick(quiet)
    assert len(sent) == 1, "news: it was not quiet before"
    for _ in range(2 * PERIOD):
        pair.clock.now += INTERVAL_S
        pair.link._known[b""].last_seen = pair.clock.now  # the hub is heard meanwhile
        pair.link.tick(quiet)
    assert len(sent) == 3
    assert sent[2] - sent[1] == pytest.approx(IDLE_HEARTBEAT_S)
    pair.clock.now += INTERVAL_S
    pair.link.tick(m.Heartbeat("scheduler", 1, 8, True, True))
    assert len(sent) == 4, "at once when there is work"

    del pair.link._beat
    pair.clock.now += INTERVAL_S
    pair.hub.tick(quiet)  # else it would think that it had not run meanwhile
    pair.link.tick(quiet)
    while not (peer in pair.hub.last_beat and pair.hub.last_beat[peer].idle):
        wait_readable(pair.hub)
        pair.read(pair.hub)
    for _ in range(DEAD_AFTER_BEATS + PERIOD):  # it says that it will be silent for longer: it is taken at its word
        pair.clock.now += INTERVAL_S
        pair.hub.tick(quiet)
    assert peer in pair.hub.peers
    for _ in range(PERIOD // 3):
        pair.clock.now += INTERVAL_S
        pair.hub.tick(quiet)
    assert peer not in pair.hub.peers


def test_two_at_rest_do_not_take_the_time_between_their_ticks_for_silence(pair: Pair) -> None:
    """However short the interval of heartbeats is; and none of it is taken for time in which we did not run."""
    peer = pair.meet()
    quiet = m.Heartbeat("scheduler", 1, 7, False, True, idle=True)
    pair.clock.now += INTERVAL_S
    pair.link.tick(quiet)  # once: what is said and not read later on is no silence
    while not (peer in pair.hub.last_beat and pair.hub.last_beat[peer].idle):
        wait_readable(pair.hub)
        pair.read(pair.hub)
    pair.hub._interval = INTERVAL_S / 10
    pair.hub.tick(quiet)
    begun = pair.clock.now
    while peer in pair.hub.peers:
        pair.clock.now += IDLE_HEARTBEAT_S
        pair.hub.tick(quiet)
    assert pair.clock.now - begun == pytest.approx(2 * IDLE_HEARTBEAT_S)
