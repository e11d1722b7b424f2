"""The aiohttp application: routes, and what happens to every request on its way in and out.

One middleware takes the time, the request id, the caller's key, turns every failure into the error body,
counts and logs.  Handlers for text read the body, admit the request and then wait once, for its end; the
relay writes to the connection itself.  A client that goes away cancels the handler, and that its request,
unless somebody else reads it (`recovery.py`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

from aiohttp import HttpVersion11, web

from pipeline.config.schema import Config
from pipeline.errors import Conflict, Forbidden, InvalidRequest, ModelNotFound, NotFound, StarlingError, TooLarge
from pipeline.observe import exposition
from stages.gateway.admin import Admin
from stages.gateway.admission.limits import Caller, Keys
from stages.gateway.endpoints import chat, completions, generate
from stages.gateway.endpoints.formatter import ResponseFormatter, to_json
from stages.gateway.endpoints.generation_request import MAX_PROMPT_IDS, GenerationRequest
from stages.gateway.endpoints.tokenize import read_detokenize, read_tokenize, tokenized
from stages.gateway.http.body import parse_object
from stages.gateway.http.sse import EventStream, WholeAnswer
from stages.gateway.requests.event_cursor import EventCursor, parse_event_cursor
from stages.gateway.requests.prompts import check_range
from stages.gateway.requests.sessions import read_close
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.service import Service

log = logging.getLogger("starling.gateway.http")

BODY_TIMEOUT_S = 30.0  # from a request's head to the end of its body
LAST_BYTES_TIMEOUT_S = 30.0  # a client that does not take the end of its stream is left
CLIENT_CLOSED = 499  # in logs and metrics: nobody was there to be answered

_CLIENT_ID = re.compile(r"[!-~]{1,128}")
_CALLER = web.RequestKey("caller", Caller)
_RECORD = web.RequestKey("record", RequestState)
_CLIENT = web.RequestKey("client", str)
_STARTED = web.RequestKey("started", float)
SERVICE = web.AppKey("service", Service)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TextEndpoint(NamedTuple):
    """An endpoint that generates text: how its body is read and how its answer looks."""

    name: str  # GenerationRequest.endpoint
    path: str
    read: Callable[[dict[str, Any]], GenerationRequest]
    shape: Callable[[RequestState, TokenBytes], ResponseFormatter]


TEXT_ENDPOINTS = (
    TextEndpoint("generate", "/v1/generate", generate.read, generate.GenerateFormatter),
    TextEndpoint("chat", "/v1/chat/completions", chat.read, chat.ChatFormatter),
    TextEndpoint("completions", "/v1/completions", completions.read, completions.CompletionFormatter),
)


def make_app(config: Config, service: Service, admin: Admin | None = None) -> web.Application:
    """The application; serves as soon as a runner takes it."""
    app = web.Application(
        client_max_size=config.server.max_body_mb << 20,
        middlewares=[_around(config, service)],
        handler_args={"access_log": None},
    )
    app[SERVICE] = service
    app.on_response_prepare.append(_headers(config))
    for endpoint in TEXT_ENDPOINTS:
        app.router.add_post(endpoint.path, _text_handler(endpoint, config, service))
    app.router.add_get("/v1/requests/{id}", _request)
    app.router.add_post("/v1/session/close", _close_session)
    app.router.add_post("/v1/tokenize", _tokenize)
    app.router.add_post("/v1/detokenize", _detokenize)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{id:.+}", _model)
    app.router.add_get("/v1/engines", _engines)
    app.router.add_get("/v1/engines/{id:.+}", _engines)
    app.router.add_get("/health", _health)
    app.router.add_get("/ready", _ready)
    if admin is not None:
        app.router.add_get("/v1/admin/state", _admin_handler("state", config, admin))
        for op in ("drain", "resume", "load", "reload", "unload"):
            app.router.add_post(f"/v1/admin/{op}", _admin_handler(op, config, admin))
    if config.metrics.enabled:
        app.router.add_get(config.metrics.endpoint, _metrics)
    return app


# ------------------------------------------------------------------ around every request


def _around(config: Config, service: Service) -> Any:
    keys = Keys(config.auth)
    has_cors = config.server.enable_cors
    logs_requests = config.logging.log_requests

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = request[_STARTED] = service.clock()
        given = request.headers.get("X-Request-Id", "")
        request[_CLIENT] = given if _CLIENT_ID.fullmatch(given) else ""
        status = CLIENT_CLOSED
        error: StarlingError | None = None
        try:
            if has_cors and request.method == "OPTIONS":
                response: web.StreamResponse = web.Response(status=204)
            else:
                if request.path.startswith("/v1/"):
                    request[_CALLER] = keys.caller(request.headers.get("Authorization"))
                response = await handler(request)
            status = response.status
            record = request.get(_RECORD)
            error = record.error if record is not None else None
            return response
        except web.HTTPException as refused:
            error = _of_aiohttp(request, refused, config)
            status = error.status
            return _error_response(error)
        except StarlingError as raised:
            # Its traceback has this frame, and this frame the error: they would stay until a collection.
            error = raised.with_traceback(None)
            status = error.status
            return _error_response(error)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("a fault of the server", extra={"path": request.path, "request_id": _id(request)})
            error = StarlingError("INTERNAL", "a fault of the server; it is in the server's log")
            status = error.status
            return _error_response(error)
        finally:
            took = service.clock() - started
            endpoint = _endpoint(request)
            service.metrics.answered(endpoint, status, took, error.code if error else "")
            if logs_requests:
                _log_request(request, endpoint, status, took, error)

    return around


def _id(request: web.Request) -> str:
    record = request.get(_RECORD)
    return request.get(_CLIENT, "") or (record.id if record is not None else "")


def _endpoint(request: web.Request) -> str:
    """The route's pattern: a label must not be what clients make up."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def _headers(config: Config) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    has_cors = config.server.enable_cors

    async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "starling"
        if request.app[SERVICE].is_leaving:
            response.force_close()
            response.headers["Connection"] = "close"
        if request_id := _id(request):
            response.headers["X-Request-Id"] = request_id
        record = request.get(_RECORD)
        if record is not None and record.response_cache:
            response.headers["X-Starling-Cache"] = record.response_cache
        if has_cors:
            response.headers["Access-Control-Allow-Origin"] = "*"
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, X-Starling-Cache, Retry-After"
            if request.method == "OPTIONS":
                response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
                response.headers["Access-Control-Allow-Headers"] = (
                    "Authorization, Content-Type, X-Request-Id, Last-Event-ID"
                )
                response.headers["Access-Control-Max-Age"] = "86400"

    return set_headers


