"""Frames over ZeroMQ: a `Link` (connecting side, DEALER) or a `Hub` (binding side, ROUTER) per edge.

`fd` is an epoll descriptor over the socket's own (edge-triggered) descriptor, the pidfds of the peers, and an
eventfd with which the endpoint wakes its own reader when something is left to be read: after a `send` that
consumed the socket's edge, and after a bounded batch.  So `fd` is level-triggered: readable means "call `receive`",
in poll() and in asyncio.

Frames pass only while the peer is up, see liveness.py.  Nothing here blocks, except for 2 ms at a peer's death to
receive its last frames.  Nothing that a peer sends raises: a frame that does not decode, that precedes `Hello` or
that belongs to another protocol version is counted (`dropped`), logged once per peer, and ignored.  On a tcp:// edge
no frame passes before both sides have proved their keys (curve.py).
"""

from __future__ import annotations

import abc
import logging
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from pipeline.config.addresses import check_address
from pipeline.errors import ConfigError
from pipeline.faults import points
from pipeline.ipc import curve
from pipeline.ipc.edge_keys import EdgeKeys
from pipeline.ipc.liveness import Liveness
from pipeline.protocol.messages import FRAMES, PROTOCOL_VERSION, Frame, Heartbeat, Hello, encode
from pipeline.protocol.topology import Edge
from pipeline.runtime import run_dir
from pipeline.runtime.process import process_epoch
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.ipc")

BATCH_FRAMES = 1024  # most frames of one `receive`, so that one edge cannot starve the others
MAX_FRAME_BYTES = 64 << 20  # larger frames are refused; a text of the largest accepted HTTP body fits
RECONNECT_MS = 20  # between connection attempts; a successor starts within tens of ms, an attempt costs microseconds
LAST_FRAMES_MS = 2  # wait for the last frames of a peer whose process has ended, once
FLUSH_MS = 200  # time that `close` gives queued frames

_POLLIN = int(zmq.POLLIN)  # plain integers: enum arithmetic is visible in profiles
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

ZmqContext = zmq.Context[zmq.Socket[bytes]]


