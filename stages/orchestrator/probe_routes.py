"""Handlers for monitoring: /health, /ready and metrics. See http_app.py."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from pipeline.api.json_body import CONTENT_TYPE, to_json
from pipeline.observe import exposition
from pipeline.observe.scrapes import Scrapes, Variant
from stages.orchestrator.head_facts import head_facts
from stages.orchestrator.http_app import FLEET, FRONT

_SCRAPES = web.AppKey("scrapes", Scrapes)


def add_routes(app: web.Application) -> None:
    """Add the routes to the orchestrator's application."""
    front, fleet = app[FRONT], app[FLEET]
    app.router.add_get("/health", _health)
    app.router.add_get("/ready", _ready)
    if not front.config.metrics.enabled:
        return

    def prepare(variant: Variant) -> Callable[[], bytes]:
        fleet.sample(front.metrics)
        return exposition.prepare(front.config, front.metrics, variant.shows_tenants)

    app[_SCRAPES] = Scrapes(prepare)
    app.router.add_get(front.config.metrics.endpoint, _metrics)


async def _health(request: web.Request) -> web.StreamResponse:
    """GET /health."""
    body = to_json({"status": "healthy", "uptime_seconds": round(request.app[FRONT].uptime_s, 1)})
    return web.Response(body=body, content_type=CONTENT_TYPE)


async def _ready(request: web.Request) -> web.StreamResponse:
    """GET /ready: whether a request can be served."""
    report = request.app[FLEET].readiness()
    return web.Response(body=to_json(report), status=200 if report["ready"] else 503, content_type=CONTENT_TYPE)


async def _metrics(request: web.Request) -> web.StreamResponse:
    """GET /metrics. A server of the same home adds its series. Where there are keys, tenants are named as on a server,
    and for the fleet's token or the one for its metrics.
    """
    front, facts = request.app[FRONT], head_facts(request)
    await front.keys.follower.refresh()
    shows_tenants = front.reads_metrics(facts.authorization)
    shows_tenants = shows_tenants or front.keys.shows_tenants(facts.authorization, facts.api_key)
    body = await request.app[_SCRAPES].body(Variant(shows_tenants))
    return web.Response(body=body, headers={"Content-Type": exposition.CONTENT_TYPE})
