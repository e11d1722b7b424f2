"""The agent process: its lease, its HTTP API, its engines, and an orderly exit.

At the start it takes the lock of its directory and ends every engine that an earlier agent has left there; only then
does it register.  On SIGTERM it leaves the coordination store first, so that no more requests come, and then stops the
engines, whose streams get `server.drain_timeout_ms`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from pipeline.api.malformed_http import connections
from pipeline.blobs.address import open_all, open_without_credentials
from pipeline.blobs.interface import BlobStore
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.coordination.address import open_store
from pipeline.errors import ConfigError
from pipeline.fleet import records
from pipeline.fleet import token as tokens
from pipeline.fleet.peer_tls import PeerTls, boot_clock, open_tls
from pipeline.runtime import run_dir
from pipeline.runtime.service_watchdog import watched
from stages.agent.disk_threads import ENGINES, STATE
from stages.agent.doors import Doors, Factory, Server, end_refused
from stages.agent.downloads.arriving import remove_showcase
from stages.agent.downloads.signed_store import SignedModels
from stages.agent.engines.external_engine import Listening
from stages.agent.engines.fence import fence
from stages.agent.engines.starling_engine import engine_arena_dir, engine_run_dir
from stages.agent.gpus import Gpus
from stages.agent.heartbeat import Reporter
from stages.agent.http_api import AgentApi
from stages.agent.kv_pages.giving import Giver
from stages.agent.kv_pages.http_api import KvPageApi
from stages.agent.kv_pages.taking import Taker, bytes_of_request
from stages.agent.lease import AgentLease
from stages.agent.metrics import AgentMetrics
from stages.agent.models import Models
from stages.agent.peers.announcements import Announcements
from stages.agent.peers.holdings import Holdings
from stages.agent.peers.http_api import PieceApi
from stages.agent.peers.sharing import Exchange
from stages.agent.session_moves.engine_sessions import EngineSessions
from stages.agent.session_moves.http_api import SessionApi
from stages.agent.state_file import Stored, place_of, read_stored, write_stored

log = logging.getLogger("starling.agent")

SHUTDOWN_S = 1.0  # for handlers of the control API to end
HANDSHAKE_S = 10.0  # of a connection with TLS
SHUTDOWN_TLS_S = 10.0  # for a peer to take what is left and to confirm the end; then the connection is cut
TICK_S = 0.5  # between two checks whether the certificate's files are due to be looked at
CHECK_S = 10.0  # between two checks of all connections: certificates end
BACKLOG = 128
LOOPBACK = "127.0.0.1"


class AgentStage:
    """The process. `run` in its event loop, in the main thread."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` when another agent runs in this directory."""
        self.config = config
        self._dir = run_dir.prepare(paths.agent_dir(config), "directory of the agent", "fleet.agent.id")
        self._lock = run_dir.StageLock(self._dir, "agent")
        before = read_stored(self._dir / "agent.json")
        self._models_before = before.models if before is not None else ()
        place = place_of(self._dir)
        # In this directory, whose lock is held, it is dead. A copy says nothing of it: its lease must end first.
        self._previous = before.incarnation if before is not None and place and before.place == place else ""
        known_id = config.fleet.agent.id or (before.agent_id if before is not None else "")
        self._tls = open_tls(config.fleet.tls, "agent", known_id)
        agent_id = known_id or (self._tls.name if self._tls is not None else new_agent_id())
        self._stored = Stored(
            agent_id=agent_id, incarnation=secrets.token_hex(8), models=self._models_before, place=place
        )
        is_plain = self._tls is None or not self._tls.is_required
        self._token = tokens.load_or_create(paths.fleet_token(config)) if is_plain else ""

    async def run(self, on_ready: Callable[[str, str], None]) -> int:
        """Run until SIGTERM; `on_ready` is called with the id and the URL once it is registered. The exit code."""
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.set)
        await ENGINES.run(self._fence)
        await STATE.run(self._write)
        agent = self.config.fleet.agent
        engines_config = self.config
        tls, is_plain = self._tls, bool(self._token)
        async with AsyncExitStack() as stack:
            listener = _listen(agent.host, agent.port)
            stack.callback(listener.close)
            url = tls_url = records.agent_url(agent, listener.getsockname()[1], is_tls=not is_plain)
            tls_listener = listener
            if tls is None:
                tls_url = ""
            elif is_plain:
                tls_listener = _listen(agent.host, agent.tls_port, "fleet.agent.tls_port")
                stack.callback(tls_listener.close)
                tls_url = records.agent_url(agent, tls_listener.getsockname()[1], is_tls=True)
            else:  # engines are reached through their doors alone
                local = msgspec.structs.replace(agent, host=LOOPBACK, advertise="")
                fleet = msgspec.structs.replace(self.config.fleet, agent=local)
                engines_config = msgspec.structs.replace(self.config, fleet=fleet)
            store = await stack.enter_async_context(open_store(self.config))
            blobs, signed = await _open_blobs(self.config, stack)
            # Engines are on this host: connections to them cost nothing, and streams must not wait for one.
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            record = records.AgentRecord(
                agent_id=self._stored.agent_id, url=url, incarnation=self._stored.incarnation, tls_url=tls_url
            )
            lease = AgentLease(store, record, agent.lease_ms / 1000, self._previous, clock=boot_clock)
            holdings = Holdings(paths.models_dir()) if agent.peers else None
            exchange = None
            if holdings is not None:
                announcements = Announcements(store, lease, record, holdings)
                exchange = Exchange(holdings, announcements, session, self._token, record.agent_id, tls=tls)
                stack.push_async_callback(_ended, asyncio.create_task(announcements.keep()))
            models = Models(
                engines_config,
                self._dir,
                paths.models_dir(),
                self._stored,
                blobs,
                session,
                free_port,
                lambda: lease.is_valid,
                exchange,
                lambda app: open_door(app, engines_config.fleet.agent.host),
                signed,
            )
            most = agent.page_mb << 20
            giver = Giver(models, bytes_of_request(most))
            left, gpus = giver.prefixes_left, Gpus(os.environ).read
            reporter = Reporter(self.config, self._stored, models, lease, prefixes_left=left, gpus=gpus)
            pieces = PieceApi(agent, holdings)
            doors = self._doors(tls) if tls is not None else None
            if doors is not None:
                stack.push_async_callback(doors.finish, SHUTDOWN_TLS_S)
            metrics = AgentMetrics((lambda: tls.not_after) if tls is not None else None)
            taker = Taker(models, session, self._token, most, tls)
            kv_pages = KvPageApi(giver, taker, pieces.bandwidth)
            sessions = EngineSessions(models, record.agent_id)
            calls = pieces, tls, doors, kv_pages, SessionApi(sessions)
            api = AgentApi(self.config, self._token, models, lease, reporter, metrics, session, *calls)
            runner = web.AppRunner(api.app(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            assert runner.server is not None
            accepted = connections(runner.server, log)
            if is_plain:
                stack.callback((await _serve(accepted, listener)).close)
            if tls is not None and doors is not None:
                context = tls.server_context("orchestrator", "agent", "monitor")
                stack.callback((await _serve_tls(accepted, tls_listener, context)).close)
                stack.push_async_callback(_ended, asyncio.create_task(_follow(tls, doors, runner.server)))
            stack.push_async_callback(models.stop)  # before the API: it passes streams of engines on
            return await self._serve(lease, models, url, ending, on_ready)

    def _doors(self, tls: PeerTls) -> Doors:
        agent = self.config.fleet.agent
        context = tls.server_context("orchestrator")

        async def listen(factory: Factory) -> tuple[Server, str]:
            listener = _listen(agent.host, 0)
            server = await _serve_tls(factory, listener, context)
            return server, records.agent_url(agent, listener.getsockname()[1], is_tls=True)

        async def connect(factory: Factory, engine: str) -> None:
            parts = urlsplit(engine)
            await asyncio.get_running_loop().create_connection(factory, parts.hostname or "", parts.port or 0)

        return Doors(listen, connect)

    async def _serve(
        self,
        lease: AgentLease,
        models: Models,
        url: str,
        ending: asyncio.Event,
        on_ready: Callable[[str, str], None],
    ) -> int:
        """Hold the lease until the end is asked for. Raises what ends the lease's tasks."""
        restoring: asyncio.Task[None] | None = None
        readying: asyncio.Task[None] | None = None

        async def begin() -> None:
            nonlocal restoring, readying
            await models.open()
            if restoring is None:
                on_ready(self._stored.agent_id, url)
                restoring = asyncio.create_task(models.restore())
                readying = asyncio.create_task(models.make_ready())

        tasks = [
            asyncio.create_task(lease.hold()),
            asyncio.create_task(lease.guard(begin, models.close)),
            asyncio.create_task(ending.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # an error of the store that no retry cures
            return 0
        finally:
            tasks += [one for one in (restoring, readying) if one is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _fence(self) -> None:
        """End the engines that an earlier agent has left."""
        for home in sorted((self._dir / "engines").glob("*")):
            sockets = engine_run_dir(home)
            killed = fence(home, sockets, engine_arena_dir(self.config, sockets))
            remove_showcase(home)
            if killed:
                log.warning("an engine of an earlier agent was ended", extra={"home": str(home), "processes": killed})

    def _write(self) -> None:
        try:
            write_stored(self._dir, self._stored)
        except OSError as error:
            raise ConfigError(f"{self._dir} cannot be written: {error.strerror}; check the disk") from None


async def _open_blobs(config: Config, stack: AsyncExitStack) -> tuple[list[BlobStore], SignedModels | None]:
    """The stores that this agent reads by itself, and models by signed URLs if it is to use no credentials."""
    fleet = config.fleet
    if not fleet.agent.signed_urls:
        return [await stack.enter_async_context(one) for one in open_all(config)], None
    own = open_without_credentials(config, [fleet.blobs])
    mirrors = open_without_credentials(config, fleet.mirrors)
    stores = [await stack.enter_async_context(one) for one in (*own, *mirrors)]
    signed = SignedModels(mirrors)
    stack.push_async_callback(signed.close)
    return stores, signed


async def _ended(task: asyncio.Task[None]) -> None:
    """End a task."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def new_agent_id() -> str:
    """An id from the host's name and chance, for hosts of the same name."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40].strip(".-") or "agent"
    return f"{host}-{secrets.token_hex(4)}"


async def _serve(factory: Factory, listener: socket.socket) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(factory, sock=listener, backlog=BACKLOG)


async def _serve_tls(factory: Factory, listener: socket.socket, context: ssl.SSLContext) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(
        factory,
        sock=listener,
        ssl=context,
        backlog=BACKLOG,
        ssl_handshake_timeout=HANDSHAKE_S,
        ssl_shutdown_timeout=SHUTDOWN_TLS_S,
    )


async def _follow(tls: PeerTls, doors: Doors, server: web.Server) -> None:
    """Follow the certificate's files without end, and end connections of peers that are no longer accepted."""
    stamp, checked = tls.stamp, time.monotonic()
    while True:
        tls.tick()
        if tls.stamp is not stamp or time.monotonic() >= checked + CHECK_S:
            stamp, checked = tls.stamp, time.monotonic()
            doors.check()
            end_refused(server.connections)
        await asyncio.sleep(TICK_S)


def _listen(host: str, port: int, param: str = "fleet.agent.port") -> socket.socket:
    """The listening socket. Raises `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"fleet.agent.host: {host}: {error.strerror}", "fleet.agent.host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"fleet.agent.host, {param}: cannot listen on {host}:{port}: {error.strerror}; stop the program "
            f"that uses it, or choose another port (0: any free one)",
            param,
        ) from None
    return listener


def free_port(host: str) -> int:
    """A port that no process listens on now. Raises `ConfigError`."""
    with _listen(host, 0) as probe:
        return int(probe.getsockname()[1])


async def open_door(app: web.Application, host: str) -> Listening:
    """Serve the door of an engine, on a port from the kernel. Raises `ConfigError`."""
    listener = _listen(host, 0)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    server: asyncio.Server | None = None

    async def close() -> None:
        if server is not None:
            server.close()
        await runner.cleanup()
        listener.close()

    try:
        await runner.setup()
        assert runner.server is not None
        server = await _serve(connections(runner.server, log), listener)
    except BaseException:
        await close()
        raise
    return Listening(int(listener.getsockname()[1]), close)


def main(config: Config, on_ready: Callable[[str, str], None]) -> int:
    """Run until SIGTERM. Raises `ConfigError`."""
    stage = AgentStage(config)
    return asyncio.run(watched(stage.run(on_ready)))
