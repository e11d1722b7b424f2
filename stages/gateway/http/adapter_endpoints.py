"""Adapters as vLLM's and llama-server's clients manage them, by the operations of administrators.

POST /v1/load_lora_adapter, /v1/unload_lora_adapter   vLLM's
GET, POST /lora-adapters                              llama-server's; `?model=NAME` chooses one of several models
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pipeline.config.schema import Config
from pipeline.errors import InvalidRequest, ModelNotFound, StarlingError
from stages.gateway.admin import Admin
from stages.gateway.endpoints.lora_adapters import LoadAdapter
from stages.gateway.http.administration import ADAPTERS, LOAD_ADAPTER, UNLOAD_ADAPTER, require_admin
from stages.gateway.http.context import SERVICE, Handler, json_response
from stages.gateway.http.request_body import read_body
from stages.gateway.versions.catalog import VersionCatalog

_FIELDS = {"target": "lora_name", "path": "lora_path"}  # of administrators' operations, and here


def add_routes(app: web.Application, config: Config, admin: Admin) -> None:
    """Add the routes, whose changes `admin` makes."""
    app.router.add_post(LOAD_ADAPTER, _load(config, admin))
    app.router.add_post(UNLOAD_ADAPTER, _unload(config, admin))
    app.router.add_get(ADAPTERS, list_adapters)
    app.router.add_post(ADAPTERS, _set_scales(config))


def _load(config: Config, admin: Admin) -> Handler:
    async def load(request: web.Request) -> web.StreamResponse:
        """POST /v1/load_lora_adapter."""
        require_admin(request)
        body: LoadAdapter = await read_body(request, config, "load_adapter", is_counted=False)
        catalog = request.app[SERVICE].catalog
        model, adapter = find_adapter(catalog, body.name)
        op = "reload" if body.is_replacing and adapter in catalog.adapters(model) else "load"
        await _change(admin, {"op": op, "target": f"{model}:{adapter}", "path": body.path})
        return web.Response(text=f"Success: LoRA adapter '{body.name}' added successfully.")

    return load


def _unload(config: Config, admin: Admin) -> Handler:
    async def unload(request: web.Request) -> web.StreamResponse:
        """POST /v1/unload_lora_adapter."""
        require_admin(request)
        name: str = await read_body(request, config, "unload_adapter", is_counted=False)
        catalog = request.app[SERVICE].catalog
        model, adapter = find_adapter(catalog, name, is_known=True)
        await _change(admin, {"op": "unload", "target": f"{model}:{adapter}"})
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    return unload


async def _change(admin: Admin, request: dict[str, Any]) -> None:
    """Make a change of administrators; an error names the fields of these endpoints."""
    try:
        await admin.answer(request)
    except StarlingError as error:
        raise StarlingError(
            error.code,
            error.message,
            _FIELDS.get(error.param, ""),
            status=error.status,
            retry_after_s=error.retry_after_s,
        ) from None


def find_adapter(catalog: VersionCatalog, name: str, *, is_known: bool = False) -> tuple[str, str]:
    """The model and the adapter of `lora_name`: MODEL:NAME, or NAME where there is one model to which it can belong.

    is_known: the adapter is loaded.  Raises `InvalidRequest` if there are several, `ModelNotFound` if there is none.
    """
    model, separator, adapter = name.partition(":")
    if separator:
        return model, adapter
    found = catalog.models_with(name) if is_known else catalog.names
    if is_known and not found:
        raise ModelNotFound(f"no loaded model has an adapter {name[:100]!r}; GET /v1/models lists them", "lora_name")
    if len(found) != 1:
        listed = " or ".join(f"{one}:{name[:100]}" for one in found[:8]) or "a model first"
        raise InvalidRequest(
            f"lora_name is {name[:100]!r}, and it can be of {len(found)} models: name {listed}", "lora_name"
        )
    return found[0], name


async def list_adapters(request: web.Request) -> web.Response:
    """GET /lora-adapters."""
    require_admin(request)
    catalog = request.app[SERVICE].catalog
    model = _model(request)
    serving = catalog.serving(model)
    adapters = serving.settings.adapters if serving is not None else ()
    return json_response(
        [
            {"id": number, "path": one.path, "scale": 0.0, "model": f"{model}:{one.name}"}
            for number, one in enumerate(adapters)
        ]
    )


def _set_scales(config: Config) -> Handler:
    async def set_scales(request: web.Request) -> web.StreamResponse:
        """POST /lora-adapters: accepted if it changes nothing."""
        require_admin(request)
        ids = await read_body(request, config, "adapter_scales", is_counted=False)
        known = len(request.app[SERVICE].catalog.adapters(_model(request)))
        for index, one in enumerate(ids):
            if one >= known:
                raise InvalidRequest(
                    f"[{index}].id is {one}; GET /lora-adapters lists {known} adapters, from 0 on", f"[{index}].id"
                )
        return json_response({"success": True})

    return set_scales


def _model(request: web.Request) -> str:
    """The model of the query, by default the first one. Raises `InvalidRequest`, `ModelNotFound`."""
    for name in request.query:
        if name != "model":
            raise InvalidRequest(f"unknown parameter {name[:60]}; known parameters: model", name[:60])
    return request.app[SERVICE].catalog.resolve(request.query.get("model", ""))
