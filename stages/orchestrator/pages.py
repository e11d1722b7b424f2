"""`/openapi.json`, `/docs` and its files: what describes the API. Made elsewhere, and injected; they need no key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from aiohttp import web
from aiohttp.hdrs import METH_HEAD

from pipeline.errors import NotFound

HEADERS = {
    "Cache-Control": "no-cache",  # use the copy if the server says that it is current
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile(NamedTuple):
    """A file, its media type and its entity tag."""

    data: bytes
    media_type: str
    etag: str


Routes = list[tuple[str, str, str]]  # method, path, and the first line of what it does
Describe = Callable[[Routes, bool], PageFile]  # bool: whether requests need a key


class Pages:
    """`describe(routes, needs_key)`: /openapi.json. `read()`: the files by name, which is called once."""

    def __init__(self, describe: Describe, read: Callable[[], Mapping[str, PageFile]]) -> None:
        self._describe = describe
        self._read = read
        self._documents: dict[bool, PageFile] = {}  # by whether requests need a key
        self._files: Mapping[str, PageFile] | None = None

    def add_routes(self, app: web.Application, needs_key: Callable[[], Awaitable[bool]]) -> None:
        """Add the routes, after all others: the document has these."""
        self._needs_key = needs_key
        app.router.add_get("/docs", self.docs)
        app.router.add_get("/web/{name}", self.file)
        app.router.add_get("/openapi.json", self.openapi)

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        """GET /openapi.json: the description of the API."""
        needs_key = await self._needs_key()
        if needs_key not in self._documents:
            self._documents[needs_key] = self._describe(_routes(request.app, {"/docs", "/web/{name}"}), needs_key)
        return _send(request, self._documents[needs_key])

    async def docs(self, request: web.Request) -> web.StreamResponse:
        """GET /docs: the reader of /openapi.json."""
        return self._send_file(request, "docs.html")

    async def file(self, request: web.Request) -> web.StreamResponse:
        """GET /web/NAME: a script or style sheet of the page."""
        return self._send_file(request, request.match_info["name"])

    def _send_file(self, request: web.Request, name: str) -> web.StreamResponse:
        if self._files is None:
            self._files = self._read()
        if name not in self._files:
            raise NotFound(f"there is no file {name[:80]!r}; /openapi.json describes the API")
        return _send(request, self._files[name])


def _routes(app: web.Application, besides: set[str]) -> Routes:
    return [
        (route.method, route.resource.canonical, route.handler.__doc__ or "")
        for route in app.router.routes()
        if route.resource is not None and route.method != METH_HEAD and route.resource.canonical not in besides
    ]


def _send(request: web.Request, file: PageFile) -> web.StreamResponse:
    headers = {**HEADERS, "ETag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")}
    if file.etag in known or "*" in known:
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.data, headers={**headers, "Content-Type": file.media_type})
