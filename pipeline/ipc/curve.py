"""CURVE on the sockets of tcp:// edges: encryption, and authentication of both sides by the keys of edge_keys.py.

A binding socket admits a connection only if the other side proves that it has the connector's secret key, which the
context's `Authenticator` checks (ZAP, RFC 27).  A connecting socket sends nothing before the other side has proved that
it has the binder's secret key.  A refused connection delivers no frame; `HandshakeMonitor` counts and logs it.
Sockets of ipc:// edges are not touched: the mode of their directory protects them.
"""

from __future__ import annotations

import hmac
import logging
import struct
import threading
import weakref
from collections.abc import Callable

import zmq
import zmq.utils.z85

from pipeline.ipc.edge_keys import EdgeKeys

log = logging.getLogger("starling.ipc")

ZmqContext = zmq.Context[zmq.Socket[bytes]]

ZAP_ADDRESS = "inproc://zeromq.zap.01"
HANDSHAKE_MS = 5000  # a connection that has not proved its key by then is closed
LOG_EVERY_S = 60.0  # between two log lines about the refused connections of one edge
MAX_EVENTS = 1024  # handshake events read at once
_EVENT = struct.Struct("=Hi")  # first part of an event: kind, value
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REASONS = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the connection was closed during the handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "no CURVE keys, or wrong ones",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "its key is not the connector's",
}

_authenticators: weakref.WeakKeyDictionary[ZmqContext, Authenticator] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def secure(socket: zmq.Socket[bytes], context: ZmqContext, edge: str, keys: EdgeKeys, *, is_binder: bool) -> None:
    """Set the keys of a socket. Call it before bind or connect."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if is_binder:
        _authenticator(context).admit(edge, keys.connector.public)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.binder.secret.encode())
        # Without an answer to its ZAP request libzmq then refuses, where it would otherwise admit any key.
        socket.setsockopt(zmq.ZAP_DOMAIN, edge.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.binder.public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.connector.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.connector.secret.encode())


def _authenticator(context: ZmqContext) -> Authenticator:
    """The one of this context: ZAP allows only one."""
    with _lock:
        found = _authenticators.get(context)
        if found is None:
            found = _authenticators[context] = Authenticator(context)
        return found


class Authenticator:
    """Answers the ZAP requests of a context's binding sockets, in a thread that ends with the context."""

    def __init__(self, context: ZmqContext) -> None:
        self._admitted: dict[bytes, bytes] = {}  # domain (name of the edge) -> public key
        self.last_refused = ""  # address of the other side
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)
        threading.Thread(target=self._run, name="zap", daemon=True).start()

    def admit(self, edge: str, public: str) -> None:
        """Admit the owner of this key, and no other, to the edge."""
        self._admitted[edge.encode()] = zmq.utils.z85.decode(public)

    def _run(self) -> None:
        try:
            while True:
                request = self._socket.recv_multipart()
                self._socket.send_multipart(self._answer(request))
        except zmq.ContextTerminated:
            self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, address, _, mechanism, *credentials = request
        admitted = self._admitted.get(domain, b"")
        is_admitted = mechanism == b"CURVE" and bool(credentials) and hmac.compare_digest(credentials[0], admitted)
        if not is_admitted:
            self.last_refused = address.decode("utf-8", "replace")
        code, text = (b"200", b"OK") if is_admitted else (b"400", b"wrong key")
        return [version, request_id, code, text, b"", b""]


class HandshakeMonitor:
    """Counts and logs the refused connections of one socket. Read by `poll`, in the thread of the socket."""

    def __init__(self, socket: zmq.Socket[bytes], context: ZmqContext, edge: str, clock: Callable[[], float]) -> None:
        self.refused = 0  # connections since the start
        self._edge = edge
        self._clock = clock
        self._context = context
        self._unlogged = 0  # refused connections since the last log line
        self._last = (0, b"")  # kind and address of the last one
        self._next_log = float("-inf")
        self._watched = socket
        address = f"inproc://handshakes-{id(self)}"
        socket.monitor(address, _FAILURES)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread must never wait for this reader
        self._events.connect(address)

    def poll(self) -> None:
        """Read what has happened since the last call. A few microseconds when nothing has."""
        for _ in range(MAX_EVENTS):
            try:
                head, address = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._last = _EVENT.unpack(head)[0], address
            self.refused += 1
            self._unlogged += 1
        now = self._clock()
        if not self._unlogged or now < self._next_log:
            return
        self._next_log = now + LOG_EVERY_S
        event, address = self._last
        facts = {"edge": self._edge, "address": address.decode("utf-8", "replace"), "count": self._unlogged}
        authenticator = _authenticators.get(self._context)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and authenticator is not None:
            facts["peer"] = authenticator.last_refused
        facts["reason"] = _REASONS.get(event, "the handshake failed")
        log.warning("connection refused", extra=facts)
        self._unlogged = 0

    def close(self) -> None:
        """Stop watching."""
        self._watched.disable_monitor()
        self._events.close()
