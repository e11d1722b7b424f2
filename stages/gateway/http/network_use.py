"""Bytes of the gateway's TCP connections, as the kernel counts them: nothing is counted for each write."""

from __future__ import annotations

import asyncio

from pipeline.ipc.tcp_transport import Bytes, tcp_bytes


class NetworkUse:
    """The sum over all connections, closed ones included.

    The socket of a TLS connection is closed before its end is known: of its bytes those count that a sum has seen.
    """

    def __init__(self) -> None:
        self._open: dict[object, asyncio.BaseTransport] = {}  # by connection
        self._seen: dict[object, Bytes] = {}  # by connection, in the last sum
        self._received = self._sent = 0  # of closed ones

    def begin(self, connection: object, transport: asyncio.BaseTransport) -> None:
        """A connection was accepted."""
        self._open[connection] = transport

    def end(self, connection: object) -> None:
        """A connection is about to be closed. Ignores an unknown one."""
        transport = self._open.pop(connection, None)
        if transport is not None:
            used = max(tcp_bytes(transport), self._seen.pop(connection, Bytes()))
            self._received += used.received
            self._sent += used.sent

    def total(self) -> Bytes:
        """All bytes so far."""
        for connection, transport in self._open.items():
            self._seen[connection] = max(tcp_bytes(transport), self._seen.get(connection, Bytes()))
        used = self._seen.values()
        return Bytes(self._received + sum(u.received for u in used), self._sent + sum(u.sent for u in used))
