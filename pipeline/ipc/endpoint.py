"""Frames over ZeroMQ: one `Link` (connector, DEALER) or `Hub` (binder, ROUTER) for each edge.

Both keep track of who is at the other end.  A peer is *up* from its `Hello` until its process is
gone (a pidfd, for peers on this machine), its heartbeats stop, or a successor says `Hello`; only then
do frames pass.  What a stage sees is an alternation `on_up`, frames, `on_down`, in that order, for
each incarnation of the peer, so that soft state can be tied to it.

    Hello.epoch    names the incarnation of the sending process
    Hello.contact  names the sender's acquaintance with the receiver: it changes when the sender has
                   given the receiver up (and with it all soft state) though both processes live.
                   A change of either is `on_down(old)` and `on_up(new)` at the receiver.
    Heartbeat.sent counts the frames sent to this peer: one that has not arrived was lost on its way, and a
                   peer of whom a frame is missing is given up and met again, as after its death.

`fd` is an epoll descriptor over the socket's own (edge-triggered) descriptor, the pidfds of the peers
and an eventfd with which the object wakes its own reader when something is left to be read: after a
`send` that has swallowed the socket's edge, after a bounded batch.  So `fd` is level-triggered:
readable means "call `receive`", in poll() and asyncio alike.

Nothing here blocks (but for 2 ms at a peer's death, for its last words), and nothing a peer sends
raises: a frame that does not decode, comes from a peer that has not said `Hello`, or from another protocol
is counted (`dropped`), logged once per peer, dropped.
"""

from __future__ import annotations

import abc
import logging
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pipeline import procfs
from pipeline.errors import ConfigError
from pipeline.faults import points
from pipeline.protocol.messages import PROTOCOL_VERSION, Frame, Heartbeat, Hello, encode
from pipeline.protocol.topology import Edge
from pipeline.runtime import run_dir, timer_coalescing
from shm.arena import process_ticks

log = logging.getLogger("starling.wire")

DEAD_AFTER_BEATS = 10  # heartbeat intervals without any frame
STARVED = 8  # times as many for a peer that only waits for a core: giving it up would make more work
# Only the gateway reports readiness, and it connects: all other directions may be slower when idle.
LISTENS = "gateway"
QUIET_BEATS = 4  # heartbeat intervals between two heartbeats of an idle stage
BATCH_FRAMES = 1024  # most frames of one `receive`, so that one edge cannot starve the others
MAX_FRAME_BYTES = 64 << 20  # larger ones are not sent; a text of the largest body that is taken fits in
RECONNECT_MS = 20  # a successor is up within tens of ms; a failed ipc connect costs microseconds
LAST_WORDS_MS = 2  # between a peer's death and its frames' arrival; waited once, at its death
FLUSH_MS = 200  # an orderly close gives queued frames this long

ENDED = "its process has ended"

_EPOCH = 0
_POLLIN = int(zmq.POLLIN)  # plain numbers: enum arithmetic shows in profiles
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def process_epoch() -> int:
    """Start of this process as its peers know it: ns since 1970, fixed at the first call."""
    global _EPOCH
    if not _EPOCH:
        _EPOCH = time.time_ns()
    return _EPOCH


def _forget_epoch() -> None:
    global _EPOCH
    _EPOCH = 0


os.register_at_fork(after_in_child=_forget_epoch)


class _Peer:
    """What is known of the process at the other end of one connection."""

    __slots__ = ("contact", "hello", "last_beat", "last_seen", "pidfd", "received", "sent")

    def __init__(self, contact: int, now: float) -> None:
        self.contact = contact  # our acquaintance's number, sent in our Hellos to it
        self.hello: Hello | None = None
        self.last_beat: Heartbeat | None = None
        self.last_seen = now
        self.pidfd = -1
        self.sent = self.received = 0  # frames, since it was met