def _error_response(error: StarlingError) -> web.Response:
    headers = error.headers()
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        body=to_json(error.body()), status=error.status, headers=headers, content_type="application/json"
    )


def _of_aiohttp(request: web.Request, refused: web.HTTPException, config: Config) -> StarlingError:
    """aiohttp's own refusals in our words."""
    match refused:
        case web.HTTPRequestEntityTooLarge():
            return _too_large(config)
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(refused.allowed_methods))
            return StarlingError(
                "METHOD_NOT_ALLOWED", f"{request.method} is not possible on {request.path}; use {allowed}"
            )
        case web.HTTPNotFound():
            paths = ", ".join(endpoint.path for endpoint in TEXT_ENDPOINTS)
            return NotFound(f"there is nothing at {request.path[:200]}; for text there are {paths}")
    return StarlingError("INVALID_REQUEST", refused.reason, status=refused.status)


def _too_large(config: Config) -> StarlingError:
    most = config.server.max_body_mb
    return TooLarge(f"the body is larger than {most} MiB ({most << 20} bytes, server.max_body_mb); send less")


def _log_request(request: web.Request, endpoint: str, status: int, took: float, error: StarlingError | None) -> None:
    caller = request.get(_CALLER)
    fields: dict[str, Any] = {
        "request_id": _id(request) or None,
        "method": request.method,
        "endpoint": endpoint,
        "status": status,
        "duration_ms": round(took * 1000, 1),
        "tenant": caller.tenant if caller else None,
    }
    record = request.get(_RECORD)
    if record is not None:
        begun = record.first_token_at
        fields |= {
            "id": record.id,
            "model": record.model,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "first_token_ms": round((begun - record.started_at) * 1000, 1) if begun else None,
            "finish": record.outcome.value,
            "session_id": record.ask.turn.session if record.ask.turn else None,
        }
    if error is not None:
        fields |= {"error": error.code, "reason": error.message}
    # Who polls /ready is told so each time; the log has the change (stage.py).
    quiet = (status < 400 and record is None) or endpoint == "/ready"
    level = logging.DEBUG if quiet else logging.WARNING if status >= 500 else logging.INFO
    log.log(level, "request", extra=fields)


