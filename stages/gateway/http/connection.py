"""A client's connection: aiohttp's protocol, with bounded heads, and with answers for a client that sends no more.

head        the bytes of an incomplete head are counted; over `MAX_HEAD_BYTES` the request is refused with 431
half close  a client that has closed its sending side still gets the answers to the requests that it has sent; the
            connection closes after the last one, or at once if there is none; over TLS it closes always, since TLS
            ends both directions together
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from aiohttp import HttpVersion11, web
from aiohttp.streams import StreamReader

from pipeline.api.error_response import error_response
from pipeline.api.malformed_http import HttpConnection
from pipeline.errors import StarlingError

log = logging.getLogger("starling.gateway")

FIRST_REQUEST_S = 5.0  # in which a client that has connected sends its request, on a machine with few free cores
MAX_HEAD_BYTES = 64 << 10  # aiohttp bounds a line (8,190 bytes) and their number (128): together a megabyte
# Set by the application when the headers of a response are about to be written: no other response can be sent.
BEGUN = web.RequestKey("begun", web.StreamResponse)
# Set by a handler whose response has begun: writes bytes to it that the client skips.
PROBE = web.RequestKey[Callable[[], None]]("probe")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # a client skips it; the host of a client that has left answers with RST

_LARGE_BODY = error_response(
    StarlingError("INVALID_REQUEST", f"the request's head has more than {MAX_HEAD_BYTES} bytes; send less", status=431)
).body
_LARGE_HEAD = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_LARGE_BODY), _LARGE_BODY)
)


class Connection(HttpConnection):
    """One per connection; `connection_gate.py` constructs it."""

    def __init__(
        self,
        server: web.Server,
        on_lost: Callable[[Connection], None],
        peer: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`peer`: the client's address, or uid:N on the Unix socket."""
        super().__init__(server, peer, log)
        self._on_lost = on_lost
        self._clock = clock
        self._opened_at = self._clock()
        self.head_since = math.inf  # s, monotonic: when the first bytes of an incomplete head arrived
        self.is_half_closed = False
        self._is_started = False
        self._head_bytes = 0
        self._body: StreamReader | None = None  # of the last request

    @property
    def is_busy(self) -> bool:
        """Whether a request has no complete answer yet."""
        # aiohttp waits for the next request in `_waiter`, once its task runs.
        is_waiting = self._waiter is not None and not self._waiter.done()
        return bool(self._messages) or (self._is_started and not is_waiting)

    @property
    def awaits_first_request(self) -> bool:
        """Whether its client has just connected, and its request is probably on its way."""
        return not self._request_count and self._clock() - self._opened_at < FIRST_REQUEST_S

    @property
    def has_next(self) -> bool:
        """Whether further requests wait behind the one that is being answered."""
        return bool(self._messages)

    async def start(self) -> None:
        """Answer requests until the connection closes; aiohttp runs this in a task."""
        self._is_started = True
        await super().start()

    def data_received(self, data: bytes) -> None:
        """Parse requests, and count the bytes of an incomplete head."""
        n_requests, was_in_body = self._request_count, self._is_in_body()
        super().data_received(data)
        if self._request_count != n_requests:
            self._head_bytes, self.head_since = 0, math.inf
            if self._messages:
                self._body = self._messages[-1][1]
        elif data and not (was_in_body or self._upgraded or self._buffer_paused or self._close or self._force_close):
            self._head_bytes += len(data)
            if self.head_since == math.inf:
                self.head_since = self._clock()
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection is closed."""
        super().connection_lost(exc)
        self._on_lost(self)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client has closed its sending side, or has left. True: the connection stays open for answers."""
        if self._force_close or not self.is_busy or self._is_in_body():
            return None
        if self.transport is None or not self.transport.can_write_eof():
            return None
        self.is_half_closed = True
        request = self._current_request
        begun = request.get(BEGUN) if request is not None else None
        if begun is not None and not self._messages:
            begun.force_close()  # its headers are sent: aiohttp closes the connection after its end
        return True

    def probe(self) -> None:
        """Send bytes that a waiting client skips, where the protocol allows."""
        request, transport = self._current_request, self.transport
        if request is None or transport is None:
            return
        if request.get(BEGUN) is None:
            if request.version >= HttpVersion11:
                transport.write(CONTINUE)
        elif probe := request.get(PROBE):
            probe()

    def _is_in_body(self) -> bool:
        return self._body is not None and not self._body.is_eof()

    def _refuse_head(self) -> None:
        if self.is_busy or self.transport is None:
            self.close()  # after the answer that is under way
            return
        self.transport.write(_LARGE_HEAD)
        self.force_close()
