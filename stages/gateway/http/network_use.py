"""Bytes of the gateway's TCP connections, as the kernel counts them: nothing is counted for each write."""

from __future__ import annotations

import asyncio

from pipeline.ipc.tcp_transport import Bytes, tcp_bytes


class NetworkUse:
    """The sum over all connections, closed ones included."""

    def __init__(self) -> None:
        self._open: dict[object, asyncio.BaseTransport] = {}  # by connection
        self._received = self._sent = 0  # of closed ones

    def begin(self, connection: object, transport: asyncio.BaseTransport) -> None:
        """A connection was accepted."""
        self._open[connection] = transport

    def end(self, connection: object) -> None:
        """A connection is about to be closed. Ignores an unknown one."""
        transport = self._open.pop(connection, None)
        if transport is not None:
            used = tcp_bytes(transport)
            self._received += used.received
            self._sent += used.sent

    def total(self) -> Bytes:
        """All bytes so far."""
        used = [tcp_bytes(transport) for transport in self._open.values()]
        return Bytes(self._received + sum(u.received for u in used), self._sent + sum(u.sent for u in used))
