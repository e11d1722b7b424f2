"""Reading a request's body: bounded in size and time, alone and with other bodies, parsed strictly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from pipeline.api import response_context
from pipeline.api.body_names import BodyNames, names_of
from pipeline.api.held_bytes import HeldBytes
from pipeline.api.output_tokens import OUTPUT, decode_output, output_length
from pipeline.config.schema import Config
from pipeline.errors import StarlingError, TooLarge
from stages.gateway.endpoints.body_readers import Body
from stages.gateway.http.context import BODY_TURN, CONTINUED, CONVERSATION, MAY_ADD, NAMES, PARSERS, PRINCIPAL, SERVICE

BODY_TIMEOUT_S = 30.0  # from a request's head to the end of its body


async def read_body(
    request: web.Request,
    config: Config,
    reader: str,
    is_counted: bool = True,
    on_part: Callable[[bytes], object] | None = None,
) -> Any:
    """Return the result of a reader of `BODY_READERS`. `on_part` is called with each part of the body, as it was sent.

    What an orchestrator sends after a body is read only if the handler has set `MAY_ADD`.

    Raises `TooLarge`, `InvalidRequest`, a 408 for a body that is late, or `Overloaded` if too many bytes of bodies are
    held for the client or in all. Bodies for administration are not counted.
    """
    is_trusted = request.get(MAY_ADD, False)
    n_output = output_length(request.headers.get(OUTPUT)) if is_trusted else 0
    n_conversation = response_context.length(request.headers.get(response_context.HEADER)) if is_trusted else 0
    n_added = n_output + n_conversation
    if (request.content_length or 0) - n_added > config.server.max_body_mb << 20:
        raise body_too_large(config)
    bounds = request.app[SERVICE].body_bytes if is_counted else None
    with HeldBytes(bounds, request[PRINCIPAL], "of request bodies are being received (server.body_buffer_mb)") as held:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _receive(request, config, held, None if n_added else on_part, n_added)
        except TimeoutError:
            raise StarlingError(
                "INVALID_REQUEST", f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s", status=408
            ) from None
        if n_output:
            request[CONTINUED] = decode_output(bytes(body[-n_output:]))
            del body[-n_output:]
        if n_conversation:
            request[CONVERSATION] = response_context.decode(bytes(body[-n_conversation:]))
            del body[-n_conversation:]
        if n_added and on_part is not None:
            on_part(bytes(body))
        headers = request.headers
        received = Body(
            body,
            reader,
            headers.get("Content-Type", ""),
            ", ".join(headers.getall("Content-Encoding", [])),
            config.server.max_body_mb << 20,
        )
        try:
            result = await request.app[PARSERS].read(received, request[PRINCIPAL])
        except StarlingError as error:
            request[NAMES] = BodyNames(*error.names)
            raise
        request[NAMES] = names_of(
            result if isinstance(result, dict) else {name: getattr(result, name, "") for name in BodyNames._fields}
        )
        return result


async def _receive(
    request: web.Request, config: Config, held: HeldBytes, on_part: Callable[[bytes], object] | None, n_added: int
) -> bytearray:
    """Return the body's bytes, `n_added` of which may be beyond its bound.

    Of all bodies with several parts, one adds a part in each turn of the event loop.
    """
    content, turn = request.content, request.app[BODY_TURN]
    body = bytearray()
    while part := await content.readany():
        held.add(len(part))
        body += part
        if on_part is not None:
            on_part(part)
        if len(body) - n_added > config.server.max_body_mb << 20:
            raise body_too_large(config)
        if not content.at_eof():
            async with turn:  # meanwhile the connection fills its buffer, and is then not read
                await asyncio.sleep(0)
    return body


def body_too_large(config: Config) -> TooLarge:
    """Return the error for a body over `server.max_body_mb`."""
    limit = config.server.max_body_mb
    return TooLarge(f"the body is larger than {limit} MiB ({limit << 20} bytes, server.max_body_mb); send less")
