"""The other agents of one download: who has what, and who reads which piece from the blob store.

While several agents download a file, each of them reads every n-th piece from the store and gets the others from
those who have read them.  There is no agreement behind this, and none is needed: an agent that dies, or does not do its
part, is waited for only so long, and its pieces are then read from the store as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from pipeline.catalog.entry import Entry
from pipeline.errors import NotFound, StarlingError
from pipeline.fleet.peer_tls import PeerTls
from pipeline.fleet.records import AgentRecord
from stages.agent.downloads.sources import Source
from stages.agent.engines.http_session import HttpSession
from stages.agent.peers.announcements import MAX_PEERS, Announcements
from stages.agent.peers.client import PeerSource
from stages.agent.peers.holdings import FileKey, Holdings, Progress

log = logging.getLogger("starling.agent.pieces")

REFRESH_S = 0.25  # until the second look at who has the file; then twice as long each time, up to MOST_REFRESH_S
MOST_REFRESH_S = 8.0
MAX_STRANGERS = 64  # agents that ask for the file before this one has found them: each causes a look
POLL_S = 0.15  # between two questions to an agent that downloads it, too
FIRST_LOOK_S = 1.0  # for which a download waits to learn who has the file
MAX_SILENT = 2  # questions in a row without an answer; then the agent is dropped
# How long a piece is left to the agent that says that it reads it: so many times the store's time for a piece.
PATIENCE = 3.0
LEAST_PATIENCE_S = 2.0
MAX_BROKEN = 3  # pieces that an agent says that it reads and does not have in that time; then it is not believed


class Exchange:
    """What the downloads of an agent have in common."""

    def __init__(
        self,
        holdings: Holdings,
        announcements: Announcements,
        session: HttpSession,
        token: str,
        agent_id: str,
        clock: Callable[[], float] = time.monotonic,
        tls: PeerTls | None = None,
    ) -> None:
        """`clock`: monotonic, s. `tls`: this agent's certificate, if it has one."""
        self._tls = tls
        self._holdings = holdings
        self._announcements = announcements
        self._session = session
        self._token = token
        self._agent_id = agent_id
        self._clock = clock

    @contextlib.asynccontextmanager
    async def join(self, entry: Entry, path: Path, checksums: list[int], progress: Progress) -> AsyncIterator[Sharing]:
        """Give the pieces of a download to others, and find theirs, until the block ends."""
        key = FileKey.of(entry)

        def source(record: AgentRecord) -> PeerSource:
            return PeerSource(self._session, self._token, record, key, len(checksums), self._tls, self._agent_id)

        sharing = Sharing(self._announcements, key, source, self._agent_id, self._clock)
        self._holdings.begin(entry, path, checksums, progress, sharing.note_question)
        task = asyncio.create_task(sharing.run())
        try:
            await sharing.wait_for_first_look()
            yield sharing
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._holdings.end(entry)
            self._announcements.changed()


class Sharing:
    """The other agents of one download. `run` looks for them; the rest is asked by the download."""

    def __init__(
        self,
        announcements: Announcements,
        key: FileKey,
        source: Callable[[AgentRecord], PeerSource],
        agent_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._announcements = announcements
        self._key = key
        self._source = source
        self._agent_id = agent_id
        self._clock = clock
        self._peers: dict[str, PeerSource] = {}
        self._silent: dict[str, int] = {}
        self._new: list[PeerSource] = []
        self._next_refresh, self._refresh_s = float("-inf"), REFRESH_S
        self._refreshed_at = float("-inf")
        self._strangers: set[str] = set()
        self._claims: dict[tuple[str, int], float] = {}  # when an agent said first that it reads a piece
        self._broken: dict[str, set[int]] = {}  # by agent: pieces that were waited for in vain
        self._looked = asyncio.Event()

    # ------------------------------------------------------------------ asked by the download

    def new_sources(self) -> list[PeerSource]:
        """The agents that have been found since the last call."""
        found, self._new = self._new, []
        return found

    def drop(self, source: Source) -> None:
        """The download uses an agent no more."""
        for one in self._peers.values():
            one.is_dropped |= one is source

    def is_own(self, piece: int) -> bool:
        """Whether this agent is the one to read a piece from the store, of those that download the file."""
        names = sorted([self._agent_id, *(one.agent_id for one in self._downloading())])
        return piece % len(names) == names.index(self._agent_id)

    def is_expected(self, piece: int, request_s: float) -> bool:
        """Whether another agent is about to have a piece. `request_s`: that the store takes for one; 0: unknown."""
        now = self._clock()
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * request_s)
        for one in self._downloading():
            broken = self._broken.setdefault(one.agent_id, set())
            if piece not in one.claimed or len(broken) >= MAX_BROKEN:
                continue
            if now < self._claims.setdefault((one.agent_id, piece), now) + patience_s:
                return True
            broken.add(piece)
        return False

    def is_hopeful(self) -> bool:
        """Whether the first look has not ended, or another agent still downloads the file."""
        return not self._looked.is_set() or bool(self._downloading())

    async def wait_for_first_look(self) -> None:
        """Wait until it is known who has the file, for a bounded time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                await self._looked.wait()

    def _downloading(self) -> list[PeerSource]:
        return [one for one in self._peers.values() if not one.is_dropped and not one.is_complete]

    # ------------------------------------------------------------------ the look at the others

    def note_question(self, agent_id: str) -> None:
        """An agent asks what this download has. An unknown one has begun since the last look: look again soon."""
        if agent_id not in self._peers and agent_id not in self._strangers and len(self._strangers) < MAX_STRANGERS:
            self._strangers.add(agent_id)
            self._next_refresh = min(self._next_refresh, self._refreshed_at + REFRESH_S)

    def is_refresh_due(self) -> bool:
        """Whether to look now at who has the file; never while the download uses `MAX_PEERS` agents."""
        now = self._clock()
        if now < self._next_refresh or self._n_used() >= MAX_PEERS:
            return False
        self._refreshed_at = now
        self._next_refresh = now + self._refresh_s * random.uniform(0.75, 1.25)
        self._refresh_s = min(MOST_REFRESH_S, 2 * self._refresh_s)
        return True

    def _n_used(self) -> int:
        return sum(not one.is_dropped for one in self._peers.values())

    async def run(self) -> None:
        """Look for other agents, and ask those that download the file, without end.

        The own announcement is written before the first look: of two agents that begin together, one finds the other.
        """
        await self._announcements.announced()
        while True:
            if self.is_refresh_due():
                for record in await self._announcements.others(self._key):
                    if record.agent_id not in self._peers and self._n_used() < MAX_PEERS:
                        self._peers[record.agent_id] = one = self._source(record)
                        self._new.append(one)
            await asyncio.gather(*(self._look(one) for one in self._downloading()))
            self._looked.set()
            await asyncio.sleep(POLL_S)

    async def _look(self, one: PeerSource) -> None:
        try:
            await one.look()
            self._silent[one.agent_id] = 0
        except StarlingError as error:
            self._silent[one.agent_id] = silent = self._silent.get(one.agent_id, 0) + 1
            if isinstance(error, NotFound) or silent >= MAX_SILENT:
                one.is_dropped = True
                log.info("an agent is not asked for pieces", extra={"agent": one.agent_id, "reason": error.message})
