"""Refuses requests of an earlier version of Anthropic's API."""

from __future__ import annotations

from aiohttp import web

from pipeline.api.message_version import HEADER, check
from stages.gateway.http.context import Handler


def checked(handler: Handler) -> Handler:
    """Return `handler`, which refuses requests of an earlier version."""

    async def handle(request: web.Request) -> web.StreamResponse:
        check(request.headers.get(HEADER))
        return await handler(request)

    return handle
