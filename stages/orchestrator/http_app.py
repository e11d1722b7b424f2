"""The orchestrator's HTTP API: the routes of a server, for the whole fleet.

Every request is checked for its key and counted within the bounds of its tenant, as in a server; errors have the same
form.  Bodies are forwarded as they were sent.  aiohttp's types are used here, and no sockets.  Plain requests for text
come from text_connection.py, with what the handlers use of aiohttp's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.hdrs import METH_HEAD

from pipeline.api import message_version, sse
from pipeline.api.body_names import BodyNames, names_of
from pipeline.api.error_response import error_response
from pipeline.api.fair_shares import address_principal
from pipeline.api.idempotency_key import HEADER as KEY
from pipeline.api.idempotency_key import other_body
from pipeline.api.json_body import CONTENT_TYPE, to_json
from pipeline.api.keys import MODELS, Caller
from pipeline.api.malformed_http import TO_RESPONSE
from pipeline.api.unsupported_paths import unsupported_path
from pipeline.errors import Forbidden, ModelNotFound, NotFound, StarlingError, TooLarge, method_not_allowed
from pipeline.observe import logs
from stages.orchestrator.event_response import BEGUN, EventResponse, send_whole
from stages.orchestrator.fleet_api import FleetApi
from stages.orchestrator.forward import Forward, Refusal
from stages.orchestrator.front import Front, Ticket
from stages.orchestrator.head_facts import head_facts
from stages.orchestrator.pages import Pages
from stages.orchestrator.read_body import OTHER_PATHS, TEXT_PATHS
from stages.orchestrator.responses.jobs import Job
from stages.orchestrator.responses.keeping import AfterOut
from stages.orchestrator.slots import hold_answer, hold_body
from stages.orchestrator.upstream import Unreachable

log = logging.getLogger("starling.orchestrator.http")

FRONT = web.AppKey("front", Front)
FLEET = web.AppKey("fleet", FleetApi)
CALLER = web.RequestKey("caller", Caller)
PRINCIPAL = web.RequestKey("principal", str)
REQUEST_ID = web.RequestKey("request_id", str)  # of the response: the client's, if it sends one
OWN_ID = web.RequestKey("own_id", str)  # of a request that has no ticket, or is refused before it has one
NAMED = web.RequestKey("named", dict[str, Any])  # the model and the session of its body
FORWARD = web.RequestKey("forward", Forward)

SERVER = {"Server": "starling"}
BODY_TIMEOUT_S = 30.0
CLIENT_CLOSED = 499
_ANSWERED = ("content-type", "retry-after", "x-should-retry", "x-starling-cache")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(front: Front, fleet: FleetApi, pages: Pages | None = None) -> web.Application:
    """The application, ready for a runner. `pages`: its description."""
    config = front.config
    app = web.Application(
        client_max_size=config.server.max_body_mb << 20,
        middlewares=[_middleware],
        handler_args={"access_log": None, "auto_decompress": False},
    )
    app[FRONT], app[FLEET], app[TO_RESPONSE] = front, fleet, _report
    app.on_response_prepare.append(_set_headers)
    for path in TEXT_PATHS:
        app.router.add_post(path, _generate)
    for path in OTHER_PATHS:
        app.router.add_post(path, _convert)
    app.router.add_get("/v1/requests/{id}", _get_request)
    app.router.add_delete("/v1/requests/{id}", _cancel_request)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{id:.+}", _model)
    app.router.add_get("/v1/engines", _redirect_engines)
    app.router.add_get("/v1/engines/{id:.+}", _redirect_engines)
    reads: dict[str, tuple[str, Callable[[FleetApi, web.Request], Any]]] = {
        "": ("The agents, models and loads of the fleet.", lambda api, request: api.state()),
        "/events": (
            "What has happened, after the event with the number `after`.",
            lambda api, request: api.events(request.query.get("after", "0")),
        ),
        "/why/{id}": (
            "Each agent's score for a request, and the choices.",
            lambda api, request: api.why(request.match_info["id"]),
        ),
    }
    for path, (summary, read) in reads.items():
        app.router.add_get(f"/v1/fleet{path}", _admin(read, summary))
    for op, summary in (
        ("place", "Keeps a model loaded on a number of agents."),
        ("cordon", "Cordons, drains or uncordons an agent."),
    ):
        app.router.add_post(f"/v1/fleet/{op}", _admin_change(op, summary))
    if pages is not None:
        pages.add_routes(app, front.needs_key)
    return app


# ------------------------------------------------------------------ every request


@web.middleware
async def _middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    front = request.app[FRONT]
    started, status = front.clock(), CLIENT_CLOSED
    error: StarlingError | None = None
    facts, path = head_facts(request), request.path
    request[REQUEST_ID] = facts.client_id
    try:
        is_fleets = path.startswith("/v1/fleet")
        if is_fleets and front.is_operator(facts.authorization):
            request[CALLER], request[PRINCIPAL] = Caller("operator", is_admin=True), "operator"
        elif path.startswith("/v1/"):
            await front.keys.follower.refresh()
            caller = request[CALLER] = front.keys.caller(facts.authorization, facts.api_key)
            if not is_fleets:  # whose handlers require an administrator's key
                caller.require(MODELS)
            request[PRINCIPAL] = caller.principal if front.keys else address_principal(_client(request))
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as rejected:
        error = _rejection(request, rejected)
        status = error.status
        return _report(request, error)
    except StarlingError as raised:
        error = raised.with_traceback(None)
        status = error.status
        return _report(request, error)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("internal error", extra={**_log_names(request, None), "path": request.path})
        error = StarlingError("INTERNAL", "internal error of the orchestrator; its log has the details")
        status = error.status
        return _report(request, error)
    finally:
        # In the next round of the loop, before anything else is received: the end of the response does not wait for it.
        asyncio.get_running_loop().call_soon(_note, request, status, error, front.clock() - started)


def _client(request: web.Request) -> str:
    """The address of a client, also behind trusted proxies."""
    peer, proxies, headers = request.remote or "", request.app[FRONT].proxies, request.headers
    if not proxies:
        return peer
    return proxies.client(peer, headers.getall("X-Forwarded-For", []), headers.getall("Forwarded", [])).address


def _note(request: web.Request, status: int, error: StarlingError | None, took_s: float) -> None:
    """Count an answer, and log it."""
    front, path = request.app[FRONT], request.path
    resource = request.match_info.route.resource
    endpoint = resource.canonical if resource is not None else "other"
    is_clients = CALLER in request and not path.startswith("/v1/fleet")
    front.traffic.answered(endpoint, status, took_s, error, request[CALLER].tenant if is_clients else "")
    if FORWARD in request:
        front.prepare(request[CALLER].tenant)
    if not front.config.logging.log_requests or not path.startswith("/v1/"):
        return
    # An event has a budget of lines: one who watches the fleet must not use up that of the clients' requests.
    level = logging.WARNING if status >= 500 else logging.INFO
    is_operators = path.startswith("/v1/fleet")
    level = logging.DEBUG if is_operators and request.method == "GET" and status < 400 else level
    if not log.isEnabledFor(level) or logs.suppresses(log, level, "fleet request" if is_operators else "request"):
        return
    facts = {
        **_log_names(request, error),
        "endpoint": endpoint,
        "status": status,
        "duration_ms": round(took_s * 1000, 1),
        "error": error.code if error is not None else None,
        "param": (error.param or None) if error is not None else None,
    }
    if is_operators:
        log.log(level, "fleet request", extra=facts)
    else:
        log.log(level, "request", extra=facts)


def _log_names(request: web.Request, error: StarlingError | None) -> dict[str, str | None]:
    """The ids and names that a log line about the request has."""
    forward, caller = request.get(FORWARD), request.get(CALLER)
    if NAMED in request:
        named: dict[str, Any] = request[NAMED]
        names = names_of(named)
    else:
        names = BodyNames(*error.names) if error is not None else BodyNames()
    return {
        "request_id": (forward.id if forward is not None else "") or _own_id(request),
        "client_request_id": head_facts(request).client_id or None,
        "tenant": caller.tenant if caller is not None else None,
        "model": names.model or None,
        "session_id": names.session_id or None,
    }


def _own_id(request: web.Request) -> str:
    """The server's id of a request that has no ticket."""
    if OWN_ID not in request:
        request[OWN_ID] = f"req-{secrets.token_hex(12)}"
    return request[OWN_ID]