async def _read_body(request: web.Request, config: Config) -> dict[str, Any]:
    """The body as a JSON object, within the bounds of size and time."""
    if (request.content_length or 0) > config.server.max_body_mb << 20:
        raise _too_large(config)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
    except TimeoutError:
        raise StarlingError(
            "INVALID_REQUEST", f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s", status=408
        ) from None
    return parse_object(body, request.headers.get("Content-Type", ""))


# ------------------------------------------------------------------ text


def _text_handler(endpoint: TextEndpoint, config: Config, service: Service) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if mark := _mark(request):
            record = service.find(mark.request, request[_CALLER].tenant, mark)
            if record.ask.endpoint != endpoint.name:
                raise InvalidRequest(
                    f"Last-Event-ID names a request of another endpoint; use GET /v1/requests/{record.id}",
                    "Last-Event-ID",
                )
            return await _take_up(request, service, record, mark)
        service.refuse_new()
        service.in_flight += 1
        try:
            ask = endpoint.read(await _read_body(request, config))
            record = await service.admit(ask, request[_CALLER], request[_STARTED], request[_CLIENT])
            request[_RECORD] = record
            shape = _shape(service, record)
            sink = _sink(request, record, shape) if ask.stream else WholeAnswer()
            record.sink = sink
            service.open(record)
            try:
                return await _answer(request, sink, shape)
            finally:
                service.recovery.leave(record, sink)  # nothing, unless the client has gone
        finally:
            service.in_flight -= 1

    return handle


async def _request(request: web.Request) -> web.StreamResponse:
    """GET /v1/requests/ID: the answer of a request that was sent before, from `Last-Event-ID` on."""
    service = request.app[SERVICE]
    mark = _mark(request)
    name = request.match_info["id"]
    if mark is not None and mark.request != name:
        raise InvalidRequest(f"Last-Event-ID is of request {mark.request}, not of this one", "Last-Event-ID")
    record = service.find(name, request[_CALLER].tenant, mark)
    return await _take_up(request, service, record, mark)


def _mark(request: web.Request) -> EventCursor | None:
    given = request.headers.get("Last-Event-ID", "")
    return parse_event_cursor(given) if given else None


async def _take_up(
    request: web.Request, service: Service, record: RequestState, mark: EventCursor | None
) -> web.StreamResponse:
    """One more reader of a request, from `mark` on. A request that was not streamed has one whole answer."""
    request[_RECORD] = record
    shape = _shape(service, record)

    def begin(received: list[int]) -> EventStream | WholeAnswer:
        if record.ask.stream:
            stream = _sink(request, record, shape)
            stream.take_up(record, mark.places if mark is not None else (), received)
            return stream
        whole = WholeAnswer()
        if record.outcome is Outcome.FINISHED:
            whole.finished()
        elif record.error is not None:
            whole.failed(record.error)
        return whole

    service.in_flight += 1
    try:
        sink = await service.take_up(record, mark, begin)
        try:
            return await _answer(request, sink, shape)
        finally:
            service.recovery.leave(record, sink)
    finally:
        service.in_flight -= 1


def _shape(service: Service, record: RequestState) -> ResponseFormatter:
    """Raises `Conflict` for an answer whose logprobs nobody can name any more."""
    endpoint = next(e for e in TEXT_ENDPOINTS if e.name == record.ask.endpoint)
    pieces = service.relay.pieces.setdefault(record.vocabulary, TokenBytes())
    if not pieces and record.outcome is Outcome.FINISHED and any(s.logprobs for s in record.sequences):
        message = f"the vocabulary of {record.id} is not here any more, to name the tokens of its logprobs"
        raise Conflict(message)
    return endpoint.shape(record, pieces)


def _sink(request: web.Request, record: RequestState, shape: ResponseFormatter) -> EventStream:
    def drop(reason: str) -> None:
        log.warning("dropping a connection: %s", reason, extra={"request_id": record.id})
        if request.transport is not None:
            request.transport.abort()

    return EventStream(record, shape, drop)


