"""Reading a request's body: bounded in size and time, alone and with other bodies, parsed strictly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from pipeline.config.schema import Config
from pipeline.errors import Overloaded, StarlingError, TooLarge
from stages.gateway.admission.fair_shares import FairShares
from stages.gateway.endpoints.body_readers import Body
from stages.gateway.http.context import BODY_TURN, PARSERS, PRINCIPAL, SERVICE

BODY_TIMEOUT_S = 30.0  # from a request's head to the end of its body


async def read_body(
    request: web.Request,
    config: Config,
    reader: str,
    is_counted: bool = True,
    on_part: Callable[[bytes], object] | None = None,
) -> Any:
    """Return the result of a reader of `BODY_READERS`. `on_part` is called with each part of the body, as it was sent.

    Raises `TooLarge`, `InvalidRequest`, a 408 for a body that is late, or `Overloaded` if too many bytes of bodies are
    held for the client or in all. Bodies for administration are not counted.
    """
    if (request.content_length or 0) > config.server.max_body_mb << 20:
        raise body_too_large(config)
    bounds = request.app[SERVICE].body_bytes if is_counted else None
    with _HeldBytes(bounds, request[PRINCIPAL]) as held:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _receive(request, config, held, on_part)
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
        return await request.app[PARSERS].read(received, request[PRINCIPAL])


class _HeldBytes:
    """The bytes of one body that are counted until it is parsed."""

    def __init__(self, bounds: FairShares | None, principal: str) -> None:
        self._bounds = bounds
        self._principal = principal
        self._bytes = 0

    def __enter__(self) -> _HeldBytes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bounds is not None:
            self._bounds.give_back(self._principal, self._bytes)

    def add(self, n: int) -> None:
        """Count more bytes. Raises `Overloaded`."""
        if self._bounds is None:
            return
        if self._bounds.refusal(self._principal, n) is not None:
            raise Overloaded(
                "too many bytes of request bodies are being received (server.body_buffer_mb); try again",
                retry_after_s=1.0,
            )
        self._bounds.take(self._principal, n)
        self._bytes += n


async def _receive(
    request: web.Request, config: Config, held: _HeldBytes, on_part: Callable[[bytes], object] | None
) -> bytearray:
    """Return the body's bytes. Of all bodies with several parts, one adds a part in each turn of the event loop."""
    content, turn = request.content, request.app[BODY_TURN]
    body = bytearray()
    while part := await content.readany():
        held.add(len(part))
        body += part
        if on_part is not None:
            on_part(part)
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
