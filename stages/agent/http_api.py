"""The agent's HTTP API: bodies of pipeline/fleet/bodies.py, errors as everywhere.

All calls but /health need the fleet's token, or over TLS a certificate of the role orchestrator (peer_tls.py). For
/metrics the token that is computed from it for scrapers is enough, and over TLS the role monitor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
from aiohttp import web

from pipeline.api.error_response import error_response
from pipeline.api.json_body import CONTENT_TYPE, to_json
from pipeline.config.schema import Config
from pipeline.errors import (
    Forbidden,
    InferenceError,
    ModelUnavailable,
    NotFound,
    StarlingError,
    TooLarge,
    method_not_allowed,
)
from pipeline.fleet import token as tokens
from pipeline.fleet.bodies import (
    CacheLevel,
    HeartbeatRequest,
    InferRequest,
    LoadModelRequest,
    LoadModelResponse,
    UnloadModelRequest,
    UnloadModelResponse,
    decode_request,
)
from pipeline.fleet.peer_tls import PeerTls, Role
from stages.agent.doors import Doors
from stages.agent.engines.http_session import HttpSession
from stages.agent.engines.interface import Engine
from stages.agent.heartbeat import CHAT_PATH, Reporter
from stages.agent.kv_pages.http_api import KvPageApi
from stages.agent.lease import AgentLease
from stages.agent.metrics import AgentMetrics
from stages.agent.models import Models
from stages.agent.peers.http_api import PieceApi
from stages.agent.placement import Placement
from stages.agent.session_moves.http_api import SessionApi

log = logging.getLogger("starling.agent.http")

BODY_TIMEOUT_S = 30.0  # from a request's head to the end of its body
CONNECT_S = 5.0  # to an engine
ANSWER_MARGIN_S = 10.0  # beyond server.request_timeout_ms, for an engine's own error to arrive
# Headers of a request that the engine gets, and of its response that the client gets.
PASSED_ON = ("Content-Type", "Accept", "Idempotency-Key", "Last-Event-ID", "X-Request-Id", "Anthropic-Version")
# Who may call the paths that begin so over TLS; the others are for orchestrators alone.
OPEN_TO: tuple[tuple[str, tuple[Role, ...]], ...] = (
    ("/health", ("agent", "orchestrator", "monitor")),
    ("/metrics", ("orchestrator", "monitor")),
    ("/pieces/", ("agent",)),
    ("/kv_pages/", ("agent",)),
)
PASSED_BACK = ("Content-Type", "Retry-After", "X-Request-Id", "X-Starling-Request", "X-Starling-Cache")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

TAKE_SESSION = "/take_session"
SESSION_MB = 44  # a session of 32 MiB in base64, and the names with it


class AgentApi:
    """The handlers."""

    def __init__(
        self,
        config: Config,
        token: str,
        models: Models,
        lease: AgentLease,
        reporter: Reporter,
        metrics: AgentMetrics,
        session: HttpSession,
        pieces: PieceApi,
        tls: PeerTls | None = None,
        doors: Doors | None = None,
        kv_pages: KvPageApi | None = None,
        sessions: SessionApi | None = None,
    ) -> None:
        """`token`: "" if only TLS is accepted. `doors`: of the engines, for what is asked over TLS."""
        self._tls = tls
        self._doors = doors
        self._config = config
        self._token = token
        self._models = models
        self._lease = lease
        self._reporter = reporter
        self._metrics = metrics
        self._session = session
        self._pieces = pieces
        self._kv_pages = kv_pages
        self._sessions = sessions

    def app(self) -> web.Application:
        """The application."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answered(request, handler)

        app = web.Application(
            client_max_size=self._config.server.max_body_mb << 20,
            middlewares=[middleware],
            handler_args={"access_log": None},
        )
        for path in ("/load_model", "/load"):
            app.router.add_post(path, self.load_model)
        app.router.add_post("/unload_model", self.unload_model)
        app.router.add_post("/heartbeat", self.heartbeat)
        app.router.add_post("/infer", self.infer)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        self._pieces.add_routes(app)
        if self._kv_pages is not None:
            self._kv_pages.add_routes(app, self._read)
        if self._sessions is not None:
            self._sessions.add_routes(app, self._read)
        return app

    async def load_model(self, request: web.Request) -> web.Response:
        """POST /load_model and /load."""
        body = decode_request(LoadModelRequest, await self._read(request), request.content_type)
        self._check_lease()
        if ":" in body.model_id:
            return await self._load_adapter(request, body)
        placement = await self._models.place(body)
        if body.wait:
            try:
                async with asyncio.timeout(body.timeout_ms / 1000):
                    await placement.wait()
            except TimeoutError:
                pass
        elif placement.state == "FAILED":
            await placement.wait()  # raises
        return await self._loaded(request, placement)

    async def _load_adapter(self, request: web.Request, body: LoadModelRequest) -> web.Response:
        load = await self._models.adapters.load(body)
        task = load.task
        if body.wait:
            await asyncio.wait([task], timeout=body.timeout_ms / 1000)
        if task.done() and not task.cancelled():
            task.result()  # raises
        if task.cancelled() or load.task.cancelled():  # whose end is no cancellation of this call
            raise ModelUnavailable(f"{body.model_id!r} was unloaded meanwhile", "model_id")
        if load.placement is not None and load.is_ready:
            return await self._loaded(request, load.placement, body.model_id)
        state = load.placement.state if load.placement is not None else "DOWNLOADING"
        progress = load.placement.progress if load.placement is not None else None  # of its model
        loading = "LOADING_TO_GPU" if state == "READY" else state
        answer = LoadModelResponse(status="loading", model_id=body.model_id, model_state=loading, progress=progress)
        return _json(answer, 202)

    async def unload_model(self, request: web.Request) -> web.Response:
        """POST /unload_model."""
        body = decode_request(UnloadModelRequest, await self._read(request), request.content_type)
        await self._models.unload(body.model_id, body.drop_cached, body.only_idle)
        self._reporter.files_changed()
        report = await self._reporter.report()
        level: CacheLevel = next(
            (one.cache_level for one in report.cached_models if body.model_id in one.names), "REMOTE"
        )
        return _json(UnloadModelResponse(status="success", model_id=body.model_id, cache_level=level))

    async def heartbeat(self, request: web.Request) -> web.Response:
        """POST /heartbeat."""
        body = decode_request(HeartbeatRequest, await self._read(request), request.content_type)
        if body.extend_lease:
            self._lease.extend()
        self._models.take_urls(body.signed)
        report = await self._reporter.report(body.prefixes_after)
        return _json(await self._doors.report(report) if self._doors is not None and request.secure else report)

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """POST /infer: the engine's answer, streamed."""
        raw = await self._read(request)
        body = decode_request(InferRequest, raw, request.content_type)
        self._check_lease()
        placement = self._models.find(body.model)
        engine = placement.engine
        if placement.state != "READY" or engine is None:
            why = f": {placement.error.message}" if placement.error is not None else "; try again later"
            raise ModelUnavailable(f"{body.model!r} is {placement.state}{why}", "model")
        if b'"path"' in raw:
            plain = msgspec.json.decode(raw)
            plain.pop("path", None)
            raw = to_json(plain)
        return await self._proxied(request, engine, body.path, raw)

    async def health(self, request: web.Request) -> web.Response:
        """GET /health, without a token."""
        return _json({"status": "degraded" if self._reporter.reasons() else "healthy"})

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        report = await self._reporter.report()
        return web.Response(
            body=self._metrics.render(report, self._models.standby.waiting),
            headers={"Content-Type": self._metrics.content_type},
        )

    # ------------------------------------------------------------------ parts

    async def _loaded(self, request: web.Request, placement: Placement, name: str = "") -> web.Response:
        """`name`: of the adapter that was asked for; "": of none."""
        one = self._reporter.loaded(placement)
        is_ready = one.model_state == "READY"
        answer = LoadModelResponse(
            status="success" if is_ready else "loading",
            model_id=name or one.model_id,
            model_state=one.model_state,
            inference_endpoint_url=one.inference_endpoint_url,
            engine_key=one.engine_key if is_ready else "",
            digest=one.digest,
            progress=one.progress,
        )
        if self._doors is not None and request.secure:
            answer = await self._doors.loaded(answer, one.engine_url)
        return _json(answer, 200 if is_ready else 202)

    def _check_lease(self) -> None:
        if not self._lease.is_valid:
            raise ModelUnavailable("this agent's lease has ended, so that it must not serve; try another agent")

    async def _read(self, request: web.Request) -> bytes:
        """The body. Raises `TooLarge`, a 408."""
        if request.path == TAKE_SESSION:
            request = request.clone(client_max_size=self._most_mb(request) << 20)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except TimeoutError:
            late = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
            raise StarlingError("INVALID_REQUEST", late, status=408) from None

    async def _proxied(self, request: web.Request, engine: Engine, path: str, raw: bytes) -> web.StreamResponse:
        """Send the body to the engine, and its answer to the client as it comes. A client that leaves ends both."""
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers["Authorization"] = f"Bearer {engine.key}"
        silent_s = self._config.server.request_timeout_ms / 1000 + ANSWER_MARGIN_S
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silent_s)
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                "POST", engine.url + path, data=raw, headers=headers, timeout=timeout
            ) as answer:
                back = {name: answer.headers[name] for name in PASSED_BACK if name in answer.headers}
                response = web.StreamResponse(status=answer.status, headers=back)
                if answer.content_length is not None:
                    response.content_length = answer.content_length
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            if response is not None and response.prepared:
                # Another answer cannot follow the part that was sent: the end of the connection says so.
                if request.transport is not None:
                    request.transport.abort()
                return response
            raise InferenceError(f"the engine does not answer: {error}; try again", status=503) from None

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        status, error = 499, ""
        known = request.match_info.route.resource
        route = known.canonical if known is not None else "other"  # of a path, which may have a ticket in it
        try:
            try:
                self._authenticate(request)
                response = await handler(request)
            except web.HTTPException as rejected:
                raise self._translated(request, rejected) from None
        except StarlingError as raised:
            status, error = raised.status, raised.code
            return _failed(raised)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("internal error", extra={"path": route})
            status, error = 500, "INTERNAL"
            return _failed(StarlingError("INTERNAL", "internal error of the agent; its log has the details"))
        else:
            status = response.status
            return response
        finally:
            self._metrics.answered(route, status)
            if error:
                log.info("request refused", extra={"path": route, "status": status, "code": error})

    def _authenticate(self, request: web.Request) -> None:
        """Raises `Unauthenticated`, `Forbidden`. A certificate is checked with each request: it may be denied since."""
        shown = request.get_extra_info("peercert") if request.secure else None
        if shown and self._tls is not None:
            if reason := self._tls.refusal(shown, *_open_to(request.path)):
                raise Forbidden(reason)
        elif request.path != "/health":
            header = request.headers.get("Authorization")
            if request.path != "/metrics" or not tokens.reads_metrics(header, self._token):
                tokens.check(header, self._token)

    def _most_mb(self, request: web.Request) -> int:
        """The bound of its body, MiB."""
        least = SESSION_MB if request.path == TAKE_SESSION else 0
        return max(self._config.server.max_body_mb, least)

    def _translated(self, request: web.Request, rejected: web.HTTPException) -> StarlingError:
        match rejected:
            case web.HTTPRequestEntityTooLarge():
                limit = self._most_mb(request)
                key = " (server.max_body_mb)" if limit == self._config.server.max_body_mb else ""
                return TooLarge(f"the body is larger than {limit} MiB{key}; send less")
            case web.HTTPMethodNotAllowed():
                return method_not_allowed(request.path, request.method, rejected.allowed_methods)
            case web.HTTPNotFound():
                return NotFound(
                    f"unknown path {request.path[:200]}; an agent has /load_model, /load, /unload_model, /heartbeat, "
                    f"/infer, /pieces, /give_pages, /take_pages, /kv_pages, /list_prefixes, /give_prefixes, "
                    f"/take_prefixes, /list_sessions, /give_session, "
                    f"/take_session, /move_session, /health and /metrics; chat is at the engine's {CHAT_PATH}"
                )
        return StarlingError("INVALID_REQUEST", rejected.reason, status=rejected.status)


def _open_to(path: str) -> tuple[Role, ...]:
    return next((roles for prefix, roles in OPEN_TO if path.startswith(prefix)), ("orchestrator",))


def _json(answer: object, status: int = 200) -> web.Response:
    return web.Response(body=to_json(answer), status=status, content_type=CONTENT_TYPE)


def _failed(error: StarlingError) -> web.Response:
    found = error_response(error)
    return web.Response(body=found.body, status=found.status, headers=found.headers, content_type=CONTENT_TYPE)
