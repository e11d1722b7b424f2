"""Liveness of the peers of one endpoint: greetings, heartbeats, and the detection of dead peers.

A peer is *up* from its `Hello` until its process ends (a pidfd, for peers on this machine), its heartbeats
stop, or a successor sends `Hello`.  For each incarnation the stage sees `on_up`, frames, `on_down`, in that
order, so it can tie soft state to the incarnation.

    Hello.epoch     identifies the incarnation of the sending process
    Hello.contact   grows when the sender has discarded the receiver, and with it all soft state, although both
                    processes live.  A change of either is `on_down(old)` and `on_up(new)` at the receiver.
    Heartbeat.sent  counts the frames sent to this peer.  When fewer have arrived, some were lost: the peer is
                    discarded and greeted again, as after its death.

Heartbeats go out every `heartbeat_ms`, and to a peer when it comes up.  A stage in steady work sends them every 0.5 s
at most, an idle one every 1.5 s, except where the receiver derives readiness from them (`Edge.is_readiness_source`): a
process's death is seen by its pidfd anyway.

Knows no sockets: it sends and reports through the `Transport` that owns it.
"""

from __future__ import annotations

import logging
import os
import select
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from pipeline import procfs
from pipeline.protocol.messages import PROTOCOL_VERSION, Frame, Heartbeat, Hello
from pipeline.runtime import timer_coalescing
from shm.arena import process_ticks

log = logging.getLogger("starling.ipc")

DEAD_AFTER_INTERVALS = 10  # heartbeat intervals without a frame after which a peer counts as dead
STARVED_FACTOR = 8  # times as long for a peer that only waits for a core: replacing it would add load
IDLE_INTERVALS = 4  # heartbeat intervals between two heartbeats of an idle stage; at least IDLE_HEARTBEAT_S
EARLY_FRACTION = 0.9  # of an interval: a tick that comes slightly early still sends
SILENT_INTERVALS = 1.5  # heartbeat intervals without a frame after which a peer with work has missed a heartbeat
LEVELS_ABOVE = 2  # processes above a stage: its supervisor, and what runs the supervisors
MAX_PEERS_LOGGED = 1024  # peers whose dropped frames are logged, one line each

PROCESS_ENDED = "its process has ended"
SILENT = "its heartbeats have stopped"
REPLACED = "replaced by a new incarnation"
_REASONS = {PROCESS_ENDED: "ended", SILENT: "silent", REPLACED: "replaced"}  # of the metric; any other: frames lost


class Transport(Protocol):
    """The endpoint, as `Liveness` uses it. `key` names a connection."""

    def transmit(self, key: bytes, frame: Frame) -> bool:
        """Send a control frame; False when it cannot be queued."""

    def has_unread(self) -> bool:
        """Whether received messages wait in the socket."""

    def wake(self) -> None:
        """Make the endpoint's descriptor readable, so that `receive` is called."""

    def notify(self, key: bytes, hello: Hello, is_up: bool) -> None:
        """Call the stage's `on_up` or `on_down`."""


class Peer:
    """State of one connection."""

    __slots__ = ("contact", "hello", "last_heartbeat", "last_seen", "pidfd", "received", "sent")

    def __init__(self, contact: int, now: float) -> None:
        self.contact = contact  # our number of this contact, sent in our `Hello`
        self.hello: Hello | None = None  # None: the peer is not up
        self.last_heartbeat: Heartbeat | None = None
        self.last_seen = now  # s, by the endpoint's clock: the last frame of any kind
        self.pidfd = -1
        self.sent = self.received = 0  # frames since the peer came up, control frames excluded


