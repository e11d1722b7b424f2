"""Doors of the engines: TLS for orchestrators, whatever an engine itself supports.

    orchestrator ─TLS, certificate of the role orchestrator─> door ─loopback─> engine

A door passes bytes on, unparsed, and holds back the side that is faster.  Each engine that is ready has one, made when
an orchestrator first asks for it over TLS.  It stays for a while after its engine was reported last: orchestrators
still cancel requests there.  Sockets are made by the functions that are passed in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import msgspec

from pipeline.errors import ModelUnavailable, StarlingError
from pipeline.fleet.bodies import HeartbeatResponse, LoadedModel, LoadModelResponse
from pipeline.fleet.peer_tls import CheckedConnection

log = logging.getLogger("starling.agent.doors")

MAX_CONNECTIONS = 2048  # of all doors
MAX_DOORS = 256  # beyond which those that were used longest ago are closed
CONNECT_S = 5.0  # to an engine
CLOSE_S = 60.0  # that a door outlives the last report of its engine
BUFFER_BYTES = 64 << 10  # of one direction of a connection, beyond which the faster side is held back


class Server(Protocol):
    """A listening socket."""

    def close(self) -> None:
        """Accept no more connections."""


Factory = Callable[[], asyncio.Protocol]
Listen = Callable[[Factory], Awaitable[tuple[Server, str]]]  # to the listening socket and its URL
Connect = Callable[[Factory, str], Awaitable[Any]]  # to an engine's URL


class _Door:
    def __init__(self, server: Server, url: str) -> None:
        self.server = server
        self.url = url
        self.used_at = 0.0  # when its engine was reported last


class Doors:
    """The doors of an agent. Used in one event loop."""

    def __init__(self, listen: Listen, connect: Connect, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic, s."""
        self._listen = listen
        self._connect = connect
        self._clock = clock
        self._doors: dict[str, _Door] = {}  # by the engine's URL
        self._opening: dict[str, asyncio.Future[_Door]] = {}  # likewise
        self._connections: set[_Outside] = set()
        self._ended = asyncio.Event()  # set when the last connection ends
        self._is_closed = False

    async def report(self, report: HeartbeatResponse) -> HeartbeatResponse:
        """The report with URLs of doors instead of those of engines. A model without a door is not ready in it."""
        models = await asyncio.gather(*(self._behind_door(one) for one in report.loaded_models))
        self._close_unused()
        return msgspec.structs.replace(report, loaded_models=tuple(models))

    async def loaded(self, answer: LoadModelResponse, engine_url: str) -> LoadModelResponse:
        """The answer with the URL of the engine's door. Raises `ModelUnavailable` if it has none."""
        if not answer.inference_endpoint_url:
            return answer
        try:
            door = await self._door(engine_url)
        except (OSError, StarlingError) as error:
            raise ModelUnavailable(f"{answer.model_id!r} is ready, but not reachable over TLS: {error}") from None
        path = answer.inference_endpoint_url.removeprefix(engine_url)
        return msgspec.structs.replace(answer, inference_endpoint_url=door.url + path)

    def check(self) -> None:
        """End connections whose peer is no longer accepted."""
        for connection in list(self._connections):
            if reason := refusal_of(connection.transport):
                log.warning("a connection to an engine ends", extra={"reason": reason})
                connection.abort()

    async def finish(self, within_s: float) -> None:
        """Close the doors. What engines have sent before their end arrives within `within_s`, or is cut off."""
        self._stop_listening()
        if self._connections:
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), within_s)
        self.close()

    def close(self) -> None:
        """Close doors and connections."""
        self._stop_listening()
        for connection in list(self._connections):
            connection.abort()

    # ---------------------------------------------------------------- parts

    def _stop_listening(self) -> None:
        self._is_closed = True
        for door in self._doors.values():
            door.server.close()
        self._doors.clear()

    async def _behind_door(self, one: LoadedModel) -> LoadedModel:
        if not one.engine_url:
            return one
        try:
            door = await self._door(one.engine_url)
        except (OSError, StarlingError) as error:
            log.error("an engine cannot be reached over TLS", extra={"model": one.model_id, "reason": str(error)})
            reason = f"no connections over TLS can be accepted for it: {error}"
            return msgspec.structs.replace(
                one, model_state="LOADING_TO_GPU", engine_url="", engine_key="", inference_endpoint_url="", error=reason
            )
        endpoint = one.inference_endpoint_url.replace(one.engine_url, door.url, 1)
        return msgspec.structs.replace(one, engine_url=door.url, inference_endpoint_url=endpoint)

    async def _door(self, engine: str) -> _Door:
        """The door of an engine, made once for all who wait. Raises `OSError`, `StarlingError`."""
        door = self._doors.get(engine)
        if door is None:
            opening = self._opening.get(engine)
            if opening is None:
                opening = self._opening[engine] = asyncio.ensure_future(self._open(engine))
                opening.add_done_callback(lambda done: self._opened(engine, done))
            door = await asyncio.shield(opening)
        door.used_at = self._clock()
        return door

    def _opened(self, engine: str, done: asyncio.Future[_Door]) -> None:
        self._opening.pop(engine, None)
        _ = done.cancelled() or done.exception()  # all who waited may have left

    async def _open(self, engine: str) -> _Door:
        server, url = await self._listen(lambda: _Outside(self, engine))
        if self._is_closed:
            server.close()
            raise ModelUnavailable("the agent is being stopped")
        door = self._doors[engine] = _Door(server, url)
        door.used_at = self._clock()
        return door

    def _close_unused(self) -> None:
        """Accept no more connections for engines that have ended. Those that exist end with their engines."""
        oldest = sorted(self._doors, key=lambda engine: self._doors[engine].used_at)
        least = self._clock() - CLOSE_S
        for engine in oldest:
            if self._doors[engine].used_at < least or len(self._doors) > MAX_DOORS:
                self._doors.pop(engine).server.close()

    # ---------------------------------------------------------------- called by connections

    def admit(self, connection: _Outside) -> bool:
        """Count a connection; False at the bound."""
        if len(self._connections) >= MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def release(self, connection: _Outside) -> None:
        """It has ended. Idempotent."""
        self._connections.discard(connection)
        if not self._connections:
            self._ended.set()

    async def connect(self, factory: Factory, engine: str) -> None:
        """Connect to an engine. Raises `OSError`, `TimeoutError`."""
        async with asyncio.timeout(CONNECT_S):
            await self._connect(factory, engine)


