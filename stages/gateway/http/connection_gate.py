"""Accepts or refuses connections, with bounds in total and for each client address, or user of the Unix socket.

    up to the bounds       any request
    `RESERVED` more        probes, administration, and requests of a tenant that has none in flight; a connection that
                           sends no request within `RESERVED_HEAD_S` is closed
    beyond                 503, and the connection is closed

So a client that opens as many connections as it can does not keep probes and other tenants out.  With TLS a connection
counts from before its handshake, which has `HANDSHAKE_S` (`RESERVED_HEAD_S` beyond the bounds).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from aiohttp import web

from pipeline.api.error_response import error_response
from pipeline.api.fair_shares import FairShares, address_principal
from pipeline.api.forwarded import TrustedProxies
from pipeline.config.schema import Config
from pipeline.errors import Overloaded
from pipeline.ipc.tcp_transport import tcp_state
from pipeline.supervise.unix_listener import peer_uid
from pipeline.tls.follower import CertificateFollower
from stages.gateway.http.connection import Connection
from stages.gateway.http.connection_watch import ConnectionWatch
from stages.gateway.http.network_use import NetworkUse
from stages.gateway.http.tls_transport import HANDSHAKE_S, secure

log = logging.getLogger("starling.gateway")

SPARE = 256  # beyond one for each request in flight: idle connections, probes, requests that are refused
RESERVED = 64  # connections beyond the bounds
RESERVED_PER_ADDRESS = 48
RESERVED_HEAD_S = 2.0
REFUSAL_S = 1.0  # time for the client of a refused connection to read the response
MAX_REFUSALS = 256  # refused connections that are open for so long; further ones are closed without a response
OTHER_FILES = RESERVED + MAX_REFUSALS + 128  # beyond the bound: also journal, logs, sockets of stages, parsers

_PROXIES = "proxies"  # all trusted ones: they connect for many clients, and are bounded in total only

_FULL_BODY = error_response(Overloaded("the server has reached its connection limit; try again")).body
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)


class ConnectionGate:
    """One per gateway. Call `serve` before the first connection."""

    def __init__(self, config: Config, max_files: int, on_refusal: Callable[[], None]) -> None:
        """`max_files`: how many files this process may open; with few, fewer connections are accepted."""
        wanted = config.server.max_concurrent_requests + SPARE
        total = max(1, min(wanted, max_files - OTHER_FILES))
        if total < wanted:
            log.warning(
                "connections are bounded by the limit of open files (ulimit -n)",
                extra={"bound": total, "wanted": wanted, "needed_limit": wanted + OTHER_FILES},
            )
        share = config.server.max_connections_per_address or total - total // 4
        self._proxies = TrustedProxies(config.server.trusted_proxies)
        self._bounds = FairShares(total, share, 0, share_of=lambda address: total if address == _PROXIES else share)
        self._reserve = FairShares(RESERVED, RESERVED_PER_ADDRESS, reserve=0)
        self._on_refusal = on_refusal
        self._watch = ConnectionWatch(time.monotonic, tcp_state)
        self.network = NetworkUse()
        self._held: dict[object, tuple[FairShares, str]] = {}  # by connection
        self._silent: set[object] = set()  # reserved connections without a request
        self._n_refusals = 0
        self._server: web.Server | None = None
        self._tls: CertificateFollower | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

    def serve(self, server: web.Server, tls: CertificateFollower | None = None) -> None:
        """Use aiohttp's server for accepted connections; with `tls`, after a handshake with its certificate."""
        self._server = server
        self._tls = tls

    def tick(self) -> None:
        """Call often: ends the connections of clients that have left or do not read; follows the certificate."""
        self._watch.tick()
        if self._tls is not None:
            self._tls.tick()

    def protocol(self) -> asyncio.Protocol:
        """The protocol of a new connection: it chooses the one that serves it once the address is known."""
        return _Arrival(partial(self.admit, tls=self._tls))

    def unix_protocol(self) -> asyncio.Protocol:
        """The same for a connection of the Unix socket."""
        return _Arrival(self.admit)

    def admit(self, transport: asyncio.Transport, early: bytearray, tls: CertificateFollower | None = None) -> None:
        """Serve the connection, or refuse it. `early`: gets bytes that arrive before the handshake of TLS begins."""
        peer = peer_name(transport)
        address = _PROXIES if self._proxies.trusts(peer) else address_principal(peer)
        held = next((one for one in (self._bounds, self._reserve) if one.refusal(address) is None), None)
        if held is None or self._server is None:
            self._refuse(transport, early, tls)
            return
        connection = Connection(self._server, self._release, peer)
        self.network.begin(connection, transport)
        held.take(address)
        self._held[connection] = held, address
        if held is self._reserve:
            self._silent.add(connection)
            asyncio.get_running_loop().call_later(RESERVED_HEAD_S, self._close_silent, connection)
        if tls is None:
            self._begin(connection, transport)
        else:
            timeout_s = RESERVED_HEAD_S if held is self._reserve else HANDSHAKE_S
            self._run(self._begin_tls(connection, transport, early, tls.certificate.context, timeout_s))

    def _begin(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._watch.add(connection, transport)
        transport.set_protocol(connection)
        connection.connection_made(transport)

    async def _begin_tls(
        self,
        connection: Connection,
        tcp: asyncio.Transport,
        early: bytearray,
        context: ssl.SSLContext,
        timeout_s: float,
    ) -> None:
        transport = None
        try:
            transport = await secure(tcp, early, context, timeout_s)
        finally:
            if transport is None:
                self._release(connection)
        if transport is not None:
            self._begin(connection, transport)

    def _refuse(self, transport: asyncio.Transport, early: bytearray, tls: CertificateFollower | None) -> None:
        self._on_refusal()
        if self._n_refusals >= MAX_REFUSALS:
            transport.abort()
            return
        self._n_refusals += 1
        if tls is None:
            self._send_refusal(transport)
        else:
            self._run(self._refuse_tls(transport, early, tls.certificate.context))

    async def _refuse_tls(self, tcp: asyncio.Transport, early: bytearray, context: ssl.SSLContext) -> None:
        transport = None
        try:
            transport = await secure(tcp, early, context, RESERVED_HEAD_S)
        finally:
            if transport is None:
                self._n_refusals -= 1
        if transport is not None:
            transport.set_protocol(asyncio.Protocol())
            self._send_refusal(transport)

    def _send_refusal(self, transport: asyncio.Transport) -> None:
        transport.write(_FULL)
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()

        def end() -> None:
            self._n_refusals -= 1
            transport.abort()

        # If it were closed at once, the kernel would discard the response as soon as unread data arrived.
        asyncio.get_running_loop().call_later(REFUSAL_S, end)

    def _run(self, handshake: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(handshake)
        self._handshakes.add(task)  # the event loop itself holds no reference
        task.add_done_callback(self._handshakes.discard)

    def head_received(self, connection: object) -> None:
        """The connection has sent a request."""
        self._silent.discard(connection)

    def is_reserved(self, connection: object) -> bool:
        """Whether the connection is beyond the bounds, so that not every request is served on it."""
        held = self._held.get(connection)
        return held is not None and held[0] is self._reserve

    def _close_silent(self, connection: Connection) -> None:
        if connection in self._silent:
            connection.force_close()

    def _release(self, connection: Connection) -> None:
        self._watch.remove(connection)
        self.network.end(connection)
        self._silent.discard(connection)
        held = self._held.pop(connection, None)
        if held is not None:
            held[0].give_back(held[1])


def peer_name(transport: asyncio.BaseTransport) -> str:
    """The address of the peer; on the Unix socket uid:N, its user; "local" if neither is known."""
    peer = transport.get_extra_info("peername")
    if isinstance(peer, tuple) and peer:
        return str(peer[0])
    try:
        return f"uid:{peer_uid(transport.get_extra_info('socket'))}"
    except (OSError, AttributeError):
        return "local"


class _Arrival(asyncio.Protocol):
    """A connection whose address is not known yet."""

    def __init__(self, admit: Callable[[asyncio.Transport, bytearray], None]) -> None:
        self._admit = admit
        self._early = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The address is known."""
        self._admit(transport, self._early)

    def data_received(self, data: bytes) -> None:
        """Keep what arrives before the handshake begins."""
        self._early += data
