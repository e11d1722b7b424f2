"""A TCP connection of asyncio: what the kernel reports of it, and how to abort it."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

_CLOSED = 7  # TCP_CLOSE of tcp_states.h: the peer has reset the connection
_INFO_BYTES = 128  # of struct tcp_info (linux/tcp.h), up to
_ACKNOWLEDGED_AT = 120  # tcpi_bytes_acked, u64


# tcpi_bytes_received; tcpi_bytes_sent and tcpi_bytes_retrans, since Linux 4.19.
_RECEIVED_AT, _SENT_AT, _ALL_BYTES = 128, 200, 216


class Bytes(NamedTuple):
    """Payload of TCP: received, and sent without repetitions."""

    received: int = 0
    sent: int = 0


class TcpState(NamedTuple):
    """What the kernel reports of a connection."""

    is_closed: bool  # reset by the peer
    acknowledged: int  # bytes that the peer's host has accepted


def tcp_state(transport: asyncio.BaseTransport) -> TcpState | None:
    """Return the state of a TCP connection; None where the kernel does not report it."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return None
    try:
        info: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except (OSError, ValueError):
        return None
    if len(info) < _INFO_BYTES:
        return None
    return TcpState(info[0] == _CLOSED, struct.unpack_from("=Q", info, _ACKNOWLEDGED_AT)[0])


def tcp_bytes(transport: asyncio.BaseTransport) -> Bytes:
    """What a connection has carried so far; zeros for a Unix socket, a closed one, and where the kernel is silent."""
    sock = transport.get_extra_info("socket")
    try:
        info: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ALL_BYTES) if sock is not None else b""
    except (OSError, ValueError):  # uvloop gives a closed socket the descriptor -1
        return Bytes()
    if len(info) < _ALL_BYTES:
        return Bytes()
    sent, repeated = struct.unpack_from("=QQ", info, _SENT_AT)
    return Bytes(struct.unpack_from("=Q", info, _RECEIVED_AT)[0], sent - repeated)


def reset(transport: asyncio.WriteTransport) -> None:
    """Abort a connection. The kernel discards what the peer has not read, instead of keeping it for minutes."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