def refusal_of(transport: asyncio.BaseTransport | None) -> str:
    """Why a connection's peer is not accepted any longer; "" if it is, or if the connection has no TLS."""
    connection = transport.get_extra_info("ssl_object") if transport is not None else None
    if isinstance(connection, CheckedConnection):
        try:
            connection.check()
        except ssl.SSLError as error:
            return str(error)
    return ""


def end_refused(connections: Iterable[Any]) -> None:
    """End connections of a server of aiohttp whose peer is no longer accepted."""
    for connection in list(connections):
        if reason := refusal_of(connection.transport):
            log.warning("a connection to the agent ends", extra={"reason": reason})
            connection.transport.abort()


class _Side(asyncio.Protocol):
    """One side of a connection; what it receives is written to the other one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The connection exists."""
        self.transport = transport
        transport.set_write_buffer_limits(high=BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        """This side reads too slowly."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """This side has caught up."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()


class _Outside(_Side):
    """The side of the orchestrator, after the handshake."""

    def __init__(self, doors: Doors, engine: str) -> None:
        super().__init__()
        self._doors = doors
        self._engine = engine
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Connect to the engine before anything is read."""
        super().connection_made(transport)
        if not self._doors.admit(self):
            log.warning("a connection is refused: too many", extra={"bound": MAX_CONNECTIONS})
            transport.abort()
            return
        transport.pause_reading()
        self._connecting = asyncio.get_running_loop().create_task(self._begin(transport))

    async def _begin(self, transport: asyncio.Transport) -> None:
        try:
            await self._doors.connect(lambda: _Inside(self), self._engine)
        except (OSError, TimeoutError):  # the engine has ended, or takes no connections
            transport.abort()
            return
        transport.resume_reading()

    def abort(self) -> None:
        """End both sides."""
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """The orchestrator has left: the engine stops its work."""
        self._doors.release(self)
        if self._connecting is not None:
            self._connecting.cancel()
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()


class _Inside(_Side):
    """The side of the engine."""

    def __init__(self, outside: _Outside) -> None:
        super().__init__()
        self.other = outside

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The engine has accepted."""
        super().connection_made(transport)
        assert self.other is not None
        outside = self.other.transport
        if outside is None or outside.is_closing():
            transport.abort()
        else:
            self.other.other = self

    def connection_lost(self, error: Exception | None) -> None:
        """The engine has closed it: what it has sent still arrives, within the time of a shutdown of TLS."""
        outside, self.other = self.other, None
        if outside is not None and outside.transport is not None:
            outside.other = None
            outside.transport.resume_reading()  # or neither its end nor that of the peer would be seen
            outside.transport.close()
