"""The calls with which KV pages go from agent to agent. An orchestrator decides which, and when.

    POST /give_pages       GivePagesRequest -> GivePagesResponse    the source: a ticket for the pages of a request
    POST /take_pages       TakePagesRequest -> TakePagesResponse    the target: get them with the ticket
    GET  /kv_pages/TICKET                                           their bytes (shm/sent_pages.py), once
    POST /list_prefixes    ListPrefixesRequest -> ListPrefixesResponse    the source: its most used prefixes
    POST /give_prefixes    GivePrefixesRequest -> GivePagesResponse       the source: a ticket for some of them
    POST /take_prefixes    TakePrefixesRequest -> TakePagesResponse       the target: get them with the ticket

`MAX_SENDING` transfers are sent at once, within `fleet.agent.peer_mb_per_s`, together with pieces of models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from pipeline.api.json_body import CONTENT_TYPE, to_json
from pipeline.errors import Overloaded, StorageUnavailable
from pipeline.fleet.bodies import (
    GivePagesRequest,
    GivePrefixesRequest,
    ListPrefixesRequest,
    Request,
    TakePagesRequest,
    TakePrefixesRequest,
    decode_request,
)
from pipeline.fleet.peer_tls import peer_of
from stages.agent.disk_threads import PAGES
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.kv_pages.giving import Giver
from stages.agent.kv_pages.taking import Taker

MAX_SENDING = 4
SEND_S = 30.0  # of one transfer; longer than a target waits

Read = Callable[[web.Request], Awaitable[bytes]]  # the body
R = TypeVar("R", bound=Request)


class KvPageApi:
    """The handlers."""

    def __init__(self, giver: Giver, taker: Taker, bandwidth: Bandwidth) -> None:
        self._giver = giver
        self._taker = taker
        self._bandwidth = bandwidth
        self._sending = 0

    def add_routes(self, app: web.Application, read: Read) -> None:
        """Add the paths."""

        def add(path: str, kind: type[R], answer: Callable[[R], Awaitable[msgspec.Struct]]) -> None:
            async def handle(request: web.Request) -> web.Response:
                asked: Any = decode_request(kind, await read(request), request.content_type)
                return web.Response(body=to_json(await answer(asked)), content_type=CONTENT_TYPE)

            app.router.add_post(path, handle)

        add("/give_pages", GivePagesRequest, self._giver.offer)
        add("/take_pages", TakePagesRequest, self._taker.take)
        add("/list_prefixes", ListPrefixesRequest, self._giver.list_prefixes)
        add("/give_prefixes", GivePrefixesRequest, self._giver.offer_prefixes)
        add("/take_prefixes", TakePrefixesRequest, self._taker.take_prefixes)
        app.router.add_get(r"/kv_pages/{ticket:[0-9A-Za-z_-]{16,64}}", self.pages)

    async def pages(self, request: web.Request) -> web.StreamResponse:
        """The pages of a ticket."""
        if self._sending >= MAX_SENDING:
            raise Overloaded(f"KV pages are being sent to {self._sending} agents", retry_after_s=1.0)
        shown = peer_of(request.get_extra_info("peercert") or {}) if request.secure else None
        found = self._giver.redeem(request.match_info["ticket"], shown.name if shown is not None else "")
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = found.head.nbytes
        parts = found.read()
        self._sending += 1
        try:
            async with asyncio.timeout(SEND_S):
                while (part := await PAGES.run(next, parts, b"")) != b"":
                    if wait := self._bandwidth.delay_s(len(part)):
                        await asyncio.sleep(wait)
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(part)
                await response.write_eof()
        except (OSError, ValueError, TimeoutError) as error:
            if not response.prepared:
                raise StorageUnavailable(f"KV pages cannot be read: {error}") from None
            if request.transport is not None:
                request.transport.abort()  # the end of the connection says that they are not whole
        finally:
            self._sending -= 1
        return response
