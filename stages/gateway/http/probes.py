"""Handlers for monitoring: /health (liveness), /ready (readiness) and metrics."""

from __future__ import annotations

from aiohttp import web

from pipeline.observe import exposition
from stages.gateway.http.context import KEYS, SERVICE, json_response


async def health(request: web.Request) -> web.Response:
    """GET /health: the gateway process responds. Whether the server can take requests is in /ready."""
    service = request.app[SERVICE]
    return json_response(service.metrics.health("draining" if service.readiness.is_stopping else "healthy"))


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 if the server can take a request, otherwise 503 with the reason."""
    report = request.app[SERVICE].readiness.report(request.app[SERVICE].in_flight.count)
    return json_response(report, 200 if report["ready"] else 503)


async def metrics(request: web.Request) -> web.Response:
    """GET `metrics.endpoint`: the metrics of all stages in the Prometheus text format.

    Where API keys are configured, only an administrator's key gets a series for each tenant. Raises `Unauthenticated`.
    """
    service, keys, authorization = request.app[SERVICE], request.app[KEYS], request.headers.get("Authorization")
    shows_tenants = not keys or (authorization is not None and keys.caller(authorization).is_admin)
    service.sample()
    body = exposition.render(service.config, service.metrics.numbers, shows_tenants)
    return web.Response(body=body, headers={"Content-Type": exposition.CONTENT_TYPE})