class _Endpoint(abc.ABC):
    """What `Link` and `Hub` share: socket, descriptor, peers by key (a Link's only key is b"")."""

    def __init__(
        self,
        kind: int,
        edge: Edge,
        address: str,
        stage: str,
        receives: Any,
        heartbeat_ms: float,
        clock: Callable[[], float],
        context: zmq.Context[zmq.Socket[bytes]] | None,
        epoch: int,
        allow_remote: bool,
    ) -> None:
        run_dir.check_address(address, allow_remote)
        self.edge = edge
        self.address = address
        self.stage = stage
        self.dropped = 0  # frames received and not delivered
        self.refused = 0  # frames not sent: peer unknown, or its queue full
        self.epoch = epoch or process_epoch()
        self._ticks = process_ticks(os.getpid())
        self._interval = heartbeat_ms / 1000
        self._quiet_s = max(timer_coalescing.IDLE_HEARTBEAT_S, QUIET_BEATS * self._interval)
        self._clock = clock
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._known: dict[bytes, _Peer] = {}
        self._contacts = 0
        self._complained: set[bytes] = set()
        self._deferred: tuple[bytes, Hello] | None = None
        self._dead: list[tuple[bytes, _Peer, str]] = []  # to be given up, and why
        self._last_tick = self._last_sent = float("-inf")
        self._said = Heartbeat("", 0, 0, False, False)  # the last beat that was offered
        self._is_local = address.startswith("ipc://")
        self.is_runnable: Callable[[int], bool] = procfs.is_runnable  # of a pid
        self._closed = False
        ends = (edge.connector, edge.binder) if kind == zmq.DEALER else (edge.binder, edge.connector)
        self._fault = points.fault_point("wire", ">".join(ends))
        self._frames_sent = 0

        socket = (context or zmq.Context.instance()).socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, edge.high_water_mark)
        socket.setsockopt(zmq.RCVHWM, edge.high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket = socket
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_woken = False
        self._epoll.register(self._option(zmq.FD), select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._pidfds: dict[int, bytes] = {}
        self.fd: int = self._epoll.fileno()

    # -------------------------------------------------------------- differs by side

    @abc.abstractmethod
    def _notify(self, key: bytes, hello: Hello, is_up: bool) -> None: ...

    @abc.abstractmethod
    def _take(self) -> tuple[bytes, bytes]:
        """Key and payload (the last part) of the next message. Raises `zmq.Again` when there is none."""

    @abc.abstractmethod
    def _put(self, key: bytes, payload: bytes) -> None: ...

    def _option(self, option: int) -> int:
        value = self._socket.getsockopt(option)
        assert isinstance(value, int)
        return value

    # -------------------------------------------------------------- sending

    def _send(self, key: bytes, frame: Frame) -> bool:
        payload = encode(frame)
        if len(payload) > MAX_FRAME_BYTES:
            # The other side would close the connection, and everything in flight on it would be lost.
            log.error(
                "a frame is too large to be sent",
                extra={"edge": self.edge.name, "bytes": len(payload), "frame": type(frame).__name__},
            )
            self.refused += 1
            return False
        try:
            self._put(key, payload)
        except zmq.ZMQError as error:
            # Full, not connected, or (a ROUTER) unknown.  Anything else is a bug and must be seen.
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.refused += 1
            return False
        finally:
            # Sending may have consumed the socket's edge: what arrived meanwhile needs a reader.
            if self._option(zmq.EVENTS) & _POLLIN:
                self._call_again()
        return True

    def _call_again(self) -> None:
        """Make `fd` readable until the next `receive`."""
        if not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._wake, 1)

    def _send_frame(self, key: bytes, frame: Frame) -> bool:
        """A stage's frame, which a fault plan may lose on its way."""
        self._frames_sent += 1
        is_lost = self._fault.trigger is not None and self._fault.trigger(self._frames_sent)
        if not is_lost and not self._send(key, frame):
            return False
        self._known[key].sent += 1
        return True

    def _send_hello(self, key: bytes) -> bool:
        contact = self._known[key].contact
        return self._send(key, Hello(self.stage, self.epoch, os.getpid(), self._ticks, PROTOCOL_VERSION, contact))

    # -------------------------------------------------------------- receiving

    def _receive(self) -> list[tuple[bytes, Frame]]:
        """Drain the socket; stops early where the order of frames and up/down events needs it."""
        frames: list[tuple[bytes, Frame]] = []
        if self._closed:
            return frames
        if self._is_woken:
            self._is_woken = False
            os.eventfd_read(self._wake)
        if self._deferred is not None:
            key, hello = self._deferred
            self._deferred = None
            self._greet(key, hello)
        self._bury()
        if self._drain(frames) and self._find_dead():
            # What they sent last may still be on its way through ZMQ's thread.
            if self._socket.poll(LAST_WORDS_MS):
                self._drain(frames)
            if frames:
                self._call_again()  # frames first, `on_down` at the next call
            else:
                self._bury()
        return frames

    def _drain(self, frames: list[tuple[bytes, Frame]]) -> bool:
        """Append what has arrived; False when something was left, which is then signalled."""
        now = self._clock()
        is_first = True
        for _ in range(BATCH_FRAMES - len(frames)):
            # Mostly one frame has come: asking whether there is more costs a third of failing to get it.
            if not is_first and not self._option(zmq.EVENTS) & _POLLIN:
                return True
            is_first = False
            try:
                key, payload = self._take()
            except zmq.Again:
                return True
            if not payload:
                self._meet_stranger(key, now)  # ZMQ_PROBE_ROUTER: a connection stands, say Hello first
                continue
            frame = self._decode(key, payload)
            if frame is None:
                continue
            if isinstance(frame, Hello):
                if not self._is_news(key, frame):
                    self._known[key].last_seen = now
                elif frames:
                    # The frames before it belong to the old incarnation: hand them out first.
                    self._deferred = (key, frame)
                    break
                else:
                    self._greet(key, frame)
                continue
            peer = self._known.get(key)
            if peer is None or peer.hello is None:
                self.dropped += 1
                self._meet_stranger(key, now)
                continue
            peer.last_seen = now
            if not isinstance(frame, Heartbeat):
                peer.received += 1
                frames.append((key, frame))
                continue
            peer.last_beat = frame
            if frame.sent not in (-1, peer.received) and all(other is not peer for _, other, _ in self._dead):
                lost = f"{frame.sent - peer.received} of its frames were lost on their way"
                self._dead.append((key, peer, lost))
        self._call_again()
        return False

    def _find_dead(self) -> bool:
        """Note the peers whose process has ended."""
        for fd, _ in self._epoll.poll(0):
            key = self._pidfds.pop(fd, None)
            if key is not None:
                self._epoll.unregister(fd)
                self._dead.append((key, self._known[key], ENDED))
        return bool(self._dead)

    def _bury(self) -> None:
        dead, self._dead = self._dead, []
        for key, peer, why in dead:
            if self._known.get(key) is not peer:
                continue
            self._lose(key, why)
            if why is not ENDED:
                log.warning("%s", why, extra={"edge": self.edge.name, "peer": peer.hello and peer.hello.stage})
                self._meet_stranger(key, self._clock())

    def _decode(self, key: bytes, payload: bytes) -> Frame | None:
        try:
            frame: Frame = self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._drop(key, f"a frame that does not decode: {error}")
            return None
        if isinstance(frame, Hello) and frame.protocol != PROTOCOL_VERSION:
            self._drop(key, f"protocol {frame.protocol} of {frame.stage}, this is {PROTOCOL_VERSION}")
            return None
        return frame

    def _drop(self, key: bytes, why: str) -> None:
        self.dropped += 1
        if key not in self._complained and len(self._complained) < 1024:
            self._complained.add(key)
            log.warning("dropped %s", why, extra={"edge": self.edge.name, "peer": key.hex()})

    def _meet_stranger(self, key: bytes, now: float) -> None:
        """One who has not said Hello, or whom we gave up: ask by saying ours."""
        if key not in self._known:
            self._contacts += 1
            self._known[key] = _Peer(self._contacts, now)
            self._send_hello(key)

    # -------------------------------------------------------------- peers

    def _is_news(self, key: bytes, hello: Hello) -> bool:
        peer = self._known.get(key)
        if peer is None or peer.hello is None:
            return True
        return (hello.epoch, hello.contact) != (peer.hello.epoch, peer.hello.contact)

    def _greet(self, key: bytes, hello: Hello) -> None:
        """Take up a new incarnation: down with the old one, our Hello, then `on_up`."""
        for other, peer in list(self._known.items()):
            if peer.hello is None or peer.hello.stage != hello.stage:
                continue
            if hello.epoch < peer.hello.epoch and not self._is_gone(peer):
                self._drop(key, f"Hello of {hello.stage} older than the one that is up")
                return
            self._lose(other, "replaced by a new incarnation", forget=other != key)
        now = self._clock()
        if key not in self._known:
            self._contacts += 1
            self._known[key] = _Peer(self._contacts, now)
        peer = self._known[key]
        peer.hello, peer.last_beat, peer.last_seen = hello, None, now
        self._watch(key, peer)
        self._send_hello(key)
        log.info("peer up", extra={"edge": self.edge.name, "peer": hello.stage, "peer_pid": hello.pid})
        self._notify(key, hello, True)

    def _watch(self, key: bytes, peer: _Peer) -> None:
        hello = peer.hello
        if not self._is_local or hello is None:
            return
        try:
            pidfd = os.pidfd_open(hello.pid)
        except OSError:
            return
        # Another namespace's pid, or one that has been used again: heartbeats alone must tell.
        if process_ticks(hello.pid) != hello.start_ticks:
            os.close(pidfd)
            return
        peer.pidfd = pidfd
        self._pidfds[pidfd] = key
        self._epoll.register(pidfd, select.EPOLLIN)

    def _is_gone(self, peer: _Peer) -> bool:
        return peer.pidfd >= 0 and process_ticks(peer.hello.pid if peer.hello else 0) == 0

    def _lose(self, key: bytes, why: str, forget: bool = True) -> None:
        peer = self._known.pop(key)
        if peer.pidfd >= 0:
            if self._pidfds.pop(peer.pidfd, None) is not None:
                self._epoll.unregister(peer.pidfd)
            os.close(peer.pidfd)
        if not forget:
            # The other side started afresh and will hear our Hello: same acquaintance, new peer.
            self._known[key] = _Peer(peer.contact, self._clock())
        if peer.hello is not None:
            log.info("peer down", extra={"edge": self.edge.name, "peer": peer.hello.stage, "reason": why})
            self._notify(key, peer.hello, False)

    def _tick(self, beat: Heartbeat) -> None:
        now = self._clock()
        usual = max(self._interval, timer_coalescing.IDLE_HEARTBEAT_S) if self._said.idle else self._interval
        late = now - self._last_tick - usual
        self._last_tick = now
        for key, peer in list(self._known.items()):
            if 0 < late < float("inf"):
                peer.last_seen += late  # we did not run (stopped, starved): not the peer's silence
            silence, limit = now - peer.last_seen, self._patience_s(peer)
            if silence > limit:
                if self._option(zmq.EVENTS) & zmq.POLLIN:
                    self._call_again()  # unread frames: it may live yet
                elif silence > STARVED * limit or not self._is_starved(peer):
                    self._lose(key, "its heartbeats have stopped")
        if now - self._last_sent >= 0.9 * self._interval and self._is_due(beat, now):
            self._last_sent = now
            self._beat(beat)

    def _patience_s(self, peer: _Peer) -> float:
        """How long without a frame until it is given up."""
        is_idle = peer.last_beat is not None and peer.last_beat.idle
        return DEAD_AFTER_BEATS * self._interval + (1.25 * self._quiet_s if is_idle else 0.0)

    def _is_starved(self, peer: _Peer) -> bool:
        return peer.pidfd >= 0 and peer.hello is not None and self.is_runnable(peer.hello.pid)

    def _is_due(self, beat: Heartbeat, now: float) -> bool:
        """A quiet stage says so less often, and at once when it is not any more."""
        said, self._said = self._said, beat
        if not (beat.idle and said.idle) or self._is_waited_for() or beat.reason != said.reason:
            return True
        return timer_coalescing.has_period_elapsed(now, self._last_sent, self._quiet_s)

    @abc.abstractmethod
    def _is_waited_for(self) -> bool:
        """Does somebody at the other end wait for each of our beats?"""

    def _beat(self, beat: Heartbeat) -> None:
        for key, peer in list(self._known.items()):
            if peer.hello is None:
                self._send_hello(key)
            else:
                self._send(key, msgspec.structs.replace(beat, sent=peer.sent))

    def send_heartbeat_if_due(self, beat: Heartbeat) -> None:
        """Between two ticks, in the middle of long work: a heartbeat when one is due, and nothing else."""
        if not self._closed and self._clock() - self._last_sent >= 0.9 * self._interval:
            self._last_sent = self._clock()
            self._beat(beat)

    def close(self, flush_ms: int = FLUSH_MS) -> None:
        """Orderly: queued frames get `flush_ms` (the context's `term` waits for it). Idempotent."""
        if self._closed:
            return
        self._closed = True
        for peer in self._known.values():
            if peer.pidfd >= 0:
                os.close(peer.pidfd)
        self._known.clear()
        self._pidfds.clear()
        self._epoll.close()
        os.close(self._wake)
        self._socket.close(linger=flush_ms)


class Link(_Endpoint):
    """The connecting side: one peer."""

    def __init__(
        self,
        edge: Edge,
        address: str,
        stage: str,
        *,
        heartbeat_ms: float,
        clock: Callable[[], float] = time.monotonic,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        epoch: int = 0,
        allow_remote: bool = False,
    ) -> None:
        self.on_up: Callable[[Hello], None] = lambda _hello: None
        self.on_down: Callable[[Hello], None] = lambda _hello: None
        super().__init__(
            zmq.DEALER,
            edge,
            address,
            stage,
            edge.to_connector,
            heartbeat_ms,
            clock,
            context,
            epoch,
            allow_remote,
        )
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        # Queue only to a connection that stands, and lose the queue with it: frames meant for a
        # dead incarnation must not be the first thing that its successor reads.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.PROBE_ROUTER, 1)
        self._socket.connect(address)
        self._contacts = 1
        self._known[b""] = _Peer(1, clock())

    @property
    def peer(self) -> Hello | None:
        known = self._known.get(b"")
        return known.hello if known else None

    @property
    def last_beat(self) -> Heartbeat | None:
        known = self._known.get(b"")
        return known.last_beat if known else None

    def send(self, frame: Frame) -> bool:
        """False: the peer is not up, or its queue is full. Never blocks."""
        if self._closed or self.peer is None:
            self.refused += 1
            return False
        return self._send_frame(b"", frame)

    def receive(self) -> list[Frame]:
        """Frames that have arrived, in order. Calls `on_up` and `on_down` at their place."""
        return [frame for _, frame in self._receive()]

    def tick(self, beat: Heartbeat) -> None:
        """Call about every 100 ms: sends `Hello` or `beat` when due, gives up a silent peer."""
        if self._closed:
            return
        if b"" not in self._known:
            self._contacts += 1
            self._known[b""] = _Peer(self._contacts, self._clock())
        self._tick(beat)

    def _is_waited_for(self) -> bool:
        return self.peer is None  # our Hello

    def _notify(self, key: bytes, hello: Hello, is_up: bool) -> None:
        (self.on_up if is_up else self.on_down)(hello)

    def _take(self) -> tuple[bytes, bytes]:
        part = self._socket.recv(_NOBLOCK, copy=False)
        while part.more:
            part = self._socket.recv(_NOBLOCK, copy=False)
        return b"", part.bytes

    def _put(self, key: bytes, payload: bytes) -> None:
        self._socket.send(payload, _NOBLOCK)


class Hub(_Endpoint):
    """The binding side: peers by ZeroMQ identity, which changes with every connection.

    At most one peer of a stage name is up.  Stages that run several times give themselves names
    of their own (`worker:MODEL`).
    """

    def __init__(
        self,
        edge: Edge,
        address: str,
        stage: str,
        *,
        heartbeat_ms: float,
        clock: Callable[[], float] = time.monotonic,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        epoch: int = 0,
        allow_remote: bool = False,
    ) -> None:
        self.on_up: Callable[[bytes, Hello], None] = lambda _peer, _hello: None
        self.on_down: Callable[[bytes, Hello], None] = lambda _peer, _hello: None
        run_dir.check_address(address, allow_remote)
        run_dir.clear_socket(address)
        super().__init__(
            zmq.ROUTER,
            edge,
            address,
            stage,
            edge.to_binder,
            heartbeat_ms,
            clock,
            context,
            epoch,
            allow_remote,
        )
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            super().close(0)
            raise ConfigError(f"cannot bind {address}: {error.strerror}") from None

    def close(self, flush_ms: int = FLUSH_MS) -> None:
        """As `Link.close`, and the socket's file goes: libzmq leaves it."""
        if self._is_local and not self._closed:
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)
        super().close(flush_ms)

    @property
    def peers(self) -> dict[bytes, Hello]:
        return {key: peer.hello for key, peer in self._known.items() if peer.hello is not None}

    @property
    def last_beat(self) -> dict[bytes, Heartbeat]:
        return {k: peer.last_beat for k, peer in self._known.items() if peer.last_beat is not None}

    def send(self, peer: bytes, frame: Frame) -> bool:
        """False: the peer is not up, or its queue is full. Never blocks."""
        known = self._known.get(peer)
        if self._closed or known is None or known.hello is None:
            self.refused += 1
            return False
        return self._send_frame(peer, frame)

    def receive(self) -> list[tuple[bytes, Frame]]:
        """(peer, frame) in order of arrival. Calls `on_up` and `on_down` at their place."""
        return self._receive()

    def tick(self, beat: Heartbeat) -> None:
        """Call about every 100 ms: sends `beat` when due, gives up silent peers."""
        if not self._closed:
            self._tick(beat)

    def _is_waited_for(self) -> bool:
        return self.edge.connector == LISTENS or any(peer.hello is None for peer in self._known.values())

    def _notify(self, key: bytes, hello: Hello, is_up: bool) -> None:
        (self.on_up if is_up else self.on_down)(key, hello)

    def _take(self) -> tuple[bytes, bytes]:
        key = self._socket.recv(_NOBLOCK)
        part = self._socket.recv(_NOBLOCK, copy=False)
        while part.more:
            part = self._socket.recv(_NOBLOCK, copy=False)
        return key, part.bytes

    def _put(self, key: bytes, payload: bytes) -> None:
        self._socket.send(key, _MORE)
        self._socket.send(payload, _NOBLOCK)
