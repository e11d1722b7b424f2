"""The aiohttp application: its routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from aiohttp import web

from pipeline.api.body_names import names_of
from pipeline.api.malformed_http import TO_RESPONSE
from pipeline.config.schema import Config
from pipeline.observe.scrapes import Scrapes
from pipeline.runtime.process import file_limit
from stages.gateway.admin import Admin
from stages.gateway.http import (
    adapter_endpoints,
    conversation_endpoints,
    embedding_endpoint,
    model_endpoints,
    probes,
    response_endpoints,
    text_endpoints,
    token_endpoints,
    web_endpoints,
)
from stages.gateway.http.administration import require_admin
from stages.gateway.http.connection_gate import ConnectionGate
from stages.gateway.http.context import (
    BACKLOGS,
    BODY_TURN,
    CALLER,
    GATE,
    NAMES,
    PARSERS,
    PRINCIPAL,
    SCRAPES,
    SERVICE,
    Handler,
    json_response,
)
from stages.gateway.http.errors import to_response
from stages.gateway.http.message_version import checked
from stages.gateway.http.middleware import make_header_setter, make_middleware
from stages.gateway.http.parser_pool import ParserPool
from stages.gateway.http.request_body import read_body
from stages.gateway.http.stream_backlogs import StreamBacklogs
from stages.gateway.service import Service


def make_app(config: Config, service: Service, admin: Admin | None = None) -> web.Application:
    """Return the application, ready for a runner. Without `admin` it has no administrative endpoints."""
    app = web.Application(
        client_max_size=config.server.max_body_mb << 20,
        middlewares=[make_middleware(config, service)],
        # A body is decompressed with bounds, and not by aiohttp in the event loop.
        handler_args={"access_log": None, "auto_decompress": False},
    )
    app[SERVICE], app[TO_RESPONSE] = service, to_response
    app.cleanup_ctx.append(_run_parsers)
    if service.plugins is not None:
        app.cleanup_ctx.append(_run_plugins)
    app[BACKLOGS] = StreamBacklogs(service.response_bytes)
    app[GATE] = ConnectionGate(
        config, file_limit(), lambda: service.metrics.numbers.add("starling_rejections_total", "OVERLOADED")
    )
    app.on_response_prepare.append(make_header_setter(config))
    for endpoint in text_endpoints.TEXT_ENDPOINTS:
        handler = text_endpoints.text_handler(endpoint, config, service)
        app.router.add_post(endpoint.path, checked(handler) if endpoint.name == "messages" else handler)
    app.router.add_post("/v1/messages/count_tokens", checked(token_endpoints.count_tokens))
    app.router.add_get("/v1/responses/{id}", response_endpoints.get_response)
    app.router.add_delete("/v1/responses/{id}", response_endpoints.delete_response)
    app.router.add_post("/v1/responses/{id}/cancel", response_endpoints.cancel_response)
    app.router.add_get("/v1/responses/{id}/input_items", response_endpoints.list_input_items)
    app.router.add_post("/v1/conversations", conversation_endpoints.create)
    app.router.add_get("/v1/conversations/{id}", conversation_endpoints.get)
    app.router.add_post("/v1/conversations/{id}", conversation_endpoints.update)
    app.router.add_delete("/v1/conversations/{id}", conversation_endpoints.delete)
    app.router.add_get("/v1/conversations/{id}/items", conversation_endpoints.list_items)
    app.router.add_post("/v1/conversations/{id}/items", conversation_endpoints.add_items)
    app.router.add_get("/v1/conversations/{id}/items/{item}", conversation_endpoints.get_item)
    app.router.add_delete("/v1/conversations/{id}/items/{item}", conversation_endpoints.delete_item)
    app.router.add_get("/v1/requests/{id}", text_endpoints.get_request)
    app.router.add_delete("/v1/requests/{id}", text_endpoints.cancel_request)
    app.router.add_post("/v1/session/close", _close_session)
    app.router.add_post("/v1/embeddings", embedding_endpoint.embeddings)
    app.router.add_post("/v1/rerank", embedding_endpoint.rerank)
    app.router.add_post("/v1/score", embedding_endpoint.score)
    app.router.add_post("/v1/tokenize", token_endpoints.tokenize)
    app.router.add_post("/v1/detokenize", token_endpoints.detokenize)
    app.router.add_get("/v1/models", model_endpoints.list_models)
    app.router.add_get("/v1/models/{id:.+}", model_endpoints.get_model)
    app.router.add_get("/v1/engines", model_endpoints.redirect_engines)
    app.router.add_get("/v1/engines/{id:.+}", model_endpoints.redirect_engines)
    app.router.add_get("/health", probes.health)
    app.router.add_get("/ready", probes.ready)
    if admin is not None:
        app.router.add_get("/v1/admin/state", _admin_handler("state", config, admin))
        for op in ("drain", "resume", "load", "reload", "unload"):
            app.router.add_post(f"/v1/admin/{op}", _admin_handler(op, config, admin))
        adapter_endpoints.add_routes(app, config, admin)
    if config.metrics.enabled:
        app[SCRAPES] = Scrapes(partial(probes.prepare_metrics, service, app[GATE]))
        app.router.add_get(config.metrics.endpoint, probes.metrics)
    web_endpoints.add_routes(app, config)
    return app


async def _run_parsers(app: web.Application) -> AsyncIterator[None]:
    app[PARSERS], app[BODY_TURN] = ParserPool(), asyncio.Lock()
    yield
    await app[PARSERS].close()


async def _run_plugins(app: web.Application) -> AsyncIterator[None]:
    plugins = app[SERVICE].plugins
    assert plugins is not None
    plugins.start()
    yield
    await plugins.close()


async def _close_session(request: web.Request) -> web.Response:
    """POST /v1/session/close."""
    service = request.app[SERVICE]
    with service.in_flight.counted(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        name, session_id = await read_body(request, service.config, "session_close")
        request[NAMES] = names_of({"model": name, "session_id": session_id})
        model = service.catalog.resolve_owner(name)  # which need not be loaded: the KV manager has its sessions
        await service.sessions.close(model, request[CALLER].tenant, session_id)
    return json_response({"model": model, "session_id": session_id, "closed": True})


def _admin_handler(op: str, config: Config, admin: Admin) -> Handler:
    """Return the handler of /v1/admin/`op`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        require_admin(request)
        body = await read_body(request, config, "object", is_counted=False) if request.method == "POST" else {}
        return json_response(await admin.answer({**body, "op": op}))

    return handle