def _shown_id(request: web.Request) -> str:
    """The client's id, the request's, or a new one where it has none: the log has it, and an error's body."""
    return request.get(REQUEST_ID) or _own_id(request)


def _report(request: web.Request, error: StarlingError) -> web.StreamResponse:
    if request.get(BEGUN):  # a second response would be read as the answer to the client's next request
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=error.status)
    is_anthropic = request.path.startswith(message_version.PATH)
    shown = error_response(error, is_anthropic=is_anthropic, request_id=_shown_id(request))
    return web.Response(body=shown.body, status=shown.status, headers=shown.headers, content_type=CONTENT_TYPE)


def _rejection(request: web.Request, rejected: web.HTTPException) -> StarlingError:
    match rejected:
        case web.HTTPRequestEntityTooLarge():
            return _too_large(request.app[FRONT].config.server.max_body_mb)
        case web.HTTPMethodNotAllowed():
            return method_not_allowed(request.path, request.method, rejected.allowed_methods)
        case web.HTTPNotFound():
            if unsupported := unsupported_path(request.path, of_fleet=True):
                return unsupported
            return NotFound(f"unknown path {request.path[:200]}; the paths for text are {', '.join(TEXT_PATHS)}")
    return StarlingError("INVALID_REQUEST", rejected.reason, status=rejected.status)