class _Endpoint(abc.ABC):
    """What `Link` and `Hub` share: socket, descriptor, liveness. Peers have a key; a Link's only key is b""."""

    def __init__(
        self,
        kind: int,
        edge: Edge,
        address: str,
        stage: str,
        *,
        heartbeat_ms: float,
        clock: Callable[[], float],
        context: ZmqContext | None,
        epoch: int,
        allow_remote: bool,
        keys: EdgeKeys | None,
    ) -> None:
        check_address(address, allow_remote)
        if keys is None and not address.startswith("ipc://"):
            raise ConfigError(f"edge {edge.name}: address {address!r} needs the keys of pipeline/ipc/edge_keys.py")
        is_binder = kind == zmq.ROUTER
        self.edge = edge
        self.address = address
        self.stage = stage
        self.epoch = epoch or process_epoch()
        self.dropped = 0  # frames received and not delivered
        self.refused = 0  # frames not sent: peer unknown, or its queue full
        self.heartbeats = 0  # received
        self.sent_bytes = self.received_bytes = 0  # of frames
        self.on_heartbeat: Callable[[Heartbeat], None] = lambda _heartbeat: None  # at its arrival
        self._is_ipc = address.startswith("ipc://")
        frames = FRAMES[edge.name]
        self._decoder = msgspec.msgpack.Decoder(frames.to_binder if is_binder else frames.to_connector)
        self._clock = clock
        self._deferred: tuple[bytes, Hello] | None = None
        self._is_closed = False
        ends = (edge.binder, edge.connector) if is_binder else (edge.connector, edge.binder)
        self._fault = points.fault_point("wire", ">".join(ends))
        self._frames_sent = 0

        context = context or zmq.Context.instance()
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, edge.high_water_mark)
        socket.setsockopt(zmq.RCVHWM, edge.high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket = socket
        self._handshakes: curve.HandshakeMonitor | None = None  # of a tcp:// edge
        if keys is not None and not self._is_ipc:
            socket.setsockopt(zmq.IPV6, int("[" in address))
            curve.secure(socket, context, edge.name, keys, is_binder=is_binder)
            self._handshakes = curve.HandshakeMonitor(socket, context, edge.name, clock)
        self.liveness = Liveness(
            self,
            edge.name,
            stage,
            self.epoch,
            heartbeat_ms / 1000,
            is_local=self._is_ipc,
            is_prompt=is_binder and edge.is_readiness_source,
            clock=clock,
        )
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_woken = False
        for fd in (self._option(zmq.FD), self._wake_fd, self.liveness.fd):
            self._epoll.register(fd, select.EPOLLIN)
        self.fd: int = self._epoll.fileno()

    # -------------------------------------------------------------- differs by side

    @abc.abstractmethod
    def notify(self, key: bytes, hello: Hello, is_up: bool) -> None:
        """Call `on_up` or `on_down`."""

    @abc.abstractmethod
    def _read(self) -> tuple[bytes, bytes]:
        """Key and payload (the last part) of the next message. Raises `zmq.Again` when there is none."""

    @abc.abstractmethod
    def _write(self, key: bytes, payload: bytes) -> None: ...

    # -------------------------------------------------------------- sending

    def transmit(self, key: bytes, frame: Frame) -> bool:
        """Send a frame whatever the peer's state; False: its queue is full, or it is unknown."""
        payload = encode(frame)
        if len(payload) > MAX_FRAME_BYTES:
            # The receiver would close the connection, and every queued frame would be lost.
            size = {"edge": self.edge.name, "bytes": len(payload), "frame": type(frame).__name__}
            log.error("frame too large to send", extra=size)
            self.refused += 1
            return False
        try:
            self._write(key, payload)
        except zmq.ZMQError as error:
            # Full, not connected, or (a ROUTER) unknown.  Anything else is a bug and must be seen.
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.refused += 1
            return False
        else:
            self.sent_bytes += len(payload)
        finally:
            # Sending may have consumed the socket's edge: frames that arrived meanwhile need a reader.
            if self._option(zmq.EVENTS) & _POLLIN:
                self.wake()
        return True

    def _send(self, key: bytes, frame: Frame) -> bool:
        """A stage's frame. A fault plan may lose it on its way."""
        peer = self.liveness.peers.get(key)
        if self._is_closed or peer is None or peer.hello is None:
            self.refused += 1
            return False
        self._frames_sent += 1
        is_lost = self._fault.trigger is not None and self._fault.trigger(self._frames_sent)
        if not is_lost and not self.transmit(key, frame):
            return False
        peer.sent += 1
        return True

    # -------------------------------------------------------------- receiving

    def wake(self) -> None:
        """Make `fd` readable until the next `receive`."""
        if not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._wake_fd, 1)

    def has_unread(self) -> bool:
        """Whether received messages wait in the socket."""
        return bool(self._option(zmq.EVENTS) & _POLLIN)

    def _receive(self) -> list[tuple[bytes, Frame]]:
        """Drain the socket; stops early where the order of frames and up/down events requires it."""
        frames: list[tuple[bytes, Frame]] = []
        if self._is_closed:
            return frames
        if self._is_woken:
            self._is_woken = False
            os.eventfd_read(self._wake_fd)
        if self._deferred is not None:
            key, hello = self._deferred
            self._deferred = None
            self._accept(key, hello)
        self.liveness.remove_dead()
        if self._drain(frames) and self.liveness.find_ended():
            # The last frames of an ended process may still be on their way through ZeroMQ's thread.
            if self._socket.poll(LAST_FRAMES_MS):
                self._drain(frames)
            if frames:
                self.wake()  # frames first, `on_down` at the next call
            else:
                self.liveness.remove_dead()
        return frames

    def _drain(self, frames: list[tuple[bytes, Frame]]) -> bool:
        """Append received frames; False when some were left, in which case `fd` stays readable."""
        now = self._clock()
        liveness = self.liveness
        is_first = True
        for _ in range(BATCH_FRAMES - len(frames)):
            # Usually one frame has arrived: asking whether there are more costs a third of a failing read.
            if not is_first and not self._option(zmq.EVENTS) & _POLLIN:
                return True
            is_first = False
            try:
                key, payload = self._read()
            except zmq.Again:
                return True
            if not payload:
                liveness.contact(key)  # ZMQ_PROBE_ROUTER: a new connection, greet first
                continue
            self.received_bytes += len(payload)
            frame = self._decode(key, payload)
            if frame is None:
                continue
            if isinstance(frame, Hello):
                if not liveness.is_new(key, frame):
                    liveness.peers[key].last_seen = now
                elif frames:
                    # The frames before it belong to the old incarnation: deliver them first.
                    self._deferred = (key, frame)
                    break
                else:
                    self._accept(key, frame)
                continue
            peer = liveness.peers.get(key)
            if peer is None or peer.hello is None:
                self.dropped += 1
                liveness.contact(key)
                continue
            peer.last_seen = now
            if isinstance(frame, Heartbeat):
                self.heartbeats += 1
                liveness.on_heartbeat(key, peer, frame)
                self.on_heartbeat(frame)
            else:
                peer.received += 1
                frames.append((key, frame))
        self.wake()
        return False

    def _accept(self, key: bytes, hello: Hello) -> None:
        if not self.liveness.accept(key, hello):
            self._drop(key, f"Hello of {hello.stage} is older than the one that is up")

    def _decode(self, key: bytes, payload: bytes) -> Frame | None:
        try:
            frame: Frame = self._decoder.decode(payload)
        except DECODE_ERRORS as error:
            self._drop(key, f"it does not decode: {error}")
            return None
        if isinstance(frame, Hello) and frame.protocol != PROTOCOL_VERSION:
            self._drop(key, f"{frame.stage} uses protocol {frame.protocol}, this process {PROTOCOL_VERSION}")
            return None
        return frame

    def _drop(self, key: bytes, why: str) -> None:
        self.dropped += 1
        self.liveness.log_dropped(key, why)

    # -------------------------------------------------------------- both

    def tick(self, heartbeat: Heartbeat) -> None:
        """Call at each tick: sends `Hello` or `heartbeat` when due, discards silent peers."""
        if not self._is_closed:
            self.liveness.tick(heartbeat)
            if self._handshakes is not None:
                self._handshakes.poll()

    @property
    def refused_connections(self) -> int:
        """Connections that CURVE has refused; 0 on an ipc:// edge."""
        return self._handshakes.refused if self._handshakes is not None else 0

    def send_heartbeat_if_due(self, heartbeat: Heartbeat) -> None:
        """Between two ticks, during long work: sends `heartbeat` when its interval has passed."""
        if not self._is_closed:
            self.liveness.send_heartbeat_if_due(heartbeat)

    def close(self, flush_ms: int = FLUSH_MS) -> None:
        """Give queued frames `flush_ms` (the context's `term` waits for it) and close. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._epoll.close()
        self.liveness.close()
        os.close(self._wake_fd)
        if self._handshakes is not None:
            self._handshakes.close()
        self._socket.close(linger=flush_ms)

    def _option(self, option: int) -> int:
        value = self._socket.getsockopt(option)
        assert isinstance(value, int)
        return value


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
        context: ZmqContext | None = None,
        epoch: int = 0,
        allow_remote: bool = False,
        keys: EdgeKeys | None = None,
    ) -> None:
        self.on_up: Callable[[Hello], None] = lambda _hello: None
        self.on_down: Callable[[Hello], None] = lambda _hello: None
        super().__init__(
            zmq.DEALER,
            edge,
            address,
            stage,
            heartbeat_ms=heartbeat_ms,
            clock=clock,
            context=context,
            epoch=epoch,
            allow_remote=allow_remote,
            keys=keys,
        )
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        # Queue only while connected, and lose the queue with the connection: a successor must not receive frames
        # that were meant for its predecessor.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.PROBE_ROUTER, 1)
        self._socket.connect(address)
        self.liveness.add(b"")

    @property
    def peer(self) -> Hello | None:
        """The peer's `Hello`; None while it is not up."""
        peer = self.liveness.peers.get(b"")
        return peer.hello if peer else None

    @property
    def last_heartbeat(self) -> Heartbeat | None:
        """The peer's last heartbeat, if it has sent one since its `Hello`."""
        peer = self.liveness.peers.get(b"")
        return peer.last_heartbeat if peer else None

    def send(self, frame: Frame) -> bool:
        """False: the peer is not up, or its queue is full. Never blocks."""
        return self._send(b"", frame)

    def receive(self) -> list[Frame]:
        """Received frames in order. Calls `on_up` and `on_down` in between."""
        return [frame for _, frame in self._receive()]

    def tick(self, heartbeat: Heartbeat) -> None:
        """As the base class; after the loss of the peer it begins a new contact."""
        if not self._is_closed and b"" not in self.liveness.peers:
            self.liveness.add(b"")
        super().tick(heartbeat)

    def notify(self, key: bytes, hello: Hello, is_up: bool) -> None:
        """Call `on_up` or `on_down`."""
        (self.on_up if is_up else self.on_down)(hello)

    def _read(self) -> tuple[bytes, bytes]:
        part = self._socket.recv(_NOBLOCK, copy=False)
        while part.more:
            part = self._socket.recv(_NOBLOCK, copy=False)
        return b"", part.bytes

    def _write(self, key: bytes, payload: bytes) -> None:
        self._socket.send(payload, _NOBLOCK)


