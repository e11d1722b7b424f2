"""Ends connections of clients that have left or do not read.

    left         a client that has closed its sending side may wait for its answers or may have left; both look the
                 same until bytes are sent: the host of a client that has left resets the connection.  `PROBE_S` after
                 the close and then every `PROBE_AGAIN_S`, an interim response or a comment in the stream is sent
    not reading  a connection whose bytes wait to be sent must accept `MIN_BYTES` of them within `STALL_S`

All connections are checked together, without a timer for each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pipeline.ipc.tcp_transport import TcpState, reset

log = logging.getLogger("starling.gateway.http")

PROBE_S, PROBE_AGAIN_S = 1.0, 10.0
CHECK_S = 1.0  # between two checks of what waits to be sent
STALL_S = 30.0
MIN_BYTES = 32 << 10


class Watched(Protocol):
    """What is called on a connection."""

    is_half_closed: bool

    @property
    def is_busy(self) -> bool:
        """Whether a request has no complete answer yet."""

    def probe(self) -> None:
        """Send bytes that a waiting client skips."""

    def force_close(self) -> None:
        """Close the connection when its bytes are sent."""


class _Waiting(NamedTuple):
    """Bytes that wait to be sent: since when, and what had been accepted then."""

    since: float
    acknowledged: int


class ConnectionWatch:
    """One per gateway. `add` and `remove` every connection, and call `tick` often. `clock` is monotonic, in s."""

    def __init__(self, clock: Callable[[], float], state_of: Callable[[asyncio.Transport], TcpState | None]) -> None:
        self._clock = clock
        self._state_of = state_of
        self._transports: dict[Watched, asyncio.Transport] = {}
        self._waiting: dict[Watched, _Waiting] = {}
        self._probe_at: dict[Watched, float] = {}  # half-closed connections
        self._next_check = 0.0

    def add(self, connection: Watched, transport: asyncio.Transport) -> None:
        """Watch a connection."""
        self._transports[connection] = transport

    def remove(self, connection: Watched) -> None:
        """The connection is closed."""
        self._transports.pop(connection, None)
        self._waiting.pop(connection, None)
        self._probe_at.pop(connection, None)

    def tick(self) -> None:
        """End the connections of clients that have left or do not read."""
        now = self._clock()
        for connection, transport in list(self._transports.items()):
            if connection.is_half_closed:
                self._check_half_closed(connection, transport, now)
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        for connection, transport in list(self._transports.items()):
            self._check_reading(connection, transport, now)

    def _check_half_closed(self, connection: Watched, transport: asyncio.Transport, now: float) -> None:
        if not connection.is_busy:
            connection.force_close()
            return
        state = self._state_of(transport)
        if state is not None and state.is_closed:
            transport.abort()
            return
        probe_at = self._probe_at.setdefault(connection, now + PROBE_S)
        if now >= probe_at:
            self._probe_at[connection] = now + PROBE_AGAIN_S
            connection.probe()

    def _check_reading(self, connection: Watched, transport: asyncio.Transport, now: float) -> None:
        n_waiting = transport.get_write_buffer_size()
        if not n_waiting:
            self._waiting.pop(connection, None)
            return
        before = self._waiting.get(connection)
        if before is not None and now - before.since < STALL_S:
            return
        state = self._state_of(transport)
        acknowledged = state.acknowledged if state is not None else -n_waiting  # rises as the waiting bytes are sent
        if before is not None and acknowledged - before.acknowledged < MIN_BYTES:
            log.warning("dropping a connection: the client does not read what waits for it", extra={"bytes": n_waiting})
            reset(transport)
            return
        self._waiting[connection] = _Waiting(now, acknowledged)
