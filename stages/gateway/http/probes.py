"""Handlers for monitoring: /health (liveness), /ready (readiness) and metrics."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from pipeline.observe import exposition
from pipeline.observe.exemplars import Exemplars, accepts_open_metrics
from pipeline.observe.scrapes import Variant
from stages.gateway.http.connection_gate import ConnectionGate
from stages.gateway.http.context import SCRAPES, SERVICE, json_response
from stages.gateway.service import Service


async def health(request: web.Request) -> web.Response:
    """GET /health: the gateway process responds. Whether the server can take requests is in /ready."""
    service = request.app[SERVICE]
    return json_response(service.metrics.health("draining" if service.readiness.is_stopping else "healthy"))


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 if the server can take a request, otherwise 503 with the reason."""
    report = request.app[SERVICE].readiness.report(request.app[SERVICE].in_flight.count)
    return json_response(report, 200 if report["ready"] else 503)


async def metrics(request: web.Request) -> web.Response:
    """GET `metrics.endpoint`: the metrics of all stages in the Prometheus text format, or in OpenMetrics.

    Where there are API keys, only one with the scope metrics gets a series for each tenant, and waits for no pause.
    Raises `Unauthenticated`, and `Forbidden` for a key of the key file without the scope.
    """
    service = request.app[SERVICE]
    await service.api_keys.follower.refresh()
    headers = request.headers
    shows_tenants = service.api_keys.shows_tenants(headers.get("Authorization"), headers.get("X-Api-Key"))
    is_open_metrics = accepts_open_metrics(", ".join(headers.getall("Accept", ())))
    is_paced = not (service.api_keys and shows_tenants)  # without keys all clients see tenants
    body = await request.app[SCRAPES].body(Variant(shows_tenants, is_open_metrics, is_paced))
    kind = exposition.OPEN_METRICS_TYPE if is_open_metrics else exposition.CONTENT_TYPE
    return web.Response(body=body, headers={"Content-Type": kind})


def prepare_metrics(service: Service, gate: ConnectionGate, variant: Variant) -> Callable[[], bytes]:
    """Measure what is measured for each scrape; what is returned renders it, in a thread."""
    service.sample()
    in_flight = (one.spec.shown_model for one in service.relay.requests.values())
    service.metrics.sample_models(in_flight, service.catalog.served_names())
    service.metrics.sample_network(*gate.network.total())
    exemplars = None
    if variant.is_open_metrics:
        # Ids of requests are for those who may see tenants.
        exemplars = service.metrics.exemplars if variant.shows_tenants else Exemplars(service.wall)
    own, processes, unready = service.metrics.numbers, service.metrics.processes, service.readiness.unready_stages()
    return exposition.prepare(service.config, own, variant.shows_tenants, exemplars, processes, unready)
