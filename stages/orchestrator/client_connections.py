"""The connections of clients: how many there may be, and the end of those whose clients do not read, or have left.

    bounds        in total, and for one address, unless it is a trusted proxy's; a connection beyond them gets 503
    not reading   bytes that wait to be sent: `MIN_READ_BYTES` of them must be accepted in `WRITE_TIMEOUT_S`
    left          while nothing more is read, a client that has left is seen only when bytes are sent to it: `PROBE_S`
                  after that and then every `PROBE_AGAIN_S`, the connection is asked to send some

It does not matter who owns a connection, text_connection.py or aiohttp.  The gateway has the same rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.api.error_response import error_response
from pipeline.api.fair_shares import FairShares, address_principal
from pipeline.api.forwarded import TrustedProxies
from pipeline.config.schema import Config
from pipeline.errors import Overloaded
from pipeline.ipc.tcp_transport import reset, tcp_state
from pipeline.runtime.process import file_limit
from stages.orchestrator.event_response import MIN_READ_BYTES, WRITE_TIMEOUT_S, accepted_bytes

SPARE = 256  # beyond two for each request in flight: idle connections, probes, requests that are refused
OTHER_FILES = 384  # of this process, besides clients' connections: refused ones, the store, logs, some of agents
CHECK_S = 1.0  # between two checks of all of them
PROBE_S, PROBE_AGAIN_S = 1.0, 10.0
REFUSAL_S = 1.0  # for the client of a refused connection to read the response
MAX_REFUSALS = 256  # that wait for it; further connections are closed without a response
_PROXIES = "proxies"  # all trusted ones: they connect for many clients, and are bounded in total only

_FULL_BODY = error_response(Overloaded("the orchestrator has reached its connection limit; try again")).body
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)


@dataclass(eq=False, slots=True)
class Client:
    """A connection. Times are the event loop's, s."""

    transport: asyncio.Transport
    address: str
    probe: Callable[[], None]  # sends bytes that a client skips, where that is possible
    probe_at: float | None = None  # None: its end is seen without
    since: float | None = None  # when bytes began to wait for its client, or were last seen to be accepted
    accepted: int = 0  # then

    def watch_for_end(self, now: float) -> None:
        """Nothing more is read of it."""
        if self.probe_at is None:
            self.probe_at = now + PROBE_S


class ClientConnections:
    """All of them. Used in one event loop."""

    def __init__(self, total: int, share: int, proxies: TrustedProxies | None = None) -> None:
        """`share`: of one address. `proxies`: whose connections are those of many clients."""
        self._proxies = TrustedProxies(()) if proxies is None else proxies
        self._bounds = FairShares(total, share, 0, share_of=lambda address: total if address == _PROXIES else share)
        self._open: set[Client] = set()
        self._n_refusals = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, transport: asyncio.Transport, peer: str, probe: Callable[[], None]) -> Client | None:
        """Count a new connection; None: it was refused."""
        address = _PROXIES if self._proxies and self._proxies.trusts(peer) else address_principal(peer)
        if self._bounds.refusal(address) is not None:
            self._refuse(transport)
            return None
        self._bounds.take(address)
        client = Client(transport, address, probe)
        self._open.add(client)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._tick)
        return client

    def release(self, client: Client) -> None:
        """It is closed."""
        if client in self._open:
            self._open.remove(client)
            self._bounds.give_back(client.address)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, transport: asyncio.Transport) -> None:
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

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        for client in list(self._open):
            self._check(client, loop.time())
        self._timer = loop.call_later(CHECK_S, self._tick) if self._open else None

    @staticmethod
    def _check(client: Client, now: float) -> None:
        transport = client.transport
        if client.probe_at is not None and not transport.is_closing():
            state = tcp_state(transport)
            if state is not None and state.is_closed:
                transport.abort()
                return
            if now >= client.probe_at:
                client.probe_at = now + PROBE_AGAIN_S
                client.probe()
        if not transport.get_write_buffer_size():
            client.since = None
        elif client.since is None or now - client.since >= WRITE_TIMEOUT_S:
            accepted = accepted_bytes(transport)
            if client.since is not None and accepted - client.accepted < MIN_READ_BYTES:
                reset(transport)
            client.since, client.accepted = now, accepted


def connections_of(config: Config) -> ClientConnections:
    """Those of an orchestrator."""
    wanted = 2 * config.fleet.orchestrator.max_concurrent_requests + SPARE
    total = max(1, min(wanted, file_limit() - OTHER_FILES))
    share = config.server.max_connections_per_address or total - total // 4
    return ClientConnections(total, share, TrustedProxies(config.server.trusted_proxies))
