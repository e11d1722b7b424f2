"""Greetings, heartbeats, deaths and restarts of peers, over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from pipeline.ipc.liveness import DEAD_AFTER_INTERVALS, STARVED_FACTOR
from pipeline.protocol import messages as m
from pipeline.protocol.topology import EDGES
from pipeline.runtime.timer_coalescing import IDLE_HEARTBEAT_S, STEADY_ALIGN_S
from shm.arena import process_ticks
from tests.pipeline.endpoint_pair import HEARTBEAT_MS, LONG_S, Pair, wait_readable
from tools.ports import free_port

# ------------------------------------------------------------------ deaths and restarts


@pytest.mark.parametrize("is_starved", [False, True])
def test_a_silent_peer_is_discarded(pair: Pair, is_starved: bool) -> None:
    """Later if its process only waits for a core."""
    pair.meet()
    pair.is_starved = is_starved
    minimum = DEAD_AFTER_INTERVALS * (STARVED_FACTOR if is_starved else 1)
    # A frame of the greeting may still be on its way, and counts as a frame of the peer when it arrives.
    for i in range(4 * (minimum + 2)):
        assert pair.link.peer is not None or i > minimum
        pair.clock.now += HEARTBEAT_MS / 1000
        pair.tick(pair.link)
        pair.link.receive()
        if pair.link.peer is None:
            break
    assert pair.link.peer is None
    assert pair.events == [("link down", 1)]
    assert not pair.link.send(m.Extend(1, "m", "s", 1))


def test_a_link_reports_each_heartbeat_when_it_arrives(pair: Pair) -> None:
    arrived: list[m.Heartbeat] = []
    pair.link.on_heartbeat = arrived.append
    pair.meet()
    before = len(arrived)
    pair.until(lambda: len(arrived) >= before + 2)
    assert arrived[-1] is pair.link.last_heartbeat
    assert {heartbeat.stage for heartbeat in arrived} == {"kv"}


def test_peers_learn_at_once_that_a_stage_is_ready(pair: Pair) -> None:
    arrived: list[m.Heartbeat] = []
    pair.link.on_heartbeat = arrived.append
    pair.meet()
    busy = m.Heartbeat("kv", 1, 8, True, False, "its worker is starting")
    for heartbeat in (
        busy,
        msgspec.structs.replace(busy, reason="its worker warms up"),  # waits for its interval
        msgspec.structs.replace(busy, ready=True, reason=""),
    ):
        pair.hub.tick(heartbeat)  # the clock stands still
    pair.until(lambda: arrived and arrived[-1].progress == 8 and arrived[-1].ready, ticking=False)
    assert [heartbeat.ready for heartbeat in arrived if heartbeat.progress == 8] == [False, True]


def test_a_peer_that_comes_up_gets_the_state_at_once(pair: Pair) -> None:
    """It may wait for this stage, whose next heartbeat is an interval away."""
    arrived: list[m.Heartbeat] = []
    pair.link.on_heartbeat = arrived.append
    pair.hub.tick(m.Heartbeat("kv", 1, 7, True, True))  # to no peer, and the only one: the clock stands still
    pair.tick(pair.link)
    pair.until(lambda: arrived, ticking=False)
    assert [(heartbeat.stage, heartbeat.ready, heartbeat.sent) for heartbeat in arrived] == [("kv", True, 0)]
    assert pair.hub.send(next(iter(pair.hub.peers)), m.Granted(1, "s", ()))
    pair.hub.tick(m.Heartbeat("kv", 1, 7, True, True))
    pair.until(lambda: [event for event in pair.events if event[0] == "frame"], ticking=False)
    assert not [event for event in pair.events if event[0].endswith("down")]


def test_unread_frames_are_not_silence(pair: Pair) -> None:
    peer = pair.meet()
    assert pair.hub.send(peer, m.Granted(1, "s", ()))
    deadline = time.monotonic() + LONG_S
    while not pair.link.has_unread():  # its descriptor may be readable for another reason
        assert time.monotonic() < deadline
    for _ in range(DEAD_AFTER_INTERVALS + 5):
        pair.clock.now += HEARTBEAT_MS / 1000
        pair.tick(pair.link)
    assert pair.link.peer is not None
    assert pair.read(pair.link) == [m.Granted(1, "s", ())]


def test_time_in_which_this_process_did_not_run_does_not_count_as_silence(pair: Pair) -> None:
    pair.meet()
    pair.tick()
    pair.clock.now += 3600
    pair.tick()
    assert pair.link.peer is not None
    assert pair.hub.peers


def test_a_discarded_peer_sees_a_new_contact(pair: Pair) -> None:
    """The hub discards the link while both processes live: the link must learn that its state there is gone."""
    pair.meet()
    # A frame of the greeting may still be on its way, and counts as a frame of the peer when it arrives.
    for _ in range(4 * (DEAD_AFTER_INTERVALS + 2)):
        pair.clock.now += HEARTBEAT_MS / 1000
        pair.tick(pair.hub)
        pair.hub.receive()
        if pair.events:
            break
    assert pair.events == [("hub down", 1)]
    assert not pair.hub.peers
    pair.until(lambda: pair.hub.peers and ("link up", 1) in pair.events)
    # A Hello of the greeting may be late, too: the hub receives it before the link receives the hub's.
    assert [e for e in pair.events if e[0].startswith("hub")] == [("hub down", 1), ("hub up", 1)]
    assert [e for e in pair.events if e[0].startswith("link")] == [("link down", 1), ("link up", 1)]
    assert pair.link.send(m.Extend(1, "m", "s", 1))
    pair.until(lambda: ("frame", m.Extend(1, "m", "s", 1)) in pair.events)


def test_a_restarted_binder_is_down_and_up(pair: Pair) -> None:
    pair.meet()
    pair.hub.close(0)
    pair.hub = pair.open_hub(2)
    pair.until(lambda: pair.hub.peers and pair.link.peer and pair.link.peer.epoch == 2)
    assert [e for e in pair.events if e[0].startswith("link")] == [("link down", 1), ("link up", 2)]


def test_a_new_connector_replaces_the_old_one_at_once(pair: Pair) -> None:
    pair.meet()
    old = pair.link
    pair.link = pair.open_link(2)
    pair.until(lambda: pair.link.peer is not None and ("hub up", 2) in pair.events)
    assert [e for e in pair.events if e[0].startswith("hub")] == [("hub down", 1), ("hub up", 2)]
    assert len(pair.hub.peers) == 1
    # The frames of the old one are dropped, and it does not come back while its successor is up.
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


def test_a_connection_that_gives_another_name_is_another_peer(pair: Pair) -> None:
    """The old one goes down, and nothing watches its process any more."""
    pair.meet()

    with pair.context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(pair.address)
        pid, ticks = os.getpid(), process_ticks(os.getpid())
        for number, name in enumerate("abc", 5):
            raw.send(m.encode(m.Hello(name, number, pid, ticks)))
        pair.until(lambda: ("hub up", 7) in pair.events)
        assert [event for event in pair.events if event[1] in (5, 6, 7)] == [
            ("hub up", 5),
            ("hub down", 5),
            ("hub up", 6),
            ("hub down", 6),
            ("hub up", 7),
        ]
        liveness = pair.hub.liveness
        assert sorted(liveness._pidfds) == sorted(peer.pidfd for peer in liveness.peers.values())


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
def test_the_death_of_a_peer_is_detected_at_once(pair: Pair, by: signal.Signals) -> None:
    """By its pidfd: the clock stands still here."""
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


def test_the_last_frames_arrive_before_on_down(pair: Pair) -> None:
    pair.link.close(0)
    with subprocess.Popen([sys.executable, "-c", PEER, pair.address, "and die"]) as process:
        # It may come and go within one read.
        pair.until(lambda: any(event[0] == "hub down" for event in pair.events), ticking=False)
        process.wait(LONG_S)
    assert [event[0] for event in pair.events] == ["hub up", "frame", "hub down"]


def test_peers_over_tcp_are_detected_by_heartbeats_only(tmp_path: Path) -> None:
    pair = Pair(tmp_path, f"tcp://127.0.0.1:{free_port()}")
    pair.meet()
    assert pair.link.send(m.Extend(1, "m", "s", 1))
    pair.until(lambda: ("frame", m.Extend(1, "m", "s", 1)) in pair.events)
    pair.link.close(0)
    pair.events.clear()
    for _ in range(4 * (DEAD_AFTER_INTERVALS + 2)):  # a heartbeat that was on its way counts when it arrives
        if pair.events:
            break
        pair.clock.now += HEARTBEAT_MS / 1000
        pair.tick(pair.hub)
        pair.hub.receive()
    assert pair.events == [("hub down", 1)]
    pair.close()


# ------------------------------------------------------------------ idle stages


INTERVAL_S = HEARTBEAT_MS / 1000
PERIOD = round(IDLE_HEARTBEAT_S / INTERVAL_S)  # ticks


@pytest.mark.parametrize(("edge", "expected"), [("gateway-kv", PERIOD), ("scheduler-kv", 1)])
def test_an_idle_hub_sends_every_heartbeat_only_where_readiness_depends_on_it(
    tmp_path: Path, edge: str, expected: int
) -> None:
    pair = Pair(tmp_path, edge=EDGES[edge])
    key = pair.meet()
    idle = m.Heartbeat("kv", 1, 7, False, True, idle=True)
    sent: list[float] = []
    pair.hub.liveness.broadcast = lambda beat: sent.append(pair.clock.now)  # type: ignore[method-assign]
    pair.clock.now += INTERVAL_S
    pair.hub.tick(idle)
    before = len(sent)
    for _ in range(PERIOD):
        pair.clock.now += INTERVAL_S
        pair.hub.liveness.peers[key].last_seen = pair.clock.now  # the other side is heard, whatever it has sent
        pair.hub.tick(idle)
    assert len(sent) - before == expected
    pair.close()


@pytest.mark.parametrize(("edge", "expected"), [("gateway-kv", 20), ("scheduler-kv", 4)])
def test_a_steady_hub_sends_every_heartbeat_only_where_readiness_depends_on_it(
    tmp_path: Path, edge: str, expected: int
) -> None:
    """Of 20 ticks in 2 s; a change of the state is sent at once in any case."""
    pair = Pair(tmp_path, edge=EDGES[edge])
    key = pair.meet()
    steady = m.Heartbeat("kv", 1, 7, False, True)
    sent: list[m.Heartbeat] = []
    pair.hub.liveness.broadcast = sent.append  # type: ignore[method-assign]
    pair.hub.liveness.is_steady = True
    pair.clock.now += INTERVAL_S
    pair.hub.tick(steady)
    before = len(sent)
    for _ in range(20):
        pair.clock.now += INTERVAL_S
        pair.hub.liveness.peers[key].last_seen = pair.clock.now
        pair.hub.tick(steady)
    assert len(sent) - before == expected
    pair.clock.now += INTERVAL_S / 10
    pair.hub.tick(m.Heartbeat("kv", 1, 7, False, False, "waiting"))
    assert sent[-1].reason == "waiting"
    pair.close()


def test_a_steady_hub_sends_at_each_common_moment_although_a_tick_was_late(tmp_path: Path) -> None:
    """The next tick comes sooner after it. Without its heartbeat 0.5 s pass; a stage is silent after 0.7."""
    pair = Pair(tmp_path, edge=EDGES["gateway-kv"])
    key = pair.meet()
    liveness, sent = pair.hub.liveness, []
    liveness.broadcast = lambda beat: sent.append(pair.clock.now)  # type: ignore[method-assign]
    liveness.interval_s, liveness.is_steady = STEADY_ALIGN_S, True
    begin = pair.clock.now // 1 + 1
    for number, late_s in enumerate((0.0, 0.0255, 0.0005, 0.05, 0.0)):  # the second one has waited for a frame
        pair.clock.now = begin + number * STEADY_ALIGN_S + late_s
        liveness.peers[key].last_seen = pair.clock.now
        pair.hub.tick(m.Heartbeat("kv", 1, 7, False, True))
    assert len(sent) == 5
    pair.close()


@pytest.mark.parametrize("is_steady", [False, True])
def test_a_stage_that_becomes_idle_reports_it_at_once(pair: Pair, is_steady: bool) -> None:
    """Its next tick may be so late that the gateway would count an active stage as silent."""
    pair.meet()
    pair.hub.liveness.is_steady = is_steady
    sent: list[m.Heartbeat] = []
    pair.hub.liveness.broadcast = sent.append  # type: ignore[method-assign]
    pair.clock.now += 5 * INTERVAL_S
    active = m.Heartbeat("kv", 1, 7, False, True)
    idle = m.Heartbeat("kv", 1, 7, False, True, idle=True)
    pair.hub.tick(active)
    pair.clock.now += INTERVAL_S / 10
    pair.hub.tick(active)
    pair.hub.tick(idle)
    pair.hub.tick(idle)
    assert sent == [active, idle]


def test_an_idle_link_sends_fewer_heartbeats_and_is_not_discarded(pair: Pair) -> None:
    peer = pair.meet()
    idle = m.Heartbeat("scheduler", 1, 7, False, True, idle=True)
    sent: list[float] = []
    pair.link.liveness.broadcast = lambda beat: sent.append(pair.clock.now)  # type: ignore[method-assign]
    pair.clock.now += INTERVAL_S
    pair.link.tick(idle)
    assert len(sent) == 1, "a change: it was not idle before"
    for _ in range(2 * PERIOD):
        pair.clock.now += INTERVAL_S
        pair.link.liveness.peers[b""].last_seen = pair.clock.now  # as if frames of the hub had arrived
        pair.link.tick(idle)
    assert len(sent) == 3
    assert sent[2] - sent[1] == pytest.approx(IDLE_HEARTBEAT_S)
    pair.clock.now += INTERVAL_S
    pair.link.tick(m.Heartbeat("scheduler", 1, 8, True, True))
    assert len(sent) == 4, "at once when there is work"

    del pair.link.liveness.broadcast
    pair.clock.now += INTERVAL_S
    pair.hub.tick(idle)  # otherwise the hub would assume that it had not run
    pair.link.tick(idle)
    while not (peer in pair.hub.last_heartbeat and pair.hub.last_heartbeat[peer].idle):
        wait_readable(pair.hub)
        pair.read(pair.hub)
    for _ in range(DEAD_AFTER_INTERVALS + PERIOD):  # an idle peer may be silent for longer
        pair.clock.now += INTERVAL_S
        pair.hub.tick(idle)
    assert peer in pair.hub.peers
    for _ in range(PERIOD // 3):
        pair.clock.now += INTERVAL_S
        pair.hub.tick(idle)
    assert peer not in pair.hub.peers


def test_idle_stages_do_not_count_the_time_between_their_ticks_as_silence(pair: Pair) -> None:
    """However short the heartbeat interval is, and none of it counts as time in which this process did not run."""
    peer = pair.meet()
    idle = m.Heartbeat("scheduler", 1, 7, False, True, idle=True)
    pair.clock.now += INTERVAL_S
    pair.link.tick(idle)  # once: later unread frames would not count as silence
    while not (peer in pair.hub.last_heartbeat and pair.hub.last_heartbeat[peer].idle):
        wait_readable(pair.hub)
        pair.read(pair.hub)
    pair.hub.liveness.interval_s = INTERVAL_S / 10
    pair.hub.tick(idle)
    begun = pair.clock.now
    while peer in pair.hub.peers:
        pair.clock.now += IDLE_HEARTBEAT_S
        pair.hub.tick(idle)
    assert pair.clock.now - begun == pytest.approx(2 * IDLE_HEARTBEAT_S)
