"""The calls with which other agents get pieces. They carry the fleet's token like all calls of an agent.

    GET /pieces/DIGEST/CHECKSUM          PieceState. With the id of the agent that asks in `X-Starling-Agent`
    GET /pieces/DIGEST/CHECKSUM/PIECE    the bytes of a piece; 404 if it is not here, 429 when too many are asked for

`fleet.agent.peer_connections` pieces are sent at once, and as many wait; all together at most
`fleet.agent.peer_mb_per_s`, with which no more are taken on than can be sent in `QUEUE_S`.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from pipeline.api.json_body import CONTENT_TYPE, to_json
from pipeline.config.schema import AgentConfig
from pipeline.errors import NotFound, Overloaded, StorageUnavailable
from pipeline.fleet.records import check_agent_id
from shm.checkpoint import PIECE_BYTES
from stages.agent.disk_threads import PEERS
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.peers.client import ASKING
from stages.agent.peers.holdings import FileKey, Holdings

CHUNK_BYTES = 1 << 20  # of a piece, for each write
SEND_S = 60.0  # of one piece, besides the waits for the bandwidth; then the connection of a slow reader is closed
RETRY_AFTER_S = 1.0
QUEUE_S = 10.0  # less than another agent waits for a piece
_FILE = r"/pieces/{digest:[0-9a-f]{64}}/{checksum:[0-9a-f]{32}}"


class PieceApi:
    """The handlers. With `holdings` None (`fleet.agent.peers` is false) every file is unknown."""

    def __init__(self, config: AgentConfig, holdings: Holdings | None) -> None:
        self._holdings = holdings
        rate = config.peer_mb_per_s << 20
        at_once = int(rate * QUEUE_S / PIECE_BYTES)  # pieces; 0 without a bound
        self._most = min(2 * config.peer_connections, max(1, at_once)) if rate else 2 * config.peer_connections
        self._sending = asyncio.Semaphore(min(config.peer_connections, -(-self._most // 2)))
        self.bandwidth = Bandwidth(rate, time.monotonic)
        self._send_s = SEND_S + (QUEUE_S if rate else 0.0)
        self._asked = 0  # pieces that are being sent, or wait
        self.bytes_sent = 0

    def add_routes(self, app: web.Application) -> None:
        """Add the paths."""
        app.router.add_get(_FILE, self.state)
        app.router.add_get(_FILE + r"/{piece:\d{1,8}}", self.piece)

    async def state(self, request: web.Request) -> web.Response:
        """Which pieces are here."""
        holdings, key = self._known(), _key(request)
        asking = request.headers.get(ASKING, "")
        if not check_agent_id(asking):
            holdings.note_question(key, asking)
        found = await PEERS.run(holdings.state, key)
        return web.Response(body=to_json(found), content_type=CONTENT_TYPE)

    async def piece(self, request: web.Request) -> web.StreamResponse:
        """One piece."""
        holdings = self._known()
        if self._asked >= self._most:
            raise Overloaded(
                f"{self._asked} pieces are asked for; fleet.agent.peer_connections and peer_mb_per_s allow no more",
                retry_after_s=RETRY_AFTER_S,
            )
        self._asked += 1
        try:
            async with self._sending:
                data = await PEERS.run(holdings.read, _key(request), int(request.match_info["piece"]))
                return await self._sent(request, data)
        finally:
            self._asked -= 1

    async def _sent(self, request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = len(data)
        view = memoryview(data)
        try:
            async with asyncio.timeout(self._send_s):
                await response.prepare(request)
                for at in range(0, len(data), CHUNK_BYTES):
                    chunk = view[at : at + CHUNK_BYTES]
                    if wait := self.bandwidth.delay_s(len(chunk)):
                        await asyncio.sleep(wait)
                    await response.write(chunk)
                    self.bytes_sent += len(chunk)
                await response.write_eof()
        except TimeoutError:
            if not response.prepared:
                raise StorageUnavailable("the piece could not be sent in time") from None
            if request.transport is not None:
                request.transport.abort()
        return response

    def _known(self) -> Holdings:
        if self._holdings is None:
            raise NotFound("this agent gives no pieces to others (fleet.agent.peers)")
        return self._holdings


def _key(request: web.Request) -> FileKey:
    return FileKey(request.match_info["digest"], request.match_info["checksum"])
