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
from collections.abc import Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pipeline.api.error_response import error_response
from pipeline.config.schema import Config
from pipeline.errors import Overloaded
from stages.gateway.admission.fair_shares import FairShares, address_principal

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
        self._held: dict[object, tuple[FairShares, str]] = {}  # by handler
        self._silent: set[object] = set()  # handlers of reserved connections without a request
        self._n_refusals = 0
        self._make_handler: web.Server | None = None

    def serve(self, make_handler: web.Server) -> None:
        """Use aiohttp's server for accepted connections."""
        lost = make_handler.connection_lost

        def on_lost(handler: RequestHandler, exc: BaseException | None = None) -> None:
            lost(handler, exc)
            self._release(handler)

        make_handler.connection_lost = on_lost  # type: ignore[method-assign]
        self._make_handler = make_handler

    def protocol(self) -> asyncio.Protocol:
        """The protocol of a new connection: it chooses the one that serves it once the address is known."""
        return _Arrival(self.admit)

    def admit(self, transport: asyncio.Transport) -> None:
        """Give the connection a handler, or refuse it."""
        peer = transport.get_extra_info("peername")
        address = address_principal(str(peer[0])) if isinstance(peer, tuple) and peer else "local"
        held = next((one for one in (self._bounds, self._reserve) if one.refusal(address) is None), None)
        if held is None or self._make_handler is None:
            self._refuse(transport)
            return
        handler = self._make_handler()
        held.take(address)
        self._held[handler] = held, address
        if held is self._reserve:
            self._silent.add(handler)
            asyncio.get_running_loop().call_later(RESERVED_HEAD_S, self._close_silent, handler)
        transport.set_protocol(handler)
        handler.connection_made(transport)

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

    def head_received(self, handler: object) -> None:
        """The connection has sent a request."""
        self._silent.discard(handler)

    def is_reserved(self, handler: object) -> bool:
        """Whether the connection is beyond the bounds, so that not every request is served on it."""
        held = self._held.get(handler)
        return held is not None and held[0] is self._reserve

    def _close_silent(self, handler: RequestHandler) -> None:
        if handler in self._silent:
            handler.force_close()

    def _release(self, handler: object) -> None:
        self._silent.discard(handler)
        held = self._held.pop(handler, None)
        if held is not None:
            held[0].give_back(held[1])


class _Arrival(asyncio.Protocol):
    """A connection whose address is not known yet."""

    def __init__(self, admit: Callable[[asyncio.Transport], None]) -> None:
        self._admit = admit

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The address is known."""
        self._admit(transport)
