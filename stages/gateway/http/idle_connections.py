"""Closes connections that do not finish the head of a request, so that they do not use up the connection limit.

aiohttp closes a connection that is idle after a request, but not one that never sends the head of its first request.
Such a connection is closed after `HEAD_S`, and so is one that
begins another head and does not finish it.  All connections are checked once a second, without a timer for each.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from aiohttp import web

HEAD_S = 30.0
SWEEP_S = 1.0


class Closable(Protocol):
    """A connection."""

    head_since: float  # s, monotonic: when the first bytes of an incomplete head arrived; infinity: there are none

    def force_close(self) -> None:
        """Close the connection now."""


class IdleConnections:
    """Call `watch` once for the application, and `sweep` often."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[Any, float] = {}  # when first seen; infinity once a head has been received
        self._next_sweep = 0.0

    def watch(self, app: web.Application) -> web.Application:
        """Add a middleware that reports requests; before the application is set up."""

        @web.middleware
        async def on_request(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            self.head_received(request.protocol)
            return await handler(request)

        app.middlewares.insert(0, on_request)
        return app

    def head_received(self, connection: object) -> None:
        """The connection has sent the head of a request."""
        self._since[connection] = math.inf

    def sweep(self, live: Iterable[Closable]) -> int:
        """Close the silent connections among `live`, all open ones; return how many were closed."""
        now = self._clock()
        if now < self._next_sweep:
            return 0
        self._next_sweep = now + SWEEP_S
        known = self._since
        self._since = {connection: known.get(connection, now) for connection in live}
        silent = [c for c, since in self._since.items() if now - min(since, c.head_since) > HEAD_S]
        for connection in silent:
            connection.force_close()
        return len(silent)
