"""What happens to every HTTP request before and after its handler.

Before: the start time, the request id and the API key.  After: errors become JSON bodies, headers are added, and the
request is counted and logged.  An error after a response has begun aborts the connection: a second response would be
read as the answer to the client's next request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from pipeline.api import page_names, response_context
from pipeline.api.body_names import BodyNames
from pipeline.api.fair_shares import address_principal
from pipeline.api.forwarded import TrustedProxies
from pipeline.api.keys import MODELS, Caller
from pipeline.api.output_tokens import RELAY, read_relay
from pipeline.api.request_name import HEADER as REQUEST_NAME
from pipeline.config.schema import Config
from pipeline.errors import Forbidden, Overloaded, StarlingError
from pipeline.ipc.tcp_transport import reset
from pipeline.observe.log_names import log_names
from stages.gateway.http.administration import is_administration, needs_key
from stages.gateway.http.connection import BEGUN, Connection
from stages.gateway.http.context import (
    CALLER,
    CLIENT,
    CLIENT_ID,
    GATE,
    KEPT,
    NAMES,
    PAGES,
    PRINCIPAL,
    SCHEME,
    SERVICE,
    STARTED_AT,
    STATE,
    TIMELINE,
    TRACE,
    Handler,
    is_anthropic,
    log_id,
    request_id,
)
from stages.gateway.http.errors import error_of, to_response
from stages.gateway.metrics import source_of
from stages.gateway.service import Service
from stages.gateway.tracing.spans import HttpCall
from stages.gateway.tracing.trace_context import TRACEPARENT, TRACESTATE
from stages.gateway.tracing.tracer import Tracer

log = logging.getLogger("starling.gateway.http")

CLIENT_CLOSED = 499  # in logs and metrics: the client closed the connection before a response
# Any origin, without cookies. The asterisk admits what clients add of their own, as `X-Stainless-Os` of the client
# `openai`; it never stands for `Authorization`, and old browsers read it as a name like any other.
CORS_HEADERS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": (
        "*, X-Request-Id, X-Starling-Request, X-Starling-Cache, Retry-After, x-ratelimit-limit-requests, "
        "x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
        "x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
    ),
}
PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": (
        "*, Authorization, Content-Type, X-Request-Id, Last-Event-ID, Idempotency-Key, X-Api-Key, "
        "Anthropic-Version, Anthropic-Beta, Anthropic-Dangerous-Direct-Browser-Access"
    ),
    "Access-Control-Max-Age": "86400",
}
_CLIENT_ID = re.compile(r"[!-~]{1,128}")  # a valid X-Request-Id


def make_middleware(config: Config, service: Service) -> Middleware:
    """Return the one middleware of the application."""
    keys = service.api_keys
    has_cors = config.server.enable_cors
    logs_requests = config.logging.log_requests
    tracer = service.tracer
    proxies = TrustedProxies(config.server.trusted_proxies)
    has_proxies = bool(proxies)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = request[STARTED_AT] = service.clock()
        connection = request.protocol
        client = connection.peer if isinstance(connection, Connection) else request.remote or ""
        if has_proxies:
            client = _forwarded_client(request, proxies, client)
        request[CLIENT] = client
        given = request.headers.get("X-Request-Id", "")
        request[CLIENT_ID] = given if _CLIENT_ID.fullmatch(given) else ""
        status = CLIENT_CLOSED
        error: StarlingError | None = None
        request.app[GATE].head_received(request.protocol)
        if tracer is not None and request.path.startswith("/v1/"):
            headers = request.headers
            request[TRACE] = tracer.begin(headers.getall(TRACEPARENT, ()), headers.getall(TRACESTATE, ()))
        try:
            if has_cors and request.method == "OPTIONS":
                response: web.StreamResponse = web.Response(status=204)
            else:
                if needs_key(request.path):
                    await keys.follower.refresh()
                    request[CALLER] = keys.caller(
                        request.headers.get("Authorization"), request.headers.get("X-Api-Key")
                    )
                    if (relay := request.headers.get(RELAY)) is not None:
                        own, request[CALLER] = request[CALLER], _relayed(request[CALLER], relay, has_keys=bool(keys))
                        service.has_relayed_tenants |= request[CALLER] is not own
                    request[PRINCIPAL] = request[CALLER].principal if keys else address_principal(client)
                    if not is_administration(request.path):  # whose handlers require an administrator's key
                        request[CALLER].require(MODELS)
                    if request.app[GATE].is_reserved(request.protocol):
                        _check_reserved(request, service)
                response = await handler(request)
            status = response.status
            state = request.get(STATE)
            error = state.error if state is not None else None
            return response
        except web.HTTPException as rejected:
            error = error_of(request, rejected, config)
            status = error.status
            return _report(request, error)
        except StarlingError as raised:
            # The traceback refers to this frame and the frame to the error: the cycle would stay until a collection.
            error = raised.with_traceback(None)
            status = error.status
            return _report(request, error)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("internal error", extra={"path": request.path, **_log_names(request)})
            error = StarlingError("INTERNAL", "internal error of the server; the server's log has the details")
            status = error.status
            return _report(request, error)
        finally:
            took = service.clock() - started
            endpoint = _endpoint(request)
            caller = request.get(CALLER)
            tenant = caller.tenant if caller else ""
            state = request.get(STATE)
            source = source_of(request.get(TRACE), state.id if state is not None else "")
            service.metrics.answered(endpoint, status, took, error.code if error else "", tenant, source)
            if tracer is not None and TRACE in request:
                _report_call(request, service, tracer, status, took, error)
            if logs_requests:
                _log_request(request, endpoint, status, took, error)

    return middleware


def _relayed(caller: Caller, given: str, *, has_keys: bool) -> Caller:
    """The caller for whom an orchestrator forwards a request. Raises `Forbidden`, `InvalidRequest`."""
    if has_keys and not caller.is_admin:
        raise Forbidden(f"{RELAY} needs an API key with the scope admin; leave it out")
    relayed = read_relay(given)
    return caller._replace(tenant=relayed.tenant, priority=relayed.priority) if relayed.tenant else caller


def _forwarded_client(request: web.Request, proxies: TrustedProxies, peer: str) -> str:
    """The address of the client, and the scheme that it has used as `request[SCHEME]`."""
    headers = request.headers
    found = proxies.client(
        peer,
        headers.getall("X-Forwarded-For", []),
        headers.getall("Forwarded", []),
        headers.getall("X-Forwarded-Proto", []),
    )
    request[SCHEME] = found.scheme
    return found.address


def _report(request: web.Request, error: StarlingError) -> web.StreamResponse:
    """Return the response that reports `error`; abort the connection if another response has begun."""
    begun = request.get(BEGUN)
    if begun is None:
        return to_response(request, error)
    log.info("a response was cut off", extra={**_log_names(request), "reason": error.message})
    if request.transport is not None:
        reset(request.transport)
    return begun  # aiohttp cannot write its end to the aborted connection, and closes it


def _check_reserved(request: web.Request, service: Service) -> None:
    """Raises `Overloaded` for a request that the reserve of connections is not for."""
    if is_administration(request.path) and request[CALLER].is_admin:
        return
    if service.in_flight.bounds.held_by(request[PRINCIPAL]):
        raise Overloaded("the server has reached its connection limit; close other connections", retry_after_s=1.0)


def make_header_setter(config: Config) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return the handler of `on_response_prepare`, which adds the headers that every response has."""
    has_cors = config.server.enable_cors
    metrics_path = config.metrics.endpoint

    async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
        request[BEGUN] = response
        response.headers["Server"] = "starling"
        if _is_last(request):
            response.force_close()
            response.headers["Connection"] = "close"
        # A stream that waits for its model has an id and no state yet.
        name = request.get(CLIENT_ID, "") or response.headers.get(REQUEST_NAME) or request_id(request)
        response.headers["X-Request-Id"] = name
        if is_anthropic(request):
            response.headers["Request-Id"] = name
        if (caller := request.get(CALLER)) is not None:
            response.headers.update(request.app[SERVICE].admission.rate_limit_headers(caller))
        if (context := request.get(TRACE)) is not None:
            response.headers.update(context.headers)
        state = request.get(STATE)
        if state is not None:
            response.headers[REQUEST_NAME] = state.id
            if pages := request.get(PAGES):
                response.headers[page_names.HEADER] = pages
            if kept := request.get(KEPT):
                response.headers[response_context.KEPT_HEADER] = str(kept)
            if state.response_cache:
                response.headers["X-Starling-Cache"] = state.response_cache
        if has_cors and request.path != metrics_path:
            response.headers.update(CORS_HEADERS)
            if request.method == "OPTIONS":
                response.headers.update(PREFLIGHT_HEADERS)

    return set_headers


