"""HTTP/1.1 requests to agents and engines, over connections that are kept for the next request.

A connection is used for one host, port and TLS context, so for one agent; connecting.py opens it.  Bounded: those
that wait for a request, in number and in time; those with a request are as many as the requests that are admitted.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from yarl import URL

from pipeline.fleet.peer_tls import PeerTls
from stages.orchestrator.engine_connection import Connection
from stages.orchestrator.upstream import Answer, Begins, Unreachable

CONNECT_S = 2.0  # for a connection, with the handshake of TLS
IDLE_S = 30.0  # a connection is kept: servers close it later
MAX_IDLE = 1024  # connections without a request; then those are closed that were used longest ago
_IDEMPOTENT = ("GET", "HEAD", "DELETE")  # they may be sent again if their connection is lost
_TARGET = re.compile(r"/[!-~]*")

Factory = Callable[[], Connection]
Connect = Callable[[Factory, str, int, ssl.SSLContext | None], Awaitable[Connection]]


class _Origin(NamedTuple):
    is_tls: bool
    host: str
    port: int
    authority: str  # for the field `Host`


class _Peer(NamedTuple):
    """Connections to one peer can stand in for each other."""

    host: str
    port: int
    context: ssl.SSLContext | None


class HttpClient:
    """A `Client`. Used in one event loop. `clock`: monotonic, s."""

    def __init__(self, connect: Connect, clock: Callable[[], float], tls: PeerTls | None = None) -> None:
        """`connect(factory, host, port, context)`: open a connection, with one of `factory` for each attempt.

        It raises `OSError` or `TimeoutError`.
        """
        self.tls = tls
        self._connect = connect
        self._clock = clock
        self._peers: dict[Connection, _Peer] = {}  # all connections
        self._idle: OrderedDict[Connection, None] = OrderedDict()  # least recently used first
        self._idle_of: dict[_Peer, list[Connection]] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def n_idle(self) -> int:
        """Connections without a request."""
        return len(self._idle)

    async def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        timeout_s: float = 0.0,
        *,
        agent_id: str,
        begins: Begins | None = None,
    ) -> Answer:
        """The response to a request. Raises `Unreachable`."""
        if not timeout_s:
            return await self._open(method, url, headers, body, agent_id, begins)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._open(method, url, headers, body, agent_id, begins)
        except TimeoutError:
            raise Unreachable(f"no answer within {timeout_s:g} s") from None

    async def _open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        agent_id: str,
        begins: Begins | None,
    ) -> Answer:
        scheme, _, rest = url.partition("://")
        authority, slash, path = rest.partition("/")
        origin = _origin(scheme, authority)
        peer = _Peer(origin.host, origin.port, self._context(origin, agent_id))
        try:
            head = request_head(method, slash + path or "/", origin.authority, headers, len(body))
        except ValueError as error:
            raise Unreachable(str(error)) from None
        kept = self._take(peer)
        while True:
            exchange = (kept or await self._make(peer)).send(method, head, body, begins)
            try:
                await exchange.head()
            except BaseException as error:  # also a caller that no longer waits
                exchange.close()
                is_lost = isinstance(error, Unreachable) and not exchange.has_begun
                if kept is None or not is_lost or method not in _IDEMPOTENT:
                    raise
                kept = None  # the server had closed it before the request came: once more, on a new one
            else:
                return exchange

    def _context(self, origin: _Origin, agent_id: str) -> ssl.SSLContext | None:
        """That of a connection to an agent's host. Connections of one context are not used for another one."""
        if origin.is_tls:
            if self.tls is None:
                raise Unreachable("it needs TLS: set fleet.tls on this orchestrator, too")
            return self.tls.client_context(agent_id)
        if self.tls is not None and self.tls.is_required:
            raise Unreachable("it offers no TLS, and fleet.tls.required is set here: set fleet.tls there, too")
        return None

    async def close(self) -> None:
        """Close all connections. Requests that wait on them fail, and no new ones are opened."""
        self._is_closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        for connection in list(self._peers):
            connection.end("the client was closed")
        await asyncio.sleep(0)  # their sockets are closed in the next round of the loop

    # ---------------------------------------------------------------- connections

    async def _make(self, peer: _Peer) -> Connection:
        made: list[Connection] = []  # one for each attempt

        def make() -> Connection:
            made.append(Connection(self._keep, self._forget))
            return made[-1]

        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._connect(make, *peer)
        except TimeoutError:
            for one in made:  # one may have connected at the same time
                one.abort()
            raise Unreachable(f"no connection to {peer.host}:{peer.port} within {CONNECT_S:g} s") from None
        except (OSError, ValueError) as error:  # also ssl.SSLError, and UnicodeError of a name that is none
            raise Unreachable(f"cannot connect to {peer.host}:{peer.port}: {error}") from None
        except asyncio.CancelledError:
            for one in made:
                one.abort()
            raise
        if self._is_closed:
            connection.abort()
            raise Unreachable("the client was closed")
        if connection.is_open:
            self._peers[connection] = peer
        elif not connection.is_answered:
            raise Unreachable(f"{peer.host}:{peer.port} closed the connection")
        return connection

    def _take(self, peer: _Peer) -> Connection | None:
        """A connection that is kept: the one that was used last."""
        kept = self._idle_of.get(peer)
        while kept:
            connection = kept[-1]
            self._remove(connection)
            if connection.is_open:
                return connection
            connection.abort()
        return None

    def _keep(self, connection: Connection) -> None:
        connection.idle_since = self._clock()
        self._idle[connection] = None
        self._idle_of.setdefault(self._peers[connection], []).append(connection)
        if len(self._idle) > MAX_IDLE:
            self._end_idle()
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(IDLE_S, self._expire)

    def _expire(self) -> None:
        """End the connections that no request has used for `IDLE_S`."""
        self._expiry = None
        least = self._clock() - IDLE_S
        while self._idle:
            left_s = next(iter(self._idle)).idle_since - least
            if left_s > 0:
                self._expiry = asyncio.get_running_loop().call_later(left_s, self._expire)
                return
            self._end_idle()

    def _end_idle(self) -> None:
        """End the connection that was used longest ago."""
        connection = next(iter(self._idle))
        self._remove(connection)
        connection.abort()

    def _remove(self, connection: Connection) -> None:
        """It is not kept any longer."""
        del self._idle[connection]
        peer = self._peers[connection]
        kept = self._idle_of[peer]
        if kept[-1] is connection:
            kept.pop()
        else:
            kept.remove(connection)
        if not kept:
            del self._idle_of[peer]

    def _forget(self, connection: Connection) -> None:
        """It has ended."""
        if connection in self._idle:
            self._remove(connection)
        self._peers.pop(connection, None)


