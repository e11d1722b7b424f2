"""Handlers of /v1/models, and of /v1/engines, OpenAI's older name for it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pipeline.errors import ModelNotFound
from stages.gateway.http.context import SERVICE, json_response
from stages.gateway.service import Service


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    service = request.app[SERVICE]
    return json_response({"object": "list", "data": [_object(service, name) for name in _names(service)]})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/ID."""
    service = request.app[SERVICE]
    name = request.match_info["id"]
    if name not in _names(service):
        raise ModelNotFound(f"there is no model {name[:200]!r}; GET /v1/models lists them", "model")
    return json_response(_object(service, name))


async def redirect_engines(request: web.Request) -> web.Response:
    """GET /v1/engines and /v1/engines/ID: redirect to /v1/models."""
    name = request.match_info.get("id", "")
    location = request.rel_url.with_path(f"/v1/models/{name}" if name else "/v1/models")
    return web.Response(status=308, headers={"Location": str(location), "Deprecation": "true"})


def _names(service: Service) -> list[str]:
    """Each model, followed by its adapters."""
    return [
        name
        for model in service.catalog.known_names()
        for name in (model, *(f"{model}:{adapter}" for adapter in service.catalog.adapters(model)))
    ]


def _object(service: Service, name: str) -> dict[str, Any]:
    model, _, adapter = name.partition(":")
    body = _model_object(service, model)
    if not adapter:
        return body
    version = service.catalog.serving(model)
    state = service.loaded.states.get(version.id) if version is not None else None
    digest = dict(state.adapters).get(adapter) if state is not None else None
    body |= {"id": name, "parent": model, "root": model, "ready": body["ready"] and digest is not None}
    if "digest" in body:
        body["adapter_digest"] = digest
    return body


def _model_object(service: Service, name: str) -> dict[str, Any]:
    version = service.catalog.serving(name)
    described = service.loaded.described.get(version.id) if version is not None else None
    body: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": described.created if described else 0,
        "owned_by": "starling",
        "ready": not service.readiness.problem(name),
        **service.on_demand.fields(name),
    }
    if described is not None and version is not None:
        body |= {
            "context_length": service.loaded.bounds(version).context,
            "vocab_size": described.vocab_size,
            "architecture": described.architecture,
            "parameters": described.parameters,
            "quantization": described.quantization,
            "digest": described.digest,
            "chat": described.chat,
        }
    return body