class Hub(_Endpoint):
    """The binding side: peers by ZeroMQ identity, which changes with every connection.

    At most one peer of a stage name is up.  Stages that run several times use a name for each
    process (`worker:MODEL`).
    """

    def __init__(
        self,
        edge: Edge,
        address: str,
        stage: str,
        *,
        heartbeat_ms: float,
        clock: Callable[[], float] = time.monotonic,
        context: ZmqContext | None = None,
        epoch: int = 0,
        allow_remote: bool = False,
        keys: EdgeKeys | None = None,
    ) -> None:
        self.on_up: Callable[[bytes, Hello], None] = lambda _peer, _hello: None
        self.on_down: Callable[[bytes, Hello], None] = lambda _peer, _hello: None
        check_address(address, allow_remote)
        run_dir.clear_socket(address)
        super().__init__(
            zmq.ROUTER,
            edge,
            address,
            stage,
            heartbeat_ms=heartbeat_ms,
            clock=clock,
            context=context,
            epoch=epoch,
            allow_remote=allow_remote,
            keys=keys,
        )
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            super().close(0)
            raise ConfigError(f"cannot bind {address}: {error.strerror}") from None

    @property
    def peers(self) -> dict[bytes, Hello]:
        """The `Hello` of each peer that is up."""
        return {key: peer.hello for key, peer in self.liveness.peers.items() if peer.hello is not None}

    @property
    def last_heartbeat(self) -> dict[bytes, Heartbeat]:
        """The last heartbeat of each peer that has sent one."""
        peers = self.liveness.peers
        return {key: peer.last_heartbeat for key, peer in peers.items() if peer.last_heartbeat is not None}

    def send(self, peer: bytes, frame: Frame) -> bool:
        """False: the peer is not up, or its queue is full. Never blocks."""
        return self._send(peer, frame)

    def receive(self) -> list[tuple[bytes, Frame]]:
        """(peer, frame) in order of arrival. Calls `on_up` and `on_down` in between."""
        return self._receive()

    def close(self, flush_ms: int = FLUSH_MS) -> None:
        """As the base class; also removes the socket's file, which libzmq leaves."""
        if self._is_ipc and not self._is_closed:
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)
        super().close(flush_ms)

    def notify(self, key: bytes, hello: Hello, is_up: bool) -> None:
        """Call `on_up` or `on_down`."""
        (self.on_up if is_up else self.on_down)(key, hello)

    def _read(self) -> tuple[bytes, bytes]:
        key = self._socket.recv(_NOBLOCK)
        part = self._socket.recv(_NOBLOCK, copy=False)
        while part.more:
            part = self._socket.recv(_NOBLOCK, copy=False)
        return key, part.bytes

    def _write(self, key: bytes, payload: bytes) -> None:
        self._socket.send(key, _MORE)
        self._socket.send(payload, _NOBLOCK)