@lru_cache(maxsize=2048)
def _origin(scheme: str, authority: str) -> _Origin:
    """Raises `Unreachable` unless it is one of HTTP."""
    try:
        url = URL(f"{scheme}://{authority}")
        host, port = url.host, url.port
    except ValueError:
        raise Unreachable(f"{scheme}://{authority} is no URL") from None
    if scheme not in ("http", "https") or not host or not port or "@" in authority:
        raise Unreachable(f"{scheme}://{authority} is no URL of HTTP")
    return _Origin(scheme == "https", host, port, authority)


def request_head(method: str, target: str, authority: str, headers: Mapping[str, str], n_body: int) -> bytes:
    """The head of a request. Raises `ValueError` if a part of it would be read as another line."""
    if not _TARGET.fullmatch(target):
        raise ValueError(f"{target[:80]!r} is no path of a request")
    fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    length = f"Content-Length: {n_body}\r\n" if n_body or method == "POST" else ""
    head = f"{method} {target} HTTP/1.1\r\nHost: {authority}\r\n{fields}{length}\r\n"
    encoded = head.encode("utf-8", "surrogateescape")
    n_lines = len(headers) + (4 if length else 3)  # with the empty one: those above have no CR, LF or NUL of their own
    if encoded.count(b"\n") != n_lines or encoded.count(b"\r") != n_lines or b"\0" in encoded:
        raise ValueError("a field of a request has a line break")
    return encoded
