"""Connections on which nothing is ever asked: they would hold their places for ever.

aiohttp closes one that stays idle after a request; one that never sends the head of its first request
would stay.  It has `FIRST_HEAD_S`, then it is closed.  Looked at once a second, without a timer for each.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from aiohttp import web

FIRST_HEAD_S = 30.0
SWEEP_S = 1.0


class Connection(Protocol):
    def force_close(self) -> None: ...


class Connections:
    """`watch` the application, `sweep` often."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[Any, float] = {}  # first seen; infinity once a head has come
        self._next_sweep = 0.0

    def watch(self, app: web.Application) -> web.Application:
        """Before the application is set up."""

        @web.middleware
        async def heard(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            self.heard(request.protocol)
            return await handler(request)

        app.middlewares.insert(0, heard)
        return app

    def heard(self, connection: object) -> None:
        """The head of a request has come."""
        self._since[connection] = math.inf

    def sweep(self, live: Iterable[Connection]) -> int:
        """Close the silent ones among those that are open; how many."""
        now = self._clock()
        if now < self._next_sweep:
            return 0
        self._next_sweep = now + SWEEP_S
        known = self._since
        self._since = {connection: known.get(connection, now) for connection in live}
        silent = [c for c, since in self._since.items() if now - since > FIRST_HEAD_S]
        for connection in silent:
            connection.force_close()
        return len(silent)