def _too_large(limit_mb: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit_mb} MiB ({limit_mb << 20} bytes, server.max_body_mb); send less")


async def _set_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(own_headers(request))
    if request.app[FLEET].is_stopping:
        response.force_close()
        response.headers["Connection"] = "close"


def own_headers(request: web.Request) -> dict[str, str]:
    """The headers that every response has."""
    name, caller, path = _shown_id(request), request.get(CALLER), request.path
    found = {**SERVER, "X-Request-Id": name}
    if path.startswith(message_version.PATH):
        found["Request-Id"] = name
    if caller is not None and not path.startswith("/v1/fleet"):
        found |= request.app[FRONT].quotas.headers(caller.tenant, caller.key_id)
    return found


async def handle_text(request: web.Request) -> web.StreamResponse:
    """Answer a request for a path of `TEXT_PATHS` as the application does."""
    return await _middleware(request, _generate)


# ------------------------------------------------------------------ text


async def _generate(request: web.Request) -> web.StreamResponse:
    """POST: text, from the agent that is expected to answer first."""
    front = request.app[FRONT]
    _check_version(request)
    with front.counted(request[PRINCIPAL]):
        return await send_whole(request, await _text(request, front))  # after the turn: the next request may follow


async def _text(request: web.Request, front: Front) -> web.StreamResponse:
    caller, facts = request[CALLER], head_facts(request)
    await front.take_request(caller)
    ticket = await front.ticket(
        caller, request.path, await body_of(request), headers_of(request), facts.key, facts.last_id
    )
    try:
        if ticket.stored:
            hold_answer(len(ticket.stored))
            request[FORWARD], request[REQUEST_ID] = ticket.forward, request[REQUEST_ID] or ticket.forward.id
            request[NAMED] = dict[str, Any](model=ticket.forward.routed.model)
            headers = {"X-Starling-Request": ticket.forward.id}
            return web.Response(body=ticket.stored, headers=headers, content_type=CONTENT_TYPE)
        if ticket.job is not None:
            return await _in_background(request, front, ticket.job)
        return await answer(request, front, ticket)
    except (ConnectionError, asyncio.CancelledError):
        await front.left(ticket)
        raise
    finally:
        await ticket.turn.end()


async def _in_background(request: web.Request, front: Front, job: Job) -> web.StreamResponse:
    """Begin a response in the background, and send it as it is now, or its stream."""
    background = front.responses.background
    assert background is not None
    request[OWN_ID] = job.request_id
    shown = await background.begin(job)
    if job.is_stream:
        find = partial(front.ticket_of, request[CALLER], job.request_id, "", is_body_held=True)
        ticket = await background.once_begun(job.request_id, find)
        return await answer(request, front, ticket._replace(is_charged=False, queued=job.shown))
    headers = {"X-Starling-Request": job.request_id}
    return web.Response(body=shown, headers=headers, content_type=CONTENT_TYPE)


async def answer(request: web.Request, front: Front, ticket: Ticket, after: int = -1) -> web.StreamResponse:
    """Forward a request, and answer it. `after`: the sequence number of the last event that is left out."""
    request[FORWARD] = ticket.forward
    request[NAMED] = dict[str, Any](model=ticket.forward.routed.model, session_id=ticket.session)
    request[REQUEST_ID] = request[REQUEST_ID] or ticket.forward.id
    try:
        if ticket.forward.is_stream:
            headers = {**own_headers(request), "X-Starling-Request": ticket.forward.id}
            is_anthropic = ticket.forward.path == message_version.PATH
            is_last, silent_s = request.app[FLEET].is_stopping, front.config.server.sse_ping_interval_s
            with EventResponse(request, headers, is_anthropic=is_anthropic, is_last=is_last, silent_s=silent_s) as out:
                await front.stream(ticket, AfterOut(out, after) if after >= 0 else out)
                return await out.end()
        status, headers, body = await front.whole(ticket)
    except Refusal as refusal:
        if refusal.is_of_key:  # the engine names the key by a hash
            raise other_body(request.headers.get(KEY, "")) from None
        return _passed_on(refusal.status, refusal.headers, refusal.body, ticket.forward)
    except Unreachable as error:
        raise StarlingError("MODEL_UNAVAILABLE", str(error)) from None
    return _passed_on(status, headers, body, ticket.forward)


def _passed_on(status: int, headers: Mapping[str, str], body: bytes, forward: Forward) -> web.Response:
    kept = {name: value for name, value in headers.items() if name.lower() in _ANSWERED}
    if forward.routed.request_id.startswith("req-"):
        kept["X-Starling-Request"] = forward.id
    return web.Response(body=body, status=status, headers=kept)