def _is_last(request: web.Request) -> bool:
    """Whether the connection is to be closed after the response."""
    connection = request.protocol
    if isinstance(connection, Connection) and connection.is_half_closed and not connection.has_next:
        return True
    return request.app[SERVICE].readiness.is_handing_over or request.app[GATE].is_reserved(connection)


def _report_call(
    request: web.Request, service: Service, tracer: Tracer, status: int, took: float, error: StarlingError | None
) -> None:
    """Send the span of a request, unless its timeline has the same trace context and is sent when it ends."""
    state, context = request.get(STATE), request[TRACE]
    timeline = state.trace if state is not None else request.get(TIMELINE)
    if timeline is not None and timeline.context is context:
        return
    caller = request.get(CALLER)
    call = HttpCall(
        request.method,
        _endpoint(request),
        status,
        service.wall() - took,
        took,
        os.getpid(),
        caller.tenant if caller else "",
        request[CLIENT_ID],
        error.code if error else "",
        state.id if state is not None else "",
    )
    tracer.answered(context, call)


def _endpoint(request: web.Request) -> str:
    """The route's pattern, not the path: clients must not be able to create metric labels."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def _names(request: web.Request) -> BodyNames:
    """The model and the session that a request names, if its body was read; the first model if it names none."""
    names = request.get(NAMES)
    if names is None:
        return BodyNames()
    if not names.model:
        with suppress(StarlingError):
            names = names._replace(model=request.app[SERVICE].catalog.resolve(""))
    return names


def _log_names(request: web.Request) -> dict[str, str | None]:
    """What every log line about the request names; as far as it was read. The tenant is who has sent it."""
    caller, state = request.get(CALLER), request.get(STATE)
    tenant = caller.tenant if caller else ""
    if state is not None:
        return log_names(state.id, state.spec.model, tenant, state.session_id)
    names = _names(request)
    return log_names(log_id(request), names.model, tenant, names.session_id)


def _log_request(request: web.Request, endpoint: str, status: int, took: float, error: StarlingError | None) -> None:
    fields: dict[str, Any] = {
        **_log_names(request),
        "client_request_id": request[CLIENT_ID] or None,
        "method": request.method,
        "endpoint": endpoint,
        "status": status,
        "duration_ms": round(took * 1000, 1),
        "client": request[CLIENT],
    }
    if scheme := request.get(SCHEME):
        fields["scheme"] = scheme
    state = request.get(STATE)
    if state is not None:
        begun = state.first_token_at
        fields |= {
            "prompt_tokens": state.prompt_tokens,
            "cached_tokens": state.cached_tokens,
            "completion_tokens": state.completion_tokens,
            "first_token_ms": round((begun - state.started_at) * 1000, 1) if begun else None,
            "finish": state.outcome.value,
        }
    if error is not None:
        fields |= {"error": error.code, "param": error.param or None}
        # Messages about a request's fields quote their values: prompts, schemas, names of sessions.
        if status >= 500 or status == 429:
            fields["reason"] = error.message
    # /ready is polled: stage.py logs the change of readiness, not each response.
    is_routine = (status < 400 and state is None) or endpoint == "/ready"
    level = logging.DEBUG if is_routine else logging.WARNING if status >= 500 else logging.INFO
    log.log(level, "request", extra=fields)