async def _answer(
    request: web.Request, sink: EventStream | WholeAnswer, shape: ResponseFormatter
) -> web.StreamResponse:
    """What comes out of the sink, until its end."""
    if isinstance(sink, WholeAnswer):
        await sink.over
        return web.Response(body=shape.whole(), content_type="application/json")
    await sink.begun  # an error up to here is answered with its status
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold events back
        }
    )
    await response.prepare(request)
    if request.transport is None:
        raise ConnectionResetError("the client has gone")
    sink.attach(request.transport, request.version >= HttpVersion11)
    await sink.over
    sink.flush()
    with suppress(ConnectionResetError):  # the client has gone, or we end: there is nothing left to say to it
        async with asyncio.timeout(LAST_BYTES_TIMEOUT_S):
            await response.write_eof()
    return response


# ------------------------------------------------------------------ the others


async def _close_session(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    name, session_id = read_close(await _read_body(request, service.config))
    model = service.model_name(name)
    await service.sessions.close(model, request[_CALLER].tenant, session_id)
    return _json({"model": model, "session_id": session_id, "closed": True})


async def _tokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.refuse_new()
    service.in_flight += 1
    try:
        ask = read_tokenize(await _read_body(request, service.config))
        model = service.model_name(ask.model)
        with service.using(model) as instance:
            encoded = await service.questions.encode(
                instance.id,
                ask.text,
                add_bos=ask.add_bos,
                parse_special=ask.parse_special,
                offsets=True,
                most=MAX_PROMPT_IDS,
            )
        body = []
        for piece in tokenized(model, encoded):
            body.append(piece)
            await asyncio.sleep(0)  # others have their turn
    finally:
        service.in_flight -= 1
    return web.Response(body=b"".join(body), content_type="application/json")


async def _detokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.refuse_new()
    service.in_flight += 1
    try:
        ask = read_detokenize(await _read_body(request, service.config))
        model = service.model_name(ask.model)
        with service.using(model) as instance:
            described = await service.describe(instance)
            check_range(ask.tokens, "tokens[{}]", "tokens", described.vocab_size)
            text = await service.questions.decode(instance.id, ask.tokens, skip_special=ask.skip_special)
    finally:
        service.in_flight -= 1
    return _json({"model": model, "text": text})


async def _models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    return _json({"object": "list", "data": [_model_json(service, name) for name in service.instances.names]})


async def _model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    name = request.match_info["id"]
    if name not in service.instances.names:
        raise ModelNotFound(f"there is no model {name[:200]!r}; GET /v1/models lists them", "model")
    return _json(_model_json(service, name))


def _model_json(service: Service, name: str) -> dict[str, Any]:
    instance = service.instances.serving(name)
    described = service.described.get(instance.id) if instance is not None else None
    body: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": described.created if described else 0,
        "owned_by": "starling",
        "ready": not service.problem(name),
    }
    if described is not None and instance is not None:
        body |= {
            "context_length": service.bounds(instance).context,
            "vocab_size": described.vocab_size,
            "architecture": described.architecture,
            "parameters": described.parameters,
            "digest": described.digest,
            "chat": described.chat,
        }
    return body


async def _engines(request: web.Request) -> web.Response:
    """OpenAI's old name of models."""
    name = request.match_info.get("id", "")
    location = request.rel_url.with_path(f"/v1/models/{name}" if name else "/v1/models")
    return web.Response(status=308, headers={"Location": str(location), "Deprecation": "true"})


def _admin_handler(op: str, config: Config, admin: Admin) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if not request[_CALLER].is_admin:
            raise Forbidden("this takes an API key with `admin: true`; on the server itself, use `starling`")
        body = await _read_body(request, config) if request.method == "POST" else {}
        return _json(await admin.answer({**body, "op": op}))

    return handle


async def _health(request: web.Request) -> web.Response:
    """Liveness: this process answers. Whether it can serve is /ready's."""
    service = request.app[SERVICE]
    return _json(service.metrics.health("draining" if service.is_draining else "healthy"))


async def _ready(request: web.Request) -> web.Response:
    report = request.app[SERVICE].readiness()
    return _json(report, 200 if report["ready"] else 503)


async def _metrics(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.sample()
    body = exposition.render(service.config, service.metrics.numbers)
    return web.Response(body=body, headers={"Content-Type": exposition.CONTENT_TYPE})


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(body), status=status, content_type="application/json")
