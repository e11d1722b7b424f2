"""Handlers of the page at `/`, of `/docs`, of their files, and of `/openapi.json`. They need no API key.

A browser keeps the files and asks whether they have changed (`ETag`).  The policy lets a page run only scripts of this
server, connect only to it, and set no HTML from text.
"""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web
from aiohttp.hdrs import METH_HEAD

from pipeline.api.fair_shares import address_principal
from pipeline.api.held_bytes import UNCOUNTED_BYTES
from pipeline.api.json_body import to_json
from pipeline.config.schema import Config
from pipeline.errors import NotFound
from stages.gateway.http.context import CLIENT, PRINCIPAL, SERVICE, Handler
from stages.gateway.http.whole_response import held_response, send_parts
from stages.gateway.openapi.document import make_document
from stages.gateway.web import File, files, make_file

HEADERS = {
    "Cache-Control": "no-cache",  # use the copy if the server says that it is current
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_routes(app: web.Application, config: Config) -> None:
    """Add the routes; those of the page only if it is enabled. Call it after all others, which the document has."""
    if config.server.enable_page:
        app.router.add_get("/", page)
        app.router.add_get("/docs", docs)
        app.router.add_get("/web/{name}", web_file)
    app.router.add_get("/openapi.json", _openapi_handler(config))


async def page(request: web.Request) -> web.StreamResponse:
    """GET /: the page."""
    return await _send(request, files()["index.html"])


async def docs(request: web.Request) -> web.StreamResponse:
    """GET /docs: the reader of /openapi.json."""
    return await _send(request, files()["docs.html"])


async def web_file(request: web.Request) -> web.StreamResponse:
    """GET /web/NAME: a script or style sheet of these pages."""
    name = request.match_info["name"]
    file = files().get(name)
    if file is None:
        raise NotFound(f"the page has no file {name[:80]!r}")
    return await _send(request, file)


def _openapi_handler(config: Config) -> Handler:
    documents: dict[bool, File] = {}  # by whether requests need a key; made for the first client that asks

    async def openapi(request: web.Request) -> web.StreamResponse:
        """GET /openapi.json: the description of the API."""
        keys = request.app[SERVICE].api_keys
        await keys.follower.refresh()
        needs_key = bool(keys)
        if needs_key not in documents:
            metrics_path = config.metrics.endpoint if config.metrics.enabled else ""
            content = make_document(routes(request.app), metrics_path=metrics_path, needs_key=needs_key)
            documents[needs_key] = make_file(to_json(content), "application/json")
        return await _send(request, documents[needs_key])

    return openapi


def routes(app: web.Application) -> Iterator[tuple[str, str, str]]:
    """Yield method, path and the handler's docstring of every route that the document has: all but the pages."""
    for route in app.router.routes():
        resource = route.resource
        if resource is None or route.method == METH_HEAD or route.handler in (page, docs, web_file):
            continue
        yield route.method, resource.canonical, route.handler.__doc__ or ""


async def _send(request: web.Request, file: File) -> web.StreamResponse:
    headers = {**HEADERS, "ETag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")}
    if file.etag in known or "*" in known:
        return web.Response(status=304, headers=headers)
    headers["Content-Type"] = file.media_type
    if request.method == METH_HEAD:
        return web.Response(headers={**headers, "Content-Length": str(len(file.data))})
    request[PRINCIPAL] = address_principal(request[CLIENT])
    with held_response(request) as held:
        if len(file.data) > UNCOUNTED_BYTES:
            held.add(len(file.data))
        return await send_parts(request, [file.data], headers)
