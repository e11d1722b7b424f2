"""TLS on an accepted connection: the handshake, within a time, and a transport that behaves like one of TCP.

    connection of TCP ─> handshake ─> TlsTransport ─> aiohttp's protocol

The handshake is made here and not by the listening socket, so that connections count within their bounds before it, and
each gets the certificate that is in use at its beginning.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

HANDSHAKE_S = 10.0  # for the client
# After the close the event loop discards what is not sent in this time. Where a client does not read, `ConnectionWatch`
# ends the connection long before.
SHUTDOWN_S = 3600.0
CLOSE_S = 1.0  # for the client to answer the end of the TLS connection, after everything is sent
WRITE_BUFFER_BYTES = 64 << 10  # of the buffer of TLS, beyond which writers wait; as for a connection of TCP


class TlsTransport(asyncio.Transport):
    """A TLS connection whose write buffer includes that of the connection below it.

    It is closed when everything is sent, also if the client does not answer that the TLS connection ends.
    """

    def __init__(self, tls: asyncio.Transport, tcp: asyncio.Transport) -> None:
        super().__init__()
        self._tls = tls
        self._tcp = tcp
        self._closing: asyncio.TimerHandle | None = None
        # Every token is a write: no call of this class comes between.
        self.write = tls.write  # type: ignore[method-assign]
        self.is_closing = tls.is_closing  # type: ignore[method-assign]
        tls.set_write_buffer_limits(WRITE_BUFFER_BYTES)

    def get_write_buffer_size(self) -> int:
        """Bytes that wait for the client; the kernel has not accepted them."""
        return self._tls.get_write_buffer_size() + self._tcp.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As of the connection."""
        return self._tls.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set what receives the data."""
        self._tls.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """What receives the data."""
        return self._tls.get_protocol()

    def is_reading(self) -> bool:
        """Whether data is passed to the protocol."""
        return self._tls.is_reading()

    def pause_reading(self) -> None:
        """Pass no more data to the protocol."""
        self._tls.pause_reading()

    def resume_reading(self) -> None:
        """Pass data to the protocol again."""
        self._tls.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set from which size of the buffer of TLS writers wait."""
        self._tls.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """From which sizes on writers wait and go on."""
        return self._tls.get_write_buffer_limits()

    def writelines(self, list_of_data: Any) -> None:
        """Write several pieces."""
        self._tls.writelines(list_of_data)

    def can_write_eof(self) -> bool:
        """False: the end of a TLS connection ends both directions."""
        return False

    def abort(self) -> None:
        """Close the connection at once."""
        self._tls.abort()

    def close(self) -> None:
        """Close the connection when everything is sent."""
        self._tls.close()
        if self._closing is None:
            self._wait_closed()

    def _wait_closed(self) -> None:
        self._closing = asyncio.get_running_loop().call_later(CLOSE_S, self._check_closed)

    def _check_closed(self) -> None:
        if self.get_write_buffer_size():
            self._wait_closed()
        else:
            self._tcp.close()


class _NotYet(asyncio.Protocol):
    """Until the handshake is complete."""

    def __init__(self) -> None:
        self.is_lost = False

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is closed."""
        self.is_lost = True


async def secure(
    tcp: asyncio.Transport, early: bytearray, context: ssl.SSLContext, timeout_s: float
) -> TlsTransport | None:
    """Make the handshake. Returns None, and the connection is closed, if it fails.

    early: bytes that have arrived, and that will until this coroutine runs.  The caller sets the protocol of the result
    before it gives control to the event loop: data may follow at once.
    """
    waiting = _NotYet()
    loop = asyncio.get_running_loop()
    if early:
        loop.call_soon(_feed, tcp, early)  # runs when `start_tls` has set its protocol, which it does at once
    try:
        tls = await loop.start_tls(
            tcp,
            waiting,
            context,
            server_side=True,
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
    except (OSError, ValueError, RuntimeError):  # ssl.SSLError; RuntimeError: the connection is closed already
        tcp.abort()
        return None
    if tls is None or waiting.is_lost:
        return None
    return TlsTransport(tls, tcp)


def _feed(tcp: asyncio.Transport, data: bytearray) -> None:
    """Give bytes to the protocol of the handshake as if they arrived now."""
    protocol: Any = tcp.get_protocol()
    if not hasattr(protocol, "get_buffer"):
        return  # the connection was closed before
    rest = memoryview(data)
    while rest:
        buffer = protocol.get_buffer(len(rest))
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        protocol.buffer_updated(count)
        rest = rest[count:]
