"""The orchestrator's process: the listening socket, the store's watch, the agents' polls, and an orderly exit.

    follow    agents, cordons and placements, as they change in the coordination store (store_follower.py)
    poll      each agent, every `poll_ms`; one that hangs delays no other
    lead      one orchestrator of the fleet carries out placements

Without the store everything that is known stays: requests are routed, and agents that answer are asked to serve on.
On SIGTERM requests in flight finish, for up to `server.drain_timeout_ms`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from pipeline.api.key_file import KeyFile, key_path
from pipeline.api.keys import Keys
from pipeline.api.quotas import Quotas
from pipeline.blobs.address import open_store as open_blobs
from pipeline.blobs.interface import BlobStore
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.coordination.address import open_store
from pipeline.coordination.election import Election
from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import ConfigError, ModelUnavailable
from pipeline.fleet import token
from pipeline.fleet.bodies import HeartbeatRequest, HeartbeatResponse
from pipeline.fleet.model_states import translate_loading
from pipeline.fleet.peer_tls import boot_clock, open_tls
from pipeline.fleet.records import AgentRecord
from pipeline.observe import logs
from pipeline.observe.metrics import Metrics
from pipeline.runtime.huge_heap import collapse_heap
from pipeline.runtime.service_watchdog import watched
from pipeline.runtime.steady_clock import SteadyClock, clock_path
from shm.decoding import DECODE_ERRORS
from stages.orchestrator import connecting, conversation_routes, probe_routes, response_routes
from stages.orchestrator.catalog_reader import CatalogReader
from stages.orchestrator.client_connections import connections_of
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.engine_connection import Connection
from stages.orchestrator.fleet_api import EventLog, FleetApi
from stages.orchestrator.forward import Bounds
from stages.orchestrator.front import Front
from stages.orchestrator.http_app import handle_text, make_app
from stages.orchestrator.http_client import Factory, HttpClient
from stages.orchestrator.keep_running import keep_running
from stages.orchestrator.key_claims import KeyClaims
from stages.orchestrator.leader import Leader
from stages.orchestrator.leaving_agents import LeavingAgents
from stages.orchestrator.model_changes import AgentCalls, ModelChanges
from stages.orchestrator.page_transfers import PageTransfers
from stages.orchestrator.pages import Pages
from stages.orchestrator.policies import order_of
from stages.orchestrator.prefix_moves import PrefixMoves
from stages.orchestrator.quotas.publisher import QuotaPublisher
from stages.orchestrator.quotas.shared_use import SharedUse
from stages.orchestrator.read_body import TEXT_PATHS
from stages.orchestrator.registry import Registry
from stages.orchestrator.relay import Relay
from stages.orchestrator.responses.works import ResponseWorks
from stages.orchestrator.router import Published, ScoreRouter
from stages.orchestrator.score import Weights
from stages.orchestrator.session_moves import SessionMoves
from stages.orchestrator.session_pages import SessionPages
from stages.orchestrator.signed_urls import UrlSigner
from stages.orchestrator.store_follower import LEADER_KEY, StoreFollower
from stages.orchestrator.text_connection import TextServer

log = logging.getLogger("starling.orchestrator")

BACKLOG = 1024
HEARTBEAT_S = 2.0  # for an agent to answer a poll
LEADER_S = 5.0  # lease of the leader
SHUTDOWN_S = 1.0  # for handlers to end after the drain


async def _open_one(
    factory: Factory, address: str, port: int, context: ssl.SSLContext | None, name: str | None
) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(factory, address, port, ssl=context, server_hostname=name)
    return connection


connect = partial(connecting.connect, _open_one)


class OrchestratorStage:
    """The process. `run` in its event loop."""

    def __init__(self, config: Config, pages: Pages | None = None) -> None:
        """`pages`: what describes the API; None: nothing does."""
        self.config = config
        self._pages = pages
        bounds = config.fleet.orchestrator
        self._token = token.load_or_create(paths.fleet_token(config))
        self._store: CoordinationStore = open_store(config)
        self._blobs: BlobStore = open_blobs(config)
        self.identity = f"{socket.gethostname()}-{bounds.port}"
        self._tls = open_tls(config.fleet.tls, "orchestrator")
        self.client = HttpClient(connect, time.monotonic, self._tls)
        self.metrics = Metrics("orchestrator", None)
        self.events = EventLog(time.time)
        self.registry = Registry(self._heartbeat, time.monotonic)
        self._published: dict[str, Published] = {}
        weights = Weights(bounds.alpha, bounds.beta, bounds.gamma, bounds.delta)
        self.router = ScoreRouter(
            weights,
            bounds.max_per_agent,
            self._published.get,
            time.time,
            order=order_of(bounds.routing),
            names=self._published.keys,
        )
        self._calls = AgentCalls(self.client, self._token, is_tls=self._tls is not None)
        self.signer = UrlSigner(self._blobs, bounds.url_valid_s, self._start_poll, time.monotonic)
        self._catalog = CatalogReader(self._blobs, self._published, self.signer, self.router, time.monotonic)
        self.changes = ModelChanges(
            self._calls,
            self.registry,
            self.router,
            self.events,
            self._published,
            bounds.load_timeout_ms,
            lambda: self.fleet.is_store_up,
            self._check_loaded,
            time.monotonic,
            self.signer,
        )
        self.cold = ColdLoads(self.changes.load, bounds.max_waiting, time.monotonic)
        self.router.loading_at, self.router.failed_at = self.cold.agents_of, self.cold.failed_at
        self.router.eviction.loads_at, self.changes.is_wanted = self.cold.models_at, self.cold.is_wanted
        self._changed = asyncio.Event()
        self.pages = PageTransfers(
            self._calls, self.registry, self.router.rates, self.router.decisions, self.events.add, time.monotonic
        )
        self.relay = Relay(
            self.client,
            self.router,
            self.registry,
            self.cold,
            Bounds(bounds.wait_ms / 1000, bounds.move_timeout_ms / 1000, bounds.silent_ms / 1000),
            time.monotonic,
            self._next_change,
            self.changes.progress,
            replays_text=bounds.lost_text == "replay",
            bring_pages=self.pages.bring,
            claims=KeyClaims(self._store, lambda: self.fleet.is_store_up, time.monotonic),
        )
        self.leaving = LeavingAgents(
            self._heartbeat, self.relay, bounds.poll_ms / 1000, bounds.silent_ms / 1000, time.monotonic
        )
        self.relay.locator.leaving = lambda: self.leaving.views
        steady = SteadyClock(clock_path(paths.state_dir(config), f"orchestrator-{bounds.port}")).seconds
        use = SharedUse(secrets.token_hex(8), steady)
        self.quotas = QuotaPublisher(self._store, use, time.monotonic)
        self.responses = ResponseWorks(config, self._store, time.time, time.monotonic)
        keys = Keys(config, KeyFile(key_path(paths.state_dir(config)), steady))
        self.front = Front(
            config,
            self._token,
            self.relay,
            self.router,
            self.metrics,
            time.monotonic,
            time.time,
            self._catalog.learn,
            keys,
            Quotas(config.rate_limits, time.monotonic, None, steady, keys.limits, use),
            self.quotas,
            self.registry.has_emptied,
            self.responses.shared,
        )
        self.cold.share_of = self.front.share_of
        self.responses.attach(self.front, self.relay, self.identity)
        self.session_moves = SessionMoves(
            self._calls,
            self.registry,
            self.router,
            self.events.add,
            self.front.sessions.bind_moved,
            bounds.session_gain_ms / 1000,
        )
        find, answer_of = self.registry.find, self.registry.answer_of
        self.session_moves.pages = SessionPages(self.session_moves.call, self.pages, find, answer_of)
        self.session_moves.is_store_up = lambda: self.fleet.is_store_up
        self.front.move_session = self.session_moves.for_turn
        self.prefix_moves = PrefixMoves(self._calls, self.registry, self.router, self.events.add, time.monotonic)
        self.prefix_moves.tenants = self.front.tenants_by_salt
        self.follower = StoreFollower(
            self._store,
            self.registry,
            self.events,
            time.monotonic,
            self._lose_agent,
            self._left,
            self._joined,
            self._table_changed,
            self.quotas.apply,
        )
        self.fleet = self.follower.fleet = FleetApi(
            self.identity, self.registry, self.router, self.relay, self.cold, self.follower.write, self.events
        )
        self.fleet.in_flight, self.fleet.max_in_flight = lambda: self.front.in_flight, bounds.max_concurrent_requests
        self.fleet.published = self._published
        self.fleet.learn = self._catalog.learn
        self.fleet.pages = self.pages
        self.fleet.session_moves = self.session_moves
        self.fleet.prefix_moves = self.prefix_moves
        self.fleet.url_of = self._calls.url_of
        self.port = 0
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._health: dict[str, str] = {}
        self.leader = Leader(
            # A term ends while the process or its machine is suspended.
            Election(self._store, LEADER_KEY, self.identity.encode(), LEADER_S, clock=boot_clock),
            self.identity,
            self.fleet,
            self.registry,
            self.router,
            self.cold,
            self.changes,
            self.signer.has_told,
            self.events,
            bounds.unload_idle_ms / 1000,
            time.monotonic,
        )
        self.leader.rounds = self._sweep, self.session_moves.begin_round, self.prefix_moves.begin_round
        self.router.eviction.placements = self.fleet.wanted
        self._stopping = asyncio.Event()
        self._texts: TextServer | None = None

    # ---------------------------------------------------------------- running

    async def run(self, on_listening: Callable[[int], Any] = lambda port: None) -> int:
        """Serve until SIGTERM. Returns the exit code. `on_listening(port)` is called once it accepts connections."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        app = make_app(self.front, self.fleet, self._pages)
        probe_routes.add_routes(app)
        response_routes.add_routes(app)
        conversation_routes.add_routes(app)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, keepalive_timeout=75.0, shutdown_timeout=SHUTDOWN_S
        )
        tasks: list[asyncio.Task[Any]] = []
        try:
            await runner.setup()
            assert runner.server is not None
            self._texts = TextServer(app, runner.server, TEXT_PATHS, handle_text, connections_of(self.config))
            collapse_heap()  # takes tens of milliseconds, in which no client could be served
            server = await self._listen(self._texts)
            works = (self.follower.follow, self.follower.probe, self._poll, self._lead, self._catalog.follow)
            tasks = [loop.create_task(keep_running(work)) for work in (*works, self.quotas.run, self._run_responses)]
            log.info("listening", extra={"host": self.config.fleet.orchestrator.host, "port": self.port})
            # Objects that live until the end are not traversed by later collections, which would delay streams.
            gc.collect()
            gc.freeze()
            gc.collect()  # counts what is left, so that the next full collection does not come too early
            on_listening(self.port)
            await self._stopping.wait()
            self.fleet.is_stopping = True
            server.close()
            self._texts.stop()
            await self._drain()
            return 0
        finally:
            for task in (*tasks, *self._polls.values()):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._catalog.close()
            await self.responses.close()
            await self.cold.close()
            await self.signer.close()
            await self.session_moves.close()
            await self.prefix_moves.close()
            if self._texts is not None:
                await self._texts.close(SHUTDOWN_S)
            await runner.cleanup()
            await self.leaving.close()
            await self.relay.close()
            await self.quotas.publish()
            await self.client.close()
            await self._store.close()
            await self._blobs.close()
            await self.responses.close_store()

    async def _listen(self, protocols: TextServer) -> asyncio.Server:
        bounds = self.config.fleet.orchestrator
        try:
            server = await asyncio.get_running_loop().create_server(
                protocols, bounds.host, bounds.port, backlog=BACKLOG, reuse_address=True
            )
        except (OSError, socket.gaierror) as error:
            raise ConfigError(
                f"cannot listen on {bounds.host}:{bounds.port}: {error.strerror or error}; stop the process that uses "
                "it, or set fleet.orchestrator.host and fleet.orchestrator.port",
                "fleet.orchestrator.port",
            ) from None
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _drain(self) -> None:
        deadline = time.monotonic() + self.config.server.drain_timeout_ms / 1000
        while self.front.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    # ---------------------------------------------------------------- the agents

    async def _poll(self) -> None:
        """Poll every agent; requests on one that is silent too long go on elsewhere."""
        interval_s = self.config.fleet.orchestrator.poll_ms / 1000
        silent_s = self.config.fleet.orchestrator.silent_ms / 1000
        looked, running_since = time.monotonic(), float("-inf")
        while True:
            before, looked = looked, time.monotonic()
            if looked - before > interval_s + silent_s / 2:  # this process was stopped, and not all agents silent
                running_since = looked
            for health in self.registry.health():
                self._start_poll(health.agent_id)
                if health.health != "READY" and min(health.age_s, looked - running_since) > silent_s:
                    self._lose_work(health.agent_id, f"the agent has not answered for {health.age_s:.1f} s")
                self._move_draining(health.agent_id)
            self.follower.settle()
            if self._tls is not None:
                self._tls.tick()
                self.metrics.set("starling_tls_certificate_expiry_seconds", self._tls.not_after)
            self.relay.kept.expire()
            await asyncio.sleep(interval_s)

    def _lose_agent(self, agent_id: str, reason: str) -> None:
        self.signer.forget(agent_id)
        self._health.pop(agent_id, None)
        self._lose_work(agent_id, reason)

    def _lose_work(self, agent_id: str, reason: str) -> None:
        """What the agent serves and loads goes on elsewhere."""
        self.relay.lose_agent(agent_id, reason)
        self.cold.lose_agent(agent_id, reason)

    def _left(self, record: AgentRecord, age_s: float) -> None:
        self.signer.forget(record.agent_id)
        self._health.pop(record.agent_id, None)
        self.cold.lose_agent(record.agent_id, "the agent has left")
        view = next((one for one in self.router.table if one.agent_id == record.agent_id), None)
        self.leaving.begin(record, age_s, view)

    def _joined(self, agent_id: str) -> None:
        self.leaving.returned(self.registry.find(agent_id))
        self._start_poll(agent_id)

    def _start_poll(self, agent_id: str) -> None:
        """Poll an agent unless a poll of it is under way."""
        if agent_id not in self._polls:
            task = asyncio.get_running_loop().create_task(self._check(agent_id))
            self._polls[agent_id] = task
            task.add_done_callback(lambda done: self._polls.pop(agent_id, None))

    async def _check(self, agent_id: str) -> None:
        await self.registry.check_node(agent_id)
        found = next((one for one in self.registry.health() if one.agent_id == agent_id), None)
        if found is not None and self._health.get(agent_id) != found.health:
            self._health[agent_id] = found.health
            self.events.add(f"agent-{found.health.lower()}", agent=agent_id, text=found.reason)
            log.info("agent health", extra={"agent": agent_id, "health": found.health, "reason": found.reason})
        self._answered(agent_id)

    async def _check_loaded(self, agent_id: str) -> bool:
        """The models of an agent have changed; whether its answer is known."""
        has_answered = await self.registry.check_node(agent_id)
        self._answered(agent_id)
        return has_answered

    def _answered(self, agent_id: str) -> None:
        """An agent was polled."""
        answer = self.registry.answer_of(agent_id)
        if answer is not None:
            self.signer.observe(answer, lambda model: self.router.under_way(agent_id, model) > 0)
        self._table_changed()

    def _move_draining(self, agent_id: str) -> None:
        cordon = self.registry.cordon(agent_id)
        if cordon is not None and cordon.is_draining:
            moved = self.relay.move_streams(agent_id, "the agent is draining")
            if moved:
                self.events.add("moved", agent=agent_id, text=f"{moved} requests go on elsewhere")

    def _table_changed(self) -> None:
        table = self.registry.table()
        self.router.update_routing_table(table)
        self.pages.keep_only({view.agent_id for view in table})
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _next_change(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _heartbeat(self, record: AgentRecord) -> HeartbeatResponse:
        cursors, is_down = self.router.prefixes.cursors(record.agent_id), not self.fleet.is_store_up
        body = HeartbeatRequest(
            orchestrator_id=self.identity,
            extend_lease=is_down,
            prefixes_after=cursors,
            signed=self.signer.take(record.agent_id),
        )
        raw = await self._calls.post(record, "/heartbeat", msgspec.json.encode(body), HEARTBEAT_S)
        try:
            return self.router.prefixes.apply(translate_loading(msgspec.json.decode(raw, type=HeartbeatResponse)))
        except DECODE_ERRORS as error:
            raise ModelUnavailable(
                f"{self._calls.url_of(record)}/heartbeat: {error}; run the same release everywhere"
            ) from None

    # ---------------------------------------------------------------- the catalog

    async def _run_responses(self) -> None:
        """Run what is in the background, as soon as it is known where."""
        await self._catalog.until_known()
        while self.registry.awaits_answers():
            await self._next_change(1.0)
        await self.responses.run()

    # ---------------------------------------------------------------- leading

    async def _lead(self) -> None:
        # Agents without credentials refuse to load a model without its entry and URLs.
        await self.leader.lead(self._catalog.until_known)

    def _sweep(self) -> None:
        self.responses.sweep_if_due(is_store_up=self.fleet.is_store_up)


def main(config: Config, on_listening: Callable[[int], Any] = lambda port: None, pages: Pages | None = None) -> int:
    """Run until SIGTERM. Returns the exit code. Raises `ConfigError` if it cannot listen."""
    logs.setup("orchestrator", config, in_background=True)

    async def run() -> int:
        return await watched(OrchestratorStage(config, pages).run(on_listening))

    return uvloop.run(run())
