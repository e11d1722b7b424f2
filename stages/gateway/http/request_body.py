"""Reading a request's body: bounded in size and time, parsed strictly."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from pipeline.api.json_body import parse_object
from pipeline.config.schema import Config
from pipeline.errors import StarlingError, TooLarge

BODY_TIMEOUT_S = 30.0  # from a request's head to the end of its body


async def read_body(request: web.Request, config: Config) -> dict[str, Any]:
    """Return the body as a JSON object. Raises `TooLarge` or `InvalidRequest`, or a 408 for a body that is late."""
    if (request.content_length or 0) > config.server.max_body_mb << 20:
        raise body_too_large(config)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
    except TimeoutError:
        raise StarlingError(
            "INVALID_REQUEST", f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s", status=408
        ) from None
    return parse_object(body, request.headers.get("Content-Type", ""))


def body_too_large(config: Config) -> TooLarge:
    """Return the error for a body over `server.max_body_mb`."""
    limit = config.server.max_body_mb
    return TooLarge(f"the body is larger than {limit} MiB ({limit << 20} bytes, server.max_body_mb); send less")