async def _convert(request: web.Request) -> web.StreamResponse:
    """POST: tokens, counts, vectors, and the end of sessions: one engine answers."""
    front = request.app[FRONT]
    _check_version(request)
    with front.counted(request[PRINCIPAL]):
        await front.take_request(request[CALLER])
        ticket = await front.plain_ticket(request[CALLER], request.path, await body_of(request), headers_of(request))
        return await send_whole(request, await answer(request, front, ticket))


async def _get_request(request: web.Request) -> web.StreamResponse:
    """GET /v1/requests/ID: a stream from `Last-Event-ID` on, or an answer once more. HEAD: which of them."""
    front = request.app[FRONT]
    with front.counted(request[PRINCIPAL]):
        last_id = request.headers.get("Last-Event-ID", "")
        ticket = await front.ticket_of(request[CALLER], request.match_info["id"], last_id)
        if request.method == METH_HEAD:  # a body would be read as the answer to the client's next request
            headers = sse.HEADERS if ticket.forward.is_stream else {"Content-Type": CONTENT_TYPE}
            return web.Response(headers={**headers, "X-Starling-Request": ticket.forward.id})
        return await send_whole(request, await answer(request, front, ticket))


async def _cancel_request(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/requests/ID: cancel a request in flight. Its readers get an error.

    It is counted apart: a tenant that has as many requests in flight as it may have must be able to end them all.
    """
    front, name = request.app[FRONT], request.match_info["id"]
    with front.counted(request[PRINCIPAL], is_cancellation=True):
        await front.cancel(request[CALLER], name)
    return _json({"id": name, "cancelled": True})


def _check_version(request: web.Request) -> None:
    if request.path.startswith(message_version.PATH):
        message_version.check(request.headers.get(message_version.HEADER))


async def body_of(request: web.Request) -> bytes:
    """The body of a request; it counts until the request has ended.

    Raises `TooLarge`, `Overloaded`, and a 408 for one that is late.
    """
    limit_mb = request.app[FRONT].config.server.max_body_mb
    if request.content.is_eof():  # a short body has come with its head
        body = request.content.read_nowait()
        if len(body) > limit_mb << 20:
            raise _too_large(limit_mb)
        hold_body(len(body))
        return body
    if (request.content_length or 0) > limit_mb << 20:
        raise _too_large(limit_mb)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _receive(request, limit_mb)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
        raise StarlingError("INVALID_REQUEST", message, status=408) from None


async def _receive(request: web.Request, limit_mb: int) -> bytes:
    """The parts of a body, each counted as it comes."""
    parts, size = [], 0
    while part := await request.content.readany():
        size += len(part)
        if size > limit_mb << 20:
            raise _too_large(limit_mb)
        hold_body(len(part))
        parts.append(part)
    return b"".join(parts)


def headers_of(request: web.Request) -> dict[str, str]:
    """The headers of a request that go to engines."""
    passed_on, name = head_facts(request).passed_on, request[REQUEST_ID]
    return {**passed_on, "X-Request-Id": name} if name else {**passed_on}


# ------------------------------------------------------------------ the fleet


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(body), status=status, content_type=CONTENT_TYPE)


async def _models(request: web.Request) -> web.StreamResponse:
    """GET /v1/models."""
    return _json({"object": "list", "data": request.app[FLEET].models()})


async def _model(request: web.Request) -> web.StreamResponse:
    """GET /v1/models/ID."""
    name = request.match_info["id"]
    found = next((one for one in request.app[FLEET].models() if one["id"] == name), None)
    if found is None:
        raise ModelNotFound(f"there is no model {name[:200]!r}; GET /v1/models lists them", "model")
    return _json(found)


async def _redirect_engines(request: web.Request) -> web.StreamResponse:
    """GET /v1/engines and /v1/engines/ID: redirect to /v1/models, their newer name."""
    name = request.match_info.get("id", "")
    location = request.rel_url.with_path(f"/v1/models/{name}" if name else "/v1/models")
    return web.Response(status=308, headers={"Location": str(location), "Deprecation": "true"})


def _admin(read: Callable[[FleetApi, web.Request], Any], text: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        _check_admin(request)
        return _json(read(request.app[FLEET], request))

    handle.__doc__ = text
    return handle


def _admin_change(op: str, text: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        _check_admin(request)
        body = await body_of(request)
        return _json(await request.app[FLEET].change(op, body, request.headers.get("Content-Type", "")))

    handle.__doc__ = text
    return handle


def _check_admin(request: web.Request) -> None:
    if not request[CALLER].is_admin:
        raise Forbidden("this needs an API key with `admin: true`, or the fleet's token; use `starling fleet`")
