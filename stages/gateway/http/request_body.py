"""Reading a request's body: bounded in size and time, parsed strictly."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from pipeline.config.schema import Config
from pipeline.errors import StarlingError, TooLarge
from stages.gateway.endpoints.body_readers import Body
from stages.gateway.http.context import BODY_TURN, CALLER, PARSERS

BODY_TIMEOUT_S = 30.0  # from a request's head to the end of its body


async def read_body(request: web.Request, config: Config, reader: str) -> Any:
    """Return the result of a reader of `BODY_READERS`.

    Raises `TooLarge` or `InvalidRequest`, or a 408 for a body that is late.
    """
    if (request.content_length or 0) > config.server.max_body_mb << 20:
        raise body_too_large(config)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _receive(request, config)
    except TimeoutError:
        raise StarlingError(
            "INVALID_REQUEST", f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s", status=408
        ) from None
    headers = request.headers
    received = Body(
        body,
        reader,
        headers.get("Content-Type", ""),
        ", ".join(headers.getall("Content-Encoding", [])),
        config.server.max_body_mb << 20,
    )
    return await request.app[PARSERS].read(received, request[CALLER].tenant)


async def _receive(request: web.Request, config: Config) -> bytearray:
    """Return the body's bytes. Of all bodies with several parts, one adds a part in each turn of the event loop."""
    content, turn = request.content, request.app[BODY_TURN]
    body = bytearray()
    while part := await content.readany():
        body += part
        if len(body) > config.server.max_body_mb << 20:
            raise body_too_large(config)
        if not content.at_eof():
            async with turn:  # meanwhile the connection fills its buffer, and is then not read
                await asyncio.sleep(0)
    return body


def body_too_large(config: Config) -> TooLarge:
    """Return the error for a body over `server.max_body_mb`."""
    limit = config.server.max_body_mb
    return TooLarge(f"the body is larger than {limit} MiB ({limit << 20} bytes, server.max_body_mb); send less")
