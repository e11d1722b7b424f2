"""Accepts or refuses connections, with bounds in total and for each client address.

    up to the bounds       any request
    `RESERVED` more        probes, administration, and requests of a tenant that has none in flight; a connection that
                           sends no request within `RESERVED_HEAD_S` is closed
    beyond                 503, and the connection is closed

So a client that opens as many connections as it can does not keep probes and other tenants out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from aiohttp import web

from pipeline.api.error_response import error_response
from pipeline.api.fair_shares import FairShares, address_principal
from pipeline.config.schema import Config
from pipeline.errors import Overloaded
from pipeline.ipc.tcp_transport import tcp_state
from stages.gateway.http.connection import Connection
from stages.gateway.http.connection_watch import ConnectionWatch

log = logging.getLogger("starling.gateway")

SPARE = 256  # beyond one for each request in flight: idle connections, probes, requests that are refused
RESERVED = 64  # connections beyond the bounds
RESERVED_PER_ADDRESS = 48
RESERVED_HEAD_S = 2.0
REFUSAL_S = 1.0  # time for the client of a refused connection to read the response
MAX_REFUSALS = 256  # refused connections that are open for so long; further ones are closed without a response
OTHER_FILES = RESERVED + MAX_REFUSALS + 128  # beyond the bound: also journal, logs, sockets of stages, parsers

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
        self._bounds = FairShares(total, config.server.max_connections_per_address or total - total // 4, reserve=0)
        self._reserve = FairShares(RESERVED, RESERVED_PER_ADDRESS, reserve=0)
        self._on_refusal = on_refusal
        self._watch = ConnectionWatch(time.monotonic, tcp_state)
        self._held: dict[object, tuple[FairShares, str]] = {}  # by connection
        self._silent: set[object] = set()  # reserved connections without a request
        self._n_refusals = 0
        self._server: web.Server | None = None

    def serve(self, server: web.Server) -> None:
        """Use aiohttp's server for accepted connections."""
        self._server = server

    def tick(self) -> None:
        """Call often: ends the connections of clients that have left or do not read."""
        self._watch.tick()

    def protocol(self) -> asyncio.Protocol:
        """The protocol of a new connection: it chooses the one that serves it once the address is known."""
        return _Arrival(self.admit)

    def admit(self, transport: asyncio.Transport) -> None:
        """Serve the connection, or refuse it."""
        peer = transport.get_extra_info("peername")
        address = address_principal(str(peer[0])) if isinstance(peer, tuple) and peer else "local"
        held = next((one for one in (self._bounds, self._reserve) if one.refusal(address) is None), None)
        if held is None or self._server is None:
            self._refuse(transport)
            return
        connection = Connection(self._server, self._release)
        held.take(address)
        self._held[connection] = held, address
        self._watch.add(connection, transport)
        if held is self._reserve:
            self._silent.add(connection)
            asyncio.get_running_loop().call_later(RESERVED_HEAD_S, self._close_silent, connection)
        transport.set_protocol(connection)
        connection.connection_made(transport)

    def _refuse(self, transport: asyncio.Transport) -> None:
        self._on_refusal()
        if self._n_refusals >= MAX_REFUSALS:
            transport.abort()
            return
        self._n_refusals += 1
        transport.write(_FULL)
        transport.write_eof()

        def end() -> None:
            self._n_refusals -= 1
            transport.abort()

        # If it were closed at once, the kernel would discard the response as soon as unread data arrived.
        asyncio.get_running_loop().call_later(REFUSAL_S, end)

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
        self._silent.discard(connection)
        held = self._held.pop(connection, None)
        if held is not None:
            held[0].give_back(held[1])


class _Arrival(asyncio.Protocol):
    """A connection whose address is not known yet."""

    def __init__(self, admit: Callable[[asyncio.Transport], None]) -> None:
        self._admit = admit

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The address is known."""
        self._admit(transport)
