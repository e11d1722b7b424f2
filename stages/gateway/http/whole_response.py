"""Writes a whole body in parts, with bounds on time and on the bytes that wait for clients.

The caller holds the request's slot meanwhile, so a client that reads slowly counts among those in flight.  Bodies of
more than `UNCOUNTED_BYTES` are counted in `Service.response_bytes` until they are written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from aiohttp import web
from aiohttp.hdrs import METH_HEAD

from pipeline.api.held_bytes import UNCOUNTED_BYTES, HeldBytes
from pipeline.api.json_body import CONTENT_TYPE
from pipeline.errors import StarlingError
from stages.gateway.http.context import PRINCIPAL, SERVICE

PART_BYTES = 64 << 10  # given to the transport at once
WRITE_TIMEOUT_S = 30.0  # for a client to accept a body, and
MIN_BYTES_PER_S = 64 << 10  # more time for each so many bytes


def held_response(request: web.Request) -> HeldBytes:
    """Return a counter of the bytes of the request's response."""
    what = "of responses wait for clients that have not read them (server.response_buffer_mb)"
    return HeldBytes(request.app[SERVICE].response_bytes, request[PRINCIPAL], what)


async def send_body(request: web.Request, body: bytes) -> web.StreamResponse:
    """Send a JSON body. Raises `Overloaded`, or a TIMEOUT if the client does not read it in time."""
    with held_response(request) as held:
        if len(body) > UNCOUNTED_BYTES:
            held.add(len(body))
        return await send_parts(request, [body])


async def send_parts(
    request: web.Request, parts: Sequence[bytes], headers: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """Send a body that is given in parts, or its length alone for a HEAD; without `headers` it is JSON.

    Raises a TIMEOUT if the client does not read it in time.
    """
    n_bytes = sum(map(len, parts))
    response = web.StreamResponse(headers=headers or {"Content-Type": CONTENT_TYPE})
    response.content_length = n_bytes
    limit_s = WRITE_TIMEOUT_S + n_bytes / MIN_BYTES_PER_S
    try:
        async with asyncio.timeout(limit_s):
            with suppress(ConnectionResetError):  # the client has disconnected: it needs no response
                await response.prepare(request)
                for part in parts if request.method != METH_HEAD else ():
                    for begin in range(0, len(part), PART_BYTES):
                        await response.write(memoryview(part)[begin : begin + PART_BYTES])
                await response.write_eof()
    except TimeoutError:
        message = f"the client did not read its response of {n_bytes} bytes within {limit_s:.0f} s"
        raise StarlingError("TIMEOUT", message) from None
    return response
