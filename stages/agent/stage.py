"""The agent process: its lease, its HTTP API, its engines, and an orderly exit.

At the start it takes the lock of its directory and ends every engine that an earlier agent has left there; only then
does it register.  On SIGTERM it leaves the coordination store first, so that no more requests come, and then stops the
engines, whose streams get `server.drain_timeout_ms`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import aiohttp
from aiohttp import web

from pipeline.blobs.address import open_all
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.coordination.address import open_store
from pipeline.errors import ConfigError
from pipeline.fleet import records
from pipeline.fleet import token as tokens
from pipeline.runtime import run_dir
from stages.agent.engines.fence import fence
from stages.agent.engines.starling_engine import engine_arena_dir, engine_run_dir
from stages.agent.heartbeat import Reporter
from stages.agent.http_api import AgentApi
from stages.agent.lease import AgentLease
from stages.agent.metrics import AgentMetrics
from stages.agent.models import Models, Stored, read_stored, write_stored
from stages.agent.peers.announcements import Announcements
from stages.agent.peers.holdings import Holdings
from stages.agent.peers.http_api import PieceApi
from stages.agent.peers.sharing import Exchange

log = logging.getLogger("starling.agent")

SHUTDOWN_S = 1.0  # for handlers of the control API to end


def boot_clock() -> float:
    """Monotonic, s; counts the time in which the machine sleeps, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class AgentStage:
    """The process. `run` in its event loop, in the main thread."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` when another agent runs in this directory."""
        self.config = config
        self._dir = run_dir.prepare(paths.agent_dir(config), "directory of the agent", "fleet.agent.id")
        self._lock = run_dir.StageLock(self._dir, "agent")
        self._token = tokens.load_or_create(paths.fleet_token(config))
        before = read_stored(self._dir / "agent.json")
        self._models_before = before.models if before is not None else ()
        self._previous = before.incarnation if before is not None else ""
        agent_id = config.fleet.agent.id or (before.agent_id if before is not None else new_agent_id())
        self._stored = Stored(agent_id=agent_id, incarnation=secrets.token_hex(8), models=self._models_before)

    async def run(self, on_ready: Callable[[str, str], None]) -> int:
        """Run until SIGTERM; `on_ready` is called with the id and the URL once it is registered. The exit code."""
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.set)
        await asyncio.to_thread(self._fence)
        self._write()
        agent = self.config.fleet.agent
        async with AsyncExitStack() as stack:
            listener = _listen(agent.host, agent.port)
            stack.callback(listener.close)
            url = records.agent_url(agent, listener.getsockname()[1])
            store = await stack.enter_async_context(open_store(self.config))
            blobs = [await stack.enter_async_context(one) for one in open_all(self.config)]
            # Engines are on this host: connections to them cost nothing, and streams must not wait for one.
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            record = records.AgentRecord(agent_id=self._stored.agent_id, url=url, incarnation=self._stored.incarnation)
            lease = AgentLease(store, record, agent.lease_ms / 1000, self._previous, clock=boot_clock)
            holdings = Holdings(paths.models_dir()) if agent.peers else None
            exchange = None
            if holdings is not None:
                announcements = Announcements(store, lease, record, holdings)
                exchange = Exchange(holdings, announcements, session, self._token, record.agent_id)
                stack.push_async_callback(_ended, asyncio.create_task(announcements.keep()))
            models = Models(
                self.config,
                self._dir,
                paths.models_dir(),
                self._stored,
                blobs,
                session,
                lambda: free_port(agent.host),
                lambda: lease.is_valid,
                exchange,
            )
            reporter = Reporter(self.config, self._stored, models, lease)
            pieces = PieceApi(agent, holdings)
            api = AgentApi(self.config, self._token, models, lease, reporter, AgentMetrics(), session, pieces)
            runner = web.AppRunner(api.app(), access_log=None, shutdown_timeout=SHUTDOWN_S)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.SockSite(runner, listener).start()
            stack.push_async_callback(models.stop)  # before the API: it passes streams of engines on
            return await self._serve(lease, models, url, ending, on_ready)

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

        async def begin() -> None:
            nonlocal restoring
            await models.open()
            if restoring is None:
                on_ready(self._stored.agent_id, url)
                restoring = asyncio.create_task(models.restore(self._models_before))

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
            tasks += [restoring] if restoring is not None else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _fence(self) -> None:
        """End the engines that an earlier agent has left."""
        for home in sorted((self._dir / "engines").glob("*")):
            sockets = engine_run_dir(home)
            killed = fence(home, sockets, engine_arena_dir(self.config, sockets))
            if killed:
                log.warning("an engine of an earlier agent was ended", extra={"home": str(home), "processes": killed})

    def _write(self) -> None:
        try:
            write_stored(self._dir, self._stored)
        except OSError as error:
            raise ConfigError(f"{self._dir} cannot be written: {error.strerror}; check the disk") from None


async def _ended(task: asyncio.Task[None]) -> None:
    """End a task."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def new_agent_id() -> str:
    """An id from the host's name and chance, for hosts of the same name."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40].strip(".-") or "agent"
    return f"{host}-{secrets.token_hex(4)}"


def _listen(host: str, port: int) -> socket.socket:
    """The listening socket. Raises `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"fleet.agent.host: {host}: {error.strerror}", "fleet.agent.host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"fleet.agent.host, fleet.agent.port: cannot listen on {host}:{port}: {error.strerror}; stop the program "
            f"that uses it, or choose another port (0: any free one)",
            "fleet.agent.port",
        ) from None
    return listener


def free_port(host: str) -> int:
    """A port that no process listens on now. Raises `ConfigError`."""
    with _listen(host, 0) as probe:
        return int(probe.getsockname()[1])


def main(config: Config, on_ready: Callable[[str, str], None]) -> int:
    """Run until SIGTERM. Raises `ConfigError`."""
    return asyncio.run(AgentStage(config).run(on_ready))