class Liveness:
    """The peers of an endpoint, by key. `interval_s`: between two heartbeats, in seconds."""

    def __init__(
        self,
        transport: Transport,
        edge: str,
        stage: str,
        epoch: int,
        interval_s: float,
        *,
        is_local: bool,
        is_prompt: bool,
        clock: Callable[[], float],
    ) -> None:
        """`is_local`: peers run on this machine. `is_prompt`: send every heartbeat, idle or not."""
        self.peers: dict[bytes, Peer] = {}
        self.lost: Counter[str] = Counter()  # peers that were up, by reason
        self.interval_s = interval_s
        self.is_steady = False  # set by the stage: heartbeats have no news
        self.is_runnable: Callable[[int], bool] = procfs.is_runnable  # of a pid
        self._transport = transport
        self._edge = edge
        self._stage = stage
        self._epoch = epoch
        self._ticks = process_ticks(os.getpid())
        self._idle_s = max(timer_coalescing.IDLE_HEARTBEAT_S, IDLE_INTERVALS * interval_s)
        self._is_local = is_local
        self._is_prompt = is_prompt
        self._clock = clock
        self._contacts = 0  # the last number given to a contact
        self._dead: list[tuple[bytes, Peer, str]] = []  # to be discarded, and why
        self._logged: set[bytes] = set()  # peers whose dropped frames have been logged
        self._last_tick = self._last_sent = float("-inf")
        self._last_offered = Heartbeat("", 0, 0, False, False)
        self._pidfds: dict[int, bytes] = {}
        self._epoll = select.epoll()
        self.fd: int = self._epoll.fileno()  # readable when the process of a local peer has ended

    # -------------------------------------------------------------- greetings

    def contact(self, key: bytes) -> None:
        """Greet a connection that has not sent `Hello`, or whose peer was discarded; once per contact."""
        if key not in self.peers:
            self.add(key)
            self.send_hello(key)

    def add(self, key: bytes) -> Peer:
        """A new contact."""
        self._contacts += 1
        peer = self.peers[key] = Peer(self._contacts, self._clock())
        return peer

    def send_hello(self, key: bytes) -> bool:
        """Send our `Hello`."""
        contact = self.peers[key].contact
        hello = Hello(self._stage, self._epoch, os.getpid(), self._ticks, PROTOCOL_VERSION, contact)
        return self._transport.transmit(key, hello)

    def is_new(self, key: bytes, hello: Hello) -> bool:
        """Whether `hello` announces another incarnation or contact than the one that is up."""
        peer = self.peers.get(key)
        if peer is None or peer.hello is None:
            return True
        return (hello.epoch, hello.contact) != (peer.hello.epoch, peer.hello.contact)

    def accept(self, key: bytes, hello: Hello) -> bool:
        """Replace the peer's old incarnation: `on_down`, our `Hello`, `on_up`. False: `hello` is outdated.

        A connection that gives another stage's name is a new peer, too.
        """
        for other, peer in list(self.peers.items()):
            if peer.hello is None:
                continue
            if peer.hello.stage == hello.stage:
                if hello.epoch < peer.hello.epoch and not self._has_ended(peer):
                    return False
            elif other != key:
                continue
            self.discard(other, REPLACED, keep_contact=other == key)
        peer = self.peers.get(key) or self.add(key)
        peer.hello, peer.last_heartbeat, peer.last_seen = hello, None, self._clock()
        self._watch_process(key, peer)
        self.send_hello(key)
        log.info("peer up", extra={"edge": self._edge, "peer": hello.stage, "peer_pid": hello.pid})
        self._transport.notify(key, hello, True)
        self._send_last_heartbeat(key, peer)
        return True

    def _send_last_heartbeat(self, key: bytes, peer: Peer) -> None:
        """To a new peer at once, which may wait for this stage: the next one may be an interval away."""
        if self._last_offered.stage and self.peers.get(key) is peer and peer.hello is not None:
            self._transport.transmit(key, msgspec.structs.replace(self._last_offered, sent=peer.sent))

    # -------------------------------------------------------------- receiving

    def on_heartbeat(self, key: bytes, peer: Peer, heartbeat: Heartbeat) -> None:
        """Store it, and mark the peer for removal when frames of it were lost."""
        peer.last_heartbeat = heartbeat
        if heartbeat.sent not in (-1, peer.received) and all(other is not peer for _, other, _ in self._dead):
            self._dead.append((key, peer, f"{heartbeat.sent - peer.received} frames from it were lost"))

    def find_ended(self) -> bool:
        """Mark peers whose process has ended for removal; whether any peer is marked."""
        for fd, _ in self._epoll.poll(0):
            key = self._pidfds.pop(fd, None)
            if key is not None:
                self._epoll.unregister(fd)
                self._dead.append((key, self.peers[key], PROCESS_ENDED))
        return bool(self._dead)

    def remove_dead(self) -> None:
        """Discard all marked peers; greet again those whose process lives."""
        dead, self._dead = self._dead, []
        for key, peer, why in dead:
            if self.peers.get(key) is not peer:
                continue
            self.discard(key, why)
            if why is not PROCESS_ENDED:
                log.warning("peer discarded", extra={"edge": self._edge, "peer": stage_of(peer), "reason": why})
                self.contact(key)

    def log_dropped(self, key: bytes, why: str) -> None:
        """Log why a frame of this peer was dropped, once per peer."""
        if key not in self._logged and len(self._logged) < MAX_PEERS_LOGGED:
            self._logged.add(key)
            log.warning("frame dropped", extra={"edge": self._edge, "peer": key.hex(), "reason": why})

    # -------------------------------------------------------------- heartbeats

    def tick(self, heartbeat: Heartbeat) -> None:
        """Discard silent peers and send `heartbeat` when it is due."""
        now = self._clock()
        expected_s = self.interval_s
        if self._last_offered.idle:
            expected_s = max(expected_s, timer_coalescing.IDLE_HEARTBEAT_S)
        late_s = now - self._last_tick - expected_s
        self._last_tick = now
        for key, peer in list(self.peers.items()):
            if 0 < late_s < float("inf"):
                peer.last_seen += late_s  # this process did not run (stopped, starved): not the peer's silence
            silence_s, limit_s = now - peer.last_seen, self._silence_limit_s(peer)
            if silence_s > limit_s:
                if self._transport.has_unread():
                    self._transport.wake()  # unread frames may be from this peer
                elif silence_s > STARVED_FACTOR * limit_s or not self._is_starved(peer):
                    self.discard(key, SILENT)
        # An idle stage ticks less often from now on: its peers must learn it before they count it as silent.
        becomes_idle = heartbeat.idle and not self._last_offered.idle
        is_urgent = becomes_idle or heartbeat.ready != self._last_offered.ready  # requests wait for a stage
        has_passed = now - self._last_sent >= EARLY_FRACTION * self.interval_s
        if self.is_steady:  # a tick that was late, such as for a frame, leaves less time until the next one
            moment_s = timer_coalescing.STEADY_ALIGN_S
            period_s = moment_s * max(1, round(self.interval_s / moment_s))
            has_passed = has_passed or timer_coalescing.has_period_elapsed(now, self._last_sent, period_s)
        if (is_urgent or has_passed) and self._is_due(heartbeat, now):
            self._last_sent = now
            self.broadcast(heartbeat)

    def send_heartbeat_if_due(self, heartbeat: Heartbeat) -> None:
        """Between two ticks, during long work: a heartbeat when the interval has passed, and nothing else."""
        if self._clock() - self._last_sent >= EARLY_FRACTION * self.interval_s:
            self._last_sent = self._clock()
            self.broadcast(heartbeat)

    def broadcast(self, heartbeat: Heartbeat) -> None:
        """A heartbeat to every peer that is up, `Hello` to all others."""
        for key, peer in list(self.peers.items()):
            if peer.hello is None:
                self.send_hello(key)
            else:
                self._transport.transmit(key, msgspec.structs.replace(heartbeat, sent=peer.sent))

    def _is_due(self, heartbeat: Heartbeat, now: float) -> bool:
        """At once after a change, and once per period while the stage is idle or in steady work."""
        last, self._last_offered = self._last_offered, heartbeat
        is_changed = (heartbeat.ready, heartbeat.reason, heartbeat.idle) != (last.ready, last.reason, last.idle)
        if is_changed or not (heartbeat.idle or self.is_steady):
            return True
        if self._is_prompt or not self.peers or any(peer.hello is None for peer in self.peers.values()):
            return True
        period_s = self._idle_s if heartbeat.idle else timer_coalescing.ALIGN_S
        return timer_coalescing.has_period_elapsed(now, self._last_sent, period_s)

    def is_held_up(self, key: bytes) -> bool:
        """Whether a peer of this machine may not have got a signal to its server yet, or not reported it.

        It is silent and waits for a core, or a process above it does, which passes the signal on.
        """
        peer = self.peers.get(key)
        if peer is None or peer.hello is None or peer.pidfd < 0:
            return False
        is_silent = self._clock() - peer.last_seen > SILENT_INTERVALS * self.interval_s
        above = procfs.ancestors(peer.hello.pid, LEVELS_ABOVE)
        return any(map(self.is_runnable, [peer.hello.pid, *above] if is_silent else above))

    def _silence_limit_s(self, peer: Peer) -> float:
        is_idle = peer.last_heartbeat is not None and peer.last_heartbeat.idle
        return DEAD_AFTER_INTERVALS * self.interval_s + (1.25 * self._idle_s if is_idle else 0.0)

    def _is_starved(self, peer: Peer) -> bool:
        return peer.pidfd >= 0 and peer.hello is not None and self.is_runnable(peer.hello.pid)

    # -------------------------------------------------------------- ends

    def discard(self, key: bytes, why: str, *, keep_contact: bool = False) -> None:
        """Forget the peer, with `on_down` if it was up.

        `keep_contact`: the peer has restarted and is waiting for our `Hello`, so the contact's number stays.
        """
        peer = self.peers.pop(key)
        self._unwatch_process(peer)
        if keep_contact:
            self.peers[key] = Peer(peer.contact, self._clock())
        if peer.hello is not None:
            self.lost[_REASONS.get(why, "frames lost")] += 1
            log.info("peer down", extra={"edge": self._edge, "peer": peer.hello.stage, "reason": why})
            self._transport.notify(key, peer.hello, False)

    def close(self) -> None:
        """Close all descriptors; no `on_down`."""
        for peer in self.peers.values():
            if peer.pidfd >= 0:
                os.close(peer.pidfd)
        self.peers.clear()
        self._pidfds.clear()
        self._epoll.close()

    def _watch_process(self, key: bytes, peer: Peer) -> None:
        hello = peer.hello
        if not self._is_local or hello is None:
            return
        try:
            pidfd = os.pidfd_open(hello.pid)
        except (OSError, OverflowError):
            return
        # A pid of another namespace, or one that has been reused: then only heartbeats detect its death.
        if process_ticks(hello.pid) != hello.start_ticks:
            os.close(pidfd)
            return
        peer.pidfd = pidfd
        self._pidfds[pidfd] = key
        self._epoll.register(pidfd, select.EPOLLIN)

    def _unwatch_process(self, peer: Peer) -> None:
        if peer.pidfd >= 0:
            if self._pidfds.pop(peer.pidfd, None) is not None:
                self._epoll.unregister(peer.pidfd)
            os.close(peer.pidfd)

    def _has_ended(self, peer: Peer) -> bool:
        return peer.pidfd >= 0 and process_ticks(peer.hello.pid if peer.hello else 0) == 0


def stage_of(peer: Peer) -> str:
    """The peer's stage name; "" while it is not up."""
    return peer.hello.stage if peer.hello is not None else ""
