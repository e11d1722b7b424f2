"""The gateway process: the listening socket, the edges to tokenizer, scheduler and KV manager, and an orderly exit.

On SIGTERM the gateway drains. New requests for text get 503, and /ready reports it. Requests in flight continue for up
to `server.drain_timeout_ms`; the rest then fail with an error that gives the reason, and the process exits. It does not
wait for journaled requests in the background or without a client: they do not end, and its successor continues them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvloop
from aiohttp import web

from pipeline.api.key_file import KeyFile, key_path
from pipeline.api.keys import Keys
from pipeline.api.quota_file import QuotaFile
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, Conflict, InvalidRequest, StarlingError
from pipeline.ipc.asyncio_loop import AsyncioLoop
from pipeline.ipc.control_asyncio import ControlServer
from pipeline.ipc.endpoint import Link
from pipeline.models import versions
from pipeline.observe import logs
from pipeline.runtime.malloc_trim import MallocTrimmer
from pipeline.runtime.steady_clock import SteadyClock, clock_path
from pipeline.supervise import listen_fd as listening
from pipeline.supervise.unix_listener import UnixListener, listener_of
from pipeline.tls import certificate, trust
from pipeline.tls.follower import CertificateFollower
from stages.gateway.admin import MAX_TIMEOUT_S, Admin
from stages.gateway.http.app import make_app
from stages.gateway.http.connection import Connection
from stages.gateway.http.context import BACKLOGS, GATE
from stages.gateway.http.idle_connections import IdleConnections
from stages.gateway.requests.journal import Journal
from stages.gateway.requests.state_writer import StateWriter
from stages.gateway.service import Service
from stages.gateway.versions.catalog import VersionCatalog

log = logging.getLogger("starling.gateway")

BACKLOG = 1024  # connections that the kernel queues while the event loop is busy
KEEPALIVE_S = 75.0  # how long an idle connection stays open
LINGER_S = 2.0  # for a client whose request is refused to send its body and read the response
FINAL_EVENTS_S = 1.0  # time for the handlers to send the last events of requests that were ended at exit


class GatewayStage:
    """The process. `run` in its event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.endpoints = AsyncioLoop("gateway", config)
        self.tokenizer: Link = self.endpoints.connect(
            "gateway-tokenizer", lambda frame: self.service.on_tokenizer(frame)
        )
        self.scheduler: Link = self.endpoints.connect(
            "gateway-scheduler", lambda frame: self.service.on_scheduler(frame)
        )
        self.kv: Link = self.endpoints.connect("gateway-kv", lambda frame: self.service.sessions.on_frame(frame))
        steady = SteadyClock(clock_path(paths.state_dir(config), "gateway")).seconds
        keys = Keys(config, KeyFile(key_path(paths.state_dir(config)), steady))
        self.state_writer = StateWriter(_open_journal(config, steady, keys), _open_quotas(config))
        catalog = VersionCatalog(config, versions.read(config), lambda table: versions.write(config, table))
        self.service = Service(
            config,
            self.scheduler.send,
            self.tokenizer.send,
            metrics=self.endpoints.metrics,
            state_writer=self.state_writer,
            send_kv=self.kv.send,
            catalog=catalog,
            steady=steady,
            api_keys=keys,
            responses_path=paths.state_dir(config) / "responses.db",
            self_tests_path=paths.state_dir(config) / "self-tests.json",
        )
        self.tokenizer.on_up = self.service.on_tokenizer_up
        self.tokenizer.on_down = self.service.on_tokenizer_down
        self.scheduler.on_up = self.service.on_scheduler_up
        self.scheduler.on_down = self.service.on_scheduler_down
        self.kv.on_up = self.service.on_kv_up
        self.kv.on_down = self.service.on_kv_down
        readiness = self.service.readiness
        self.tokenizer.on_heartbeat = partial(readiness.on_heartbeat, readiness.tokenizer)
        self.scheduler.on_heartbeat = partial(readiness.on_heartbeat, readiness.scheduler)
        self.kv.on_heartbeat = partial(readiness.on_heartbeat, readiness.kv)
        self.service.loader.on_begun = (
            self.endpoints.mark_active
        )  # its heartbeat wakes the stages that follow the table
        self.endpoints.on_tick += [self._tick, MallocTrimmer(self.endpoints.clock).tick]
        self.admin = Admin(self.service, paths.arena_dir(config) / "gateway.drains")
        self.control = ControlServer(paths.run_dir(config), "gateway", self._operate)
        self.port = 0  # the port it listens on
        self._connections = IdleConnections(self.service.clock)
        app = make_app(config, self.service, self.admin)
        self._gate, self._backlogs = app[GATE], app[BACKLOGS]
        self._runner = web.AppRunner(
            self._connections.watch(app),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            shutdown_timeout=FINAL_EVENTS_S,
        )
        self._was_ready = False
        self.service.changes.on_notify = self._on_change
        self._expiry = -1.0  # of the certificate, as in the metrics
        self._inherited = listening.claim()  # the supervisor's listening socket
        self._inherited_unix = listening.claim(listening.UNIX_VARIABLE)
        self._own_unix: UnixListener | None = None
        self._servers: list[asyncio.Server] = []  # while it accepts connections
        self._tls = _follow_certificate(config)
        self._handover_until = 0.0  # s, monotonic; 0.0: no handover is under way
        self._is_handed_over = False

    async def run(self, on_listening: Callable[[int], Any] = lambda port: None) -> int:
        """Serve until SIGTERM. Returns the exit code. `on_listening(port)` is called once it accepts connections."""
        try:
            await self._runner.setup()
            assert self._runner.server is not None
            self._gate.serve(self._runner.server, self._tls)
            if self._tls is not None:
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._tls.look_soon)
            await self._listen()
            await self.control.start()
            where = {"host": self.config.server.host, "port": self.port, "unix_socket": self.config.server.unix_socket}
            log.info("listening", extra={name: value for name, value in where.items() if value})
            self.endpoints.start()
            # Everything allocated so far lives until the end, so later collections need not traverse it. A full
            # collection runs when the number of new objects reaches a quarter of those that the last one left: the
            # second `collect` resets that number to exclude the frozen objects.
            gc.collect()
            gc.freeze()
            gc.collect()
            on_listening(self.port)
            code = await self.endpoints.stopped()
            await self._end_remaining()
            return code
        finally:
            self._stop_accepting()
            for inherited in (self._inherited, self._inherited_unix, self._own_unix):
                if inherited is not None:
                    inherited.close()
            await self.control.close()
            await self._runner.cleanup()
            if left := self.service.lifecycle.leave_to_successor():
                log.info("requests are left to the successor", extra={"requests": left})
            self.service.responses.store.close()
            await asyncio.sleep(0)  # its answers: the ends of requests in the background are journaled after them
            self.state_writer.close()
            if self.service.tracer is not None:
                self.service.tracer.exporter.close()
            self.endpoints.close()

    async def _listen(self) -> None:
        try:
            if self.config.server.unix_socket:
                self._servers.append(await self._listen_unix())
            if self.config.server.host:
                self._servers.append(await self._listen_tcp())
        except BaseException:
            self._stop_accepting()
            raise

    def _stop_accepting(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def _listen_unix(self) -> asyncio.Server:
        """Raises `ConfigError`."""
        listener = self._inherited_unix
        if listener is None:
            self._own_unix = self._own_unix or listener_of(self.config)
            assert self._own_unix is not None
            listener = self._own_unix.socket
        loop: Any = asyncio.get_running_loop()  # uvloop's, which would remove the file that the next gateway needs
        server: asyncio.Server = await loop.create_unix_server(
            self._gate.unix_protocol, sock=listener.dup(), backlog=BACKLOG, cleanup_socket=False
        )
        return server

    async def _listen_tcp(self) -> asyncio.Server:
        host, port = self.config.server.host, self.config.server.port
        loop = asyncio.get_running_loop()
        try:
            if self._inherited is not None:
                server = await loop.create_server(self._gate.protocol, sock=self._inherited.dup(), backlog=BACKLOG)
            else:
                server = await loop.create_server(self._gate.protocol, host, port, backlog=BACKLOG, reuse_address=True)
        except (OSError, socket.gaierror) as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; stop the process that uses it, or set "
                f"server.host and server.port (STARLING_SERVER__PORT={port + 1 if port < 65535 else 8080})",
                "server.port",
            ) from None
        self.port = server.sockets[0].getsockname()[1]
        return server

    # -------------------------------------------------------------- handing over

    async def _operate(self, request: dict[str, Any]) -> dict[str, Any]:
        """The control socket's handler: the operations of `Admin`, and `{"op": "handover", "timeout_s"}`.

        A handover stops accepting connections: new ones wait for the successor in the queue of the socket that the
        supervisor holds. Requests in flight finish: `unfinished` are left, without those that the successor continues.
        If none has started after `timeout_s`, this process accepts again.
        """
        if request.get("op") == "handover":
            self._hand_over(request.get("timeout_s"))
            request = {"op": "state"}
        answer = await self.admin.answer(request)
        unfinished = self.service.in_flight.would_be_lost
        return {**answer, "handed_over": self._is_handed_over, "unfinished": unfinished}

    def _hand_over(self, timeout_s: Any) -> None:
        is_inherited = self._inherited or not self.config.server.host
        if not is_inherited or (self.config.server.unix_socket and self._inherited_unix is None):
            raise Conflict("this gateway opened its listening socket itself, so it cannot be handed over")
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"timeout_s is {timeout_s!r}; it must be greater than 0 and at most {MAX_TIMEOUT_S:g}", "timeout_s"
            )
        self._handover_until = self.service.clock() + timeout_s
        self.service.readiness.is_handing_over = True
        self._stop_accepting()
        log.info("handing over", extra={"in_flight": self.service.in_flight.count})
        # Ticks see the end of the last request, while new connections wait.
        self.endpoints.mark_active()

    async def _end_handover(self) -> None:
        log.warning("no successor has started: accepting connections again")
        self._handover_until = 0.0
        self._is_handed_over = self.service.readiness.is_handing_over = False
        await self._listen()

    @property
    def _connected(self) -> list[Connection]:
        return cast("list[Connection]", self._runner.server.connections) if self._runner.server is not None else []

    def _tick_handover(self) -> None:
        connections = self._connected
        is_used = any(one.is_busy or one.awaits_first_request for one in connections)
        is_used = is_used or self.service.in_flight.would_be_lost > 0
        if not is_used and not self._is_handed_over:
            self._is_handed_over = True
            # All connections are idle: their clients connect again and wait for the successor.
            for connection in connections:
                connection.force_close()
        if self.service.clock() >= self._handover_until and not self.endpoints.stopping:
            self._handover_until = float("inf")
            self._taking_back = asyncio.get_running_loop().create_task(self._end_handover())

    def _tick(self) -> None:
        """At each tick: exit and handover, readiness, metrics."""
        if self._handover_until:
            self._tick_handover()
        service, endpoints = self.service, self.endpoints
        unfinished = service.in_flight.would_be_lost if endpoints.stopping else service.in_flight.count
        if unfinished or self._handover_until:
            endpoints.mark_active()
        if endpoints.stopping and not service.readiness.is_stopping:
            log.info("draining", extra={"in_flight": unfinished})
            service.readiness.stop()
        service.tick(self.tokenizer.last_heartbeat, self.scheduler.last_heartbeat, self.kv.last_heartbeat)
        if not endpoints.stopping:
            service.loader.tick()
        if self._runner.server is not None:
            self._connections.sweep(self._connected)
            self._gate.tick()
            self._follow_expiry()
            self._backlogs.tick()
        endpoints.progress = service.relay.counts.tokens + service.metrics.total_requests
        # A gateway that waits for another stage is not busy, and so never counts as stuck.
        endpoints.busy = unfinished > 0 if endpoints.stopping else False
        # This process is ready; whether the whole server is, /ready reports.
        endpoints.ready = True
        state = service.readiness.report(service.in_flight.count)
        is_ready = bool(state["ready"])
        endpoints.is_steady = is_ready and not self._handover_until and service.is_steady
        if is_ready and not self._was_ready:
            log.info("ready", extra={"url": listening.url(self.config, self.port)})
        elif self._was_ready and not is_ready:
            log.warning("not ready", extra={"reason": state["reason"]})
        self._was_ready = is_ready

    def _on_change(self) -> None:
        """Tick at once if the server has become ready: a tick records it, and `starling up` waits for that."""
        if not self._was_ready and self.service.readiness.report(self.service.in_flight.count)["ready"]:
            self.endpoints.tick_soon()

    def _follow_expiry(self) -> None:
        if self._tls is not None and self._tls.certificate.not_after != self._expiry:
            self._expiry = self._tls.certificate.not_after
            self.endpoints.metrics.set("starling_tls_certificate_expiry_seconds", self._expiry)

    async def _end_remaining(self) -> None:
        self.service.readiness.stop()
        limit_s = self.config.server.drain_timeout_ms / 1000
        error = StarlingError(
            "DRAINING",
            f"the server is being stopped, and this request did not finish within {limit_s:g} s; send it again",
        )
        ended = self.service.lifecycle.end_all(error, is_exit=True)
        if ended:
            log.warning("ended requests that did not finish in time", extra={"requests": ended})
            deadline = self.service.clock() + FINAL_EVENTS_S
            while self.service.in_flight.count and self.service.clock() < deadline:
                await asyncio.sleep(0.01)


def _open_journal(config: Config, steady: Callable[[], float], keys: Keys) -> Journal | None:
    """None if it is off: requests then end with this process."""
    if not config.server.journal_mb:
        return None
    return Journal(paths.state_dir(config) / "journal", config.server.journal_mb << 20, steady, keys.part_of)


def _open_quotas(config: Config) -> QuotaFile | None:
    """None if the file cannot be opened: used quotas are then forgotten at a restart."""
    path = paths.state_dir(config) / "quotas" / "levels.table"
    try:
        return QuotaFile(path)
    except OSError as error:
        log.error("quotas are kept in memory only", extra={"path": str(path), "reason": error.strerror})
        return None


def _follow_certificate(config: Config) -> CertificateFollower | None:
    """None without TLS. Raises `ConfigError`."""
    files = certificate.files_of(config)
    return CertificateFollower(files, partial(trust.publish, config)) if files is not None else None


def main(config: Config) -> int:
    """Run until SIGTERM. Returns the exit code. Raises `ConfigError` if it cannot listen or has no certificate."""
    logs.setup("gateway", config, in_background=True)

    async def run() -> int:
        return await GatewayStage(config).run()

    return uvloop.run(run())
