"""The header `anthropic-version`: which version of Anthropic's API a request is of.

What this server supports has had one form since `VERSION`: later versions are accepted, earlier ones had other events.
"""

from __future__ import annotations

import re

from aiohttp import web

from pipeline.errors import InvalidRequest
from stages.gateway.http.context import Handler

HEADER = "Anthropic-Version"
VERSION = "2023-06-01"
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def checked(handler: Handler) -> Handler:
    """Return `handler`, which refuses requests of an earlier version. Without the header it is `VERSION`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        version = request.headers.get(HEADER, VERSION)
        if not _DATE.fullmatch(version) or version < VERSION:
            name = HEADER.lower()
            raise InvalidRequest(f"{name} is {version[:40]!r}; send {VERSION} or the date of a later version", name)
        return await handler(request)

    return handle
