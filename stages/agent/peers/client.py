"""One other agent as a source of the pieces of one file.

It is reached over TLS where both agents have certificates: then it shows that it is the agent that is meant.  What it
answers is checked against the request: length, number of pieces.  The pieces themselves are compared with
their checksums by the download, as those of every source.
"""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
import msgspec

from pipeline.errors import NotFound, StorageUnavailable
from pipeline.fleet import token as tokens
from pipeline.fleet.bodies import MAX_CLAIMED, PieceState
from pipeline.fleet.peer_tls import PeerTls
from pipeline.fleet.records import AgentRecord
from shm.checkpoint import PIECE_BYTES
from shm.decoding import DECODE_ERRORS
from stages.agent.downloads.sources import PEER
from stages.agent.engines.http_session import HttpSession
from stages.agent.peers.holdings import FileKey

CONNECT_S = 2.0
STATE_S = 2.0  # of one answer about pieces
PIECE_S = 15.0  # of one piece: 8 MiB at 0.56 MB/s. A slower agent is of no use
ASKING = "X-Starling-Agent"  # header: the id of the agent that asks
BUSY = (429, 503)
RETRY_AFTER_S = 1.0  # of a busy agent that does not say it


class PeerSource:
    """Pieces of the file `key`, which has `total` of them, from one agent."""

    expected_rate = PEER
    is_local = False
    is_peer = True
    timeout_s = PIECE_S

    def __init__(
        self,
        session: HttpSession,
        token: str,
        record: AgentRecord,
        key: FileKey,
        total: int,
        tls: PeerTls | None = None,
        own_id: str = "",
    ) -> None:
        """`tls`: this agent's certificate; None: it has none, and presents the token. `own_id`: its id."""
        self.agent_id = record.agent_id
        self.name = f"agent {record.agent_id}"
        self.is_dropped = False
        self.is_complete = False
        self.claimed: frozenset[int] = frozenset()
        self._present = b""
        self._session = session
        self._tls = tls
        base = record.tls_url if tls is not None and record.tls_url else record.url
        self._is_tls = base.startswith("https://")
        self._headers = {"Accept-Encoding": "identity", **({} if self._is_tls else tokens.authorization(token))}
        if own_id:
            self._headers[ASKING] = own_id
        self._url = f"{base}/pieces/{key.digest}/{key.checksum}"
        self._total = total

    def holds(self, piece: int) -> bool:
        """Whether it had the piece when it was asked last."""
        if self.is_dropped or self.is_complete:
            return not self.is_dropped
        return piece >> 3 < len(self._present) and bool(self._present[piece >> 3] >> (piece & 7) & 1)

    async def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes, which are a piece. Raises `NotFound`, `StorageUnavailable`."""
        return await self._get(f"{self._url}/{offset // PIECE_BYTES}", nbytes, nbytes)

    async def look(self) -> None:
        """Ask which pieces it has. Raises `NotFound`, `StorageUnavailable`."""
        try:
            async with asyncio.timeout(STATE_S):
                raw = await self._get(self._url, 0, 4096 + self._total // 4)
        except TimeoutError:
            raise StorageUnavailable(f"{self.name} did not say within {STATE_S:.0f} s what it has") from None
        try:
            state = msgspec.json.decode(raw, type=PieceState)
        except DECODE_ERRORS as error:
            raise NotFound(f"{self.name} answers nonsense: {error}") from None
        if state.pieces != self._total or not (state.is_complete or len(state.present) == -(-self._total // 8)):
            raise NotFound(f"{self.name} has another file: {state.pieces} pieces, expected {self._total}")
        self.is_complete, self._present = state.is_complete, state.present
        self.claimed = frozenset(state.claimed[:MAX_CLAIMED])

    def _context(self) -> ssl.SSLContext | bool:
        """That of a connection to the agent. Raises `NotFound` if one of both agents requires TLS and one has none."""
        if self._is_tls and self._tls is not None:
            return self._tls.client_context(self.agent_id)
        if self._is_tls:
            raise NotFound(f"{self.name} needs TLS: set fleet.tls on this agent, too")
        if self._tls is not None and self._tls.is_required:
            raise NotFound(f"{self.name} offers no TLS, and fleet.tls.required is set here: set fleet.tls there, too")
        return True

    async def _get(self, url: str, least: int, most: int) -> bytes:
        """The body of an answer of `least` to `most` bytes."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        try:
            context = self._context()
            async with self._session.request(
                "GET", url, headers=self._headers, timeout=timeout, allow_redirects=False, ssl=context
            ) as response:
                if response.status in BUSY:
                    raise StorageUnavailable(f"{self.name} is busy", retry_after_s=RETRY_AFTER_S)
                length = response.content_length
                if response.status != 200 or length is None or not least <= length <= most:
                    response.close()  # its body need not be received
                    raise NotFound(f"{self.name} answers {response.status} with {length} bytes, expected up to {most}")
                if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    response.close()  # it could be expanded to any length
                    raise NotFound(f"{self.name} answers with the encoding {encoding[:40]!r}, which was not asked for")
                body: bytes = await response.content.readexactly(length)
                return body
        except (aiohttp.ClientError, OSError, EOFError, TimeoutError) as error:
            raise StorageUnavailable(f"{self.name}: {str(error) or type(error).__name__}") from None
